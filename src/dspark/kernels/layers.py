"""Decoder layers as steps of a program, for few rows on a CPU: a part of a target's pass and of a drafter's.

stack = LayerStack([LayerWeights(...), ...], norm, rotation, eps)
memory = LayerMemory(stack, capacity, keys, values)
program = Program([*memory.steps(), ...], stack.rotation)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.kernels.attention import AttentionPlan
from dspark.kernels.attention_cpu import set_words
from dspark.kernels.attention_numba import CALL as ATTENTION_CALL
from dspark.kernels.bounds import inside
from dspark.kernels.lowbit import LowBitLinear
from dspark.kernels.simd import LANES
from dspark.kernels.steps import Rotation, Step, attend, gather, norm, product, rotate, swiglu, width

__all__ = ["LayerMemory", "LayerStack", "LayerWeights", "room"]

UNLIMITED = 2**62  # a window that hides nothing


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One pre-norm layer: q, k, v are one product, gate and up another."""

    input_norm: Tensor
    qkv: LowBitLinear
    o: LowBitLinear
    post_norm: Tensor
    gate_up: LowBitLinear
    down: LowBitLinear
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int | None = None

    @property
    def products(self) -> tuple[LowBitLinear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


class LayerStack:
    """Decoder layers with low-bit weights and the norm behind them.

    Args:
        layers: of one shape.
        norm: gain of the final RMSNorm [H].
        rotation: heads of every layer, and the rotary tables.
        eps: of every norm.
    """

    def __init__(self, layers: Sequence[LayerWeights], norm: Tensor, rotation: Rotation, eps: float) -> None:
        assert self.supports(layers, norm, rotation.head_dim)
        self.layers, self.norm, self.rotation, self.eps = tuple(layers), norm, rotation, eps
        self.windows = [UNLIMITED if w.window is None else w.window for w in layers]

    @staticmethod
    def supports(layers: Sequence[LayerWeights], norm: Tensor, head_dim: int) -> bool:
        """Whether all products are packed and all rows fill whole vectors."""
        sizes = [len(norm), head_dim // 2, *(layer.down.in_features for layer in layers)]
        products = [p for layer in layers for p in layer.products]
        packed = all(p.packed is not None for p in products) and len({p.integer for p in products}) == 1
        unbiased = all(p.bias is None for layer in layers for p in layer.products[1:])
        kind = norm.dtype == torch.float32 and norm.device.type == "cpu"
        return packed and unbiased and kind and all(size % LANES == 0 for size in sizes)

    def check_positions(self, positions: Tensor) -> None:
        """The compiled path trusts its indices: they must lie inside the rotary table."""
        assert inside(positions.numpy(), len(self.rotation.cos))


class LayerMemory:
    """Working memory of layers for up to `capacity` rows over one pool, and the steps that use it."""

    def __init__(
        self, layers: LayerStack, capacity: int, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> None:
        self.layers, self.capacity, self.keys, self.values = layers, capacity, keys, values
        first, shape = layers.layers[0], layers.rotation
        size, heads = len(layers.norm), shape.heads * shape.head_dim
        self.normed, self.out = torch.empty(capacity, size), torch.empty(capacity, width(first.o))
        self.qkv, self.gates = (torch.empty(capacity, width(p)) for p in (first.qkv, first.gate_up))
        self.q, self.mixed = torch.empty(2, capacity, heads)
        self.gated = torch.empty(capacity, first.down.in_features)
        # What products read: with integer layers, the codes of what the steps before them wrote.
        self.normed_codes, self.mixed_codes, self.gated_codes = (
            torch.empty(capacity, p.code_bytes, dtype=torch.uint8) if p.integer else None
            for p in (first.qkv, first.o, first.down)
        )
        # The calls' words, and which of them differ from pass to pass: those not set here.
        self.attention = calls = np.zeros(len(layers.layers), dtype=ATTENTION_CALL)
        calls["q"], calls["out"] = self.q.data_ptr(), self.mixed.data_ptr()
        calls["k"], calls["v"] = ([t.data_ptr() for t in side] for side in (keys, values))
        calls["kv_bytes"] = keys[0].itemsize
        calls["window"], calls["scale"] = layers.windows, shape.head_dim**-0.5
        fixed = ("q", "out", "k", "v", "kv_bytes", "window", "scale")
        self._words = calls.view(np.int64).reshape(len(calls), -1)
        self._vary = np.flatnonzero([name not in fixed for name in ATTENTION_CALL.names or ()])

    def steps(self, out: Tensor | None = None, codes: Tensor | None = None) -> list[Step]:
        """All layers and the norm behind them, which goes to `out` (or is set later), and its codes."""
        layers = self.layers
        steps = [step for i, layer in enumerate(layers.layers) for step in self._layer(i, layer)]
        return [*steps, norm(layers.norm, layers.eps, out, add=self.out, codes=codes)]

    def _layer(self, i: int, layer: LayerWeights) -> list[Step]:
        eps, heads = self.layers.eps, self.layers.rotation
        q_and_k = (layer.q_norm, layer.k_norm)
        codes = self.normed_codes
        normed, mixed, gated = (
            floats if rounded is None else rounded
            for floats, rounded in (
                (self.normed, codes),
                (self.mixed, self.mixed_codes),
                (self.gated, self.gated_codes),
            )
        )
        return [
            norm(layer.input_norm, eps, self.normed, add=self.out if i else None, codes=codes),
            product(layer.qkv, normed, self.qkv),
            rotate(self.qkv, 0, heads, self.keys[i], self.values[i], self.q, layer.qkv.bias, q_and_k, eps),
            attend(self.attention[i : i + 1]),
            *([] if self.mixed_codes is None else [gather(self.mixed, codes=self.mixed_codes)]),
            product(layer.o, mixed, self.out),
            norm(layer.post_norm, eps, self.normed, add=self.out, codes=codes),
            product(layer.gate_up, normed, self.gates),
            swiglu(self.gates, self.gated, self.gated_codes),
            product(layer.down, gated, self.out),
        ]

    def fits(self, rows: int, keys: Sequence[Tensor]) -> bool:
        return rows <= self.capacity and keys[0].data_ptr() == self.keys[0].data_ptr()

    def plan(self, plan: AttentionPlan) -> int:
        """Have all layers attend by `plan`; returns the units of work in that."""
        shape, work = self.layers.rotation, plan.work
        work.bind(shape.heads, shape.kv_heads, shape.head_dim)
        set_words(self._words, self._vary, work.call.view(np.int64))
        return len(work.items) * shape.kv_heads


def room(rows: int) -> int:
    """Capacity for `rows` rows and some more, so that it is seldom made anew."""
    return max(16, 1 << (rows - 1).bit_length())
