"""All layers of a decoder in one call, for few rows on a CPU.

    layers = CompiledLayers([LayerWeights(...), ...], norm, rotary.cos, rotary.sin, eps)
    normed, tapped = layers(x, positions, plan, keys, values, taps)

Between the products of a layer lie a dozen small operations. Called one by one from Python they take as long as
reading the weights. Here a pass is a list of steps (`layers_numba`) that is made once and run inside one
parallel region. Products and attention are those of `lowbit` and `attention`, and like theirs a row's result is
bitwise the same alone, in any batch and with any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import cfunc, types
from torch import Tensor

from dspark.kernels.attention import AttentionPlan, check_pool
from dspark.kernels.attention_numba import CALL as ATTENTION_CALL
from dspark.kernels.layers_numba import (
    ATTEND,
    NORM,
    PASS,
    PASS_TYPE,
    PRODUCT,
    ROTARY,
    STEP,
    SWIGLU,
    layers_worker,
)
from dspark.kernels.lowbit import LowBitLinear
from dspark.kernels.lowbit_numba import CALL as PRODUCT_CALL
from dspark.kernels.lowbit_numba import TILE
from dspark.kernels.parallel import WORKER, parallel
from dspark.kernels.simd import LANES

__all__ = ["CompiledLayers", "LayerWeights", "compile_worker"]

PARALLEL_WORK = 1_000_000  # weights x rows below which waking workers costs more than it saves
COUNTER_STEP = 8  # int64 from one step's counters to the next: a cache line


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


@dataclass(frozen=True)
class _Compiled:
    """The worker's machine code and its address. `keep` owns that code."""

    work: Any
    address: int
    keep: Any

    @staticmethod
    @cache
    def load() -> _Compiled:
        """Compile (seconds), or read from Numba's cache on disk (tens of milliseconds)."""
        worker = cfunc(types.void(types.CPointer(PASS_TYPE)), cache=True)(layers_worker)
        address = int(worker.address or 0)
        return _Compiled(WORKER(address), address, worker)


def compile_worker() -> None:
    """Compile now rather than at the first call."""
    _Compiled.load()


