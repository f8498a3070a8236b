"""Rotary position embedding in the rotate-half convention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Rotary", "apply_rotary"]


class Rotary(nn.Module):
    """Tables for every position up to `max_context`."""

    def __init__(self, head_dim: int, theta: float, max_context: int) -> None:
        super().__init__()
        # Real tables also under `torch.device("meta")`, where computing would import a second's worth of PyTorch.
        exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        inverse = theta ** (-torch.arange(0, head_dim, 2, **exact) / head_dim)
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
