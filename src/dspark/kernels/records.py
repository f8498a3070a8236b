"""How weights lie in memory for the product kernels: one record for each block of 32 inputs of a tile of 32 outputs.

    scales [32] f16 | minima [32] f16 (4 bits only) | codes, 4 bits: [4, 32] u32, 8 bits: [8, 32] u32

With 4 bits, word g of an output holds its inputs 4g .. 4g + 3 in the low nibbles and those + 16 in the high nibbles of
its bytes, which is how GGUF orders a block; with 8 bits, inputs 4g .. 4g + 3 as signed bytes. The records of a tile
follow each other, so its product reads one stream of memory.
"""

from __future__ import annotations

from typing import Any

from dspark.kernels import simd
from dspark.kernels.simd import HALVES, LANES, VECTOR

__all__ = ["BLOCK", "HEAD_BYTES", "RECORD_BYTES", "TILE", "load_head", "prefetch_record"]

BLOCK = 32  # inputs that share a scale
TILE = 2 * LANES  # outputs: two vectors of 16 lanes
HEAD_BYTES = {4: 4 * TILE, 8: 2 * TILE}  # scales and minima
RECORD_BYTES = {4: HEAD_BYTES[4] + BLOCK * TILE // 2, 8: HEAD_BYTES[8] + BLOCK * TILE}
AHEAD = 16  # records to ask for in advance


def prefetch_record(builder: Any, bits: int, record: Any, vectors: int) -> None:
    """Ask for a later record; half of it by each of the two passes that narrow machines take."""
    for line in range(0, RECORD_BYTES[bits] // (2 // vectors), 64):
        simd.prefetch(builder, record, AHEAD * RECORD_BYTES[bits] + line)


def load_head(builder: Any, bits: int, record: Any, first: int, vectors: int) -> list[list[Any]]:
    """Scales and, of 4 bits, minima as floats, each in `vectors` vectors from `first` on."""
    return [
        [
            builder.fpext(simd.load(builder, HALVES, record, 64 * part + 32 * (first + v), 2), VECTOR)
            for v in range(vectors)
        ]
        for part in range(2 if bits == 4 else 1)
    ]
