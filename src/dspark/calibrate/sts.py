"""Sequential temperature scaling: fit one temperature a slot, left to right (section 3 of the paper).

Slot k's temperature minimises the calibration error of the *cumulative product* against prefix survival, with the
temperatures before it frozen. What a slot cannot mend by itself, its predecessors' error, it makes up for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dspark.calibrate.calibration import sigmoid
from dspark.calibrate.metrics import Bins, expected_calibration_error
from dspark.errors import DSparkError

__all__ = ["HIGHEST", "LOWEST", "at_the_edge", "fit_sts"]

LOWEST, HIGHEST = 1 / 20, 20.0  # temperatures that are tried
_POINTS = 60  # grid points on either side of 1
_FINER = 20  # points between a grid point and its neighbours


def fit_sts(logits: np.ndarray, survival: np.ndarray, observed: np.ndarray, bins: Bins) -> tuple[float, ...]:
    """Temperatures [gamma].

    Args:
        logits: [n, gamma] confidence logits.
        survival: [n, gamma] whether x_1..x_k were all accepted (0 or 1), or the probability of it; from rounds
            that were verified in full, never from scheduled ones alone: those are a selection.
        observed: [n, gamma] bool, true up to each round's verified length.

    Raises:
        DSparkError: a slot with fewer rounds than bins.
    """
    prefix = np.ones(len(logits))
    temperatures = []
    for k in range(logits.shape[1]):
        rows = observed[:, k]
        if rows.sum() < bins.count:
            raise DSparkError(
                f"slot {k + 1} was verified in {rows.sum()} rounds, fewer than the {bins.count} bins: collect more "
                "rounds, or calibrate fewer drafts"
            )
        before, x, y = prefix[rows], logits[rows, k].astype(np.float64), survival[rows, k]

        def error(t: float, before: np.ndarray = before, x: np.ndarray = x, y: np.ndarray = y) -> float:
            return expected_calibration_error(before * sigmoid(x / t), y, bins)

        temperatures.append(_search(error))
        prefix[rows] = before * sigmoid(x / temperatures[-1])
    return tuple(temperatures)


def at_the_edge(temperature: float) -> bool:
    """The search ended where it had to end: a temperature does not mend this slot."""
    return temperature <= LOWEST * 1.001 or temperature >= HIGHEST / 1.001


def _search(error: Callable[[float], float]) -> float:
    """1-D grid search, then a finer grid around the best point. Of equals the one nearest to 1 wins."""
    ratio = HIGHEST ** (1 / _POINTS)
    coarse = ratio ** np.arange(-_POINTS, _POINTS + 1)  # 1 itself is one of them
    best = _best(error, coarse)
    finer = best * ratio ** (np.arange(-_FINER, _FINER + 1) / _FINER)
    return _best(error, np.clip(finer, LOWEST, HIGHEST))


def _best(error: Callable[[float], float], grid: np.ndarray) -> float:
    by_distance = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]
    errors = [error(float(t)) for t in by_distance]
    return float(by_distance[int(np.argmin(errors))])
