# mypy: ignore-errors
"""The compiled kernels behind `lowbit`: products with 4-bit and 8-bit weights, dequantised in registers.

A tile is 32 outputs (two vectors of 16 lanes). It is stored as one record for each block of 32 inputs, so a
tile's product reads one stream of memory:

    scales [32] f16 | minima [32] f16 (4 bits only) | codes, 4 bits: [4, 32] u32, 8 bits: [32, 32] i8

Word g of an output holds its inputs 4g .. 4g + 3 in the low nibbles and those + 16 in the high nibbles of its
bytes, which is how GGUF orders a block. w = fma(scale, code, minimum) is the dequantised weight to the last
bit: scale x code has at most 19 significant bits, so only the addition rounds, once either way.

Every kernel adds the inputs of an output in the same order, one at a time. A row's result therefore depends
neither on the other rows, nor on how rows are grouped, nor on the number of threads.
"""

import numpy as np
from llvmlite import binding, ir
from numba import carray, from_dtype, njit
from numba.core import cgutils, config, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from dspark.kernels.simd import LANES, fetch_add

__all__ = [
    "BLOCK",
    "CALL",
    "CALL_TYPE",
    "RECORD_BYTES",
    "SCRATCH",
    "TILE",
    "lowbit_worker",
    "multiply_tile",
    "runs_here",
]

BLOCK = 32  # inputs that share a scale
TILE = 2 * LANES  # outputs
HEAD_BYTES = {4: 4 * TILE, 8: 2 * TILE}  # scales and minima
RECORD_BYTES = {4: HEAD_BYTES[4] + BLOCK * TILE // 2, 8: HEAD_BYTES[8] + BLOCK * TILE}

_FEATURES = frozenset((config.CPU_FEATURES or get_host_cpu_features()).split(","))
_WIDE = "+avx512f" in _FEATURES  # 32 registers of 16 floats, and table look-up of 16 floats
VECTORS = 2 if _WIDE else 1  # of a tile, worked on together: with the rows they have to fit the registers
RECORD_ROWS = 8 if _WIDE else 4  # worked on together by `multiply_records`
FLOAT_ROWS = 12 if _WIDE else 4  # and by `multiply_floats`
PIECE = 6  # blocks of a tile that fit the first-level cache in float32
# From so many rows on a tile is dequantised once, into memory, instead of once for each group of rows.
UNPACK_ROWS = 17 if _WIDE else 9
FLOAT_ROWS_LEAST = 8 if _WIDE else 3  # the smallest of equal groups of UNPACK_ROWS or more rows
SCRATCH = BLOCK * TILE * PIECE  # floats
AHEAD = 16  # records to ask for in advance

# `next_tile` is the address of the counter that workers share.
_FIELDS = "next_tile x rows out records tiles blocks record_bytes bits out_step"
CALL = np.dtype([(name, np.int64) for name in _FIELDS.split()])
CALL_TYPE = from_dtype(CALL)

_ORDER = (0, 16, 1, 17, 2, 18, 3, 19)  # inputs of a group of eight, relative to its first

_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)
_I64 = ir.IntType(64)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)


def runs_here() -> bool:
    """Whether this machine converts float16 and multiplies and adds in one: else LLVM calls missing libraries."""
    arm = binding.get_process_triple().startswith(("aarch64", "arm64"))
    return arm or {"+f16c", "+fma"} <= _FEATURES


def _load(builder, kind, address, offset=0, align=4):
    where = builder.add(address, _I64(offset))
    return builder.load(builder.inttoptr(where, kind.as_pointer()), align=align)


def _store(builder, value, address, offset=0):
    where = builder.add(address, _I64(offset))
    builder.store(value, builder.inttoptr(where, value.type.as_pointer()), align=4)


def _prefetch(builder, address, offset):
    """Ask for a cache line: hardware prefetching stops at the end of a page, and a tile is not much longer."""
    kind, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    where = builder.inttoptr(builder.add(address, _I64(offset)), kind)
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [where, i32(0), i32(3), i32(1)])


def _splat(builder, scalar):
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


