"""Sequential temperature scaling: fit one temperature a slot, left to right (section 3 of the paper).

Slot k's temperature minimises the calibration error of the *cumulative product* against prefix survival, with the
temperatures before it frozen. What a slot cannot mend by itself, its predecessors' error, it makes up for.

Beyond the paper, a slot may have an offset, c_k = sigmoid(logit_k / T_k + b_k). A temperature turns the reliability
curve about the logit 0; an offset shifts it, which is what a head needs that is too confident (or too timid)
throughout. At each T that is tried, b_k follows from the mean: the search stays one over T alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dspark.calibrate.calibration import sigmoid
from dspark.calibrate.metrics import Bins, expected_calibration_error
from dspark.errors import DSparkError

__all__ = ["HIGHEST", "LOWEST", "at_the_edge", "fit_sts", "fit_sts_with_offsets", "matching_offset"]

LOWEST, HIGHEST = 1 / 20, 20.0  # temperatures that are tried
_FARTHEST = 10.0  # offset either way, in logits
_POINTS = 60  # grid points on either side of 1
_FINER = 20  # points between a grid point and its neighbours

_Offset = Callable[[np.ndarray, np.ndarray, np.ndarray], float]  # prefix survival, logits / T, labels


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
    return tuple(t for t, _ in _fit(logits, survival, observed, bins, lambda *_: 0.0))


def fit_sts_with_offsets(
    logits: np.ndarray, survival: np.ndarray, observed: np.ndarray, bins: Bins
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Temperatures [gamma] and offsets [gamma]; arguments and errors are those of `fit_sts`.

    With the offset that belongs to it, every temperature predicts the right mean; the best one makes the rest fit.
    """
    fitted = _fit(logits, survival, observed, bins, matching_offset)
    return tuple(t for t, _ in fitted), tuple(b for _, b in fitted)


def matching_offset(before: np.ndarray, scaled: np.ndarray, survival: np.ndarray) -> float:
    """The b at which mean(before * sigmoid(scaled + b)) = mean(survival), all [n]; no farther from 0 than 10.

    The mean rises with b, so a bracket closes on the root; Newton's steps where they stay inside, halving elsewhere.
    """
    low, high, b = -_FARTHEST, _FARTHEST, 0.0
    for _ in range(60):
        c = 0.5 + 0.5 * np.tanh((scaled + b) / 2)  # the sigmoid; of a mean no more digits are needed
        weighted = before * c
        gap = float(np.mean(weighted - survival))
        if abs(gap) < 1e-10:
            break
        low, high = (b, high) if gap < 0 else (low, b)
        slope = float(np.mean(weighted * (1 - c)))
        newton = b - gap / slope if slope > 0 else low
        b = newton if low < newton < high else (low + high) / 2
    return b


def _fit(
    logits: np.ndarray, survival: np.ndarray, observed: np.ndarray, bins: Bins, offset: _Offset
) -> list[tuple[float, float]]:
    """(T_k, b_k) of each slot, left to right; `offset` gives b_k for any T that is tried."""
    prefix = np.ones(len(logits))
    fitted = []
    for k in range(logits.shape[1]):
        rows = observed[:, k]
        if rows.sum() < bins.count:
            raise DSparkError(
                f"slot {k + 1} was verified in {rows.sum()} rounds, fewer than the {bins.count} bins: collect more "
                "rounds, or calibrate fewer drafts"
            )
        before, x, y = prefix[rows], logits[rows, k].astype(np.float64), survival[rows, k]

        def error(t: float, before: np.ndarray = before, x: np.ndarray = x, y: np.ndarray = y) -> float:
            return expected_calibration_error(before * sigmoid(x / t + offset(before, x / t, y)), y, bins)

        t = _search(error)
        b = offset(before, x / t, y)
        fitted.append((t, b))
        prefix[rows] = before * sigmoid(x / t + b)
    return fitted


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
