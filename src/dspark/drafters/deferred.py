"""Committed rows that a drafter has not looked at yet.

Following the commits costs a drafter a projection of every row, drafts or not. Put off until a draft needs them, rows
of rounds without drafts are projected many at once, which costs a tenth; and those of requests that end first, never.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dspark.core import Request
from dspark.drafters.base import ObserveBatch

__all__ = ["DeferredRows"]

MOST_ROWS = 2048  # kept: their taps are memory


class DeferredRows:
    """Rows of `ObserveBatch`es in order; each row's slot stays its request's until `forget`.

    Taps are copied to memory of its own. A pass's taps that outlive it would lie between the passes' large outputs,
    which the C library then returns to the system and fetches anew, page by page: 1 ms a pass of 16 rows.
    """

    def __init__(self) -> None:
        self._parts: list[ObserveBatch] = []  # without taps
        self._count = 0
        self._taps: Tensor | None = None  # [MOST_ROWS, m * H], the parts' rows in order

    def add(self, batch: ObserveBatch) -> bool:
        """Keep the rows; False, and nothing was kept, if there is no room for them."""
        assert batch.taps is not None
        stop = self._count + len(batch.slots)
        if stop > MOST_ROWS:
            return False
        if self._taps is None:
            with torch.inference_mode(False):  # `forget` writes to it outside of a round, too
                shape = MOST_ROWS, batch.taps.shape[1]
                self._taps = torch.empty(shape, dtype=batch.taps.dtype, device=batch.taps.device)
        self._taps[self._count : stop] = batch.taps
        self._parts.append(replace(batch, taps=None))
        self._count = stop
        return True

    def forget(self, request: Request) -> None:
        """Drop a request's rows: its slots may soon be another's."""
        if not any(other.uid == request.uid for part in self._parts for other in part.requests):
            return
        start, kept = 0, 0
        parts, self._parts = self._parts, []
        for part in parts:
            assert self._taps is not None
            first, start = start, start + len(part.slots)
            whole = replace(part, taps=self._taps[first:start])
            rest = whole.without(request)
            if rest is None or rest.taps is None:
                continue
            if rest is not whole or kept < first:
                # Rows move towards the front, never over one that has not moved yet; places may overlap.
                self._taps[kept : kept + len(rest.slots)] = rest.taps.clone()
            kept += len(rest.slots)
            self._parts.append(replace(rest, taps=None))
        self._count = kept

    def take(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Positions [N], slots [N] and taps [N, m * H] of all rows, which leave; None if there are none.

        The taps hold until rows are added again.
        """
        parts, count, self._parts, self._count = self._parts, self._count, [], 0
        if not count:
            return None
        assert self._taps is not None
        positions, slots = (
            torch.cat(column) for column in ([p.positions for p in parts], [p.slots for p in parts])
        )
        return positions, slots, self._taps[:count]
