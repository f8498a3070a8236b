"""Schedulers as plain loops with their faults as options: what the audit must catch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from dspark.schedule.policies import Dependence, ScheduleState


@dataclass
class LoopScheduler:
    """Admit drafts by survival within a budget from survivals `lag` rounds old (0: the current block).

    `early_stop`: stop at the first rate that does not improve. `later_first`: ties put the later slot first.
    `seconds[b]`: price of a pass over b tokens.
    """

    seconds: tuple[float, ...]
    lag: int = 0
    early_stop: bool = False
    later_first: bool = False
    dependence: Dependence = Dependence.LAGGED
    uses_survival: bool = True
    history: list[np.ndarray] = field(default_factory=list)

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        return state.room

    def verify_lengths(self, state: ScheduleState, survival: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        known = [survival, *self.history]
        budget = self._budget(known[self.lag]) if self.lag < len(known) else 0
        lengths = np.zeros(len(survival), dtype=np.int64)
        for r, _ in self._order(survival)[:budget]:
            lengths[r] += 1
        return lengths

    def observe(self, state: ScheduleState, survival: np.ndarray, *rest: np.ndarray) -> None:
        self.history = [survival, *self.history][: self.lag]

    def _order(self, survival: np.ndarray) -> list[tuple[int, int]]:
        sign = -1 if self.later_first else 1
        return sorted(np.ndindex(*survival.shape), key=lambda c: (-survival[c], sign * c[1], c[0]))

    def _budget(self, survival: np.ndarray) -> int:
        R = len(survival)
        tau, best, budget = float(R), R / self.seconds[R], 0
        for k, candidate in enumerate(self._order(survival), start=1):
            tau += survival[candidate]
            if tau / self.seconds[R + k] > best:
                best, budget = tau / self.seconds[R + k], k
            elif self.early_stop:
                break
        return budget


APPENDIX_A_SECONDS = (0.0, 1.0, 2.0, 1 / 0.45, 3.3, 3.6, 3.7, 3.9)
RISING = (0.0, 0.9, 1.0, 1.2, 1.45, 1.75, 2.2, 3.0)
STAIRS = (0.0, 1.0, 1.0, 1.3, 1.3, 2.0, 2.0, 3.0)


def make_live() -> LoopScheduler:
    return LoopScheduler(APPENDIX_A_SECONDS, dependence=Dependence.LIVE)


def make_liar() -> LoopScheduler:
    return LoopScheduler(APPENDIX_A_SECONDS, dependence=Dependence.LAGGED)


def make_sound() -> LoopScheduler:
    return LoopScheduler(RISING, lag=1)