def _call(builder, name, result, args):
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _fma(builder, a, b, c):
    return _call(builder, f"llvm.fma.v{LANES}f32", _VECTOR, [a, b, c])


def _nibble(builder, words, shift):
    """Bits shift .. shift + 3 of each word as a float."""
    if shift:
        words = builder.lshr(words, ir.Constant(_WORDS, [shift] * LANES))
    if _WIDE:  # the look-up ignores all but the lowest four bits of an index
        table = ir.Constant(_VECTOR, [float(i) for i in range(16)])
        return _call(builder, "llvm.x86.avx512.permvar.sf.512", _VECTOR, [table, words])
    return builder.sitofp(builder.and_(words, ir.Constant(_WORDS, [15] * LANES)), _VECTOR)


def _each_input(builder, bits, vectors, first, records, blocks, emit):
    """Call emit(start, offset, weights) for all inputs start + offset, in the one order there is.

    `start` is an IR value, `offset` a constant, `weights` the `vectors` vectors of the tile from `first` on.
    """
    with cgutils.for_range(builder, blocks) as block:
        record = builder.add(records, builder.mul(block.index, _I64(RECORD_BYTES[bits])))
        for line in range(0, RECORD_BYTES[bits] // (2 // vectors), 64):
            _prefetch(builder, record, AHEAD * RECORD_BYTES[bits] + line)
        halves = [
            [_load(builder, _HALVES, record, 64 * part + 32 * (first + v), 2) for v in range(vectors)]
            for part in range(2 if bits == 4 else 1)
        ]
        head = [[builder.fpext(half, _VECTOR) for half in part] for part in halves]
        with cgutils.for_range(builder, _I64(4)) as group:
            _eight_inputs(builder, bits, vectors, first, record, head, block.index, group.index, emit)


def _eight_inputs(builder, bits, vectors, first, record, head, block, group, emit):
    """Inputs 4g .. 4g + 3 and those + 16 of a block."""
    start = builder.add(builder.mul(block, _I64(BLOCK)), builder.mul(group, _I64(4)))
    codes = builder.add(record, _I64(HEAD_BYTES[bits]))
    codes = builder.add(codes, builder.mul(group, _I64(4 * TILE)))
    if bits == 4:
        words = [_load(builder, _WORDS, codes, 64 * (first + v)) for v in range(vectors)]
    for offset in _ORDER:
        weights = []
        for v in range(vectors):
            if bits == 4:
                code = _nibble(builder, words[v], 8 * (offset % 16) + 4 * (offset // 16))
                weights.append(_fma(builder, head[0][v], code, head[1][v]))
            else:
                raw = _load(builder, _BYTES, codes, offset * TILE + 16 * (first + v), 1)
                code = builder.sitofp(builder.sext(raw, _WORDS), _VECTOR)
                weights.append(builder.fmul(head[0][v], code))
        emit(start, offset, weights)


class _Sums:
    """rows x vectors running sums, kept in registers; they start from 0 or from what `write` left."""

    def __init__(self, builder, rows, vectors, x, x_step, out, out_step, resume=None):
        self.builder = builder
        self.out = [builder.add(out, builder.mul(out_step, _I64(4 * r))) for r in range(rows)]
        self.sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(vectors)] for _ in range(rows)]
        for row, totals in zip(self.out, self.sums, strict=True):
            for v, total in enumerate(totals):
                start = _ZERO
                if resume is not None:
                    start = builder.select(resume, _load(builder, _VECTOR, row, 64 * v), _ZERO)
                builder.store(start, total)
        self.x = [builder.add(x, builder.mul(x_step, _I64(4 * r))) for r in range(rows)]

    def add(self, start, offset, weights):
        """Add x[r, start + offset] x weights to each row r."""
        builder = self.builder
        for x, totals in zip(self.x, self.sums, strict=True):
            at = builder.add(x, builder.mul(start, _I64(4)))
            value = _splat(builder, _load(builder, _FLOAT, at, 4 * offset))
            for total, weight in zip(totals, weights, strict=True):
                builder.store(_fma(builder, value, weight, builder.load(total)), total)

    def write(self):
        for row, totals in zip(self.out, self.sums, strict=True):
            for v, total in enumerate(totals):
                _store(self.builder, self.builder.load(total), row, 64 * v)


def _by_rows(builder, rows, least, most, emit):
    """Run emit(count) compiled for the count that `rows` turns out to be, least .. most."""
    after = builder.append_basic_block("rows_done")
    switch = builder.switch(rows, after)
    for count in range(least, most + 1):
        case = builder.append_basic_block(f"rows_{count}")
        switch.add_case(_I64(count), case)
        builder.position_at_end(case)
        emit(count)
        builder.branch(after)
    builder.position_at_end(after)


@intrinsic(prefer_literal=True)
def multiply_records(typingctx, bits, rows, records, blocks, x, out, out_step):
    """out[r] = sum_k x[r, k] w[k] for 1 .. RECORD_ROWS rows and one tile; `bits` is a literal.

    x [rows, 32 blocks]; rows of out are `out_step` floats apart.
    """
    width = bits.literal_value

    def codegen(context, builder, signature, args):
        _, rows, records, blocks, x, out, out_step = args

        def emit(count):
            for first in range(0, 2, VECTORS):
                here = builder.add(out, _I64(64 * first))
                sums = _Sums(builder, count, VECTORS, x, builder.mul(blocks, _I64(BLOCK)), here, out_step)
                _each_input(builder, width, VECTORS, first, records, blocks, sums.add)
                sums.write()

        _by_rows(builder, rows, 1, RECORD_ROWS, emit)
        return context.get_dummy_value()

    return types.void(bits, *[types.int64] * 6), codegen


@intrinsic(prefer_literal=True)
def unpack_records(typingctx, bits, records, blocks, w):
    """Dequantise a tile: w [32 blocks, 32] floats."""
    width = bits.literal_value

    def codegen(context, builder, signature, args):
        _, records, blocks, w = args

        def emit(start, offset, weights):
            row = builder.add(w, builder.mul(start, _I64(4 * TILE)))
            for v, weight in enumerate(weights):
                _store(builder, weight, row, 4 * TILE * offset + 64 * v)

        _each_input(builder, width, 2, 0, records, blocks, emit)
        return context.get_dummy_value()

    return types.void(bits, *[types.int64] * 3), codegen


@intrinsic
def multiply_floats(typingctx, rows, resume, w, blocks, x, x_step, out, out_step):
    """`multiply_records` for FLOAT_ROWS_LEAST .. FLOAT_ROWS rows and weights from `unpack_records`.

    Adds to what is in `out` if `resume` is not 0, in the same order. Rows of x are `x_step` floats apart.
    """

    def one(builder, count, first, args):
        _, resume, w, blocks, x, x_step, out, out_step = args
        here, more = builder.add(out, _I64(64 * first)), builder.icmp_signed("!=", resume, _I64(0))
        sums = _Sums(builder, count, VECTORS, x, x_step, here, out_step, more)
        with cgutils.for_range(builder, blocks) as block, cgutils.for_range(builder, _I64(4)) as group:
            start = builder.add(builder.mul(block.index, _I64(BLOCK)), builder.mul(group.index, _I64(4)))
            near = builder.add(w, builder.mul(start, _I64(4 * TILE)))
            for offset in _ORDER:
                at = 4 * TILE * offset + 64 * first
                sums.add(start, offset, [_load(builder, _VECTOR, near, at + 64 * v) for v in range(VECTORS)])
        sums.write()

    def codegen(context, builder, signature, args):
        def emit(count):
            for first in range(0, 2, VECTORS):
                one(builder, count, first, args)

        _by_rows(builder, args[0], FLOAT_ROWS_LEAST, FLOAT_ROWS, emit)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen


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


@njit
def multiply_tile(call, tile, scratch):
    """All rows of one tile. `scratch` holds SCRATCH floats from UNPACK_ROWS rows on."""
    many = call.rows >= UNPACK_ROWS
    if call.bits == 4 and many:
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
