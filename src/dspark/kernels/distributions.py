"""Softmax and draws over a whole vocabulary on a CPU, each row in one go.

`dspark.sampling` in PyTorch passes over a row of 50,000 logits ten times and makes as many temporaries; this is the
same for rows without filters, float32. A row's result does not depend on the others.
"""

from __future__ import annotations

import numpy as np
import torch

from dspark.compilation import compiled
from dspark.kernels.distributions_numba import draw_row, softmax_row
from dspark.kernels.simd import LANES

__all__ = ["draw", "fits", "softmax"]


def fits(values: torch.Tensor) -> bool:
    """Whether rows [n, V] are where and as the kernels want them."""
    return (
        values.device.type == "cpu"
        and values.dtype == torch.float32
        and values.ndim == 2
        and values.is_contiguous()
        and values.shape[1] % LANES == 0
        and values.shape[1] > 0
    )


def softmax(logits: torch.Tensor, temperature: np.ndarray) -> torch.Tensor:
    """softmax(logits / temperature), [n, V]; a row of -inf alone becomes one-hot at 0, a greedy one at its argmax.

    Args:
        logits: [n, V], as `fits` says. NaN and +inf spread over their row, if it is not greedy.
        temperature: [n] float64, 0 = greedy.
    """
    out = torch.empty_like(logits)
    _softmax(logits.data_ptr(), out.data_ptr(), logits.shape[1], temperature)
    return out


def draw(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Tokens [n] int64 by inverse CDF, see `dspark.sampling.sample`.

    Args:
        p: [n, V], as `fits` says; need not be normalised.
        u: [n] float64 on the host.
    """
    return torch.from_numpy(_draw(p.data_ptr(), p.shape[1], np.ascontiguousarray(u.numpy())))


@compiled
def _softmax(logits: int, out: int, size: int, temperature: np.ndarray) -> None:
    for r in range(len(temperature)):
        softmax_row(logits + 4 * size * r, out + 4 * size * r, size, temperature[r])


@compiled
def _draw(p: int, size: int, u: np.ndarray) -> np.ndarray:
    chosen = np.empty(len(u), np.int64)
    for r in range(len(u)):
        chosen[r] = draw_row(p + 4 * size * r, size, u[r])
    return chosen
