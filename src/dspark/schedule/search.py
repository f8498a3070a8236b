"""Which drafts to verify: the ranking of Algorithm 1, the curve of expected tokens per second, and its searches.

A candidate (r, j) is draft j + 1 of request r. Candidates are ranked by survival, ties by earlier slot, then by
request, so every prefix of the ranking holds prefixes of the rows, and a row's later confidences can move nothing
that is ranked before them. `reference.py` holds the same functions as plain loops.

A search needs the *sorted* survivals alone; who is admitted then follows from the last one admitted. So nothing is
ranked one by one: the values are sorted, and `loops.py` does the rest.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from dspark.schedule import loops
from dspark.schedule.base import ScheduleState
from dspark.schedule.cost import CostModel

__all__ = [
    "Curve",
    "Ranking",
    "best_budget",
    "best_to_draft",
    "decoding_curve",
    "early_stop",
    "fill_upwards",
    "rank",
    "stops_at_best",
]


class Ranking:
    """Candidates in order of admission: N of them, with `alive` [R, gamma], their survivals as `loops.usable` has them.

    Args:
        survival: [R, gamma] float64, contiguous.
        drafted: [R] slots that are candidates.
        marked: first slots are told apart, see `loops.usable`.
    """

    __slots__ = ("alive", "ascending", "candidates", "requests")

    def __init__(self, survival: np.ndarray, drafted: np.ndarray, marked: bool = False) -> None:
        self.alive, self.ascending = np.empty(survival.shape), np.empty(survival.size)
        self.requests, self.candidates = loops.usable(survival, drafted, marked, self.alive, self.ascending)
        self.ascending.sort()  # what is no candidate comes first

    def __len__(self) -> int:
        return self.candidates

    @property
    def survival(self) -> np.ndarray:
        """[N] non-increasing."""
        return self.ascending[::-1][: self.candidates]

    @property
    def order(self) -> tuple[np.ndarray, np.ndarray]:
        """[N] requests and [N] slots, both 0-based."""
        by_slot = self.alive.T.ravel()
        order = np.argsort(-by_slot, kind="stable")[: self.candidates]
        slots, rows = np.divmod(order, len(self.alive) or 1)
        return rows, slots

    def lengths(self, budget: int) -> np.ndarray:
        """[R] int64: drafts of each request among the first `budget` candidates."""
        out = np.empty(len(self.alive), np.int64)
        loops.lengths(self.alive, self.ascending, budget, out)
        return out


class Curve:
    """Expected output and time of a round by budget K = 0..N.

    Args:
        outputs: tokens without any draft.
        seconds: [N + 1] or longer, of the pass.
        spent: seconds whatever the budget: what the draft took.
    """

    __slots__ = ("outputs", "ranking", "seconds", "spent")

    def __init__(self, ranking: Ranking, outputs: float, seconds: np.ndarray, spent: float = 0.0) -> None:
        self.ranking, self.outputs, self.seconds, self.spent = ranking, float(outputs), seconds, spent

    @property
    def tokens(self) -> np.ndarray:
        """[N + 1] tau."""
        return np.cumsum(np.append(self.outputs, self.ranking.survival))

    @property
    def rate(self) -> np.ndarray:
        """[N + 1] Theta, expected tokens per second."""
        return self.tokens / (self.seconds[: len(self.ranking) + 1] + self.spent)


def rank(survival: np.ndarray, drafted: np.ndarray) -> Ranking:
    """Sort the drafted candidates: [R, gamma] survivals, drafted [R] <= gamma.

    A survival counts as at most 1 and at most the one before it, so each slot rests on itself and those before; NaN
    counts as 0: a slot without a usable confidence is never verified.
    """
    return Ranking(np.ascontiguousarray(survival, dtype=np.float64), np.ascontiguousarray(drafted))


def decoding_curve(state: ScheduleState, cost: CostModel, most: int) -> np.ndarray:
    """[most + 1] what a pass with 0, 1, ... drafts costs beyond its prompts.

    A prompt has to be processed once whatever is drafted, so its seconds belong to no schedule. In the denominator
    of Theta they would make every draft look nearly free: faster rounds would seem to spread them over more tokens,
    but the answers end sooner, the next prompts come sooner, and a token bears as much of them as before.
    """
    R, rows, decoding, context = len(state.uids), state.query_tokens, state.outputs, state.context
    seconds = cost.step_curve(R, rows, most + 1, context)
    if rows == R:
        return seconds
    alone = cost.step_price(decoding, decoding, state.decoding_context)
    return seconds - max(cost.step_price(R, rows, context) - alone, 0.0)


def early_stop(curve: Curve, min_gain: float = 0.0) -> int:
    """Algorithm 1: admit while Theta improves. The budget.

    With `min_gain` g a token counts 1 / (1 + g) in the test: it must bring (1 + g) times what its time is worth
    at the present rate. As part of the stop test this keeps the decision CAUSAL.
    """
    ranking, gain = curve.ranking, float(min_gain)
    return loops.early_stop(
        ranking.ascending, ranking.candidates, curve.outputs, curve.seconds, curve.spent, gain
    )


def best_budget(curve: Curve) -> int:
    """Unconstrained search: the smallest budget of the largest Theta."""
    ranking = curve.ranking
    return loops.most_rate(ranking.ascending, ranking.candidates, curve.outputs, curve.seconds, curve.spent)


def stops_at_best(curve: Curve) -> bool:
    """`early_stop` finds the budget that `best_budget` does."""
    ranking = curve.ranking
    return loops.stops_at_most_rate(
        ranking.ascending, ranking.candidates, curve.outputs, curve.seconds, curve.spent
    )


def best_to_draft(
    survival: np.ndarray, room: np.ndarray, outputs: int, seconds: np.ndarray, cost: CostModel
) -> tuple[tuple[np.ndarray, int, int, float], tuple[np.ndarray, int, int]]:
    """Where drafting is still to be decided: [R] lengths of the best budget of at least 1; that budget, how many
    requests have some of it, and its expected tokens. And [R] lengths with a draft more of each, with their requests
    and drafts.

    `survival` [R, gamma] expected, `room` [R], of which no more than gamma count, `seconds` [sum of room + 1] or longer
    of the pass by budget.
    """
    ranking = Ranking(survival, room, marked=True)
    lengths, wider = np.empty(len(room), np.int64), np.empty(len(room), np.int64)
    budget, requests, tokens, some, drafts = loops.best_to_draft(
        ranking.alive,
        ranking.ascending,
        ranking.candidates,
        float(outputs),
        seconds,
        cost.draft_terms,
        room,
        lengths,
        wider,
    )
    return (lengths, budget, requests, tokens), (wider, some, drafts)


def fill_upwards(budget: int, query_tokens: int, candidates: int, sizes: tuple[int, ...]) -> int:
    """Let the batch take the rest of the size it is executed at.

    How many are added depends on the budget alone, and the next in rank are taken, so CAUSAL remains CAUSAL.
    NOTE: rounding *down* does not: it withdraws an admitted draft because of tokens admitted behind it.
    """
    index = bisect_left(sizes, query_tokens + budget)
    return budget if index == len(sizes) else min(sizes[index] - query_tokens, candidates)
