"""How good are probabilities? Calibration error, its sampling floor, ranking (AUC) and Brier score.

`predicted` [n] are probabilities, `realised` [n] outcomes (0 or 1) or their expectations (0..1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dspark.errors import DSparkError

__all__ = ["Bins", "Reliability", "area_under_curve", "brier", "ece_floor", "expected_calibration_error"]


@dataclass(frozen=True)
class Bins:
    """Where calibration error is averaged.

    "mass": as many predictions in each bin, equal ones never apart; resolves predictions that crowd together, as
    survivals of late slots do near 0. "width": equal parts of [0, 1].
    """

    count: int = 15
    kind: Literal["mass", "width"] = "mass"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise DSparkError(f"the number of bins must be 1 or more, got {self.count}")
        if self.kind not in ("mass", "width"):
            raise DSparkError(f"bins are of equal mass or width, not {self.kind!r}")

    def assign(self, predicted: np.ndarray) -> np.ndarray:
        """[n] int64, the bin of each prediction, 0..count - 1. Bin b of "width" is (b / count, (b + 1) / count]."""
        inner = np.arange(1, self.count) / self.count
        edges = np.quantile(predicted, inner) if self.kind == "mass" and len(predicted) else inner
        return np.searchsorted(edges, predicted, side="left")


@dataclass(frozen=True, eq=False)
class Reliability:
    """The points of a reliability diagram: bins that hold something, from low to high."""

    predicted: np.ndarray  # [b] mean prediction
    realised: np.ndarray  # [b] mean outcome
    count: np.ndarray  # [b] int64

    @staticmethod
    def of(predicted: np.ndarray, realised: np.ndarray, bins: Bins) -> Reliability:
        where = bins.assign(predicted)
        count = np.bincount(where, minlength=bins.count)
        held = count > 0
        sums = [np.bincount(where, v, bins.count)[held] for v in (predicted, realised)]
        return Reliability(sums[0] / count[held], sums[1] / count[held], count[held])


def expected_calibration_error(predicted: np.ndarray, realised: np.ndarray, bins: Bins) -> float:
    """sum_b n_b / n |mean prediction - mean outcome| over bins (Naeini et al. 2015); NaN of nothing."""
    if not len(predicted):
        return float("nan")
    gaps = np.bincount(bins.assign(predicted), predicted - realised)
    return float(np.abs(gaps).sum() / len(predicted))


def ece_floor(
    conditional: np.ndarray, lengths: np.ndarray, bins: Bins, simulations: int, rng: np.random.Generator
) -> np.ndarray:
    """Calibration errors that a perfectly calibrated predictor shows by chance, [simulations, gamma].

    Outcomes are drawn from the predictions themselves: slot k of a block is accepted with `conditional` [n, gamma]
    as long as all before it were; slots at and past `lengths` [n] are not looked at. Drawn jointly, so that a row
    is one plausible set of errors. Rounds of one text are drawn independently: real ones may scatter more.
    """
    n, gamma = conditional.shape
    observed = np.arange(gamma) < lengths[:, None]
    survival = np.where(observed, conditional, 0.0).cumprod(axis=1)
    slots = [np.flatnonzero(observed[:, k]) for k in range(gamma)]
    where = [bins.assign(survival[rows, k]) for k, rows in enumerate(slots)]
    errors = np.full((simulations, gamma), np.nan)
    for s in range(simulations):
        alive = np.ones(n, dtype=bool)
        for k, rows in enumerate(slots):
            alive &= rng.random(n) < np.nan_to_num(conditional[:, k])
            if len(rows):
                gaps = np.bincount(where[k], survival[rows, k] - alive[rows])
                errors[s, k] = np.abs(gaps).sum() / len(rows)
    return errors


def area_under_curve(predicted: np.ndarray, realised: np.ndarray) -> float:
    """Probability that a random success was predicted above a random failure, ties count half.

    `realised` holds 0 and 1. NaN where one of the two is missing.
    """
    success = np.asarray(realised, dtype=bool)
    good, bad = int(success.sum()), int((~success).sum())
    if not good or not bad:
        return float("nan")
    _, inverse, count = np.unique(predicted, return_inverse=True, return_counts=True)
    mid_rank = (np.cumsum(count) - (count - 1) / 2)[inverse]  # 1-based, mean rank of equal predictions
    return float((mid_rank[success].sum() - good * (good + 1) / 2) / (good * bad))


def brier(predicted: np.ndarray, realised: np.ndarray) -> float:
    """Mean squared difference; NaN of nothing."""
    return float(np.square(predicted - realised).mean()) if len(predicted) else float("nan")
