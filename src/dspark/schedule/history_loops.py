"""The loops of what a policy remembers, compiled by Numba: `loops.py` has those of its decisions."""

from __future__ import annotations

import numpy as np

from dspark.compilation import compiled
from dspark.schedule.loops import NO_DRAFT

__all__ = [
    "append",
    "conditional",
    "expected",
    "file_outcomes",
    "file_promises",
    "idle_rounds",
    "locate",
    "promised",
]


@compiled
def conditional(total: np.ndarray, prior: float, known: np.ndarray, weight: float) -> np.ndarray:
    """[gamma] mean conditional acceptance of `total` [2, gamma], reached and passed, and `weight` rounds of what is
    `known` [gamma] of a slot, or else (NaN) of the slot before it, and of `prior` before the first."""
    out, previous = np.empty(total.shape[1]), prior
    for k in range(len(out)):
        if not np.isnan(known[k]):
            previous = known[k]
        previous = (total[1, k] + weight * previous) / (total[0, k] + weight)
        out[k] = previous
    return out


@compiled
def expected(
    numbers: np.ndarray,
    at: np.ndarray,
    idle: np.ndarray,
    decay: float,
    mean: np.ndarray,
    weight: float,
    trust: float,
) -> np.ndarray:
    """[R, gamma] expected prefix survival.

    `numbers` [n, 2 + past, gamma]: reached, passed, and what was promised; a row fades by `decay` for each round that
    its request was `idle` [R].
    """
    out = np.empty((len(at), len(mean)))
    for r in range(len(at)):
        alive, left = trust, decay ** idle[r]
        for k in range(len(mean)):
            reached, passed = left * numbers[at[r], 0, k], left * numbers[at[r], 1, k]
            alive *= (passed + weight * mean[k]) / (reached + weight)
            out[r, k] = min(alive, 1.0)
    return out


@compiled
def file_promises(
    numbers: np.ndarray, at: np.ndarray, ages: np.ndarray, alive: np.ndarray, decay: float, total: np.ndarray
) -> None:
    """Add a round's confidences to `numbers`, which fade by `decay` for each of the `ages` [R] rounds since the last,
    and to `total` [2, gamma], which fades by one."""
    total *= decay
    past = numbers.shape[1] - 2
    for r in range(len(at)):
        mine, before = numbers[at[r]], 1.0
        mine[:2] *= decay ** ages[r]
        if alive.shape[1] == 0 or alive[r, 0] == NO_DRAFT:
            continue
        for age in range(past - 1, 0, -1):
            mine[2 + age] = mine[1 + age]
        if past:
            mine[2] = np.nan
        for k in range(min(alive.shape[1], numbers.shape[2])):
            a = alive[r, k]
            if a == NO_DRAFT:
                break
            mine[0, k] += before
            mine[1, k] += a
            total[0, k] += before
            total[1, k] += a
            if past:
                mine[2, k] = a
            before = a


@compiled
def promised(alive: np.ndarray, scheduled: np.ndarray) -> float:
    """Accepted drafts that the survivals of the scheduled ones promise."""
    out = 0.0
    for r in range(len(alive)):
        for k in range(min(scheduled[r], alive.shape[1])):
            out += max(alive[r, k], 0.0)
    return out


@compiled
def file_outcomes(
    numbers: np.ndarray,
    at: np.ndarray,
    ages: np.ndarray,
    scheduled: np.ndarray,
    accepted: np.ndarray,
    decay: float,
    total: np.ndarray,
) -> None:
    """`file_promises` where there are none: scheduled slots as they turned out."""
    total *= decay
    for r in range(len(at)):
        numbers[at[r], :2] *= decay ** ages[r]
        for k in range(min(scheduled[r], accepted[r] + 1)):
            passed = k < accepted[r]
            numbers[at[r], 0, k] += 1.0
            numbers[at[r], 1, k] += passed
            total[0, k] += 1.0
            total[1, k] += passed


@compiled
def locate(
    wanted: np.ndarray, uids: np.ndarray, n: int, seen: np.ndarray, oldest: int
) -> tuple[np.ndarray, int]:
    """[R] where each uid lies among the first n of the increasing `uids`, -1 where it does not or was last `seen`
    before `oldest`, and how many do not."""
    at, missing, i = np.empty(len(wanted), dtype=np.int64), 0, 0
    for r in range(len(wanted)):
        i += 1  # most lie behind the one before
        if i >= n or uids[i] != wanted[r]:
            i = np.searchsorted(uids[:n], wanted[r])
        if i < n and uids[i] == wanted[r] and seen[i] >= oldest:
            at[r] = i
        else:
            at[r] = -1
            missing += 1
    return at, missing


@compiled
def append(
    wanted: np.ndarray,
    at: np.ndarray,
    uids: np.ndarray,
    seen: np.ndarray,
    rows: np.ndarray,
    initial: np.ndarray,
    n: int,
    now: int,
) -> int:
    """Rows for the uids that `locate` left out, behind the first n: how many there are then.

    -1, and nothing of it counts, where they do not come in increasing order, or no room is left.
    """
    for r in range(len(wanted)):
        if at[r] < 0:
            if n == len(uids) or (n > 0 and wanted[r] <= uids[n - 1]):
                return -1
            uids[n], seen[n], rows[n] = wanted[r], now, initial
            at[r] = n
            n += 1
    return n


@compiled
def idle_rounds(seen: np.ndarray, at: np.ndarray, now: int) -> np.ndarray:
    """[R] rounds since each was last seen."""
    out = np.empty(len(at), dtype=np.int64)
    for r in range(len(at)):
        out[r] = now - seen[at[r]]
    return out
