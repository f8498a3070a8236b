"""Committed rows that a drafter has not looked at yet.

Following the commits costs a drafter a projection of every row, drafts or not. Put off until a draft needs them, rows
of rounds without drafts are projected many at once, which costs a tenth; and those of requests that end first, never.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.core import Request
from dspark.drafters.base import ObserveBatch

__all__ = ["DeferredRows"]

MOST_ROWS = 512  # kept: their taps are memory


class DeferredRows:
    """Rows of `ObserveBatch`es in order; each row's slot stays its request's until `forget`."""

    def __init__(self) -> None:
        self._parts: list[ObserveBatch] = []
        self._count = 0

    def add(self, batch: ObserveBatch) -> None:
        assert batch.taps is not None
        self._parts.append(batch)  # no more than this: it happens in every round
        self._count += len(batch.slots)

    @property
    def full(self) -> bool:
        return self._count >= MOST_ROWS

    def forget(self, request: Request) -> None:
        """Drop a request's rows: its slots may soon be another's."""
        kept = (part.without(request) for part in self._parts)
        self._parts = [part for part in kept if part is not None]
        self._count = sum(len(part.slots) for part in self._parts)

    def take(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Positions [N], slots [N] and taps [N, m * H] of all rows, which leave; None if there are none."""
        parts, self._parts, self._count = self._parts, [], 0
        if not parts:
            return None
        columns = zip(*((part.positions, part.slots, part.taps) for part in parts), strict=True)
        positions, slots, taps = (_joined(column) for column in columns)
        return positions, slots, taps


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
