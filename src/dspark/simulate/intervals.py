"""Confidence intervals over seeds: Student's t for the mean of independent runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np

from dspark.errors import DSparkError

__all__ = ["Interval", "interval", "lower_bound", "t_quantile", "upper_bound"]


@dataclass(frozen=True)
class Interval:
    """Mean of n runs with a two-sided interval; infinitely wide for one run, NaN for none."""

    mean: float
    low: float
    high: float
    n: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> Interval:
    """Runs that measured nothing (NaN) are left out."""
    finite = np.array([v for v in values if not math.isnan(v)])
    if not len(finite):
        return Interval(math.nan, math.nan, math.nan, 0)
    mean, margin = float(finite.mean()), _margin(finite, (1 + confidence) / 2)
    return Interval(mean, mean - margin, mean + margin, len(finite))


def lower_bound(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> float:
    """One-sided: the mean lies above it with this confidence."""
    return float(np.mean(values)) - _margin(np.asarray(values), confidence)


def upper_bound(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> float:
    """One-sided: the mean lies below it with this confidence."""
    return float(np.mean(values)) + _margin(np.asarray(values), confidence)


def _margin(values: np.ndarray, probability: float) -> float:
    n = len(values)
    if n < 2:
        return math.inf
    return t_quantile(probability, n - 1) * float(values.std(ddof=1)) / math.sqrt(n)


@cache
def t_quantile(probability: float, df: int) -> float:
    """Student's t: P(T <= t) = probability.

    With t = sqrt(df) tan(a) the distribution is 1/2 + c * integral of cos^(df - 1) from 0 to a, which is summed
    finely and solved for a.

    Raises:
        DSparkError: a probability outside 0.5..1, or no degrees of freedom.
    """
    if not 0.5 <= probability < 1 or df < 1:
        raise DSparkError(
            f"a confidence lies between 0.5 and 1 and needs two runs, got {probability} and {df + 1}"
        )
    angle = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angle) ** (df - 1)
    total = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    at = float(np.interp(2 * probability - 1, total / total[-1], angle))
    return math.sqrt(df) * math.tan(at)
