"""Two-sample tests for the statistical audit: chi-square with pooled cells, Holm's correction, and power.

Counts come in strata (one a prompt): each stratum has its own table, statistics and degrees of freedom add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

__all__ = ["LEAST_EXPECTED", "ChiSquare", "critical_value", "detectable_tv", "holm", "power", "two_sample"]

LEAST_EXPECTED = 10.0  # expected count of a cell, in the smaller sample, below which cells are pooled
Strata = Iterable[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's statistic of two samples over all strata.

    `pooled`: share of the counts in cells of several rare outcomes, among which a difference cannot be seen.
    """

    statistic: float
    freedom: int
    samples: int  # outcomes of each sample, over all strata
    pooled: float

    @property
    def p_value(self) -> float:
        """Of no difference. 1 where there is a single cell."""
        return _upper_tail(self.statistic, self.freedom)


def two_sample(strata: Strata) -> ChiSquare:
    """Do two samples of outcomes (whole numbers, any shape) follow one law?

    Which outcomes share a cell depends on both samples together, so that it does not prefer one. Pearson's form is
    taken, not G: with few counts a cell its tail stays on the safe side where samples are equally large.
    """
    statistic, freedom, samples, rare, total = 0.0, 0, 0, 0, 0
    for first, second in strata:
        counts, pooled = _table(np.ravel(first), np.ravel(second))
        sizes = counts.sum(1)  # [2]
        expected = counts.sum(0) * (sizes / sizes.sum())[:, None]
        statistic += float(((counts - expected) ** 2 / expected).sum())
        freedom += counts.shape[1] - 1
        samples += int(sizes.min())
        rare, total = rare + pooled, total + int(sizes.sum())
    return ChiSquare(statistic, freedom, samples, rare / total if total else 0.0)


def _table(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, int]:
    """Counts [2, cells], and how many counts are in cells that several outcomes share.

    In order of falling counts (equal ones by number) outcomes fill cells; too few at the end join the last one.
    """
    _, index = np.unique(np.concatenate((first, second)), return_inverse=True)
    width = int(index.max()) + 1
    split = index[: len(first)], index[len(first) :]
    counts = np.stack([np.bincount(part, minlength=width) for part in split])  # [2, outcomes]
    together = counts.sum(0)
    needed = LEAST_EXPECTED * len(index) / min(len(first), len(second))
    order = np.argsort(-together, kind="stable")
    starts, filled = [0], 0
    for i, count in enumerate(together[order].tolist()):
        if filled >= needed:
            starts.append(i)
            filled = 0
        filled += count
    if filled < needed and len(starts) > 1:
        starts.pop()
    shared = np.diff([*starts, width]) > 1
    cells = np.add.reduceat(counts[:, order], starts, axis=1)
    return cells.astype(float), int(cells[:, shared].sum())


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: where those at most a level count as failures, the chance of any false alarm over
    all tests is at most that level, however the tests depend on each other."""
    order = np.argsort(p_values, kind="stable")
    adjusted, worst = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order.tolist()):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted


def critical_value(freedom: int, level: float) -> float:
    """What chi-square exceeds with probability `level`."""
    return _bisect(lambda x: level - _upper_tail(x, freedom), 10.0)


def power(noncentrality: float, freedom: int, critical: float) -> float:
    """Chance that a noncentral chi-square exceeds `critical`: central ones, weighted by a Poisson distribution."""
    if noncentrality == 0:
        return _upper_tail(critical, freedom)
    half = noncentrality / 2
    j = torch.arange(int(half + 12 * math.sqrt(half + 1) + 20), dtype=torch.float64)
    weight = (j * math.log(half) - half - torch.lgamma(j + 1)).exp()
    tails = torch.special.gammaincc(freedom / 2 + j, torch.full_like(j, critical / 2))
    return float((weight * tails).sum())


@cache
def detectable_tv(freedom: int, samples: int, level: float, wanted: float = 0.99) -> float:
    """Total variation distance that a test at `level` finds with the chance `wanted`, whatever its direction.

    Two samples of n outcomes whose laws differ by TV have the noncentrality n sum (p - q)^2 / (p + q) or more, at
    least 2 n TV^2 by the Cauchy-Schwarz inequality (sum |p - q| = 2 TV, sum (p + q) = 2). Over strata of equal
    size the bound holds for the mean distance. Distances are those between pooled cells. 1: none can be found.
    """
    if freedom == 0 or samples == 0:
        return 1.0
    critical = critical_value(freedom, level)
    needed = _bisect(lambda x: power(x, freedom, critical) - wanted, 10.0)
    return min(1.0, math.sqrt(needed / (2 * samples)))


def _upper_tail(x: float, freedom: int) -> float:
    """Of the chi-square distribution."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _bisect(rising: Callable[[float], float], high: float) -> float:
    """Where a rising function crosses 0, above 0."""
    low = 0.0
    while rising(high) < 0:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high
