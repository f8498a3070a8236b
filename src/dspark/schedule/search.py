"""Which drafts to verify: the ranking of Algorithm 1, the curve of expected tokens per second, and its searches.

A candidate (r, j) is draft j + 1 of request r. Candidates are ranked by survival, ties by earlier slot, then by
request, so every prefix of the ranking holds prefixes of the rows, and a row's later confidences can move nothing
that is ranked before them. `reference.py` holds the same functions as plain loops.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.schedule.base import ScheduleState
from dspark.schedule.cost import CostModel

__all__ = [
    "Curve",
    "Ranking",
    "best_budget",
    "decoding_seconds",
    "early_stop",
    "fill_upwards",
    "prefix_survival",
    "rank",
    "rate_curve",
]

_SMALL = 2048  # below this numpy's stable sort is the faster one


@dataclass(frozen=True)
class Ranking:
    """Candidates in order of admission."""

    rows: np.ndarray  # [N] int64 request
    slots: np.ndarray  # [N] int64 slot, 0-based
    survival: np.ndarray  # [N] float64, non-increasing
    num_requests: int

    def lengths(self, budget: int) -> np.ndarray:
        """[R] int64: drafts of each request among the first `budget` candidates."""
        return np.bincount(self.rows[:budget], minlength=self.num_requests)


@dataclass(frozen=True)
class Curve:
    """Expected output and time of a round by budget K = 0..N."""

    tokens: np.ndarray  # [N + 1] tau
    seconds: np.ndarray  # [N + 1]

    @property
    def rate(self) -> np.ndarray:
        """[N + 1] Theta, expected tokens per second."""
        return self.tokens / self.seconds


def prefix_survival(survival: np.ndarray) -> np.ndarray:
    """[R, gamma] float64 in 0..1 and non-increasing along a row, each slot from itself and those before it.

    NaN counts as 0: a slot without a usable confidence is never verified.
    """
    slots = np.array(survival.T, dtype=np.float64, order="C")  # slot-major: as `rank` wants it
    np.fmin(np.fmax(slots, 0.0, out=slots), 1.0, out=slots)
    for k in range(1, len(slots)):
        np.minimum(slots[k], slots[k - 1], out=slots[k])
    return slots.T


def rank(survival: np.ndarray, drafted: np.ndarray) -> Ranking:
    """Sort the drafted candidates. `survival` [R, gamma] as `prefix_survival` leaves it, drafted [R] <= gamma."""
    R, gamma = survival.shape
    flat = np.flatnonzero(np.arange(gamma)[:, None] < drafted)  # slot-major: ties keep slot, then request
    a = survival.T.ravel()[flat]
    order = _stable_descending(a)
    slots, rows = np.divmod(flat[order], max(R, 1))
    return Ranking(rows, slots, a[order], R)


def rate_curve(
    ranking: Ranking, state: ScheduleState, cost: CostModel, draft_seconds: np.ndarray | float
) -> Curve:
    """`draft_seconds` of the round: one number, or [N + 1] where drafting is still to be decided."""
    tokens = np.empty(len(ranking.survival) + 1)
    tokens[0], tokens[1:] = state.outputs, ranking.survival
    np.cumsum(tokens, out=tokens)
    return Curve(tokens, decoding_seconds(state, cost, np.arange(len(tokens))) + draft_seconds)


def decoding_seconds(state: ScheduleState, cost: CostModel, budget: np.ndarray | int) -> np.ndarray:
    """What a pass with `budget` drafts costs beyond its prompts.

    A prompt has to be processed once whatever is drafted, so its seconds belong to no schedule. In the denominator
    of Theta they would make every draft look nearly free: faster rounds would seem to spread them over more tokens,
    but the answers end sooner, the next prompts come sooner, and a token bears as much of them as before.
    """
    R, rows, context = state.num_requests, state.query_tokens, state.context
    seconds = cost.step_seconds(R, rows + budget, context)
    if rows == R:
        return seconds
    decoding = state.outputs
    alone = cost.step_seconds(decoding, decoding, state.decoding_context)
    return seconds - np.maximum(cost.step_seconds(R, rows, context) - alone, 0.0)


def early_stop(curve: Curve, min_gain: float = 0.0) -> int:
    """Algorithm 1: admit while Theta improves. The budget.

    With `min_gain` g a token counts 1 / (1 + g) in the test: it must bring (1 + g) times what its time is worth
    at the present rate. As part of the stop test this keeps the decision CAUSAL.
    """
    tokens, seconds = curve.tokens, curve.seconds
    gains = tokens[1:] - tokens[:-1]
    after = tokens[1:] if min_gain == 0 else tokens[:-1] + gains / (1 + min_gain)
    improves = after / seconds[1:] > tokens[:-1] / seconds[:-1]
    return len(improves) if improves.all() else int(improves.argmin())


def best_budget(curve: Curve) -> int:
    """Unconstrained search: the smallest budget of the largest Theta."""
    return int(curve.rate.argmax())


def fill_upwards(budget: int, query_tokens: int, candidates: int, sizes: tuple[int, ...]) -> int:
    """Let the batch take the rest of the size it is executed at.

    How many are added depends on the budget alone, and the next in rank are taken, so CAUSAL remains CAUSAL.
    NOTE: rounding *down* does not: it withdraws an admitted draft because of tokens admitted behind it.
    """
    index = int(np.searchsorted(sizes, query_tokens + budget))
    return budget if index == len(sizes) else min(int(sizes[index]) - query_tokens, candidates)


def _stable_descending(a: np.ndarray) -> np.ndarray:
    """argsort of -a, equal elements in order of index."""
    if len(a) <= _SMALL:
        return np.argsort(-a, kind="stable")
    order = np.argsort(-a)  # several times faster than the stable kind; ties are put right below
    ordered = a[order]
    fresh = ordered[1:] != ordered[:-1]
    if fresh.all():
        return order
    group = np.concatenate(([0], np.cumsum(fresh)))
    return np.sort((group << 32) | order) & 0xFFFFFFFF
