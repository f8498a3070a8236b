"""Rows of a step that a drafter learns of."""

from __future__ import annotations

import numpy as np

from dspark.engine.packing import kept_rows, pack_rows


def test_kept_rows_are_the_first_of_each_request() -> None:
    tables = np.array([[2], [0], [1]])
    samples = np.array([True, False, True])
    rows = pack_rows(np.array([3, 0, 5]), np.array([1, 2, 1]), np.array([2, 0, 1]), samples, tables, 8)
    counts = np.array([2, 2, 0])  # one draft accepted, a part of a prompt, a request that ended
    start, index, positions, slots = kept_rows(rows.query_start, rows.positions, rows.slots, counts)
    assert start.tolist() == [0, 2, 4, 4]
    assert index.tolist() == [0, 1, 3, 4]
    assert positions.tolist() == [3, 4, 0, 1]
    assert slots.tolist() == [19, 20, 0, 1]
