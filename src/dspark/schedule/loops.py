"""The loops of a decision, compiled by Numba: a round of a few requests pays a microsecond for each, not fifty.

Arrays are C-contiguous. Survivals are [R, gamma] float64 as `usable` leaves them: non-increasing along a row, and
`NO_DRAFT` where there is no candidate. `reference.py` says the same in plain Python.
"""

from __future__ import annotations

import numpy as np

from dspark.compilation import compiled

__all__ = [
    "NO_DRAFT",
    "best_to_draft",
    "beyond",
    "count_batch",
    "early_stop",
    "lengths",
    "mark_first_slots",
    "most_rate",
    "nobody_minds",
    "priced",
    "rescaled",
    "tally",
    "totals",
    "usable",
    "while_at_least",
    "widen",
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
    pending: np.ndarray | None, samples: np.ndarray | None, context: np.ndarray
) -> tuple[int, int, int, int]:
    """Rows without any draft; requests that decode (one row, one token); cached positions of all, and of these."""
    rows, decoding, cached, decoding_cached = 0, 0, 0, 0
    for r in range(len(context)):
        mine = 1 if pending is None else pending[r]
        rows += mine
        cached += int(context[r])
        if mine == 1 and (samples is None or samples[r]):
            decoding += 1
            decoding_cached += int(context[r])
    return rows, decoding, cached, decoding_cached


@compiled
def nobody_minds(tolerates_live: np.ndarray, room: np.ndarray) -> bool:
    """Every row with room for drafts stays exact whatever the schedule looks at."""
    for r in range(len(room)):  # noqa: SIM110 (plain for Numba)
        if room[r] > 0 and not tolerates_live[r]:
            return False
    return True


@compiled
def usable(survival: np.ndarray, drafted: np.ndarray) -> tuple[np.ndarray, int]:
    """[R, gamma] survivals in 0..1, each slot at most the one before it (NaN counts as 0), and how many candidates."""
    out, candidates = np.empty(survival.shape), 0
    for r in range(len(survival)):
        alive = 1.0
        for k in range(survival.shape[1]):
            if k >= drafted[r]:
                out[r, k] = NO_DRAFT
                continue
            a = survival[r, k]
            if not a > 0.0:
                alive = 0.0
            elif a < alive:
                alive = a
            out[r, k] = alive
            candidates += 1
    return out, candidates


@compiled
def while_at_least(alive: np.ndarray, threshold: float, conditional: bool) -> np.ndarray:
    """[R] int64: leading slots whose survival, or if `conditional` their share of the slot before, is that high."""
    out = np.zeros(len(alive), dtype=np.int64)
    for r in range(len(alive)):
        before = 1.0
        for a in alive[r]:
            held = a
            if conditional and a >= 0.0:
                held = a / before if before > 0.0 else 0.0
            if a == NO_DRAFT or held < threshold:
                break
            out[r] += 1
            before = a
    return out


@compiled
def mark_first_slots(survival: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, int]:
    """`usable`, with the lowest bit of each number telling whether it is a first slot.

    A request comes in with its first slot, so what follows from sorted survivals alone has to tell which those are.
    That moves survivals by 1 in 2^52, and two that were as near as that tie, the first slot first.
    """
    out, candidates = usable(survival, room)
    bits = out.view(np.int64)
    for r in range(len(out)):
        for k in range(min(room[r], out.shape[1])):
            bits[r, k] = (bits[r, k] & -2) | (k == 0)
    return out, candidates


@compiled
def early_stop(
    ascending: np.ndarray, candidates: int, outputs: float, seconds: np.ndarray, min_gain: float
) -> int:
    """Algorithm 1: the budget at which Theta stops improving. `seconds` [candidates + 1] of the round."""
    tau = outputs
    for budget in range(candidates):
        gain = ascending[len(ascending) - 1 - budget]
        worth = tau + gain if min_gain == 0 else tau + (tau + gain - tau) / (1 + min_gain)
        if worth / seconds[budget + 1] <= tau / seconds[budget]:
            return budget
        tau += gain
    return candidates


