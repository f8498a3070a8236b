"""Prefix survival from confidence logits: a_{r,j} = prod_{i <= j} c_{r,i} (section 2 of the algorithm)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dspark.core import Draft, DSparkError

__all__ = ["Calibrate", "survival"]

Calibrate = Callable[[np.ndarray], np.ndarray]
"""Confidence logits [R, gamma] float64 -> probabilities of conditional acceptance [R, gamma], slot by slot: what
comes out at a slot must depend on that slot's logit and those before it alone, or the schedule would look ahead."""


def survival(draft: Draft, calibrate: Calibrate | None = None) -> np.ndarray | None:
    """[R, gamma] float64, non-increasing along a row; None for a drafter without a confidence head.

    Raises:
        DSparkError: `calibrate` gave something else than one probability a slot.
    """
    if draft.confidence is None:
        return None
    if calibrate is None:
        return torch.sigmoid(draft.confidence.double()).cumprod(-1).cpu().numpy()
    logits = draft.confidence.double().cpu().numpy()
    c = np.asarray(calibrate(logits), dtype=np.float64)
    if c.shape != logits.shape or ((c < 0) | (c > 1)).any():
        raise DSparkError(
            "the calibration did not give one probability a slot: was it fitted for another block length?"
        )
    return c.cumprod(axis=-1)
