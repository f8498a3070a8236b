"""Copies of a round's rows: on a CPU by NumPy. PyTorch would wake its threads for them, and wait for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["take_rows"]


def take_rows(source: Tensor, index: np.ndarray) -> Tensor:
    """Rows `index` [n] int64 of `source` [N, d], in new memory: [n, d]."""
    if source.device.type == "cpu" and source.dtype != torch.bfloat16:  # which NumPy lacks
        return torch.from_numpy(source.numpy().take(index, axis=0))
    return source[torch.from_numpy(index).to(source.device)]
