"""Drafters in few bits: their precision is free, because output is exact whatever they propose."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.kernels.lowbit import lowbit_linears, supports, supports_integers
from dspark.target.decoder import DecoderLayer

__all__ = ["can_quantise", "quantise"]


def quantise(model: nn.Module) -> None:
    """Layers to 4 bits, what is outside them (heads, projections) to 8, where rounding costs more acceptance."""
    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            lowbit_linears(layer, 4, supports_integers())
    lowbit_linears(model, 8, supports_integers())


def can_quantise(weight: Tensor) -> bool:
    """Whether the low-bit kernels take this weight."""
    fits = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.shape[1] % 32 == 0
    return fits and supports()
