"""Prefix survival from confidence logits: a_{r,j} = prod_{i <= j} c_{r,i} (section 2 of the algorithm)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dspark.compilation import compiled
from dspark.core import Draft, DSparkError

__all__ = ["Calibrate", "along", "survival"]

Calibrate = Callable[[np.ndarray], np.ndarray]
"""Confidence logits [R, gamma] float64 -> probabilities of conditional acceptance [R, gamma], slot by slot: what
comes out at a slot must depend on that slot's logit and those before it alone, or the schedule would look ahead."""


def survival(
    draft: Draft, calibrate: Calibrate | None = None, free: np.ndarray | None = None
) -> np.ndarray | None:
    """[R, gamma] float64, non-increasing along a row; None for a drafter without a confidence head.

    Rows with `free` drafts [R] hold copies: their confidences are counted, and nothing was fitted to them.

    Raises:
        DSparkError: `calibrate` gave something else than one probability a slot.
    """
    if draft.confidence is None:
        return None
    logits = draft.confidence.double().cpu().numpy()
    copied = None if free is None else free > 0
    if calibrate is None or (copied is not None and not np.count_nonzero(draft.lengths[~copied])):
        return along(logits)
    c = np.asarray(calibrate(logits), dtype=np.float64)
    if c.shape != logits.shape or ((c < 0) | (c > 1)).any():
        raise DSparkError(
            "the calibration did not give one probability a slot: was it fitted for another block length?"
        )
    alive = c.cumprod(axis=-1)
    return alive if copied is None else np.where(copied[:, None], along(logits), alive)


@compiled
def along(logits: np.ndarray) -> np.ndarray:
    """[R, gamma] running products of the logistic function of `logits` [R, gamma] float64."""
    alive = np.empty_like(logits)
    for r in range(len(logits)):
        product = 1.0
        for j in range(logits.shape[1]):
            product /= 1.0 + np.exp(-logits[r, j])
            alive[r, j] = product
    return alive
