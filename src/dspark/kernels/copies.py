"""Copies of a round's rows: on a CPU by NumPy. PyTorch would wake its threads for them, and wait for them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["copy_rows", "take_rows"]


def take_rows(source: Tensor, index: np.ndarray) -> Tensor:
    """Rows `index` [n] int64 of `source` [N, d], in new memory: [n, d]."""
    if _numpy_has(source):
        return torch.from_numpy(source.numpy().take(index, axis=0))
    return source[torch.from_numpy(index).to(source.device)]


def copy_rows(source: Tensor, out: Tensor) -> None:
    """`source` [n, d] into `out`, of the same shape, type and device."""
    if _numpy_has(source):
        np.copyto(out.numpy(), source.numpy())
    else:
        out.copy_(source)


def _numpy_has(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and rows.dtype != torch.bfloat16
