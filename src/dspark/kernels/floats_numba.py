# mypy: ignore-errors
"""Products of float32 activations with 4-bit and 8-bit weights, which are dequantised in registers.

`records` says how weights lie in memory. w = fma(scale, code, minimum) is the dequantised weight to the last
bit: scale x code has at most 19 significant bits, so only the addition rounds, once either way.

Every kernel adds the inputs of an output in the same order, one at a time. A row's result therefore depends
neither on the other rows, nor on how rows are grouped, nor on the number of threads.
"""

from functools import cache

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from dspark.kernels import simd
from dspark.kernels.records import BLOCK, HEAD_BYTES, RECORD_BYTES, TILE, load_head, prefetch_record
from dspark.kernels.simd import FEATURES, FLOAT, HALF, I32, I64, VECTOR, WORDS, ZERO, constant

__all__ = [
    "FLOAT_ROWS",
    "FLOAT_ROWS_LEAST",
    "RECORD_ROWS",
    "multiply_floats",
    "multiply_records",
    "runs_here",
    "unpack_records",
    "unpack_row",
]

_WIDE = "+avx512f" in FEATURES  # 32 registers of 16 floats, and table look-up of 16 floats
VECTORS = 2 if _WIDE else 1  # of a tile, worked on together: with the rows they have to fit the registers
RECORD_ROWS = 8 if _WIDE else 4  # worked on together by `multiply_records`
FLOAT_ROWS = 12 if _WIDE else 4  # and by `multiply_floats`
FLOAT_ROWS_LEAST = (
    8 if _WIDE else 3
)  # the smallest of equal groups of `lowbit_numba.UNPACK_ROWS` or more rows

_ORDER = (0, 16, 1, 17, 2, 18, 3, 19)  # inputs of a group of eight, relative to its first


@cache
def runs_here() -> bool:
    """Whether this machine converts float16 and multiplies and adds in one: else LLVM calls missing libraries."""
    arm = binding.get_process_triple().startswith(("aarch64", "arm64"))
    return arm or {"+f16c", "+fma"} <= FEATURES


def _nibble(builder, words, shift):
    """Bits shift .. shift + 3 of each word as a float."""
    if shift:
        words = builder.lshr(words, constant(shift, WORDS))
    if _WIDE:  # the look-up ignores all but the lowest four bits of an index
        table = ir.Constant(VECTOR, [float(i) for i in range(16)])
        return simd.call(builder, "llvm.x86.avx512.permvar.sf.512", VECTOR, [table, words])
    return builder.sitofp(builder.and_(words, constant(15, WORDS)), VECTOR)


def _byte(builder, words, shift):
    """Bits shift .. shift + 7 of each word, signed, as a float."""
    if shift < 24:
        words = builder.shl(words, constant(24 - shift, WORDS))
    return builder.sitofp(builder.ashr(words, constant(24, WORDS)), VECTOR)


def _each_input(builder, bits, vectors, first, records, blocks, add):
    """Call add(start, offset, weights) for all inputs start + offset, in the one order there is.

    `start` is an IR value, `offset` a constant, `weights` the `vectors` vectors of the tile from `first` on.
    """
    with cgutils.for_range(builder, blocks) as block:
        record = builder.add(records, builder.mul(block.index, I64(RECORD_BYTES[bits])))
        prefetch_record(builder, bits, record, vectors)
        head = load_head(builder, bits, record, first, vectors)
        with cgutils.for_range(builder, I64(4)) as group:
            _eight_inputs(builder, bits, vectors, first, record, head, block.index, group.index, add)


def _eight_inputs(builder, bits, vectors, first, record, head, block, group, add):
    """Inputs 4g .. 4g + 3 and those + 16 of a block."""
    start = builder.add(builder.mul(block, I64(BLOCK)), builder.mul(group, I64(4)))
    codes = builder.add(record, I64(HEAD_BYTES[bits]))
    codes = builder.add(codes, builder.mul(group, I64(4 * TILE)))
    # With 8 bits, inputs + 16 are four words on.
    at = [64 * (first + v) + far for far in ((0,) if bits == 4 else (0, 16 * TILE)) for v in range(vectors)]
    words = [simd.load(builder, WORDS, codes, offset) for offset in at]
    for offset in _ORDER:
        near, far = offset % 16, offset // 16
        weights = []
        for v in range(vectors):
            if bits == 4:
                code = _nibble(builder, words[v], 8 * near + 4 * far)
                weights.append(simd.fma(builder, head[0][v], code, head[1][v]))
            else:
                code = _byte(builder, words[far * vectors + v], 8 * near)
                weights.append(builder.fmul(head[0][v], code))
        add(start, offset, weights)


class _Sums:
    """rows x vectors running sums, kept in registers; they start from 0 or from what `write` left."""

    def __init__(self, builder, rows, vectors, x, x_step, out, out_step, resume=None):
        self.builder = builder
        self.out = [builder.add(out, builder.mul(out_step, I64(4 * r))) for r in range(rows)]
        self.sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(vectors)] for _ in range(rows)]
        for row, totals in zip(self.out, self.sums, strict=True):
            for v, total in enumerate(totals):
                start = ZERO
                if resume is not None:
                    start = builder.select(resume, simd.load(builder, VECTOR, row, 64 * v), ZERO)
                builder.store(start, total)
        self.x = [builder.add(x, builder.mul(x_step, I64(4 * r))) for r in range(rows)]

    def add(self, start, offset, weights):
        """Add x[r, start + offset] x weights to each row r."""
        builder = self.builder
        for x, totals in zip(self.x, self.sums, strict=True):
            at = builder.add(x, builder.mul(start, I64(4)))
            value = simd.load_float(builder, at, 4 * offset)
            for total, weight in zip(totals, weights, strict=True):
                builder.store(simd.fma(builder, value, weight, builder.load(total)), total)

    def write(self):
        for row, totals in zip(self.out, self.sums, strict=True):
            for v, total in enumerate(totals):
                simd.store(self.builder, self.builder.load(total), row, 64 * v)


