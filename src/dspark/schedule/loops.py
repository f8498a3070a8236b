"""The loops of a decision, compiled by Numba: a round of a few requests pays a microsecond for each, not fifty.

Arrays are C-contiguous. Survivals are [R, gamma] float64 as `usable` leaves them: non-increasing along a row, and
`NO_DRAFT` where there is no candidate. `reference.py` says the same in plain Python.

Arrays that come out are made by the caller and filled here: handing one over takes Numba longer than most of these
loops take.
"""

from __future__ import annotations

import numpy as np

from dspark.compilation import compiled

__all__ = [
    "NO_DRAFT",
    "best_to_draft",
    "count_batch",
    "counted",
    "early_stop",
    "lengths",
    "most_rate",
    "priced",
    "rescale",
    "stops_at_most_rate",
    "tally",
    "tally_outcomes",
    "totals",
    "usable",
    "while_at_least",
]

NO_DRAFT = -1.0  # in the place of survivals that are no candidates


@compiled
def totals(lengths: np.ndarray) -> tuple[int, int]:
    """Of [R] lengths: how many are above 0, and their sum."""
    some, total = 0, 0
    for length in lengths:
        some += length > 0
        total += length
    return some, total


@compiled
def count_batch(
    room: np.ndarray,
    context: np.ndarray,
    pending: np.ndarray | None,
    samples: np.ndarray | None,
    tolerates_live: np.ndarray | None,
    free: np.ndarray | None,
) -> tuple[int, int, int, int, int, bool]:
    """Rows without any draft; requests that decode (one row, one token); cached positions of all, and of these;
    requests that a model may draft for; whether all that have room for drafts tolerate LIVE."""
    rows, decoding, cached, decoding_cached = 0, 0, 0, 0
    open_to_model, nobody_minds = 0, tolerates_live is not None
    for r in range(len(context)):
        mine = 1 if pending is None else pending[r]
        rows += mine
        cached += int(context[r])
        if mine == 1 and (samples is None or samples[r]):
            decoding += 1
            decoding_cached += int(context[r])
        if room[r] > 0:
            open_to_model += free is None or free[r] <= 0
            nobody_minds &= tolerates_live is not None and tolerates_live[r]
    return rows, decoding, cached, decoding_cached, open_to_model, nobody_minds


@compiled
def counted(survival: float, before: float) -> float:
    """A survival as it counts: in 0..1, at most the one of the slot before; NaN as 0."""
    if not survival > 0.0:
        return 0.0
    return min(survival, before)


@compiled
def usable(
    survival: np.ndarray, drafted: np.ndarray, marked: bool, alive: np.ndarray, values: np.ndarray
) -> tuple[int, int]:
    """Fill `alive` [R, gamma] with the survivals as they are `counted`, and `values` [R * gamma] with the same, to be
    sorted: how many requests have candidates, and how many candidates there are.

    If `marked`, the lowest bit of each number tells whether it is a first slot. A request comes in with its first slot,
    so what follows from sorted survivals alone has to tell which those are. That moves survivals by 1 in 2^52, and two
    that were as near as that tie, the first slot first.
    """
    R, gamma = survival.shape
    requests, candidates, bits = 0, 0, alive.view(np.int64)
    for r in range(R):
        before = 1.0
        requests += drafted[r] > 0 and gamma > 0
        for k in range(gamma):
            if k < drafted[r]:
                before = counted(survival[r, k], before)
                alive[r, k] = before
                if marked:
                    bits[r, k] = (bits[r, k] & -2) | (k == 0)
                candidates += 1
            else:
                alive[r, k] = NO_DRAFT
            values[r * gamma + k] = alive[r, k]
    return requests, candidates


@compiled
def while_at_least(
    survival: np.ndarray, drafted: np.ndarray, threshold: float, conditional: bool, out: np.ndarray
) -> None:
    """Fill `out` [R] with the leading slots whose survival, or if `conditional` its share of the one before, is that
    high."""
    for r in range(len(survival)):
        before, out[r] = 1.0, 0
        for k in range(min(drafted[r], survival.shape[1])):
            a = counted(survival[r, k], before)
            held = a
            if conditional:
                held = a / before if before > 0.0 else 0.0
            if held < threshold:
                break
            out[r] += 1
            before = a


@compiled
def early_stop(
    ascending: np.ndarray,
    candidates: int,
    outputs: float,
    seconds: np.ndarray,
    spent: float,
    min_gain: float,
) -> int:
    """Algorithm 1: the budget at which Theta stops improving. `seconds` [candidates + 1] of the pass, and those `spent`
    whatever the budget."""
    tau = outputs
    for budget in range(candidates):
        gain = ascending[len(ascending) - 1 - budget]
        worth = tau + gain if min_gain == 0 else tau + (tau + gain - tau) / (1 + min_gain)
        if worth / (seconds[budget + 1] + spent) <= tau / (seconds[budget] + spent):
            return budget
        tau += gain
    return candidates


