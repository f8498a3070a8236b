"""Softmax and draws over a whole vocabulary on a CPU, each row in one go.

`dspark.sampling` in PyTorch passes over a row of 50,000 logits ten times and makes as many temporaries; this is the
same for rows without filters, float32. A row's result does not depend on the others.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from dspark.compilation import compiled
from dspark.kernels.memory import floats
from dspark.kernels.rows import exp_row, largest_sum, multiply_row
from dspark.kernels.simd import LANES

__all__ = ["draw", "fits", "softmax"]

CHUNK = 512  # probabilities that a draw sums up before it looks where it is
_LOG2_E = math.log2(math.e)


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
    """softmax(logits / temperature), [n, V]; a row of -inf alone becomes one-hot at 0.

    Args:
        logits: [n, V], as `fits` says. NaN and +inf spread over their row.
        temperature: [n] float64, above 0.
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
    return torch.from_numpy(_draw(p.numpy(), np.ascontiguousarray(u.numpy())))


@compiled
def _softmax(logits: int, out: int, size: int, temperature: np.ndarray) -> None:
    for r in range(len(temperature)):
        x, p = logits + 4 * size * r, out + 4 * size * r
        top = floats(x, size)[largest_sum(x, 0, size)]  # type: ignore[call-arg]
        if top == -np.inf:  # nothing is allowed, or nothing is a number
            values = floats(x, size)
            broken = False
            for v in range(size):
                broken |= values[v] != values[v]
            floats(p, size)[:] = np.nan if broken else 0.0
            floats(p, size)[0] = np.nan if broken else 1.0
            continue
        total = exp_row(x, top, np.float32(min(_LOG2_E / temperature[r], 3e38)), p, size)
        multiply_row(p, np.float32(1.0 / total), size)


@compiled
def _draw(p: np.ndarray, u: np.ndarray) -> np.ndarray:
    n, size = p.shape
    chunks = -(-size // CHUNK)
    chosen, before = np.empty(n, np.int64), np.empty(chunks + 1, np.float64)
    for r in range(n):
        row = p[r]
        before[0] = 0.0
        for c in range(chunks):
            parts = np.zeros(8, np.float64)  # sums that do not wait for each other
            start, stop = c * CHUNK, min(size, (c + 1) * CHUNK)
            for v in range(start, stop - 7, 8):
                for lane in range(8):
                    parts[lane] += row[v + lane]
            for v in range(start + (stop - start) // 8 * 8, stop):
                parts[0] += row[v]
            before[c + 1] = before[c] + parts.sum()
        total = before[chunks]
        point = min(u[r] * total, np.nextafter(total, 0.0))
        c = 0
        while c < chunks - 1 and before[c + 1] <= point:
            c += 1
        # The chunk's sum may round differently when it is taken one by one: go on behind it, and keep the last token
        # that has any probability at all.
        reached, last = before[c], 0
        for v in range(c * CHUNK, size):
            if row[v] > 0:
                last = v
                reached += row[v]
                if reached > point:
                    break
        if last == 0 and not row[0] > 0:  # rounding left nothing in this chunk or behind it
            for v in range(c * CHUNK):
                if row[v] > 0:
                    last = v
        chosen[r] = last
    return chosen
