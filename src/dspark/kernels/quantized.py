"""Weights in 4 or 8 bits, and activations in 8: what the codes mean, in torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dspark.core import DSparkError
from dspark.kernels.records import BLOCK, HEAD_BYTES, RECORD_BYTES, TILE

__all__ = ["PackedRows", "QuantizedWeight", "pack", "packed_bytes", "round_activations"]


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
    def from_float(weight: torch.Tensor, bits: int = 8) -> QuantizedWeight:
        """Round weight [out, in] to the nearest codes: symmetric with 8 bits, within a range with 4.

        With 4 bits the range of a block is from its minimum to its maximum, or shrunk by up to a quarter if
        that errs less (sum of squares).

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
        tries = [QuantizedWeight._from_range(rows, shrink) for shrink in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)]
        errors = torch.stack(
            [
                (scale.float()[..., None] * codes + minimum.float()[..., None] - rows).square().sum(-1)
                for codes, scale, minimum in tries
            ]
        )
        best = errors.argmin(0)[None]  # [1, out, blocks]
        scale, minimum = (torch.stack([t[i] for t in tries]).gather(0, best)[0] for i in (1, 2))
        index = best[..., None].expand(1, *rows.shape)
        codes = torch.stack([t[0] for t in tries]).gather(0, index)[0]
        packed = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        return QuantizedWeight(packed.view(out, size // 2), scale, minimum, bits)

    @staticmethod
    def _from_range(rows: torch.Tensor, shrink: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """4-bit codes of rows [out, blocks, 32], scales and minima, with ranges `shrink` times as wide."""
        low, high = rows.amin(-1), rows.amax(-1)
        middle, half = (low + high) / 2, (high - low) / 2 * shrink
        minimum = (middle - half).half()
        scale = ((middle + half - minimum.float()) / 15).half()
        steps = (rows - minimum.float()[..., None]) / _nonzero(scale)[..., None]
        return steps.round().clamp(0, 15).to(torch.uint8), scale, minimum


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """Divisors for codes: a block whose scale rounds to 0 takes any codes."""
    return torch.where(scale == 0, 1.0, scale.float())


def packed_bytes(shape: tuple[int, int], bits: int) -> int:
    """Bytes of the records of a weight [out, in], whole tiles."""
    out, size = shape
    return -(-out // TILE) * (size // BLOCK) * RECORD_BYTES[bits]


def pack(weight: QuantizedWeight, memory: torch.Tensor | None = None) -> torch.Tensor:
    """The records of all tiles [tiles, blocks, bytes] uint8; see `records`. Missing outputs are zeros.

    They lie in `memory` (uint8, as many bytes) where that is given. NumPy, tile by tile: torch would wake its threads
    for every few rows, which on a busy machine takes longer than the copy.
    """
    out, size = weight.shape
    if memory is None:
        memory = torch.empty(packed_bytes(weight.shape, weight.bits), dtype=torch.uint8)
    packed = memory.view(-1, size // BLOCK, RECORD_BYTES[weight.bits])
    if out % TILE:
        packed[-1] = 0
    words, heads = _tiled(packed, weight.bits)
    codes = weight.codes.contiguous().numpy().view(np.int32).reshape(out, size // BLOCK, -1)
    scales = [part.numpy() for part in (weight.scale, weight.minimum) if part is not None]
    for tile in range(len(packed)):
        rows = slice(tile * TILE, min(out, (tile + 1) * TILE))
        count = rows.stop - rows.start
        words[tile, :, :, :count] = codes[rows].transpose(1, 2, 0)
        for part, scale in enumerate(scales):
            heads[tile, :, part, :count] = scale[rows].T
    return packed


def _tiled(packed: torch.Tensor, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Views of records: words with codes [tiles, blocks, words of a row, 32] int32, heads [..., 1 or 2, 32] float16."""
    tiles, blocks, _ = packed.shape
    records: np.ndarray = packed.numpy()
    words, heads = records[..., HEAD_BYTES[bits] :], records[..., : HEAD_BYTES[bits]]
    return (
        words.view(np.int32).reshape(tiles, blocks, -1, TILE),
        heads.view(np.float16).reshape(tiles, blocks, -1, TILE),
    )


class PackedRows:
    """Rows of a weight as `pack` laid it out, for look-ups; a view of `packed`.

    With 8 bits 7 us for one row of 576 inputs and 15 us for 16, with 4 bits twice that: NumPy, because calls of torch
    cost more than this work.
    """

    def __init__(self, packed: torch.Tensor, bits: int) -> None:
        self.bits, self.packed, self.inputs = bits, packed, packed.shape[1] * BLOCK
        # [tile, row in it, block, word of the row's codes] and [..., scale (and minimum)]
        self._words, self._heads = (part.transpose(0, 3, 1, 2) for part in _tiled(packed, bits))

    def quantized(self, rows: np.ndarray) -> QuantizedWeight:
        """`rows` [n] int64 of the weight."""
        words, heads = self._take(rows)
        codes = torch.from_numpy(words).view(torch.uint8 if self.bits == 4 else torch.int8).flatten(1)
        scale, minimum = torch.from_numpy(heads[..., 0].copy()), torch.from_numpy(heads[..., -1].copy())
        return QuantizedWeight(codes, scale, minimum if self.bits == 4 else None, self.bits)

    def dequantized(self, rows: np.ndarray) -> torch.Tensor:
        """`quantized(rows).dequantize()`, bit for bit."""
        words, halves = self._take(rows)
        heads = halves.astype(np.float32)
        if self.bits == 8:
            return torch.from_numpy((heads * words.view(np.int8)).reshape(len(words), self.inputs))
        nibbles = words.view(np.uint8)
        codes = np.empty((*words.shape[:2], BLOCK), np.uint8)
        np.bitwise_and(nibbles, 15, out=codes[..., : BLOCK // 2])
        np.right_shift(nibbles, 4, out=codes[..., BLOCK // 2 :])
        values = heads[..., :1] * codes
        values += heads[..., 1:]
        return torch.from_numpy(values.reshape(len(words), self.inputs))

    def _take(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Words [n, blocks, bits] int32 with the codes, and heads [n, blocks, 1 or 2] float16."""
        tile, lane = rows // TILE, rows % TILE
        return self._words[tile, lane], self._heads[tile, lane]


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """x [..., in] as its 8-bit codes have it: in blocks of 32, to the nearest of 255 steps between +-max |x|."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True)
    codes = torch.where(most == 0, 0.0, blocks * (127 / most)).round()
    return (codes * (most / 127)).flatten(-2)
