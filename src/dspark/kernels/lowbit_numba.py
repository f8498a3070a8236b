# mypy: ignore-errors
"""The compiled kernels behind `lowbit`: a product as tiles of outputs that workers draw.

A tile is all rows times 32 outputs. Rows are taken in groups that fit the registers, by the products of
`floats_numba` or, where activations have 8 bits, of `integers_numba`.
"""

import numpy as np
from numba import carray, from_dtype, njit

from dspark.kernels.floats_numba import (
    FLOAT_ROWS,
    RECORD_ROWS,
    multiply_floats,
    multiply_records,
    unpack_records,
)
from dspark.kernels.integers_numba import CODES_BYTES, INTEGER_ROWS, multiply_codes, quantize_row
from dspark.kernels.memory import fetch_add
from dspark.kernels.records import BLOCK, TILE

__all__ = [
    "CALL",
    "CALL_TYPE",
    "SCRATCH",
    "lowbit_worker",
    "multiply_tile",
    "quantize_worker",
]

PIECE = 6  # blocks of a tile that fit the first-level cache in float32
# From so many rows on a tile is dequantised once, into memory, instead of once for each group of rows.
UNPACK_ROWS = 2 * RECORD_ROWS + 1
SCRATCH = BLOCK * TILE * PIECE  # floats

# `next_tile` is the address of the counter that workers share; `integer`: x holds records of `quantize_row`.
_FIELDS = "next_tile x rows out records tiles blocks record_bytes bits integer out_step"
CALL = np.dtype([(name, np.int64) for name in _FIELDS.split()])
CALL_TYPE = from_dtype(CALL)


@njit(inline="always")
def _few_rows(bits, call, tile):
    """All rows of one tile, which is dequantised in registers once for each group of rows."""
    records = call.records + tile * call.blocks * call.record_bytes
    row, groups = 0, -(-call.rows // RECORD_ROWS)
    for group in range(groups):  # of sizes as equal as can be
        count = (call.rows - row) // (groups - group)
        x = call.x + 4 * BLOCK * call.blocks * row
        out = call.out + 4 * (call.out_step * row + TILE * tile)
        multiply_records(bits, count, records, call.blocks, x, out, call.out_step)
        row += count


@njit
def _multiply_piece(call, tile, block, blocks, w):
    """All rows times `blocks` blocks of a tile from `block` on, dequantised in `w`."""
    row, groups, x_step = 0, -(-call.rows // FLOAT_ROWS), BLOCK * call.blocks
    for group in range(groups):
        count = (call.rows - row) // (groups - group)
        x = call.x + 4 * (x_step * row + BLOCK * block)
        out = call.out + 4 * (call.out_step * row + TILE * tile)
        multiply_floats(count, block, w, blocks, x, x_step, out, call.out_step)
        row += count


@njit(inline="always")
def _many_rows(bits, call, tile, w):
    """All rows of one tile, dequantised piece by piece into `w`, which stays in the first-level cache."""
    for block in range(0, call.blocks, PIECE):
        blocks = min(PIECE, call.blocks - block)
        records = call.records + (tile * call.blocks + block) * call.record_bytes
        unpack_records(bits, records, blocks, w)
        _multiply_piece(call, tile, block, blocks, w)


@njit(inline="always")
def _integer_rows(bits, call, tile):
    """All rows of one tile in integers."""
    records = call.records + tile * call.blocks * call.record_bytes
    row, groups = 0, -(-call.rows // INTEGER_ROWS)
    for group in range(groups):
        count = (call.rows - row) // (groups - group)
        x = call.x + CODES_BYTES * call.blocks * row
        out = call.out + 4 * (call.out_step * row + TILE * tile)
        multiply_codes(bits, count, records, call.blocks, x, out, call.out_step)
        row += count


@njit
def multiply_tile(call, tile, scratch):
    """All rows of one tile. `scratch` holds SCRATCH floats from UNPACK_ROWS rows on."""
    many = call.rows >= UNPACK_ROWS
    if call.integer and call.bits == 4:
        _integer_rows(4, call, tile)
    elif call.integer:
        _integer_rows(8, call, tile)
    elif call.bits == 4 and many:
        _many_rows(4, call, tile, scratch.ctypes.data)
    elif call.bits == 4:
        _few_rows(4, call, tile)
    elif many:
        _many_rows(8, call, tile, scratch.ctypes.data)
    else:
        _few_rows(8, call, tile)


def lowbit_worker(pointer_to_call):
    """Draw tiles until there are none. Any number of workers may run it on the same call."""
    call = carray(pointer_to_call, 1)[0]
    scratch = np.empty(SCRATCH if call.rows >= UNPACK_ROWS else 0, np.float32)
    tile = fetch_add(call.next_tile, 1)
    while tile < call.tiles:
        multiply_tile(call, tile, scratch)
        tile = fetch_add(call.next_tile, 1)


def quantize_worker(pointer_to_call):
    """Round `rows` rows x [32 blocks] to records of activations at `out`."""
    call = carray(pointer_to_call, 1)[0]
    for row in range(call.rows):
        x = call.x + 4 * BLOCK * call.blocks * row
        quantize_row(x, call.blocks, call.out + CODES_BYTES * call.blocks * row)