@compiled
def most_rate(ascending: np.ndarray, candidates: int, outputs: float, seconds: np.ndarray) -> int:
    """The smallest budget of the largest Theta."""
    tau, best, best_rate = outputs, 0, outputs / seconds[0]
    for budget in range(1, candidates + 1):
        tau += ascending[len(ascending) - budget]
        rate = tau / seconds[budget]
        if rate > best_rate:
            best, best_rate = budget, rate
    return best


@compiled
def lengths(alive: np.ndarray, ascending: np.ndarray, budget: int) -> np.ndarray:
    """[R] int64: drafts of each request among the first `budget` candidates.

    Ranked by survival, ties by earlier slot, then by request: the last one admitted says who is.
    """
    R, gamma = alive.shape
    out = np.zeros(R, dtype=np.int64)
    if budget <= 0:
        return out
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
                    return out
    return out


@compiled
def best_to_draft(
    alive: np.ndarray,
    ascending: np.ndarray,
    candidates: int,
    outputs: float,
    seconds: np.ndarray,
    draft: tuple[float, float, float],
) -> tuple[np.ndarray, int, int, float]:
    """Where drafting is still to be decided: `lengths` of the best budget of at least 1, the budget, its requests
    and its tokens.

    `alive` as `mark_first_slots` leaves them; `draft`: seconds of a draft, of each request in it and of each of its
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
    return lengths(alive, ascending, best), best, best_requests, best_tau


@compiled
def tally(drafted: np.ndarray, scheduled: np.ndarray, accepted: np.ndarray) -> tuple[int, int, int, int, int]:
    """Of a round's lengths [R]: requests with drafts, drafts, scheduled ones, accepted ones, the longest scheduled."""
    requests, drafts, rows, won, longest = 0, 0, 0, 0, 0
    for r in range(len(drafted)):
        requests += drafted[r] > 0
        drafts += drafted[r]
        rows += scheduled[r]
        won += accepted[r]
        longest = max(longest, scheduled[r])
    return requests, drafts, rows, won, longest


@compiled
def beyond(
    drafted: np.ndarray, scheduled: np.ndarray, accepted: np.ndarray, base: np.ndarray
) -> tuple[int, int, int, int]:
    """Requests with drafts within `base` [R]; and drafts, scheduled ones and accepted ones beyond it."""
    within, drafts, rows, won = 0, 0, 0, 0
    for r in range(len(drafted)):
        within += min(drafted[r], base[r]) > 0
        drafts += max(drafted[r] - base[r], 0)
        rows += max(scheduled[r] - base[r], 0)
        won += max(accepted[r] - base[r], 0)
    return within, drafts, rows, won


@compiled
def widen(lengths: np.ndarray, room: np.ndarray, everyone: bool) -> tuple[np.ndarray, int, int]:
    """[R] a draft more where there is room, for `everyone` or for those who have some, with their `totals`."""
    out, some, total = np.zeros(len(lengths), dtype=np.int64), 0, 0
    for r in range(len(lengths)):
        if everyone or lengths[r] > 0:
            out[r] = min(lengths[r] + 1, room[r])
            some += out[r] > 0
            total += out[r]
    return out, some, total


@compiled
def priced(
    table: np.ndarray, first: int, count: int, constant: float, context: float, context_row: float
) -> np.ndarray:
    """[count] seconds of passes over first, first + 1, ... rows: `table` by rows and a constant, with attention's
    price beyond the profile (see `ContextCost`)."""
    out = np.empty(count)
    for i in range(count):
        seconds = table[first + i] + constant
        out[i] = max(seconds + context, 0.01 * seconds) + context_row * (first + i)
    return out


@compiled
def rescaled(values: np.ndarray, factor: float, constant: float) -> np.ndarray:
    """`values` themselves, changed in place: times a factor, and a constant more."""
    for i in range(len(values)):
        values[i] = values[i] * factor + constant
    return values
