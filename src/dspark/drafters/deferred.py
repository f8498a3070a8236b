"""Committed rows that a drafter has not looked at yet.

Following the commits costs a drafter a projection of every row, drafts or not. Put off until a draft needs them, rows
of rounds without drafts are projected many at once, which costs a tenth; and those of requests that end first, never.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dspark.core import Request
from dspark.drafters.base import ObserveBatch

__all__ = ["DeferredRows"]

MOST_ROWS = 512  # kept: their taps are memory


class DeferredRows:
    """Rows of `ObserveBatch`es in order; each row's slot stays its request's until `forget`."""

    def __init__(self) -> None:
        self._parts: list[
            tuple[np.ndarray, Tensor, Tensor, Tensor]
        ] = []  # owner, position, slot, taps of rows
        self._count = 0

    def add(self, batch: ObserveBatch) -> None:
        assert batch.taps is not None
        counts = np.diff(batch.row_start)
        uids = [r.uid for r in batch.requests] or [-1] * len(counts)
        owners = np.repeat(np.array(uids, dtype=np.int64), counts)
        self._parts.append((owners, batch.positions, batch.slots, batch.taps))
        self._count += len(owners)

    @property
    def full(self) -> bool:
        return self._count >= MOST_ROWS

    def forget(self, request: Request) -> None:
        """Drop a request's rows: its slots may soon be another's."""
        kept = []
        for part in self._parts:
            keep = part[0] != request.uid
            if keep.all():
                kept.append(part)
            elif keep.any():
                rows = torch.from_numpy(np.flatnonzero(keep)).to(part[1].device)
                kept.append((part[0][keep], *(values[rows] for values in part[1:])))
        self._parts, self._count = kept, sum(len(part[0]) for part in kept)

    def take(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Positions [N], slots [N] and taps [N, m * H] of all rows, which leave; None if there are none."""
        parts, self._parts, self._count = self._parts, [], 0
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0][1:]
        _, *columns = zip(*parts, strict=True)
        positions, slots, taps = (torch.cat(column) for column in columns)
        return positions, slots, taps
