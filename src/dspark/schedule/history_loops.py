"""The loops of what a policy remembers, compiled by Numba: `loops.py` has those of its decisions."""

from __future__ import annotations

import numpy as np

from dspark.compilation import compiled
from dspark.schedule.loops import NO_DRAFT

__all__ = [
    "conditional",
    "expected",
    "fading",
    "file_outcomes",
    "file_promises",
    "find",
    "remembered",
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
def fading(decay: float, rounds: int) -> float:
    """What is left of a number behind so many rounds: mostly one, and a power takes far longer than all else."""
    return decay if rounds == 1 else decay**rounds if rounds else 1.0


@compiled
def expected(
    numbers: np.ndarray,
    seen: np.ndarray,
    at: np.ndarray,
    now: int,
    decay: float,
    total: np.ndarray,
    prior: float,
    known: np.ndarray,
    weight: float,
    trust: float,
    out: np.ndarray,
) -> None:
    """Fill `out` [R, gamma] with the expected prefix survival.

    `numbers` [n, 2 + past, gamma]: reached, passed, and what was promised; a row fades by `decay` for each round
    since it was last `seen` [n]. It leans on the mean of all requests, see `conditional`.
    """
    assumed = weight * conditional(total, prior, known, weight)
    for r in range(len(at)):
        alive, left = trust, fading(decay, now - seen[at[r]])
        for k in range(len(assumed)):
            reached, passed = left * numbers[at[r], 0, k], left * numbers[at[r], 1, k]
            alive *= (passed + assumed[k]) / (reached + weight)
            out[r, k] = min(alive, 1.0)


@compiled
def file_promises(
    numbers: np.ndarray,
    seen: np.ndarray,
    at: np.ndarray,
    now: int,
    alive: np.ndarray,
    scheduled: np.ndarray,
    accepted: np.ndarray,
    decay: float,
    total: np.ndarray,
) -> tuple[float, int]:
    """Add a round's confidences to `numbers`, which fade by `decay` for each round since the last in which they were
    `seen` [n], and to `total` [2, gamma], which fades by one.

    Accepted drafts that the survivals of the scheduled ones promise, and how many there were.
    """
    total *= decay
    past, gamma, width, promised, won = numbers.shape[1] - 2, numbers.shape[2], alive.shape[1], 0.0, 0
    for r in range(len(at)):
        i, before, left = at[r], 1.0, fading(decay, now - seen[at[r]])
        seen[i] = now
        won += accepted[r]
        # Three indices each time: to make an array of the row takes longer than its loop.
        for k in range(gamma):
            numbers[i, 0, k] *= left
            numbers[i, 1, k] *= left
        if width == 0 or alive[r, 0] == NO_DRAFT:
            continue
        for age in range(past - 1, -1, -1):
            for k in range(gamma):
                numbers[i, 2 + age, k] = numbers[i, 1 + age, k] if age else np.nan
        for k in range(min(width, gamma)):
            a = alive[r, k]
            if a == NO_DRAFT:
                break
            numbers[i, 0, k] += before
            numbers[i, 1, k] += a
            total[0, k] += before
            total[1, k] += a
            if past:
                numbers[i, 2, k] = a
            if k < scheduled[r]:
                promised += a
            before = a
    return promised, won


@compiled
def file_outcomes(
    numbers: np.ndarray,
    seen: np.ndarray,
    at: np.ndarray,
    now: int,
    scheduled: np.ndarray,
    accepted: np.ndarray,
    decay: float,
    total: np.ndarray,
) -> None:
    """`file_promises` where there are none: scheduled slots as they turned out."""
    total *= decay
    for r in range(len(at)):
        numbers[at[r], :2] *= fading(decay, now - seen[at[r]])
        seen[at[r]] = now
        for k in range(min(scheduled[r], accepted[r] + 1)):
            passed = k < accepted[r]
            numbers[at[r], 0, k] += 1.0
            numbers[at[r], 1, k] += passed
            total[0, k] += 1.0
            total[1, k] += passed


@compiled
def remembered(numbers: np.ndarray, at: np.ndarray, age: int, expected: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` [R, gamma] with survivals as they were promised `age` rounds before the last; what is unknown as
    `expected`."""
    for r in range(len(at)):
        for k in range(expected.shape[1]):
            promised = numbers[at[r], 2 + age, k]
            out[r, k] = expected[r, k] if np.isnan(promised) else promised


@compiled
def find(
    wanted: np.ndarray,
    uids: np.ndarray,
    seen: np.ndarray,
    rows: np.ndarray,
    initial: np.ndarray,
    n: int,
    now: int,
    oldest: int,
    at: np.ndarray,
) -> tuple[int, int]:
    """Fill `at` [R] with where each uid lies among the first n of the increasing `uids`: how many do not, and n.

    A uid that was last `seen` before `oldest` counts as new. New ones are appended, the usual way: they come in
    order, and there is room. What is left has -1.
    """
    missing, i = 0, -1
    for r in range(len(wanted)):
        i += 1  # most lie behind the one before
        if i >= n or uids[i] != wanted[r]:
            i = np.searchsorted(uids[:n], wanted[r])
        if i < n and uids[i] == wanted[r] and seen[i] >= oldest:
            at[r] = i
        elif i == n < len(uids):
            uids[n], seen[n], rows[n] = wanted[r], now, initial
            at[r] = n
            n += 1
        else:
            at[r] = -1
            missing += 1
    return missing, n
