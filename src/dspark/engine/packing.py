"""How the rows of a step lie side by side: compiled loops over requests, since every round pays for them.

Request r owns rows query_start[r] .. query_start[r + 1]: its pending tokens, then its scheduled drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dspark.compilation import compiled

__all__ = ["PackedRows", "draft_rows", "kept_rows", "pack_rows"]


class PackedRows(NamedTuple):
    """Rows of R requests, and those whose logits are wanted: of the S requests that decide a token, the anchor's
    row and one a draft."""

    query_start: np.ndarray  # [R + 1] int64
    positions: np.ndarray  # [N] int64
    slots: np.ndarray  # [N] int64
    sampling: np.ndarray  # [S] int64 requests
    lengths: np.ndarray  # [S] int64 drafts of each
    logit_start: np.ndarray  # [S] int64, its first among the wanted rows
    logit_rows: np.ndarray  # [n] int64 wanted rows


def pack_rows(
    cached: np.ndarray,
    rows: np.ndarray,
    drafts: np.ndarray,
    samples: np.ndarray,
    tables: np.ndarray,
    block_size: int,
) -> PackedRows:
    """Lay out a step.

    Args:
        cached, rows, drafts: [R] int64 positions in the cache, pending rows, scheduled drafts.
        samples: [R] bool, decides a token this round; drafts are 0 elsewhere.
        tables: [R, max_blocks] int64.
    """
    return PackedRows(*_pack(cached, rows, drafts, samples, tables, block_size))


@compiled
def _pack(
    cached: np.ndarray,
    rows: np.ndarray,
    drafts: np.ndarray,
    samples: np.ndarray,
    tables: np.ndarray,
    block_size: int,
) -> tuple[np.ndarray, ...]:
    R, total, wanted, deciding = len(rows), 0, 0, 0
    for r in range(R):
        total += rows[r] + drafts[r]
        if samples[r]:
            deciding += 1
            wanted += 1 + drafts[r]
    query_start, positions, slots = (
        np.empty(R + 1, np.int64),
        np.empty(total, np.int64),
        np.empty(total, np.int64),
    )
    sampling, lengths = np.empty(deciding, np.int64), np.empty(deciding, np.int64)
    logit_start, logit_rows = np.empty(deciding, np.int64), np.empty(wanted, np.int64)
    row, s, logit = 0, 0, 0
    query_start[0] = 0
    for r in range(R):
        if samples[r]:
            sampling[s], lengths[s], logit_start[s] = r, drafts[r], logit
            for k in range(1 + drafts[r]):
                logit_rows[logit] = row + rows[r] - 1 + k
                logit += 1
            s += 1
        for i in range(rows[r] + drafts[r]):
            position = cached[r] + i
            positions[row] = position
            slots[row] = tables[r, position // block_size] * block_size + position % block_size
            row += 1
        query_start[r + 1] = row
    return query_start, positions, slots, sampling, lengths, logit_start, logit_rows


@compiled
def draft_rows(query_start: np.ndarray, rows: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """Where scheduled drafts go, [3, sum(drafts)] int64: row of the step, request, slot."""
    out = np.empty((3, drafts.sum()), np.int64)
    n = 0
    for r in range(len(rows)):
        for slot in range(drafts[r]):
            out[0, n], out[1, n], out[2, n] = query_start[r] + rows[r] + slot, r, slot
            n += 1
    return out


@compiled
def kept_rows(
    query_start: np.ndarray, positions: np.ndarray, slots: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The first counts[r] rows of each request side by side.

    Returns:
        start [R + 1], where each request's begin; and of all kept rows [n] their number in the step, position, slot.
    """
    total = counts.sum()
    start, index = np.empty(len(counts) + 1, np.int64), np.empty(total, np.int64)
    kept_positions, kept_slots = np.empty(total, np.int64), np.empty(total, np.int64)
    n = 0
    start[0] = 0
    for r in range(len(counts)):
        for row in range(query_start[r], query_start[r] + counts[r]):
            index[n], kept_positions[n], kept_slots[n] = row, positions[row], slots[row]
            n += 1
        start[r + 1] = n
    return start, index, kept_positions, kept_slots