class CompiledLayers:
    """Decoder layers with low-bit weights and the norm behind them.

    Args:
        layers: of one shape.
        norm: gain of the final RMSNorm [H].
        cos, sin: rotary tables [max_context, head_dim / 2].
        heads, kv_heads, head_dim: of every layer.
        eps: of every norm.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int, int],
        eps: float,
    ) -> None:
        assert self.supports(layers, norm, heads[2])
        self.layers, self.norm, self.cos, self.sin, self.eps = tuple(layers), norm, cos, sin, eps
        self.heads, self.kv_heads, self.head_dim = heads
        self.hidden_size = len(norm)
        self.num_weights = sum(p.in_features * p.out_features for layer in layers for p in layer.products)
        self._bound: _Bound | None = None

    @staticmethod
    def supports(layers: Sequence[LayerWeights], norm: Tensor, head_dim: int) -> bool:
        """Whether all products are packed and all rows fill whole vectors."""
        sizes = [len(norm), head_dim // 2, *(layer.down.in_features for layer in layers)]
        packed = all(product.packed is not None for layer in layers for product in layer.products)
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
            capacity = max(16, 1 << (rows - 1).bit_length())
            bound = self._bound = _Bound(self, capacity, keys, values, taps)
        check_pool(keys[0], values[0], plan)
        assert int(positions.max()) < len(self.cos)
        normed = torch.empty_like(x)
        tapped = torch.empty(rows, len(taps) * self.hidden_size)
        shared = bound.prepare(x, positions.contiguous(), plan, normed, tapped)
        threads, compiled = torch.get_num_threads(), _Compiled.load()
        if threads == 1 or rows * self.num_weights < PARALLEL_WORK:
            compiled.work(shared.ctypes.data)
        else:
            parallel()(compiled.address, shared.ctypes.data, threads)
        return normed, tapped


class _Bound:
    """The steps over one pool and one set of taps, with memory for `capacity` rows."""

    def __init__(
        self,
        layers: CompiledLayers,
        capacity: int,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        taps: tuple[int, ...],
    ) -> None:
        self.layers, self.capacity, self.keys, self.values, self.taps = layers, capacity, keys, values, taps
        first = layers.layers[0]
        heads = layers.heads * layers.head_dim
        sizes = {
            "normed": layers.hidden_size,
            "qkv": _padded(first.qkv),
            "q": heads,
            "mixed": heads,
            "out": _padded(first.o),
            "gates": _padded(first.gate_up),
            "gated": first.down.in_features,
        }
        self.buffers = {name: torch.empty(capacity, size) for name, size in sizes.items()}
        count = len(layers.layers)
        self.products = np.zeros(4 * count, dtype=PRODUCT_CALL)
        self.attention = np.zeros(count, dtype=ATTENTION_CALL)
        steps: list[dict[str, Any]] = []
        for i, layer in enumerate(layers.layers):
            steps += self._layer_steps(i, layer)
        steps.append(self._norm(layers.norm, "out", ""))
        self.steps = np.zeros(len(steps), dtype=STEP)
        for record, fields in zip(self.steps, steps, strict=True):
            for name, value in fields.items():
                record[name] = value
        self.counters = np.zeros((len(steps), COUNTER_STEP), dtype=np.int64)
        self.steps["next_unit"] = self.counters.ctypes.data + 8 * COUNTER_STEP * np.arange(len(steps))
        self.steps["finished"] = self.steps["next_unit"] + 8
        self.shared = np.zeros(1, dtype=PASS)
        self.shared["steps"], self.shared["num_steps"] = self.steps.ctypes.data, len(steps)
        self.shared["attention"] = self.attention.ctypes.data
        self.shared["cos"], self.shared["sin"] = layers.cos.data_ptr(), layers.sin.data_ptr()
        self.kinds = {kind: self.steps["kind"] == kind for kind in (NORM, ROTARY, ATTEND, SWIGLU)}
        self.entries = np.flatnonzero(self.kinds[NORM])[::2]  # norms where layers begin, and the last

    def fits(self, rows: int, keys: Sequence[Tensor], taps: tuple[int, ...]) -> bool:
        return rows <= self.capacity and taps == self.taps and keys[0].data_ptr() == self.keys[0].data_ptr()

    def prepare(
        self, x: Tensor, positions: Tensor, plan: AttentionPlan, normed: Tensor, tapped: Tensor
    ) -> np.ndarray:
        """Set what differs from pass to pass; returns the pass. Its tensors have to outlive the call."""
        rows, layers, steps, work = len(x), self.layers, self.steps, plan.work
        work.bind(layers.heads, layers.kv_heads, layers.head_dim)
        self.counters[:] = 0
        self.products["rows"] = rows
        self.attention[:] = work.call[0]
        attention = self.attention
        attention["q"], attention["out"] = self._address("q"), self._address("mixed")
        attention["k"] = [t.data_ptr() for t in self.keys]
        attention["v"] = [t.data_ptr() for t in self.values]
        attention["window"] = [2**62 if w.window is None else w.window for w in layers.layers]
        attention["scale"] = layers.head_dim**-0.5
        for kind, units in (
            (NORM, rows),
            (ROTARY, rows * (layers.heads + 2 * layers.kv_heads)),
            (ATTEND, attention["num_units"][0]),
            (SWIGLU, rows),
        ):
            steps["units"][self.kinds[kind]] = units
        steps["x"][self.kinds[NORM]] = x.data_ptr()
        steps["out"][-1] = normed.data_ptr()
        hidden = layers.hidden_size
        for column, layer in enumerate(self.taps):
            steps["tap"][self.entries[layer + 1]] = tapped.data_ptr() + 4 * hidden * column
        steps["tap_step"] = hidden * len(self.taps)
        shared = self.shared
        shared["positions"], shared["slots"] = positions.data_ptr(), work.call["slots"][0]
        return shared

    def _address(self, buffer: str) -> int:
        return self.buffers[buffer].data_ptr()

    def _layer_steps(self, i: int, layer: LayerWeights) -> list[dict[str, Any]]:
        layers, qkv, gates = self.layers, self.buffers["qkv"], self.buffers["gates"]
        rotary = {
            "kind": ROTARY,
            "x": qkv.data_ptr(),
            "x_step": qkv.shape[1],
            "y": _address_of(layer.qkv.bias),
            "out": self._address("q"),
            "q_norm": _address_of(layer.q_norm),
            "k_norm": _address_of(layer.k_norm),
            "k_pool": self.keys[i].data_ptr(),
            "v_pool": self.values[i].data_ptr(),
            "heads": layers.heads,
            "kv_heads": layers.kv_heads,
            "head_dim": layers.head_dim,
            "block_size": self.keys[i].shape[-1],
            "eps": layers.eps,
        }
        swiglu = {
            "kind": SWIGLU,
            "x": gates.data_ptr(),
            "x_step": gates.shape[1],
            "out": self._address("gated"),
            "out_step": layer.down.in_features,
            "size": layer.down.in_features,
        }
        call = self.attention.ctypes.data + i * ATTENTION_CALL.itemsize
        return [
            self._norm(layer.input_norm, "out" if i else "", "normed"),
            self._product(4 * i, layer.qkv, "normed", "qkv"),
            rotary,
            {"kind": ATTEND, "call": call},
            self._product(4 * i + 1, layer.o, "mixed", "out"),
            self._norm(layer.post_norm, "out", "normed"),
            self._product(4 * i + 2, layer.gate_up, "normed", "gates"),
            swiglu,
            self._product(4 * i + 3, layer.down, "gated", "out"),
        ]

    def _norm(self, weight: Tensor, add: str, out: str) -> dict[str, Any]:
        """x += `add`, `out` = RMSNorm(x). x, and the last step's out, are the pass's own."""
        return {
            "kind": NORM,
            "y": self._address(add) if add else 0,
            "out_step": self.buffers["out"].shape[1],
            "x_step": self.layers.hidden_size,
            "out": self._address(out) if out else 0,
            "weight": weight.data_ptr(),
            "size": self.layers.hidden_size,
            "eps": self.layers.eps,
        }

    def _product(self, number: int, product: LowBitLinear, x: str, out: str) -> dict[str, Any]:
        call = self.products[number : number + 1]
        for name, value in product.call_fields().items():
            call[name] = value
        call["x"], call["out"] = self._address(x), self._address(out)
        return {"kind": PRODUCT, "call": call.ctypes.data, "units": call["tiles"][0]}


def _padded(product: LowBitLinear) -> int:
    """Outputs of a product with those that fill its last tile."""
    return -(-product.out_features // TILE) * TILE


def _address_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
