"""A policy behind another object: whoever watches or changes one part of it writes that part alone."""

from __future__ import annotations

import numpy as np

from dspark.schedule.base import Dependence, Observer, Policy, Resting, ScheduleState, Timed

__all__ = ["ForwardingPolicy"]


class ForwardingPolicy:
    """Decides and learns as `inner` does; what `inner` does not listen to goes nowhere."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self._observer = inner if isinstance(inner, Observer) else None
        self._timed = inner if isinstance(inner, Timed) else None
        self._resting = inner if isinstance(inner, Resting) else None

    @property
    def dependence(self) -> Dependence:
        return self.inner.dependence

    @property
    def uses_survival(self) -> bool:
        return self.inner.uses_survival

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        return self.inner.draft_lengths(state)

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        return self.inner.verify_lengths(state, survival, drafted)

    def observe(
        self,
        state: ScheduleState,
        survival: np.ndarray | None,
        drafted: np.ndarray,
        scheduled: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        if self._observer is not None:
            self._observer.observe(state, survival, drafted, scheduled, accepted)

    def timed(
        self, state: ScheduleState, drafted: np.ndarray, scheduled: np.ndarray, draft_s: float, step_s: float
    ) -> None:
        if self._timed is not None:
            self._timed.timed(state, drafted, scheduled, draft_s, step_s)

    def rests(self, num_requests: int) -> float:
        return 0 if self._resting is None else self._resting.rests(num_requests)
