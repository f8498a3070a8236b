"""Decoder layers, and a drafter's context projection, as programs: one call a pass, for few rows on a CPU.

layers = CompiledLayers([LayerWeights(...), ...], norm, rotation, eps)
normed, tapped = layers(x, positions, plan, keys, values, taps)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.kernels.attention import AttentionPlan, check_pool
from dspark.kernels.attention_numba import CALL as ATTENTION_CALL
from dspark.kernels.lowbit import LowBitLinear
from dspark.kernels.program import (
    Program,
    Rotation,
    Step,
    attend,
    norm,
    product,
    quantize,
    rotate,
    swiglu,
    width,
)
from dspark.kernels.program_numba import NORM
from dspark.kernels.simd import LANES

__all__ = ["CompiledContext", "CompiledLayers", "LayerWeights"]

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


class CompiledLayers:
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
        self._bound: _Bound | None = None

    @staticmethod
    def supports(layers: Sequence[LayerWeights], norm: Tensor, head_dim: int) -> bool:
        """Whether all products are packed and all rows fill whole vectors."""
        sizes = [len(norm), head_dim // 2, *(layer.down.in_features for layer in layers)]
        products = [p for layer in layers for p in layer.products]
        packed = all(p.packed is not None for p in products) and len({p.integer for p in products}) == 1
        unbiased = all(p.bias is None for layer in layers for p in layer.products[1:])
        kind = norm.dtype == torch.float32 and norm.device.type == "cpu"
        return packed and unbiased and kind and all(size % LANES == 0 for size in sizes)

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """Run rows x [N, H] (used up), at `positions` [N], through the layers.

        Args:
            keys, values: each layer's part of the KV pool; rows' own keys and values go to `plan.slots`.
            taps: distinct layers, -1 for x itself.

        Returns:
            RMSNorm(x) behind the last layer [N, H], and x behind each of `taps` [N, len(taps) * H].
        """
        rows, bound = len(x), self._bound
        if bound is None or not bound.fits(rows, keys, taps):
            bound = self._bound = _Bound(self, _capacity(rows), keys, values, taps)
        check_pool(keys[0], values[0], plan)
        assert rows == 0 or int(positions.max()) < len(self.rotation.cos)
        return bound.run(x, positions.contiguous(), plan)


class _Bound:
    """The program over one pool and one set of taps, with memory for `capacity` rows."""

    def __init__(
        self,
        layers: CompiledLayers,
        capacity: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        taps: tuple[int, ...],
    ) -> None:
        self.layers, self.capacity, self.keys, self.values, self.taps = layers, capacity, keys, values, taps
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
        self.attention = np.zeros(len(layers.layers), dtype=ATTENTION_CALL)
        steps = [step for i, layer in enumerate(layers.layers) for step in self._steps(i, layer)]
        self.program = Program([*steps, norm(layers.norm, layers.eps, None, add=self.out)], shape)
        self.norms = self.program.of_kind(NORM)
        self.entries = self.norms[::2]  # where layers begin, and the last

    def _steps(self, i: int, layer: LayerWeights) -> list[Step]:
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
            *([] if self.mixed_codes is None else [quantize(self.mixed, self.mixed_codes)]),
            product(layer.o, mixed, self.out),
            norm(layer.post_norm, eps, self.normed, add=self.out, codes=codes),
            product(layer.gate_up, normed, self.gates),
            swiglu(self.gates, self.gated, self.gated_codes),
            product(layer.down, gated, self.out),
        ]

    def fits(self, rows: int, keys: Sequence[Tensor], taps: tuple[int, ...]) -> bool:
        return rows <= self.capacity and taps == self.taps and keys[0].data_ptr() == self.keys[0].data_ptr()

    def run(self, x: Tensor, positions: Tensor, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        layers, shape, work, size = self.layers, self.layers.rotation, plan.work, x.shape[1]
        work.bind(shape.heads, shape.kv_heads, shape.head_dim)
        calls = self.attention
        calls[:] = work.call[0]
        calls["q"], calls["out"] = self.q.data_ptr(), self.mixed.data_ptr()
        calls["k"], calls["v"] = ([t.data_ptr() for t in side] for side in (self.keys, self.values))
        calls["kv_bytes"] = self.keys[0].itemsize
        calls["window"], calls["scale"] = layers.windows, shape.head_dim**-0.5
        normed, tapped = torch.empty_like(x), torch.empty(len(x), len(self.taps) * size)
        steps = self.program.steps
        steps["x"][self.norms] = x.data_ptr()
        steps["out"][-1] = normed.data_ptr()
        for column, layer in enumerate(self.taps):
            steps["tap"][self.entries[layer + 1]] = tapped.data_ptr() + 4 * size * column
        steps["tap_step"] = size * len(self.taps)
        self.program.run(len(x), positions, plan.slots.contiguous(), int(work.call["num_units"][0]))
        return normed, tapped


class CompiledContext:
    """A drafter's context (eqs. 2-3): RMSNorm(W_c taps), and its keys and values for every draft layer.

    Args:
        fc: W_c. norm: gain of the context's norm. kv: keys and values of all draft layers, side by side.
        k_norms: each layer's norm of keys, or None.
        rotation: no query heads.
    """

    def __init__(
        self,
        fc: LowBitLinear,
        norm: Tensor,
        kv: LowBitLinear,
        k_norms: Sequence[Tensor | None],
        rotation: Rotation,
        eps: float,
    ) -> None:
        self.fc, self.norm, self.kv, self.k_norms, self.rotation, self.eps = (
            fc,
            norm,
            kv,
            k_norms,
            rotation,
            eps,
        )
        self._capacity = 0
        self._first_key = 0
        self._program: Program | None = None
        self._memory: tuple[Tensor, ...] = ()

    @staticmethod
    def supports(fc: LowBitLinear, norm: Tensor, kv: LowBitLinear, head_dim: int) -> bool:
        packed = fc.packed is not None and kv.packed is not None and fc.bias is None and kv.bias is None
        packed = packed and fc.integer == kv.integer
        return (
            packed and norm.dtype == torch.float32 and len(norm) % LANES == 0 and head_dim // 2 % LANES == 0
        )

    def store(
        self,
        taps: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
    ) -> None:
        """Write the keys and values of rows `taps` [N, m * H] to `plan.slots`."""
        rows = len(taps)
        if self._program is None or rows > self._capacity or keys[0].data_ptr() != self._first_key:
            self._bind(_capacity(rows), keys, values)
        assert self._program is not None
        check_pool(keys[0], values[0], plan)
        assert rows == 0 or int(positions.max()) < len(self.rotation.cos)
        self._memory[0][:rows] = taps
        self._program.run(rows, positions.contiguous(), plan.slots.contiguous())

    def _bind(self, capacity: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        sizes = (self.fc.in_features, width(self.fc), len(self.norm), width(self.kv))
        taps, fused, context, kv = self._memory = tuple(torch.empty(capacity, size) for size in sizes)
        shape = self.rotation
        if self.fc.integer:
            codes = [torch.empty(capacity, p.code_bytes, dtype=torch.uint8) for p in (self.fc, self.kv)]
            self._memory += (*codes,)
            steps = [quantize(taps, codes[0]), product(self.fc, codes[0], fused)]
            steps += [
                norm(self.norm, self.eps, context, fused, codes=codes[1]),
                product(self.kv, codes[1], kv),
            ]
        else:
            steps = [product(self.fc, taps, fused), norm(self.norm, self.eps, context, fused)]
            steps.append(product(self.kv, context, kv))
        for i, k_norm in enumerate(self.k_norms):
            column = i * 2 * shape.kv_heads * shape.head_dim
            steps.append(rotate(kv, column, shape, keys[i], values[i], norms=(None, k_norm), eps=self.eps))
        self._program, self._capacity, self._first_key = Program(steps, shape), capacity, keys[0].data_ptr()


def _capacity(rows: int) -> int:
    """Room for `rows` rows and some more, so that it is seldom made anew."""
    return max(16, 1 << (rows - 1).bit_length())
