"""Drafters in few bits: their precision is free, because output is exact whatever they propose."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.kernels.lowbit import divisible, lowbit_linears, supports, supports_integers
from dspark.target.base import Target
from dspark.target.layer import DecoderLayer

__all__ = ["can_quantise", "low_bits", "quantise", "serves_blocks"]


def low_bits(model: nn.Module) -> dict[str, int]:
    """Bits of each linear layer that is served in few, by name.

    Those of decoder layers have 4, what is outside them (heads, projections) 8: there rounding costs more acceptance.
    """
    inside = tuple(f"{name}." for name, layer in model.named_modules() if isinstance(layer, DecoderLayer))
    linears = [name for name, layer in model.named_modules() if divisible(layer)]
    return {name: 4 if name.startswith(inside) else 8 for name in linears}


def quantise(model: nn.Module) -> None:
    """Round the model's linear layers as `low_bits` says; those that are in few bits already stay as they are."""
    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            lowbit_linears(layer, 4, supports_integers())
    lowbit_linears(model, 8, supports_integers())


def can_quantise(weight: Tensor) -> bool:
    """Whether the low-bit kernels take this weight."""
    fits = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.shape[1] % 32 == 0
    return fits and supports()


def serves_blocks(target: Target) -> bool:
    """Whether drafters for this target run on weights in few bits."""
    return target.dtype == torch.float32 and target.device.type == "cpu" and supports()
