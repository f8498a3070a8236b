"""Linear layers with 4-bit or 8-bit weights: float32 in, float32 out.

    layer = LowBitLinear(weight)                   # weight: QuantizedWeight; layer(x [n, in]) -> [n, out]
    model = lowbit_linears(model, bits=8)          # every nn.Linear inside, quantised here, in place

The weights are what `QuantizedWeight.dequantize` gives. Activations are float32, and products as exact as float32
sums; or, with `integer`, they are rounded to 8 bits in blocks of 32 and multiplied in integers, which takes a quarter
of the instructions. Decoding reads a fifth to a quarter as many bytes as with float32 weights. A row's result is
bitwise the same alone, in any batch and with any number of threads (compiled path), either way.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TypeGuard

import numpy as np
import torch
from torch import nn

from dspark.kernels.floats_numba import runs_here
from dspark.kernels.integers_numba import CODES_BYTES, integers_run_here
from dspark.kernels.lowbit_numba import CALL, CALL_TYPE, lowbit_worker, quantize_worker
from dspark.kernels.parallel import parallel
from dspark.kernels.quantized import PackedRows, QuantizedWeight, pack, packed_bytes, round_activations
from dspark.kernels.records import BLOCK, TILE
from dspark.kernels.worker import load_worker

__all__ = [
    "BLOCK",
    "LowBitEmbedding",
    "LowBitLinear",
    "QuantizedWeight",
    "WeightMemory",
    "compile_worker",
    "divisible",
    "gather_weights",
    "lowbit_linear_reference",
    "lowbit_linears",
    "packed_bytes",
    "packed_table",
    "supports",
    "supports_integers",
]

LINE = 64  # bytes of a cache line
PARALLEL_WORK = 300_000  # weights x rows below which waking workers costs more than it saves


@cache
def supports() -> bool:
    """Whether this machine runs the compiled path: it must convert float16 by itself and have fused multiply-add."""
    return runs_here()


@cache
def supports_integers() -> bool:
    """Whether products with 8-bit activations are compiled here: x86 with AVX2, better with VNNI."""
    return supports() and integers_run_here()


def lowbit_linear_reference(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x [..., in] times the dequantised weight, in torch."""
    return nn.functional.linear(x, weight.dequantize().to(x.device, x.dtype))


