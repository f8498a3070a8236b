"""How much to draft: decided before the block exists, from past rounds and prices alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.base import ScheduleState
from dspark.schedule.cost import CostModel
from dspark.schedule.history import AcceptanceHistory
from dspark.schedule.search import rank, rate_curve

__all__ = ["Aim", "AimConfig", "DraftGate"]


@dataclass(frozen=True)
class AimConfig:
    """`hysteresis`: gain needed to switch drafting on again; it goes off where plain decoding is faster.

    Drafting is tried for `trial_rounds` at the start, and again after `retry_after` rounds without it; each trial
    in vain doubles the wait, up to `retry_at_most`.
    """

    prior: float = 0.6
    weight: float = 2.0
    decay: float = 0.95
    hysteresis: float = 0.03
    trial_rounds: int = 8
    retry_after: int = 64
    retry_at_most: int = 1024

    def __post_init__(self) -> None:
        if self.hysteresis < 0:
            raise DSparkError(f"hysteresis must be 0 or more, got {self.hysteresis}")
        if self.trial_rounds < 1 or not 1 <= self.retry_after <= self.retry_at_most:
            raise DSparkError(
                "trial_rounds must be 1 or more, and retry_after between 1 and retry_at_most: drafting that is "
                "never tried again stays off for ever"
            )


class DraftGate:
    """Whether to draft at all, with a memory, counted in rounds."""

    def __init__(self, config: AimConfig) -> None:
        self._config = config
        self._trial, self._off, self._wait = config.trial_rounds, 0, config.retry_after
        self.on = True

    @property
    def trying(self) -> bool:
        """A trial is due or under way: draft, whatever the estimate says."""
        return self._trial > 0 or self._off >= self._wait

    def passes(self, gain: float) -> bool:
        """`gain`: expected tokens per second with drafts, over those without."""
        return self.trying or gain > (1.0 if self.on else 1 + self._config.hysteresis)

    def observe(self, wanted: bool, drafted: bool) -> None:
        """File a round in which drafting was possible; one whose drafter had nothing to say tells nothing."""
        config = self._config
        if wanted and not drafted:
            return
        if not wanted:
            self.on = False
            self._off += 1
            return
        if self._off >= self._wait:
            self._trial = config.trial_rounds
            self._wait = min(2 * self._wait, config.retry_at_most)
        elif self._trial == 0:
            self._wait = config.retry_after  # it goes on without a trial: it pays
        self._trial, self._off, self.on = max(0, self._trial - 1), 0, True


class Aim:
    """Draft lengths of the adaptive policies, and the history they share.

    One search over expected survivals prices verification and drafting together; its lengths are what a drafter
    without confidences is asked for. With confidences each row may have one draft more: the block then shows by
    itself whether it was worth it, and unexplored slots get explored. A drafted round is worth the larger of
    what the search expects and what the last ones *realised*: confidences pick good moments, which a mean
    cannot see.
    """

    def __init__(self, gamma: int, cost: CostModel, config: AimConfig | None = None) -> None:
        if gamma < 1:
            raise DSparkError(f"gamma must be at least 1, got {gamma}")
        config = config or AimConfig()
        self.gamma, self.cost, self.config = gamma, cost, config
        self.history = AcceptanceHistory(gamma, config.prior, config.weight, config.decay)
        self.gate = DraftGate(config)
        self._confident = False
        self._realised = np.zeros(4)  # tokens, seconds with drafts; tokens, seconds without: decayed sums
        self._wanted = False

    def lengths(self, state: ScheduleState) -> np.ndarray:
        """[R] int64 drafts to propose."""
        room = np.minimum(state.room, self.gamma)
        chosen = self._choose(state, room) if room.any() else np.zeros_like(room)
        self._wanted = bool(chosen.any())
        return chosen

    def observe(
        self,
        state: ScheduleState,
        survival: np.ndarray | None,
        drafted: np.ndarray,
        scheduled: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        if not state.room.any():
            return
        resumed = not self.gate.on
        self.gate.observe(self._wanted, bool(drafted.any()))
        if not drafted.any():
            return
        if resumed:
            self._realised[:] = 0
        self._confident = survival is not None
        self.history.observe(state.uids, survival, drafted, scheduled, accepted)
        with_drafts = self._step(state, int(scheduled.sum())) + self._draft(drafted)
        round_ = (state.outputs + int(accepted.sum()), with_drafts, state.outputs, self._step(state, 0))
        self._realised = self.config.decay * self._realised + round_

    def _choose(self, state: ScheduleState, room: np.ndarray) -> np.ndarray:
        if self.gate.trying:
            return room
        ranking = rank(self.history.survival(state.uids), room)
        drafted_for = np.cumsum(np.concatenate(([False], ranking.slots == 0)))  # requests in the first K
        drafting = self.cost.draft_seconds(drafted_for, np.arange(len(drafted_for)))
        curve = rate_curve(ranking, state, self.cost, drafting)
        rates = curve.rate
        best = int(rates.argmax())
        lengths = ranking.lengths(best)
        if not self._confident:
            return lengths if self.gate.passes(float(rates[best] / rates[0])) else np.zeros_like(room)
        verifying = float(curve.seconds[best] - drafting[best])
        wider = np.minimum(lengths + 1, room)
        some = np.where(lengths > 0, wider, 0)  # the others are not worth a draft at this load
        gain, choice = max(
            ((float(curve.tokens[best] / rates[0]) / (verifying + self._draft(d)), d) for d in (some, wider)),
            key=lambda option: option[0],
        )
        if self._realised_gain() > gain:
            gain, choice = self._realised_gain(), wider if best else room
        return choice if self.gate.passes(gain) and choice.any() else np.zeros_like(room)

    def _realised_gain(self) -> float:
        """Of the last drafted rounds over plain decoding; nothing is known of rounds long past."""
        tokens, seconds, plain_tokens, plain_seconds = self._realised
        known = self.gate.on and seconds > 0 and plain_tokens > 0
        return float(tokens / seconds * plain_seconds / plain_tokens) if known else 0.0

    def _step(self, state: ScheduleState, budget: int) -> float:
        return float(self.cost.step_seconds(state.num_requests, state.query_tokens + budget, state.context))

    def _draft(self, drafted: np.ndarray) -> float:
        return float(self.cost.draft_seconds(int(np.count_nonzero(drafted)), int(drafted.sum())))
