"""Copies of rows: on a CPU by NumPy, for PyTorch takes longer to wake its threads than a round's rows to copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["copy_rows", "take_rows"]


def take_rows(source: Tensor, index: np.ndarray) -> Tensor:
    """Rows `index` [n] int64 of contiguous `source` [N, d], in new memory: [n, d]."""
    if source.device.type != "cpu":
        return source[torch.from_numpy(index).to(source.device)]
    return torch.from_numpy(_bytes(source).take(index, axis=0)).view(source.dtype)


def copy_rows(source: Tensor, out: Tensor) -> None:
    """Contiguous `source` [N, d] into the first rows of `out`, which has its type and lies where it does."""
    if source.device.type != "cpu":
        out[: len(source)] = source
    else:
        _bytes(out)[: len(source)] = _bytes(source)


def _bytes(rows: Tensor) -> np.ndarray:
    """The same memory as bytes: NumPy has not all of PyTorch's types."""
    return rows.view(torch.uint8).numpy()