@intrinsic(prefer_literal=True)
def multiply_records(typingctx, bits, rows, records, blocks, x, out, out_step):
    """out[r] = sum_k x[r, k] w[k] for 1 .. RECORD_ROWS rows and one tile; `bits` is a literal.

    x [rows, 32 blocks]; rows of out are `out_step` floats apart.
    """
    width = bits.literal_value

    def codegen(context, builder, signature, args):
        _, rows, records, blocks, x, out, out_step = args

        def each(count):
            for first in range(0, 2, VECTORS):
                here = builder.add(out, I64(64 * first))
                sums = _Sums(builder, count, VECTORS, x, builder.mul(blocks, I64(BLOCK)), here, out_step)
                _each_input(builder, width, VECTORS, first, records, blocks, sums.add)
                sums.write()

        simd.by_count(builder, rows, 1, RECORD_ROWS, each)
        return context.get_dummy_value()

    return types.void(bits, *[types.int64] * 6), codegen


@intrinsic(prefer_literal=True)
def unpack_records(typingctx, bits, records, blocks, w):
    """Dequantise a tile: w [32 blocks, 32] floats."""
    width = bits.literal_value

    def codegen(context, builder, signature, args):
        _, records, blocks, w = args

        def add(start, offset, weights):
            row = builder.add(w, builder.mul(start, I64(4 * TILE)))
            for v, weight in enumerate(weights):
                simd.store(builder, weight, row, 4 * TILE * offset + 64 * v)

        _each_input(builder, width, 2, 0, records, blocks, add)
        return context.get_dummy_value()

    return types.void(bits, *[types.int64] * 3), codegen


@intrinsic(prefer_literal=True)
def unpack_row(typingctx, bits, records, blocks, lane, out):
    """Dequantise one output, `lane` of a tile: out [32 blocks] floats. One weight at a time: rows are few."""
    width = bits.literal_value
    word_bytes = 4 * TILE

    def codegen(context, builder, signature, args):
        _, records, blocks, lane, out = args
        with cgutils.for_range(builder, blocks) as block:
            record = builder.add(records, builder.mul(block.index, I64(RECORD_BYTES[width])))
            at = builder.add(record, builder.mul(lane, I64(2)))
            scale = builder.fpext(simd.load(builder, HALF, at, 0, 2), FLOAT)
            minimum = builder.fpext(simd.load(builder, HALF, at, 2 * TILE, 2), FLOAT) if width == 4 else None
            words = builder.add(record, builder.add(I64(HEAD_BYTES[width]), builder.mul(lane, I64(4))))
            to = builder.add(out, builder.mul(block.index, I64(4 * BLOCK)))
            for group in range(4 if width == 4 else 8):
                word = simd.load(builder, I32, words, word_bytes * group)
                for i in range(4):
                    if width == 8:
                        code = builder.ashr(builder.shl(word, I32(24 - 8 * i)), I32(24))
                        value = builder.fmul(scale, builder.sitofp(code, FLOAT))
                        simd.store(builder, value, to, 4 * (4 * group + i))
                        continue
                    for far in range(2):
                        code = builder.and_(builder.lshr(word, I32(8 * i + 4 * far)), I32(15))
                        code = builder.sitofp(code, FLOAT)
                        value = simd.call(builder, "llvm.fma.f32", FLOAT, [scale, code, minimum])
                        simd.store(builder, value, to, 4 * (4 * group + i + 16 * far))
        return context.get_dummy_value()

    return types.void(bits, *[types.int64] * 4), codegen


@intrinsic
def multiply_floats(typingctx, rows, resume, w, blocks, x, x_step, out, out_step):
    """`multiply_records` for FLOAT_ROWS_LEAST .. FLOAT_ROWS rows and weights from `unpack_records`.

    Adds to what is in `out` if `resume` is not 0, in the same order. Rows of x are `x_step` floats apart.
    """

    def one(builder, count, first, args):
        _, resume, w, blocks, x, x_step, out, out_step = args
        here, more = builder.add(out, I64(64 * first)), builder.icmp_signed("!=", resume, I64(0))
        sums = _Sums(builder, count, VECTORS, x, x_step, here, out_step, more)
        with cgutils.for_range(builder, blocks) as block, cgutils.for_range(builder, I64(4)) as group:
            start = builder.add(builder.mul(block.index, I64(BLOCK)), builder.mul(group.index, I64(4)))
            near = builder.add(w, builder.mul(start, I64(4 * TILE)))
            for offset in _ORDER:
                at = 4 * TILE * offset + 64 * first
                sums.add(
                    start, offset, [simd.load(builder, VECTOR, near, at + 64 * v) for v in range(VECTORS)]
                )
        sums.write()

    def codegen(context, builder, signature, args):
        def each(count):
            for first in range(0, 2, VECTORS):
                one(builder, count, first, args)

        simd.by_count(builder, args[0], FLOAT_ROWS_LEAST, FLOAT_ROWS, each)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen
