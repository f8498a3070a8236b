"""Weights in 4 or 8 bits, and activations in 8: what the codes mean, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark.core import DSparkError
from dspark.kernels.records import BLOCK, HEAD_BYTES, RECORD_BYTES, TILE

__all__ = ["QuantizedWeight", "pack", "round_activations"]


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


def pack(weight: QuantizedWeight) -> torch.Tensor:
    """The records of all tiles [tiles, blocks, bytes] uint8; see `records`. Missing outputs are zeros."""
    out, size = weight.shape
    tiles, blocks = -(-out // TILE), size // BLOCK
    packed = torch.zeros(tiles, blocks, RECORD_BYTES[weight.bits], dtype=torch.uint8)

    def tiled(rows: torch.Tensor) -> torch.Tensor:
        """[out, blocks, n] -> [tiles, blocks, n, 32]."""
        if len(rows) % TILE:
            rows = torch.cat((rows, rows.new_zeros(-len(rows) % TILE, *rows.shape[1:])))
        return rows.view(tiles, TILE, blocks, -1).permute(0, 2, 3, 1)

    codes = weight.codes.contiguous().view(out, blocks, -1).view(torch.int32)
    head = [weight.scale] if weight.minimum is None else [weight.scale, weight.minimum]
    start = HEAD_BYTES[weight.bits]
    halves = packed[..., :start].view(torch.float16).view(tiles, blocks, len(head), TILE)
    halves.copy_(tiled(torch.stack(head, dim=-1)))
    tiled_codes = tiled(codes)
    packed[..., start:].view(codes.dtype).view(tiled_codes.shape).copy_(tiled_codes)
    return packed


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """x [..., in] as its 8-bit codes have it: in blocks of 32, to the nearest of 255 steps between +-max |x|."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True)
    codes = torch.where(most == 0, 0.0, blocks * (127 / most)).round()
    return (codes * (most / 127)).flatten(-2)
