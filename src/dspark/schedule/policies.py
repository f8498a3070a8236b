"""Scheduling policies: how many tokens to draft, and how many of the drafts to verify.

A policy is a pure object over plain arrays: no clock, no randomness, no tensors. It declares what its verify
decision depends on, which settles for which rows it is lossless. `draft_lengths` knows past rounds alone.

| policy | verifies | dependence |
|---|---|---|
| FixedLength | all that was drafted | STATIC |
| Threshold | while survival (or confidence) holds | CAUSAL |
| PrefixScheduler | Algorithm 1: while expected tokens per second improve | CAUSAL |
| LaggedScheduler | a budget from old survivals, shared out by newer ones | LAGGED |
| GlobalScheduler | the best budget for the block at hand | LIVE |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.aim import Aim, AimConfig
from dspark.schedule.base import Dependence, Observer, Policy, Resting, ScheduleState, Timed
from dspark.schedule.cost import CostModel
from dspark.schedule.feedback import LiveCost
from dspark.schedule.loops import tally, totals, while_at_least
from dspark.schedule.search import Curve, Ranking, best_budget, early_stop, fill_upwards, rank

__all__ = [
    "Dependence",
    "FixedLength",
    "GlobalScheduler",
    "LaggedScheduler",
    "Observer",
    "Policy",
    "PrefixScheduler",
    "Resting",
    "ScheduleState",
    "Threshold",
    "Timed",
]


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
        return np.minimum(drafted, self.length)


@dataclass(frozen=True)
class Threshold:
    """Draft `length` tokens, verify while prefix survival stays at or above `threshold`.

    `on="confidence"` asks it of each slot's own c_k instead. CAUSAL: decided left to right, each row by itself.
    NOTE: it knows no prices, and pays for every draft that it then drops.
    """

    length: int
    threshold: float
    on: Literal["survival", "confidence"] = "survival"
    dependence: Dependence = Dependence.CAUSAL
    uses_survival: bool = True

    def __post_init__(self) -> None:
        if self.length < 0:
            raise DSparkError(f"num_speculative_tokens must be 0 or more, got {self.length}")
        if not 0 <= self.threshold <= 1:
            raise DSparkError(f"threshold must lie between 0 and 1, got {self.threshold}")
        if self.on not in ("survival", "confidence"):
            raise DSparkError(f"a threshold is set on survival or confidence, not on {self.on!r}")

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        return np.minimum(state.room, self.length)

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        if survival is None:
            if drafted.any():
                raise DSparkError("a threshold needs a drafter with a confidence head; use another policy")
            return drafted
        survival, most = np.ascontiguousarray(survival, dtype=np.float64), np.minimum(drafted, self.length)
        lengths = np.empty(len(drafted), dtype=np.int64)
        while_at_least(survival, most, float(self.threshold), self.on == "confidence", lengths)
        return lengths


class _Adaptive(ABC):
    """Drafts what `Aim` finds worth drafting, learns from rounds, verifies within the round's prices.

    A drafter without confidences is verified in full: what it was asked for already came out of the search.

    Args:
        gamma: most drafts a request may have.
        cost: prices of target pass and draft.
        aim: priors, hysteresis and trials of drafting.
    """

    uses_survival = True
    remembers = 0  # rounds whose survivals the search wants as they were

    def __init__(self, gamma: int, cost: CostModel, *, aim: AimConfig | None = None) -> None:
        self.gamma, self.cost = gamma, cost
        self.aim = Aim(gamma, cost, aim, remembers=self.remembers)
        self._seen: tuple[np.ndarray, np.ndarray] | None = (
            None  # survivals of this round, as given and as usable
        )

    @property
    def warning(self) -> str | None:
        """What is suspicious about the prices this policy decides by."""
        return self.cost.warning

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        return self.aim.lengths(state)

    def rests(self, num_requests: int) -> float:
        """See `Resting`: drafting pays at no load that was met lately, and the next trial at this one is far."""
        return self.aim.rests(num_requests)

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        if survival is None:
            return drafted
        ranking = rank(survival, drafted)
        self._seen = survival, ranking.alive
        return self._schedule(state, ranking, drafted)

    def observe(
        self,
        state: ScheduleState,
        survival: np.ndarray | None,
        drafted: np.ndarray,
        scheduled: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        alive, seen, self._seen = None, self._seen, None
        if survival is not None:
            alive = seen[1] if seen is not None and seen[0] is survival else rank(survival, drafted).alive
        self.aim.observe(state, alive, drafted, scheduled, accepted)
        self.aim.forget_prices()

    def timed(
        self, state: ScheduleState, drafted: np.ndarray, scheduled: np.ndarray, draft_s: float, step_s: float
    ) -> None:
        """Let prices that follow the machine learn what the round took: where drafting rests, of few rounds."""
        if isinstance(self.cost, LiveCost):
            if self.aim.gate(len(state.uids)).deaf:
                return
            requests, drafts, rows = self.aim.counted or tally(state.modelled(drafted), scheduled)
            self.aim.took(state, requests, drafts, draft_s)
            self.cost.observe(state, requests, drafts, rows, draft_s, step_s)
            self.aim.forget_prices()

    @abstractmethod
    def _schedule(self, state: ScheduleState, ranking: Ranking, drafted: np.ndarray) -> np.ndarray:
        """Scheduled lengths [R] where there are drafts with confidences."""

    def _curve(self, state: ScheduleState, ranking: Ranking, drafted: np.ndarray) -> Curve:
        requests, drafts = ranking.requests, ranking.candidates
        if state.free is not None:
            requests, drafts = totals(state.modelled(drafted))
        spent = self.cost.draft_price(requests, drafts)
        return Curve(ranking, state.outputs, self.aim.seconds(state, len(ranking)), spent)


class PrefixScheduler(_Adaptive):
    """Algorithm 1, the hardware-aware prefix scheduler: admit by survival while Theta improves, then stop.

    On a staircase of captured sizes (`TableCost(executed=True)`) the rest of a size is free and gets used, but the
    first token of the next size pays for all of it, so the stop comes early where only the whole step would pay;
    looking past it would be LIVE. The way around that keeps CAUSAL: price by the straight line between the
    sizes, and give them as `sizes`: once stopped, the batch is filled *upwards* to the size it is executed at.

    Args:
        min_gain: a token must bring (1 + min_gain) times what its time is worth; part of the stop test.
        sizes: batch sizes that are executed, increasing; none where a batch runs as it is.
    """

    dependence = Dependence.CAUSAL

    def __init__(
        self,
        gamma: int,
        cost: CostModel,
        *,
        min_gain: float = 0.0,
        sizes: tuple[int, ...] = (),
        aim: AimConfig | None = None,
    ) -> None:
        super().__init__(gamma, cost, aim=aim)
        if min_gain < 0:
            raise DSparkError(f"min_gain must be 0 or more, got {min_gain}")
        if any(b <= a for a, b in pairwise(sizes)):
            raise DSparkError(f"sizes must increase, got {list(sizes)}")
        self.min_gain, self.sizes = min_gain, sizes

    def _schedule(self, state: ScheduleState, ranking: Ranking, drafted: np.ndarray) -> np.ndarray:
        budget = early_stop(self._curve(state, ranking, drafted), self.min_gain)
        return ranking.lengths(fill_upwards(budget, state.query_tokens, len(ranking), self.sizes))


class GlobalScheduler(_Adaptive):
    """The budget of the largest expected tokens per second, whatever lies between.

    LIVE: it looks at tokens to decide whether to verify them. Exact for greedy rows and deterministic drafts,
    biased for sampled ones (Appendix A).
    """

    dependence = Dependence.LIVE

    def _schedule(self, state: ScheduleState, ranking: Ranking, drafted: np.ndarray) -> np.ndarray:
        return ranking.lengths(best_budget(self._curve(state, ranking, drafted)))


class LaggedScheduler(_Adaptive):
    """The production form: a global search over survivals two rounds old sets the budget, newer ones share it out.

    The budget knows nothing of the current block, so the search may be unconstrained and staircases do no harm.
    With `ranks="current"` the top candidates of the current block take it: which is lossless, as a candidate's
    rank depends on what precedes it. With `ranks="previous"` last round's survivals fix the lengths. Slots that a
    request has no past for are taken at its expected survival: 1.0 is never assumed.

    Args:
        ranks: whose survivals share the budget out.
        sample: requests that one old round is enough of. With fewer, it tells little of the next round (one block
            of one request is a draw of luck), and the budget rests on all past rounds, on expected survivals.
    """

    dependence = Dependence.LAGGED
    remembers = 2

    def __init__(
        self,
        gamma: int,
        cost: CostModel,
        *,
        ranks: Literal["current", "previous"] = "current",
        sample: int = 8,
        aim: AimConfig | None = None,
    ) -> None:
        super().__init__(gamma, cost, aim=aim)
        if ranks not in ("current", "previous"):
            raise DSparkError(f"ranks must be current or previous, got {ranks!r}")
        self.ranks, self.sample = ranks, sample

    def budget(self, state: ScheduleState, drafted: np.ndarray) -> int:
        """Drafts to verify in all, from survivals two rounds old."""
        older = rank(self._older(state), drafted)
        return best_budget(self._curve(state, older, drafted))

    def _older(self, state: ScheduleState) -> np.ndarray:
        """[R, gamma] survivals that the budget rests on."""
        history = self.aim.history
        if state.num_requests < self.sample:
            return history.survival(state.uids)
        return history.past_survival(state.uids, 1)

    def _schedule(self, state: ScheduleState, ranking: Ranking, drafted: np.ndarray) -> np.ndarray:
        newer = ranking
        if self.ranks == "previous":
            newer = rank(self.aim.history.past_survival(state.uids, 0), drafted)
        return newer.lengths(self.budget(state, drafted))
