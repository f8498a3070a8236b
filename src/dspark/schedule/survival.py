"""Prefix survival from confidence logits: a_{r,j} = prod_{i <= j} c_{r,i} (section 2 of the algorithm)."""

from __future__ import annotations

import numpy as np
import torch

from dspark.core import Draft

__all__ = ["survival"]


def survival(draft: Draft) -> np.ndarray | None:
    """[R, gamma] float64, non-increasing along a row; None for a drafter without a confidence head."""
    if draft.confidence is None:
        return None
    return torch.sigmoid(draft.confidence.double()).cumprod(-1).cpu().numpy()