class _Call(ctypes.Structure):
    """The counter from which workers draw tiles, and the `CALL` that they are given."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("counter", *(CALL.names or ())))


def compile_worker() -> None:
    """Compile now rather than at the first call."""
    load_worker(lowbit_worker, CALL_TYPE)
    load_worker(quantize_worker, CALL_TYPE)


class LowBitLinear(nn.Module):
    """y = x W^T + b for inference, W quantised. Where `supports()` is false it keeps W in float32.

    Args:
        weight: not kept, but laid out anew.
        bias: [out] or None.
        integer: round activations to 8 bits. Fast where `supports_integers()`, but the same everywhere.
        memory: where to lay the weight out; None: anywhere.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None = None,
        integer: bool = False,
        memory: WeightMemory | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits, self.integer = weight.bits, integer
        self.bias = None if bias is None else bias.detach()
        # Plain attributes: the layout is opaque to state_dict() and to().
        compiled = supports_integers() if integer else supports()
        place = (
            None if memory is None or not compiled else memory.take(packed_bytes(weight.shape, weight.bits))
        )
        self.packed = pack(weight, place) if compiled else None
        self.weight = None if compiled else weight.dequantize()
        self._call = self._invariable()

    @property
    def code_bytes(self) -> int:
        """Bytes of a row of activations in 8 bits."""
        return self.in_features // BLOCK * CODES_BYTES

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], float32 on a CPU."""
        if self.packed is None:
            assert self.weight is not None
            return nn.functional.linear(round_activations(x) if self.integer else x, self.weight, self.bias)
        assert x.dtype == torch.float32
        assert x.shape[-1] == self.in_features
        x = x.contiguous()
        rows = x.numel() // self.in_features
        out = torch.empty(*x.shape[:-1], self.packed.shape[0] * TILE)
        if rows:
            codes = self._codes(x, rows) if self.integer else x
            self._multiply(codes.data_ptr(), rows, out.data_ptr())
        if out.shape[-1] != self.out_features:
            out = out[..., : self.out_features]
        return out if self.bias is None else out.add_(self.bias)

    def _codes(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """The activations' records, [rows, code_bytes] uint8."""
        codes = torch.empty(rows, self.code_bytes, dtype=torch.uint8)
        call = _Call(x=x.data_ptr(), rows=rows, out=codes.data_ptr(), blocks=self.in_features // BLOCK)
        load_worker(quantize_worker, CALL_TYPE).work(ctypes.addressof(call) + _Call.next_tile.offset)
        return codes

    def _multiply(self, x: int, rows: int, out: int) -> None:
        call = _Call.from_buffer_copy(self._call)  # of this thread alone
        address = ctypes.addressof(call)
        call.next_tile, call.x, call.rows, call.out = address, x, rows, out
        threads = torch.get_num_threads()
        compiled = load_worker(lowbit_worker, CALL_TYPE)
        argument = address + _Call.next_tile.offset
        if threads == 1 or rows * self.out_features * self.in_features < PARALLEL_WORK:
            compiled.work(argument)
        else:
            parallel()(compiled.address, argument, threads)

    def call_fields(self) -> dict[str, int]:
        """The `CALL` of this layer's product, but for rows and addresses of inputs and outputs."""
        assert self.packed is not None
        tiles, blocks, record_bytes = self.packed.shape
        fields = {"records": self.packed.data_ptr(), "tiles": tiles, "blocks": blocks, "bits": self.bits}
        return {**fields, "record_bytes": record_bytes, "out_step": tiles * TILE, "integer": self.integer}

    def move(self, memory: torch.Tensor) -> None:
        """Keep the packed weights in `memory` (uint8, as many bytes) from now on."""
        assert self.packed is not None
        self.packed = memory.view(self.packed.shape).copy_(self.packed)
        self._call = self._invariable()

    def _invariable(self) -> bytes:
        """What is the same in all calls."""
        return b"" if self.packed is None else bytes(_Call(**self.call_fields()))

    def rows(self, index: torch.Tensor) -> QuantizedWeight:
        """Rows of the weight, `index` [n] int64, as they are kept: only where it is packed."""
        assert self.packed is not None
        return PackedRows(self.packed, self.bits).quantized(index.numpy())

    def extra_repr(self) -> str:
        where = "packed" if self.packed is not None else "float32"
        x = "int8" if self.integer else "float32"
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, {where}, x {x}"


class LowBitEmbedding(nn.Module):
    """Look-up of rows of `layer`'s weight: an embedding tied to a head whose weights are kept in few bits.

    The layer is shared, neither a part of this module nor copied.
    """

    def __init__(self, layer: LowBitLinear) -> None:
        super().__init__()
        self._layer = (layer,)  # a tuple hides it from `modules()`
        self._rows: PackedRows | None = None

    @property
    def layer(self) -> LowBitLinear:
        return self._layer[0]

    @property
    def weight(self) -> torch.Tensor:
        """The whole table [rows, in] float32, made anew at each use."""
        return self(torch.arange(self.layer.out_features))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] int64 -> [..., in] float32, the dequantised rows.

        Raises:
            IndexError: an id is no row.
        """
        layer = self.layer
        if layer.packed is None:
            assert layer.weight is not None
            return nn.functional.embedding(ids, layer.weight)
        if self._rows is None or self._rows.packed is not layer.packed:
            self._rows = PackedRows(layer.packed, layer.bits)
        rows = ids.reshape(-1).numpy()
        if len(rows) and not (rows.min() >= 0 and rows.max() < layer.out_features):
            raise IndexError(f"a token id is outside 0..{layer.out_features - 1}")
        return self._rows.dequantized(rows).view(*ids.shape, layer.in_features)

    def extra_repr(self) -> str:
        return f"{self.layer.out_features}, {self.layer.in_features}, bits={self.layer.bits}, shared"


def packed_table(embedding: nn.Module) -> LowBitLinear | None:
    """The packed layer whose rows an embedding looks up, for programs; None where there is none."""
    if isinstance(embedding, LowBitEmbedding) and embedding.layer.packed is not None:
        return embedding.layer
    return None


class WeightMemory:
    """One stretch of memory for the weights of many layers, one behind the other.

    NumPy asks for huge pages for large arrays: fewer look-ups of addresses, which is a tenth of the time of
    a single row. And reading ahead behind the end of a layer finds the next one. What is not taken costs nothing.

    Args:
        size: bytes for all weights, see `packed_bytes`; more than needed does no harm.
    """

    def __init__(self, size: int) -> None:
        memory = torch.from_numpy(np.empty(size + LINE, dtype=np.uint8))
        self._free = memory[-memory.data_ptr() % LINE :]

    def take(self, size: int) -> torch.Tensor:
        """The next `size` bytes, uint8."""
        taken, self._free = self._free[:size], self._free[size:]
        return taken


def gather_weights(module: nn.Module) -> None:
    """Move the weights of all `LowBitLinear` inside `module` to one stretch of memory, in their order."""
    layers = {id(m): m for m in module.modules() if isinstance(m, LowBitLinear)}
    packed = [(layer, layer.packed.numel()) for layer in layers.values() if layer.packed is not None]
    memory = WeightMemory(sum(size for _, size in packed))
    for layer, size in packed:
        layer.move(memory.take(size))


def lowbit_linears(module: nn.Module, bits: int = 8, integer: bool = False) -> nn.Module:
    """Quantise every `nn.Linear` inside `module` (itself included) that has a multiple of 32 inputs.

    For models whose precision is free, such as drafters. Returns the module. A layer that occurs twice is
    laid out once.
    """
    done: dict[int, LowBitLinear] = {}
    originals: list[nn.Linear] = []  # ids stay unique while these live

    def quantise(layer: nn.Linear) -> LowBitLinear:
        if id(layer) not in done:
            done[id(layer)] = LowBitLinear(
                QuantizedWeight.from_float(layer.weight, bits), layer.bias, integer
            )
            originals.append(layer)
        return done[id(layer)]

    if divisible(module):
        return quantise(module)
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if divisible(child):
                parent._modules[name] = quantise(child)
    if done:
        gather_weights(module)
    return module


def divisible(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whole blocks in; and more than one output, which alone would be padded to a tile."""
    return type(module) is nn.Linear and module.in_features % BLOCK == 0 and module.out_features > 1
