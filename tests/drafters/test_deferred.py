"""Rows that a drafter puts off: none is lost, none of an ended request is written, and drafts are the same."""

from __future__ import annotations

import numpy as np
import torch

from dspark.core import Request, SamplingParams
from dspark.drafters.base import Deferring, ObserveBatch
from dspark.drafters.deferred import MOST_ROWS, DeferredRows
from dspark.drafters.lookup import LookupFirst
from dspark.engine.engine import Engine
from dspark.kv import KVPool
from dspark.schedule.policies import FixedLength
from dspark.testing import tiny_decoder, tiny_drafter


def request(uid: int) -> Request:
    return Request(uid, str(uid), [1, 2], SamplingParams(), 0, 10)


def observed(*rows: tuple[int, int]) -> ObserveBatch:
    """Requests (uid, number of rows); slots and positions 100 uid, 100 uid + 1, ..."""
    slots = torch.cat([torch.arange(n) + 100 * uid for uid, n in rows])
    start = np.cumsum([0, *(n for _, n in rows)])
    return ObserveBatch([request(uid) for uid, _ in rows], start, slots, slots, slots[:, None].float())


def test_rows_come_back_in_order_once() -> None:
    rows = DeferredRows()
    assert rows.take() is None
    rows.add(observed((1, 2), (2, 1)))
    rows.add(observed((1, 1)))
    taken = rows.take()
    assert taken is not None
    positions, slots, taps = taken
    assert positions.tolist() == slots.tolist() == [100, 101, 200, 100]
    assert taps[:, 0].tolist() == [100.0, 101.0, 200.0, 100.0]
    assert rows.take() is None


def test_rows_of_an_ended_request_leave() -> None:
    rows = DeferredRows()
    rows.add(observed((1, 2), (2, 3)))
    rows.add(observed((1, 1)))
    rows.forget(request(1))
    taken = rows.take()
    assert taken is not None
    assert taken[1].tolist() == [200, 201, 202]


def test_not_more_rows_than_memory_is_meant_for() -> None:
    rows = DeferredRows()
    assert rows.add(observed((1, MOST_ROWS - 3)))
    assert rows.add(observed((2, 2), (3, 1)))
    assert not rows.add(observed((4, 1)))
    rows.forget(request(1))
    assert rows.add(observed((4, MOST_ROWS - 3)))
    taken = rows.take()
    assert taken is not None
    assert taken[2][:, 0].tolist() == [200, 201, 300, *range(400, 400 + MOST_ROWS - 3)]


def test_rows_move_over_each_other() -> None:
    """What is left of many parts, when requests in front, in between and behind have ended."""
    rows = DeferredRows()
    for n in range(1, 6):
        rows.add(observed((1, n), (2, 7), (3, 2 * n)))
    rows.add(observed((2, 30)))
    rows.forget(request(1))
    rows.forget(request(3))
    rows.forget(request(9))
    taken = rows.take()
    assert taken is not None
    expected = [200 + i for _ in range(5) for i in range(7)] + [200 + i for i in range(30)]
    assert taken[1].tolist() == taken[2][:, 0].tolist() == expected


class _Eager:
    """The same drafter, made to catch up at once."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def observe(self, batch: ObserveBatch) -> None:
        self._inner.observe(batch)  # type: ignore[attr-defined]
        self._inner.catch_up()  # type: ignore[attr-defined]


class _Now:
    """Drafts in some rounds only, so that rows pile up in between."""

    dependence, uses_survival = FixedLength(4).dependence, False

    def __init__(self) -> None:
        self.round = 0

    def draft_lengths(self, state):  # type: ignore[no-untyped-def]
        self.round += 1
        return np.minimum(state.room, 4 if self.round % 5 == 0 else 0)

    def verify_lengths(self, state, survival, drafted):  # type: ignore[no-untyped-def]
        return drafted


def test_drafts_do_not_depend_on_when_the_context_is_written() -> None:
    """Requests of several lengths come and go; both engines accept the same drafts and end with the same draft KV."""
    results = []
    for eager in (False, True):
        target = tiny_decoder()
        drafter = tiny_drafter(target)
        assert isinstance(drafter, Deferring)
        engine = Engine(target, _Eager(drafter) if eager else drafter, _Now())  # type: ignore[arg-type]
        for i in range(5):
            prompt = [(7 * i + j) % 60 + 1 for j in range(5 + 9 * i)]
            engine.add(prompt, SamplingParams(temperature=0, max_tokens=12 + 6 * i), request_id=str(i))
        outputs = {}
        while engine.has_unfinished:
            for event in engine.step():
                if event.output is not None:
                    outputs[event.request_id] = event.output
        results.append(
            {
                name: (out.token_ids, out.metrics.drafted, out.metrics.accepted)
                for name, out in outputs.items()
            }
        )
    assert results[0] == results[1]
    assert sum(accepted for _, _, accepted in results[0].values()) >= 0
    assert sum(drafted for _, drafted, _ in results[0].values()) > 0


def test_a_lookup_in_front_passes_it_on() -> None:
    drafter = LookupFirst(tiny_drafter(tiny_decoder()), 3, 5)
    drafter.drafter._behind.add(observed((1, 2)))  # type: ignore[attr-defined]
    drafter.forget(request(1))
    drafter.catch_up()  # nothing is left to write, and no pool is needed
    assert drafter.drafter._behind.take() is None  # type: ignore[attr-defined]


def test_another_pool_starts_with_nothing_behind() -> None:
    """Rows of an engine that was given up would be written over another one's."""
    drafter = tiny_drafter(tiny_decoder())
    drafter._behind.add(observed((1, 2)))
    drafter.attach(KVPool(drafter.kv_specs, 2), 0)
    assert drafter._behind.take() is None
