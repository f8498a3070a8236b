"""Rotary position embedding in the rotate-half convention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RopeScaling", "Rotary", "apply_rotary"]


@dataclass(frozen=True)
class RopeScaling:
    """How a model was stretched beyond the `original` context it was first trained on.

    Without bounds every frequency is divided by `factor` ("linear"). With them (Llama 3.1's "llama3") only the slow
    ones are: those that turn fewer than `low` times within the original context; those of more than `high` turns stay,
    and in between the two are mixed in proportion.
    """

    factor: float
    low: float | None = None
    high: float | None = None
    original: int | None = None

    def apply(self, inverse: Tensor) -> Tensor:
        """Angular frequencies [d / 2], radians a position, to scaled ones."""
        if self.low is None or self.high is None or self.original is None:
            return inverse / self.factor
        turns = self.original * inverse / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * inverse + (1 - kept) * inverse / self.factor


class Rotary(nn.Module):
    """Tables for every position up to `max_context`."""

    def __init__(
        self, head_dim: int, theta: float, max_context: int, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        # Real tables also under `torch.device("meta")`, where computing would import a second's worth of PyTorch.
        exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        inverse = theta ** (-torch.arange(0, head_dim, 2, **exact) / head_dim)
        if scaling is not None:
            inverse = scaling.apply(inverse)
        angles = torch.arange(max_context, **exact)[:, None] * inverse
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos().float(), persistent=False)  # [max_context, head_dim / 2]
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [N, 1, head_dim / 2] for positions [N]."""
        return self.cos[positions].to(dtype)[:, None], self.sin[positions].to(dtype)[:, None]


def apply_rotary(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads x [N, h, d] by cos, sin [N, 1, d / 2]."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
