"""Distributions and draws over a whole vocabulary on a CPU, each row in one go.

`dspark.sampling` in PyTorch passes over a row of 50,000 logits ten times and makes as many temporaries (and
with a top-p sorts hundreds of them); this is the same for float32. A row's result does not depend on the others.
"""

from __future__ import annotations

import numpy as np
import torch

from dspark.compilation import compiled
from dspark.kernels.distributions_numba import PARAMETERS, distribution_row, draw_row
from dspark.kernels.simd import LANES

__all__ = ["draw", "fits", "probabilities"]


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


def probabilities(logits: torch.Tensor, parameters: np.ndarray) -> torch.Tensor:
    """Softmax after temperature and filters, [n, V], see `dspark.sampling.probabilities`.

    Args:
        logits: [n, V], as `fits` says. NaN and +inf spread over their row, if it is not greedy.
        parameters: [n, 4] float64: temperature, top_k, top_p, min_p; see `PARAMETERS`.
    """
    assert parameters.shape == (len(logits), PARAMETERS)
    out = torch.empty_like(logits)
    _probabilities(logits.data_ptr(), out.data_ptr(), logits.shape[1], parameters)
    return out


def draw(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Tokens [n] int64 by inverse CDF, see `dspark.sampling.sample`.

    Args:
        p: [n, V], as `fits` says; need not be normalised.
        u: [n] float64 on the host.
    """
    return torch.from_numpy(_draw(p.data_ptr(), p.shape[1], np.ascontiguousarray(u.numpy())))


@compiled
def _probabilities(logits: int, out: int, size: int, parameters: np.ndarray) -> None:
    for r in range(len(parameters)):
        at = parameters[r].ctypes.data
        distribution_row(logits + 4 * size * r, out + 4 * size * r, size, at)


@compiled
def _draw(p: int, size: int, u: np.ndarray) -> np.ndarray:
    chosen = np.empty(len(u), np.int64)
    for r in range(len(u)):
        chosen[r] = draw_row(p + 4 * size * r, size, u[r])
    return chosen
