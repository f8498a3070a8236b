"""Prices that follow the machine: a profile's, corrected by what rounds really take."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from dspark.schedule import loops
from dspark.schedule.base import ScheduleState
from dspark.schedule.cost import CostModel

__all__ = ["Drift", "LiveCost"]

WINDOW = 9  # measurements whose median counts: up to four outliers in a row move nothing
STEP = 0.1  # most that a factor moves at once (log scale)
MOST = math.log(64.0)  # a profile can be that wrong: one thread was measured, or a machine that was idle
MOST_SHAPE = math.log(4.0)  # rows of a real batch take more work than a profile's, behind the pass as well
FRESH = 320  # rounds for which a plain pass tells what passes cost now
SETTLED = 16  # rounds without drafts, behind which a pass finds the caches as plain decoding leaves them
TELLING = 0.02  # of the plain price: drafts that cost less say nothing about the price of rows


class Drift:
    """A factor, 1 at first, that follows the median of recent ratios in bounded steps."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._log = 0.0
        self.factor = 1.0

    def follow(self, ratio: float) -> None:
        """File measured over predicted."""
        most, log = self._most, math.log(ratio) if ratio > 0 else -self._most
        self._recent.append(most if log > most else -most if log < -most else log)
        ordered = sorted(self._recent)
        last, middle = len(ordered) - 1, len(ordered) // 2
        self._step((ordered[middle] + ordered[last - middle]) / 2)

    def relax(self) -> None:
        """Go back towards 1 where nothing can be measured."""
        self._recent.clear()
        self._step(0.0)

    def _step(self, goal: float) -> None:
        step = goal - self._log
        self._log += STEP if step > STEP else -STEP if step < -STEP else step
        self.factor = math.exp(self._log)


class LiveCost:
    """`base`, with three factors: of plain passes, of further rows beside them, of drafts.

    They are what the choice between drafting and not rests on, and they keep prices rising with the size. Plain passes
    are those of plain decoding: one soon behind a draft, whose weights have displaced the target's in the caches, takes
    longer. A pass with drafts tells the price of its rows (`base`'s displacement taken off) only while it is known what
    a plain pass costs now; if the last one is long ago, the pass as a whole is taken to have become slower or faster,
    and its shape to be the profile's again.
    """

    def __init__(self, base: CostModel) -> None:
        self.base = base
        self._displaced, self._draft_terms = base.displacement, base.draft_terms
        self._plain, self._rows, self._draft = Drift(MOST), Drift(MOST_SHAPE), Drift(MOST)
        self._since_plain, self._undrafted = FRESH, SETTLED
        self._floor: tuple[int, int, float] = (
            0,
            0,
            0.0,
        )  # requests, context and price of the last plain pass asked

    @property
    def warning(self) -> str | None:
        return self.base.warning

    @property
    def factors(self) -> tuple[float, float, float]:
        """Of a plain pass, of a pass's further rows relative to it, and of drafts."""
        return self._plain.factor, self._rows.factor, self._draft.factor

    def step_seconds(
        self, num_requests: np.ndarray | int, query_tokens: np.ndarray | int, context: np.ndarray | int
    ) -> np.ndarray:
        plain, rows = self._plain.factor, self._rows.factor
        floor = self.base.step_seconds(num_requests, num_requests, context)
        whole = self.base.step_seconds(num_requests, query_tokens, context)
        return plain * (rows * whole + (1 - rows) * floor)

    def draft_seconds(self, num_requests: np.ndarray | int, drafts: np.ndarray | int) -> np.ndarray:
        seconds, displacement = self.base.draft_seconds(num_requests, drafts), self._displaced
        own = np.maximum(seconds - displacement, 0.0)
        return self._draft.factor * own + self._plain.factor * displacement * (seconds > 0)

    def step_price(self, num_requests: int, query_tokens: int, context: int) -> float:
        plain, rows = self._plain.factor, self._rows.factor
        whole = self.base.step_price(num_requests, query_tokens, context)
        return plain * (rows * whole + (1 - rows) * self._plain_pass(num_requests, context))

    def step_curve(self, num_requests: int, first: int, count: int, context: int) -> np.ndarray:
        plain, rows = self._plain.factor, self._rows.factor
        curve = self.base.step_curve(num_requests, first, count, context)
        if first == num_requests:  # it begins with the plain pass
            floor = curve.item(0)
            self._floor = num_requests, context, floor
        else:
            floor = self._plain_pass(num_requests, context)
        loops.rescale(curve, plain * rows, plain * (1 - rows) * floor)
        return curve

    def draft_price(self, num_requests: int, drafts: int) -> float:
        if not drafts:
            return 0.0
        return self._draft.factor * self._own(num_requests, drafts) + self._plain.factor * self._displaced

    @property
    def draft_terms(self) -> tuple[float, float, float]:
        factor, (base, per_request, per_draft) = self._draft.factor, self._draft_terms
        displaced = self._displaced
        own = factor * (base - displaced)
        return own + self._plain.factor * displaced, factor * per_request, factor * per_draft

    @property
    def displacement(self) -> float:
        return self._plain.factor * self._displaced

    def _own(self, num_requests: int, drafts: int) -> float:
        """`base`'s price of a draft itself, without what its displacement costs the pass behind it."""
        base, per_request, per_draft = self._draft_terms
        return base + per_request * num_requests + per_draft * drafts - self._displaced

    def _plain_pass(self, num_requests: int, context: int) -> float:
        """`base`'s price of a pass without drafts: one round asks for it several times."""
        known_requests, known_context, price = self._floor
        if known_requests != num_requests or known_context != context:
            price = self.base.step_price(num_requests, num_requests, context)
            self._floor = num_requests, context, price
        return price

    def observe(
        self,
        state: ScheduleState,
        drafted_for: int,
        drafts: int,
        budget: int,
        draft_s: float,
        step_s: float,
    ) -> None:
        """Learn from a round of decoding; one that also processes prompts has other work in it.

        `drafts` are a model's, of `drafted_for` requests; `budget` drafts were verified, copies among them.
        """
        R = len(state.uids)
        if state.query_tokens != R or not R:
            return
        displacement = 0.0
        if drafted_for:
            displacement, expected = self._displaced, self._own(drafted_for, drafts)
            if expected > 0:
                self._draft.follow(draft_s / expected)
        self._undrafted = 0 if drafted_for else self._undrafted + 1
        floor = self._plain_pass(R, state.context)
        if not budget:
            if self._undrafted > SETTLED:
                self._since_plain = 0
                self._plain.follow(step_s / floor)
            return
        self._since_plain += 1
        further = self.base.step_price(R, R + budget, state.context) - floor
        if self._since_plain > FRESH:
            self._rows.relax()
            self._plain.follow(step_s / (floor + displacement + self._rows.factor * further))
        elif further > TELLING * floor:
            self._rows.follow((step_s / self._plain.factor - floor - displacement) / further)
