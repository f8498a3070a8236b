"""How much to draft: decided before the block exists, from past rounds and prices alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.base import ScheduleState
from dspark.schedule.cost import CostModel
from dspark.schedule.feedback import LiveCost
from dspark.schedule.gate import AimConfig, DraftGate, Realised
from dspark.schedule.history import AcceptanceHistory
from dspark.schedule.loops import NO_DRAFT, tally_outcomes, totals
from dspark.schedule.search import best_to_draft, decoding_curve

__all__ = ["Aim", "AimConfig", "DraftGate", "Realised"]

_REACH = 32  # rounds for which one verified length keeps its slot drafted
_WIDER = 8  # rounds, of which one drafts a slot further, where that has not paid lately
_WIDENING_FADES = 0.05  # a round
_BOLD = 2  # drafted rounds, at any load, in which all is drafted that could pay at best
_PROMPTS = 64  # rounds in a row that a trial waits for one without prompts
_SHORTEST = 2  # rounds of a trial: many requests tell much in one
_RECENT = 0.99  # memory a round of how often a load is met
_OFTEN = (
    0.25  # share of recent rounds from which on what pays at a load is worth being followed for at others
)
_CLEAR = 1.5  # gain over plain decoding: its price is not wrong by that much for want of a pause
_TAUGHT = 24  # drafted rounds, at any load, behind which no trial is made on hope alone

_Lengths = tuple[np.ndarray, np.ndarray, np.ndarray]  # [R] each: drafted, scheduled, accepted


@dataclass
class _Load:
    """What is known of one batch size (within a factor of 2): whether drafting pays is a question of the load."""

    gate: DraftGate
    tried: Realised  # in trials, which draft for everybody
    realised: Realised  # with the lengths that were chosen
    prompts: int = 0  # rounds that a trial waited for one without prompts
    met: int = 0  # the last round at this load
    often: float = 0.0  # share of recent rounds then
    widening: float = 0.0  # tokens a round that one slot further brought lately, less what its time was worth


class Aim:
    """Draft lengths of the adaptive policies, and the history they share.

    One search over expected survivals prices verification and drafting together; its lengths are what the drafter is
    asked for. With confidences each row has one draft more as long as those that confidences then keep are worth
    those that they drop, else in one round of `_WIDER`: unexplored slots get explored. Whether to draft at all is
    settled by what the last drafted rounds *realised* at this load, as soon as that is known well enough, and by the
    search's expectation before: confidences pick good moments, which a mean cannot see.
    """

    def __init__(
        self, gamma: int, cost: CostModel, config: AimConfig | None = None, *, remembers: int = 0
    ) -> None:
        if gamma < 1:
            raise DSparkError(f"gamma must be at least 1, got {gamma}")
        config = config or AimConfig()
        self.gamma, self.cost, self.config = gamma, cost, config
        self.history = AcceptanceHistory(
            gamma, config.prior, config.weight, config.decay, remembers, config.acceptance
        )
        self._loads: dict[int, _Load] = {}
        self._confident = False
        self._wanted = False
        self._waits = False  # a trial is due, but not in the round at hand
        self._unlikely = (
            0.0  # nor is it likely to pay: rounds of plain decoding that a drafted round would lose
        )
        self._rounds = _TAUGHT if config.acceptance else 0  # with drafts, at any load
        self._round = 0  # of all that were observed
        # Of the last round that was observed, where they are known: requests with drafts of a model, drafts, and drafts
        # that were verified, copies among them.
        self.counted: tuple[int, int, int] | None = None
        self._priced: tuple[ScheduleState, np.ndarray] | None = None  # of the round at hand
        self._reach = float(gamma)  # longest length verified lately
        self._before_widening: np.ndarray | None = None  # the expected lengths, where more was asked for

    def gate(self, num_requests: int = 1) -> DraftGate:
        """The gate of batches of this size."""
        return self._load(num_requests).gate

    def rests(self, num_requests: int) -> float:
        """Rounds to the next trial at this load; 0 if it is soon, or if drafting pays at a load that is often met."""
        pays = any(
            load.gate.on and not load.gate.fresh and load.often * _RECENT ** (self._round - load.met) > _OFTEN
            for load in self._loads.values()
        )
        return 0 if self._wanted or self._waits or pays else self.gate(num_requests).far

    def seconds(self, state: ScheduleState, most: int) -> np.ndarray:
        """`decoding_curve` [most + 1] or longer, to be read only: a round asks for it several times."""
        if self._priced is None or self._priced[0] is not state or len(self._priced[1]) <= most:
            self._priced = state, decoding_curve(state, self.cost, most)
        return self._priced[1]

    def forget_prices(self) -> None:
        """The round is over, or prices have changed."""
        self._priced = None

    def lengths(self, state: ScheduleState) -> np.ndarray:
        """[R] int64 drafts to propose."""
        load = self._load(len(state.uids))
        gate, chosen = load.gate, None
        self._waits, self._unlikely, self._before_widening = False, 0.0, None
        if gate.resting or gate.pausing:
            pass  # a round that is to cost nothing
        elif not gate.trying:
            chosen = self._pays(load, state)
        elif state.query_tokens > state.num_requests and load.prompts < _PROMPTS:
            # Prompts in a round hide what a trial in it costs: better wait for one without, if there is to be one.
            self._try(load, state.behind_prompts(self.gamma))
            self._waits = not self._unlikely
        else:
            chosen = self._try(load, state)
        self._wanted = chosen is not None
        return np.zeros(state.num_requests, dtype=np.int64) if chosen is None else chosen

    def observe(
        self,
        state: ScheduleState,
        survival: np.ndarray | None,
        drafted: np.ndarray,
        scheduled: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """File a round. `survival` as `loops.usable` leaves it."""
        load = self._load(len(state.uids))
        gate = load.gate
        self.counted = None
        self._round += 1
        load.often = load.often * _RECENT ** (self._round - load.met) + (1 - _RECENT)
        load.met = self._round
        if self._waits:
            load.prompts += 1
        elif self._unlikely:
            gate.put_off(self._unlikely)
            gate.observe(False, False)
        elif gate.pausing or not (gate.on or self._wanted):
            gate.observe(False, False)
        else:
            self._file(load, state, survival, (drafted, scheduled, accepted))

    def took(self, state: ScheduleState, requests: int, drafts: int, draft_s: float) -> None:
        """Seconds of a draft beyond its price are lost: the first draft of a trial catches up with whole prompts."""
        late = draft_s - self.cost.draft_price(requests, drafts) if requests else 0.0
        if late > 0:
            plain = self.cost.step_price(state.num_requests, state.num_requests, state.context)
            self._load(state.num_requests).gate.lose(late / plain)

    def _file(
        self, load: _Load, state: ScheduleState, survival: np.ndarray | None, lengths: _Lengths
    ) -> None:
        """A round that was open to drafts: what came of those of a model, and what they were worth."""
        ours, base = lengths, self._before_widening
        if state.free is not None:
            ours = state.modelled(ours[0]), state.modelled(ours[1]), state.modelled(ours[2])
        (requests, drafts, rows, won, longest), further = tally_outcomes(
            *ours, ours[0] if base is None else base
        )
        copied, without = 0, state.outputs
        if state.free is not None:  # copies are verified either way
            copied, without = totals(lengths[1])[1] - rows, without + totals(lengths[2])[1] - won
        self.counted = requests, drafts, copied + rows
        if not requests and not state.open_to_model:
            return
        load.prompts = 0
        if self._wanted and not load.gate.on:  # nothing is known of rounds long past
            load.tried, load.realised = Realised(self.config.memory), Realised(self.config.memory)
        if not requests:
            load.gate.observe(self._wanted, False)
            return
        if survival is not None and state.free is not None:
            survival = np.where(state.free[:, None] > 0, NO_DRAFT, survival)
        self.history.observe(state.uids, survival, *ours)
        self._confident = survival is not None
        self._rounds += 1
        reach = self._reach - 1 / _REACH
        self._reach = reach if reach > longest else float(longest)
        self._weigh(
            load, state, (requests, drafts, rows, won), copied, without, None if base is None else further
        )

    def _weigh(
        self,
        load: _Load,
        state: ScheduleState,
        counts: tuple[int, int, int, int],
        copied: int,
        without: int,
        further: tuple[int, int, int, int] | None,
    ) -> None:
        """What a round's drafts brought over plain decoding, and its widening. `without`: tokens without any."""
        requests, drafts, rows, won = counts
        seconds, tokens = self.seconds(state, copied + rows), without + won
        with_drafts = seconds.item(copied + rows) + self.cost.draft_price(requests, drafts)
        worth, decoding = without * with_drafts / seconds.item(copied), max(without, 1)
        if further is not None:
            outside, more_drafts, more_rows, more_tokens = further
            narrower = seconds.item(copied + rows - more_rows)
            narrower += self.cost.draft_price(requests - outside, drafts - more_drafts)
            net = more_tokens - (with_drafts - narrower) * tokens / with_drafts
            load.widening += _WIDENING_FADES * (net - load.widening)
        (load.tried if load.gate.trying else load.realised).add(tokens, worth, decoding)
        clear = load.realised.gain - self.config.doubt * load.realised.error > _CLEAR
        load.gate.observe(True, True, (worth - tokens) / decoding, clear)

    def _try(self, load: _Load, state: ScheduleState) -> np.ndarray | None:
        """Drafts of a trial, unless nothing known speaks for it."""
        if not state.open_to_model:
            return None
        room = state.modelled(state.room)
        hopeful = np.tile(self.config.hope ** np.arange(1.0, self.gamma + 1), (len(room), 1))
        gain, lengths = self._best(load, state, room, hopeful)
        if gain <= 1:
            self._unlikely = math.inf
            return None
        if self._rounds < _BOLD:
            return lengths
        # Between hope and what is remembered: most trials are in vain, and cost.
        known = self.history.survival(state.uids)
        gain, lengths = self._best(load, state, room, (hopeful * known) ** 0.5)
        under_way = load.gate.on and not load.gate.fresh
        if gain <= 1 and not (under_way or load.gate.insists) and self._rounds >= _TAUGHT:
            self._unlikely = math.inf
        elif load.gate.fresh and self.config.acceptance:
            expected, _ = self._best(load, state, room, known)
            self._unlikely = max(0.0, 1 / expected - 1)
        return None if self._unlikely else lengths

    def _pays(self, load: _Load, state: ScheduleState) -> np.ndarray | None:
        """Drafts of a round outside a trial, if they are expected to pay."""
        if not state.open_to_model:
            return None
        room = state.modelled(state.room)
        gain, lengths = self._best(load, state, room, self.history.survival(state.uids))
        doubt, realised = self.config.doubt, load.realised
        seen = realised.at_best(doubt)
        if gain < 1 < seen and self._confident:
            # The mean block does not pay, but confidences find those that do: as far as they lately reached.
            reach = min(1 + math.ceil(self._reach), self.gamma)
            lengths, self._before_widening = np.minimum(room, reach), None
        if realised.rounds > 2 * load.gate.trial_rounds:
            gain = seen if load.gate.on else min(gain, seen)
        else:
            gain = max(gain + doubt * load.tried.error, load.tried.at_best(doubt), seen)
        return lengths if load.gate.passes(gain) else None

    def _best(
        self, load: _Load, state: ScheduleState, room: np.ndarray, survival: np.ndarray
    ) -> tuple[float, np.ndarray]:
        """The drafts of the best round that has any, and its expected gain over plain decoding."""
        seconds, outputs = self.seconds(state, survival.size), state.outputs
        best, (wider, requests, more) = best_to_draft(survival, room, outputs, seconds, self.cost)
        lengths, budget, few, tokens = best
        worth = tokens * seconds.item(0) / max(outputs, 1)
        verifying = seconds.item(budget)
        if not self._confident or (load.widening < 0 and self._rounds % _WIDER):
            return worth / (verifying + self.cost.draft_price(few, budget)), lengths
        self._before_widening = lengths
        gain = worth / (verifying + self.cost.draft_price(requests, more))
        if few == requests:
            return gain, wider
        # The others, a draft each, may not be worth one at this load.
        without_them = worth / (verifying + self.cost.draft_price(few, more - (requests - few)))
        return (without_them, np.where(lengths > 0, wider, 0)) if without_them >= gain else (gain, wider)

    def _load(self, num_requests: int) -> _Load:
        size = num_requests.bit_length()
        load = self._loads.get(size)
        if load is None:
            memory, rounds = self.config.memory, -(-self.config.trial_rounds // max(1, 2 ** (size - 1)))
            gate = DraftGate(self.config, max(_SHORTEST, rounds), isinstance(self.cost, LiveCost))
            load = self._loads[size] = _Load(gate, Realised(memory), Realised(memory))
        return load
