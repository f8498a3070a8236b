"""Linear layers with 4-bit or 8-bit weights, dequantised in registers: float32 in, float32 out.

    layer = LowBitLinear(weight)                   # weight: QuantizedWeight; layer(x [n, in]) -> [n, out]
    model = lowbit_linears(model, bits=8)          # every nn.Linear inside, quantised here, in place

The weights are what `QuantizedWeight.dequantize` gives, to the last bit; sums are float32. Decoding is bound by
reading weights, of which this reads a fifth to a quarter as many bytes as float32. A row's result is bitwise
the same alone, in any batch and with any number of threads (compiled path).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeGuard

import numpy as np
import torch
from torch import nn

from dspark.core import DSparkError
from dspark.kernels.lowbit_numba import (
    BLOCK,
    CALL,
    CALL_TYPE,
    HEAD_BYTES,
    RECORD_BYTES,
    TILE,
    lowbit_worker,
    runs_here,
)
from dspark.kernels.parallel import parallel
from dspark.kernels.worker import load_worker

__all__ = [
    "BLOCK",
    "LowBitLinear",
    "QuantizedWeight",
    "compile_worker",
    "lowbit_linear_reference",
    "lowbit_linears",
    "supports",
]

LINE = 64  # bytes of a cache line
PARALLEL_WORK = 300_000  # weights x rows below which waking workers costs more than it saves


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix [out, in] in blocks of 32 inputs: w = scale x code + minimum (8 bits: no minimum).

    4-bit codes are as in GGUF: byte j of a block holds input j in its low half and input j + 16 in its high
    half.
    """

    codes: torch.Tensor  # 4 bits: [out, in / 2] uint8; 8 bits: [out, in] int8
    scale: torch.Tensor  # [out, in / 32] float16
    minimum: torch.Tensor | None  # [out, in / 32] float16 where bits == 4
    bits: int

    def __post_init__(self) -> None:
        kind = {4: torch.uint8, 8: torch.int8}.get(self.bits)
        if kind is None:
            raise DSparkError(f"quantised weights have 4 or 8 bits, not {self.bits}")
        out, blocks = self.scale.shape
        assert self.codes.dtype == kind
        assert self.codes.shape == (out, blocks * BLOCK * self.bits // 8)
        assert self.scale.dtype == torch.float16
        assert (self.minimum is not None) == (self.bits == 4)
        if self.minimum is not None:
            assert self.minimum.dtype == torch.float16
            assert self.minimum.shape == self.scale.shape

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.scale.shape[0], self.scale.shape[1] * BLOCK

    def dequantize(self) -> torch.Tensor:
        """[out, in] float32."""
        out, size = self.shape
        if self.minimum is None:
            codes = self.codes.view(out, -1, BLOCK)
            return (self.scale.float()[..., None] * codes).view(out, size)
        nibbles = self.codes.view(out, -1, BLOCK // 2)
        codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-1)
        # scale x code is exact in float32, so only the addition rounds, as in a fused multiply-add
        return (self.scale.float()[..., None] * codes + self.minimum.float()[..., None]).view(out, size)

    @staticmethod
    def cat(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """The rows of all `weights`, which have the same inputs and bits."""
        minima = [weight.minimum for weight in weights if weight.minimum is not None]
        return QuantizedWeight(
            torch.cat([weight.codes for weight in weights]),
            torch.cat([weight.scale for weight in weights]),
            torch.cat(minima) if minima else None,
            weights[0].bits,
        )

    @staticmethod
    def from_float(weight: torch.Tensor, bits: int = 8) -> QuantizedWeight:
        """Round weight [out, in] to the nearest codes: symmetric with 8 bits, from minimum to maximum with 4.

        Raises:
            DSparkError: `in` is no multiple of 32, or `bits` is neither 4 nor 8.
        """
        out, size = weight.shape
        if size % BLOCK:
            raise DSparkError(f"a weight with {size} inputs has no blocks of {BLOCK}: keep it in float32")
        rows = weight.detach().float().view(out, -1, BLOCK)
        if bits == 8:
            scale = (rows.abs().amax(-1) / 127).half()
            codes = (rows / _nonzero(scale)[..., None]).round().clamp(-127, 127).to(torch.int8)
            return QuantizedWeight(codes.view(out, size), scale, None, 8)
        minimum = rows.amin(-1).half()
        scale = ((rows.amax(-1) - minimum.float()) / 15).half()
        steps = (rows - minimum.float()[..., None]) / _nonzero(scale)[..., None]
        codes = steps.round().clamp(0, 15).to(torch.uint8)
        packed = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        return QuantizedWeight(packed.view(out, size // 2), scale, minimum, bits)


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """Divisors for codes: a block whose scale rounds to 0 takes any codes."""
    return torch.where(scale == 0, 1.0, scale.float())


@cache
def supports() -> bool:
    """Whether this machine runs the compiled path: it must convert float16 by itself and have fused multiply-add."""
    return runs_here()


def lowbit_linear_reference(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x [..., in] times the dequantised weight, in torch."""
    return nn.functional.linear(x, weight.dequantize().to(x.device, x.dtype))


def pack(weight: QuantizedWeight) -> torch.Tensor:
    """The records of all tiles [tiles, blocks, bytes] uint8; see `lowbit_numba`. Missing outputs are zeros."""
    out, size = weight.shape
    tiles, blocks = -(-out // TILE), size // BLOCK
    packed = torch.zeros(tiles, blocks, RECORD_BYTES[weight.bits], dtype=torch.uint8)

    def tiled(rows: torch.Tensor) -> torch.Tensor:
        """[out, blocks, n] -> [tiles, blocks, n, 32]."""
        if len(rows) % TILE:
            rows = torch.cat((rows, rows.new_zeros(-len(rows) % TILE, *rows.shape[1:])))
        return rows.view(tiles, TILE, blocks, -1).permute(0, 2, 3, 1)

    codes = weight.codes.contiguous().view(out, blocks, -1)
    codes = codes.view(torch.int32) if weight.bits == 4 else codes
    head = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
    start = HEAD_BYTES[weight.bits]
    halves = packed[..., :start].view(torch.float16).view(tiles, blocks, len(head), TILE)
    halves.copy_(tiled(torch.stack(head, dim=-1)))
    tiled_codes = tiled(codes)
    packed[..., start:].view(codes.dtype).view(tiled_codes.shape).copy_(tiled_codes)
    return packed


class _Call(ctypes.Structure):
    """The counter from which workers draw tiles, and the `CALL` that they are given."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("counter", *(CALL.names or ())))

    @staticmethod
    def of(packed: torch.Tensor, bits: int) -> bytes:
        """What is the same in all calls with weights `packed`."""
        return bytes(_Call(**_fields(packed, bits)))


def _fields(packed: torch.Tensor, bits: int) -> dict[str, int]:
    tiles, blocks, record_bytes = packed.shape
    fields = {"records": packed.data_ptr(), "tiles": tiles, "blocks": blocks, "bits": bits}
    return {**fields, "record_bytes": record_bytes, "out_step": tiles * TILE}


def compile_worker() -> None:
    """Compile now rather than at the first call."""
    load_worker(lowbit_worker, CALL_TYPE)


class LowBitLinear(nn.Module):
    """y = x W^T + b for inference, W quantised. Where `supports()` is false it keeps W in float32.

    Args:
        weight: not kept, but laid out anew.
        bias: [out] or None.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits = weight.bits
        self.bias = None if bias is None else bias.detach()
        # Plain attributes: the layout is opaque to state_dict() and to().
        self.packed = pack(weight) if supports() else None
        self.weight = None if supports() else weight.dequantize()
        self.call = b"" if self.packed is None else _Call.of(self.packed, self.bits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], float32 on a CPU."""
        if self.packed is None:
            assert self.weight is not None
            return nn.functional.linear(x, self.weight, self.bias)
        assert x.dtype == torch.float32
        assert x.shape[-1] == self.in_features
        x = x.contiguous()
        rows = x.numel() // self.in_features
        out = torch.empty(*x.shape[:-1], self.packed.shape[0] * TILE)
        if rows:
            self._multiply(x.data_ptr(), rows, out.data_ptr())
        if out.shape[-1] != self.out_features:
            out = out[..., : self.out_features]
        return out if self.bias is None else out.add_(self.bias)

    def _multiply(self, x: int, rows: int, out: int) -> None:
        call = _Call.from_buffer_copy(self.call)  # of this thread alone
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
        return _fields(self.packed, self.bits)

    def extra_repr(self) -> str:
        where = "packed" if self.packed is not None else "float32"
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, {where}"


def gather_weights(module: nn.Module) -> None:
    """Move the weights of all `LowBitLinear` inside `module` to one stretch of memory, in their order.

    NumPy asks for huge pages for large arrays: fewer look-ups of addresses, which is a tenth of the time of
    a single row. And reading ahead behind the end of a layer finds the next one.
    """
    layers = {id(m): m for m in module.modules() if isinstance(m, LowBitLinear) and m.packed is not None}
    sizes = [layer.packed.numel() for layer in layers.values() if layer.packed is not None]
    memory = torch.from_numpy(np.empty(sum(sizes) + LINE, dtype=np.uint8))
    memory = memory[-memory.data_ptr() % LINE :]
    for layer, target in zip(layers.values(), memory.split([*sizes, len(memory) - sum(sizes)]), strict=False):
        assert layer.packed is not None
        layer.packed = target.view(layer.packed.shape).copy_(layer.packed)
        layer.call = _Call.of(layer.packed, layer.bits)


def lowbit_linears(module: nn.Module, bits: int = 8) -> nn.Module:
    """Quantise every `nn.Linear` inside `module` (itself included) that has a multiple of 32 inputs.

    For models whose precision is free, such as drafters. Returns the module. A layer that occurs twice is
    laid out once.
    """
    done: dict[int, LowBitLinear] = {}
    originals: list[nn.Linear] = []  # ids stay unique while these live

    def quantise(layer: nn.Linear) -> LowBitLinear:
        if id(layer) not in done:
            done[id(layer)] = LowBitLinear(QuantizedWeight.from_float(layer.weight, bits), layer.bias)
            originals.append(layer)
        return done[id(layer)]

    if _divisible(module):
        return quantise(module)
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if _divisible(child):
                parent._modules[name] = quantise(child)
    gather_weights(module)
    return module


def _divisible(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.in_features % BLOCK == 0