@compiled
def most_rate(
    ascending: np.ndarray, candidates: int, outputs: float, seconds: np.ndarray, spent: float
) -> int:
    """The smallest budget of the largest Theta."""
    tau, best, best_rate = outputs, 0, outputs / (seconds[0] + spent)
    for budget in range(1, candidates + 1):
        tau += ascending[len(ascending) - budget]
        rate = tau / (seconds[budget] + spent)
        if rate > best_rate:
            best, best_rate = budget, rate
    return best


@compiled
def stops_at_most_rate(
    ascending: np.ndarray, candidates: int, outputs: float, seconds: np.ndarray, spent: float
) -> bool:
    """Algorithm 1 finds the budget that a global search does."""
    stop = early_stop(ascending, candidates, outputs, seconds, spent, 0.0)
    return stop == most_rate(ascending, candidates, outputs, seconds, spent)


@compiled
def lengths(alive: np.ndarray, ascending: np.ndarray, budget: int, out: np.ndarray) -> None:
    """Fill `out` [R] with the drafts of each request among the first `budget` candidates.

    Ranked by survival, ties by earlier slot, then by request: the last one admitted says who is.
    """
    R, gamma = alive.shape
    out[:] = 0
    if budget <= 0:
        return
    last, left = ascending[len(ascending) - budget], budget
    for r in range(R):
        for k in range(gamma):  # without a branch that nobody can predict
            out[r] += alive[r, k] > last
        left -= out[r]
    for k in range(gamma):
        for r in range(R):
            if alive[r, k] == last:  # then all slots before it are in
                out[r] += 1
                left -= 1
                if left == 0:
                    return


@compiled
def best_to_draft(
    alive: np.ndarray,
    ascending: np.ndarray,
    candidates: int,
    outputs: float,
    seconds: np.ndarray,
    draft: tuple[float, float, float],
    room: np.ndarray,
    out: np.ndarray,
    wider: np.ndarray,
) -> tuple[int, int, float, int, int]:
    """Where drafting is still to be decided: the best budget of at least 1, its requests and its tokens. Fill `out`
    [R] with its `lengths`, and `wider` [R] with a draft more of each where there is `room`: requests and drafts of it.

    `alive` as `usable` leaves them, marked; `draft`: seconds of a draft, of each request in it and of each of its
    tokens.
    """
    base, per_request, per_draft = draft
    bits = ascending.view(np.int64)
    tau, requests = outputs, 0
    best, best_rate, best_requests, best_tau = 0, 0.0, 0, 0.0
    for budget in range(1, candidates + 1):
        at = len(ascending) - budget
        tau += ascending[at]
        requests += bits[at] & 1
        rate = tau / (seconds[budget] + base + per_request * requests + per_draft * budget)
        if rate > best_rate:
            best, best_rate, best_requests, best_tau = budget, rate, requests, tau
    lengths(alive, ascending, best, out)
    some, drafts = 0, 0
    for r in range(len(out)):
        wider[r] = min(out[r] + 1, room[r], alive.shape[1])
        some += wider[r] > 0
        drafts += wider[r]
    return best, best_requests, best_tau, some, drafts


@compiled
def tally(drafted: np.ndarray, scheduled: np.ndarray) -> tuple[int, int, int]:
    """Of a round's lengths [R]: requests with drafts, drafts, and scheduled ones."""
    requests, drafts, rows = 0, 0, 0
    for r in range(len(drafted)):
        requests += drafted[r] > 0
        drafts += drafted[r]
        rows += scheduled[r]
    return requests, drafts, rows


@compiled
def tally_outcomes(
    drafted: np.ndarray, scheduled: np.ndarray, accepted: np.ndarray, base: np.ndarray
) -> tuple[tuple[int, int, int, int, int], tuple[int, int, int, int]]:
    """`tally`, accepted drafts, and the longest length scheduled; then what lies beyond `base` [R]: requests with
    drafts there alone, drafts, scheduled ones and accepted ones."""
    requests, drafts, rows, won, longest = 0, 0, 0, 0, 0
    outside, more_drafts, more_rows, further = 0, 0, 0, 0
    for r in range(len(drafted)):
        requests += drafted[r] > 0
        drafts += drafted[r]
        rows += scheduled[r]
        won += accepted[r]
        longest = max(longest, scheduled[r])
        outside += base[r] == 0 and drafted[r] > 0
        more_drafts += max(drafted[r] - base[r], 0)
        more_rows += max(scheduled[r] - base[r], 0)
        further += max(accepted[r] - base[r], 0)
    return (requests, drafts, rows, won, longest), (outside, more_drafts, more_rows, further)


@compiled
def priced(
    table: np.ndarray, first: int, constant: float, context: float, context_row: float, out: np.ndarray
) -> None:
    """Fill `out` with the seconds of passes over first, first + 1, ... rows: `table` by rows and a constant, with
    attention's price beyond the profile (see `ContextCost`)."""
    for i in range(len(out)):
        seconds = table[first + i] + constant
        out[i] = max(seconds + context, 0.01 * seconds) + context_row * (first + i)


@compiled
def rescale(values: np.ndarray, factor: float, constant: float) -> None:
    """`values` in place: times a factor, and a constant more."""
    for i in range(len(values)):
        values[i] = values[i] * factor + constant
