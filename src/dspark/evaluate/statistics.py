"""Intervals for what an evaluation measures: proportions, and ratios of sums over prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dspark.core import DSparkError

__all__ = ["bootstrap_ratio", "wilson"]

Z_95 = 1.959963984540054  # two-sided 95%


def wilson(successes: int, trials: int, z: float = Z_95) -> tuple[float, float] | None:
    """Wilson's score interval of a proportion; None without trials.

    It takes the trials as independent. Rounds of one answer are not quite, so read it as the least uncertainty.

    Raises:
        DSparkError: successes outside 0..trials.
    """
    if not 0 <= successes <= trials:
        raise DSparkError(f"{successes} successes of {trials} trials: successes must lie in 0..trials")
    if trials == 0:
        return None
    p, z2 = successes / trials, z * z
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> tuple[float, float] | None:
    """Percentile interval of sum(numerators) / sum(denominators) over resampled prompts.

    One entry of each a prompt: whole prompts are drawn with replacement, so what rounds of one prompt have in
    common widens the interval. None for fewer than two prompts, or where every denominator is 0.
    """
    top, bottom = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    if len(top) != len(bottom):
        raise DSparkError(f"{len(top)} numerators came with {len(bottom)} denominators: give one each")
    if len(top) < 2 or not bottom.any():
        return None
    drawn = np.random.default_rng(seed).multinomial(len(top), np.full(len(top), 1 / len(top)), resamples)
    sums, totals = drawn @ top, drawn @ bottom
    ratios = sums[totals > 0] / totals[totals > 0]
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
