"""How much to draft: decided before the block exists, from past rounds and prices alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.base import ScheduleState
from dspark.schedule.cost import CostModel
from dspark.schedule.history import AcceptanceHistory
from dspark.schedule.search import decoding_seconds, rank, rate_curve

__all__ = ["Aim", "AimConfig", "DraftGate", "Realised"]

_LOOK = 8  # rounds without drafts from one estimate to the next
_BOLD = 2  # rounds in which all is drafted that could pay at best
_FIRST = (
    8  # times `exploration` may be spent on the first retry, half as much on the next: it knows little yet
)


@dataclass(frozen=True)
class AimConfig:
    """`hysteresis`: gain needed to switch drafting on again; it goes off where plain decoding is shown to be faster.

    Drafting is tried for `trial_rounds` at the start, and again after `retry_after` rounds without it; each trial
    in vain doubles the wait, up to `retry_at_most`. The wait is never shorter than what a trial cost (in rounds of
    plain decoding, until drafting was off again) over `exploration`, so that trials in vain take that share of the
    time in the long run. No trial is made where
    it could not pay even if every draft were accepted with probability `hope`. What drafted rounds brought is
    remembered with `memory` a round (longer than the history: it settles whether to draft, not how much) and judged
    with `doubt` standard errors in favour of drafting: rounds without drafts teach nothing, so a wrong "off" lasts,
    while a wrong "on" is soon found out.
    """

    prior: float = 0.6
    weight: float = 2.0
    decay: float = 0.95
    hysteresis: float = 0.03
    trial_rounds: int = 8
    retry_after: int = 64
    retry_at_most: int = 1024
    exploration: float = 0.01
    hope: float = 0.9
    memory: float = 0.98
    doubt: float = 1.0

    def __post_init__(self) -> None:
        for name in ("hysteresis", "doubt"):
            if getattr(self, name) < 0:
                raise DSparkError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("hope", "memory", "exploration"):
            if not 0 < getattr(self, name) < 1:
                raise DSparkError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
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
        self._lasted = 0  # drafted rounds since the last trial
        self._lost = 0.0  # since the last trial began, in rounds of plain decoding
        self.on = True

    @property
    def trying(self) -> bool:
        """A trial is due or under way: draft, whatever the estimate says."""
        return self._trial > 0 or self._off >= self._patience

    @property
    def resting(self) -> bool:
        """Off, and not to be asked in this round: an estimate costs time in a round that is to cost none."""
        return not self.on and not self.trying and self._off % _LOOK > 0

    @property
    def _patience(self) -> float:
        config = self._config
        share = config.exploration * max(1.0, _FIRST * config.retry_after / self._wait)
        return max(self._wait, self._lost / share)

    def passes(self, gain: float) -> bool:
        """`gain`: expected tokens per second with drafts, over those without."""
        return self.trying or gain > (1.0 if self.on else 1 + self._config.hysteresis)

    def observe(self, wanted: bool, drafted: bool, lost: float = 0.0) -> None:
        """File a round in which drafting was possible; one whose drafter had nothing to say tells nothing.

        `lost`: rounds of plain decoding that the time would have been worth, less what it brought in such rounds.
        """
        config = self._config
        if wanted and not drafted:
            return
        if not wanted:
            self.on = False
            self._off += 1
            return
        if self._off >= self._patience:
            self._trial, self._lasted, self._lost = config.trial_rounds, 0, 0.0
            self._wait = min(2 * self._wait, config.retry_at_most)
        elif self._trial == 0:
            self._lasted += 1
        self._lost = max(0.0, self._lost + lost)
        if self._lasted >= config.retry_after:  # it goes on for long without a trial: it pays
            self._wait, self._lost = config.retry_after, 0.0
        self._trial, self._off, self.on = max(0, self._trial - 1), 0, True


class Realised:
    """What drafted rounds brought over plain decoding: a ratio of decayed sums, with its standard error."""

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._sums = np.zeros(7)  # of w, w^2, and by w: tokens, their plain worth, their squares and product

    def add(self, tokens: float, plain_worth: float) -> None:
        """File a round. `plain_worth`: tokens that plain decoding decides in the seconds it took."""
        t, b = tokens, plain_worth
        fade = np.full(7, self._memory)
        fade[1] **= 2
        self._sums = fade * self._sums + (1.0, 1.0, t, b, t * t, t * b, b * b)

    @property
    def gain(self) -> float:
        """Tokens over their plain worth; 0 where nothing is known."""
        return float(self._sums[2] / self._sums[3]) if self._sums[3] > 0 else 0.0

    @property
    def error(self) -> float:
        """Standard error of the gain (of a ratio of means, rounds taken as independent)."""
        w, w2, _, b, tt, tb, bb = self._sums.tolist()
        if b <= 0:
            return 0.0
        g = self.gain
        spread = max(tt - 2 * g * tb + g * g * bb, 0.0) / w
        return float((spread * w2) ** 0.5 / b)

    @property
    def rounds(self) -> float:
        """How many rounds weigh in."""
        return float(self._sums[0])


@dataclass
class _Load:
    """What is known of one batch size (within a factor of 2): whether drafting pays is a question of the load."""

    gate: DraftGate
    tried: Realised  # in trials, which draft for everybody
    realised: Realised  # with the lengths that were chosen


class Aim:
    """Draft lengths of the adaptive policies, and the history they share.

    One search over expected survivals prices verification and drafting together; its lengths are what a drafter
    without confidences is asked for. With confidences each row may have one draft more: the block then shows by
    itself whether it was worth it, and unexplored slots get explored. Whether to draft at all is settled by what
    the last drafted rounds *realised* at this load, as soon as that is known well enough, and by the search's
    expectation before: confidences pick good moments, which a mean cannot see.
    """

    def __init__(self, gamma: int, cost: CostModel, config: AimConfig | None = None) -> None:
        if gamma < 1:
            raise DSparkError(f"gamma must be at least 1, got {gamma}")
        config = config or AimConfig()
        self.gamma, self.cost, self.config = gamma, cost, config
        self.history = AcceptanceHistory(gamma, config.prior, config.weight, config.decay)
        self._loads: dict[int, _Load] = {}
        self._confident = False
        self._wanted = False
        self._rounds = 0  # with drafts, at any load

    def gate(self, num_requests: int = 1) -> DraftGate:
        """The gate of batches of this size."""
        return self._load(num_requests).gate

    def lengths(self, state: ScheduleState) -> np.ndarray:
        """[R] int64 drafts to propose."""
        room = np.minimum(state.modelled(state.room), self.gamma)
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
        if not state.modelled(state.room).any():
            return
        load = self._load(state.num_requests)
        tried = load.gate.trying
        if self._wanted and not load.gate.on:  # nothing is known of rounds long past
            load.tried, load.realised = Realised(self.config.memory), Realised(self.config.memory)
        drafted, ours, kept = state.modelled(drafted), state.modelled(scheduled), state.modelled(accepted)
        if not drafted.any():
            load.gate.observe(self._wanted, False)
            return
        self._confident = survival is not None
        self._rounds += 1
        self.history.observe(state.uids, survival, drafted, ours, kept)
        copied = int(scheduled.sum() - ours.sum())  # are verified either way
        without = state.outputs + int(accepted.sum() - kept.sum())
        with_drafts = self._step(state, int(scheduled.sum())) + self._draft(drafted)
        worth, tokens = without * with_drafts / self._step(state, copied), without + int(kept.sum())
        (load.tried if tried else load.realised).add(tokens, worth)
        load.gate.observe(True, True, (worth - tokens) / max(without, 1))

    def _choose(self, state: ScheduleState, room: np.ndarray) -> np.ndarray:
        load, nothing = self._load(state.num_requests), np.zeros_like(room)
        if load.gate.resting:
            return nothing
        if load.gate.trying:
            hopeful = np.tile(self.config.hope ** np.arange(1.0, self.gamma + 1), (len(room), 1))
            gain, lengths = self._best(state, room, hopeful)
            if (
                self._rounds >= _BOLD
            ):  # between hope and what is remembered: most trials are in vain, and cost
                lengths = self._best(state, room, (hopeful * self.history.survival(state.uids)) ** 0.5)[1]
            return lengths if gain > 1 else nothing
        gain, lengths = self._best(state, room, self.history.survival(state.uids))
        seen = load.realised.gain + self.config.doubt * load.realised.error
        if gain < 1 < seen and self._confident:
            lengths = room  # the mean block does not pay, but confidences find those that do
        if load.realised.rounds > self.config.trial_rounds / 2:
            gain = seen if load.gate.on else min(gain, seen)
        else:
            gain = max(gain + self.config.doubt * load.tried.error, seen)
        return lengths if load.gate.passes(gain) else nothing

    def _best(self, state: ScheduleState, room: np.ndarray, survival: np.ndarray) -> tuple[float, np.ndarray]:
        """The drafts of the best round that has any, and its expected gain over plain decoding."""
        ranking = rank(survival, room)
        drafted_for = np.cumsum(np.concatenate(([False], ranking.slots == 0)))  # requests in the first K
        drafting = self.cost.draft_seconds(drafted_for, np.arange(len(drafted_for)))
        curve = rate_curve(ranking, state, self.cost, drafting)
        rates = curve.rate
        best = 1 + int(rates[1:].argmax())
        lengths = ranking.lengths(best)
        if not self._confident:
            return float(rates[best] / rates[0]), lengths
        verifying = float(curve.seconds[best] - drafting[best])
        wider = np.minimum(lengths + 1, room)
        some = np.where(lengths > 0, wider, 0)  # the others are not worth a draft at this load
        worth = float(curve.tokens[best] / rates[0])
        return max(
            ((worth / (verifying + self._draft(d)), d) for d in (some, wider)), key=lambda option: option[0]
        )

    def _load(self, num_requests: int) -> _Load:
        size = num_requests.bit_length()
        if size not in self._loads:
            memory = self.config.memory
            self._loads[size] = _Load(DraftGate(self.config), Realised(memory), Realised(memory))
        return self._loads[size]

    def _step(self, state: ScheduleState, budget: int) -> float:
        return float(decoding_seconds(state, self.cost, budget))

    def _draft(self, drafted: np.ndarray) -> float:
        return float(self.cost.draft_seconds(int(np.count_nonzero(drafted)), int(drafted.sum())))
