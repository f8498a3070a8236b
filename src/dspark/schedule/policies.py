"""Scheduling policies: how many tokens to draft, and how many of the drafts to verify.

A policy is a pure object over plain arrays. It declares what its verify decision depends on, which settles
for which rows it is lossless (DESIGN seam 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np

from dspark.core import DSparkError

__all__ = ["Dependence", "FixedLength", "Policy", "ScheduleState"]


class Dependence(IntEnum):
    """What a verify decision depends on, weakest first."""

    STATIC = 0  # nothing drawn this round
    CAUSAL = 1  # early stop: verifying x_k depends on nothing at or after x_k
    LAGGED = 2  # budget from old rounds, ranks from the current one
    LIVE = 3  # anything in the current block


@dataclass(frozen=True)
class ScheduleState:
    """What a policy may know before drafting: R requests of this round."""

    uids: np.ndarray  # [R] int64
    room: np.ndarray  # [R] int64: most drafts each may have (0 while prefilling, or where speculation is off)
    context_lens: np.ndarray  # [R] int64 cached positions


class Policy(Protocol):
    """`uses_survival`: whether `verify_lengths` reads confidences (they cost a device synchronisation)."""

    @property
    def dependence(self) -> Dependence: ...

    @property
    def uses_survival(self) -> bool: ...

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        """Drafts to propose, [R] int64 in 0..room; all 0 means that nothing is drafted."""
        ...

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        """Scheduled lengths [R] int64 in 0..drafted. `survival` [R, gamma]: a_{r,j}, where confidences exist."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """Draft and verify `length` tokens of every request."""

    length: int
    dependence: Dependence = Dependence.STATIC
    uses_survival: bool = False

    def __post_init__(self) -> None:
        if self.length < 0:
            raise DSparkError(f"num_speculative_tokens must be 0 or more, got {self.length}")

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        return np.minimum(state.room, self.length)

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        return drafted
