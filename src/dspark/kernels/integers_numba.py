# mypy: ignore-errors
"""Products of 8-bit activations with 4-bit and 8-bit weights: integer dot products, scaled once a block.

A row of activations is rounded to 8 bits in blocks of 32 inputs, each with its own scale, as llama.cpp does with its
Q8_1. It is stored as one record of CODES_BYTES for each block:

    d f32 | d x sum of codes f32 | -128 x sum of codes i32 | 0 | codes [32] i8,     x = d x code, |code| <= 127

With weights w = scale x code + minimum a block contributes scale x d x (dot product of codes) + minimum x d x sum.
The dot product and the sum are exact; d x sum, scale x dot and the two additions round, in one order. So a row's
result depends neither on the other rows, nor on threads, nor on which instructions the machine has: VNNI where it
does (four products a lane and instruction), else those of AVX2.
"""

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from dspark.kernels import simd
from dspark.kernels.records import BLOCK, HEAD_BYTES, RECORD_BYTES, TILE, load_head, prefetch_record
from dspark.kernels.simd import BYTES, FEATURES, FLOAT, I32, I64, LANES, VECTOR, WORDS, ZERO, constant

__all__ = ["CODES_BYTES", "INTEGER_ROWS", "integers_run_here", "multiply_codes", "quantize_row"]

CODES_BYTES = 16 + BLOCK  # of a block of activations
_SMALLEST = 1e-30  # blocks without a larger magnitude are 0: 127 / magnitude must be finite

_WIDE = "+avx512vnni" in FEATURES
_HALF_WIDE = "+avxvnni" in FEATURES
INTEGER_ROWS = 8 if _WIDE else 4  # rows worked on together
VECTORS = 2 if _WIDE else 1  # of a tile, likewise
_BYTE_OPERANDS = binding.llvm_version_info[0] >= 22  # LLVM's intrinsics took vectors of words before


def integers_run_here() -> bool:
    """Whether this machine has integer dot products that the kernel knows."""
    return {"+avx2", "+f16c", "+fma"} <= FEATURES


def _vnni(builder, sums, weights, codes, lanes):
    """sums + the dot product of four unsigned bytes of `weights` and four signed ones of `codes`, lane by lane."""
    if _BYTE_OPERANDS:
        kind = ir.VectorType(ir.IntType(8), 4 * lanes)
        weights, codes = builder.bitcast(weights, kind), builder.bitcast(codes, kind)
    return simd.call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", sums.type, [sums, weights, codes])


def _avx2(builder, sums, weights, codes, signed):
    """The same in 8 lanes without VNNI. Pairs of products fit 16 bits: 2 x 128 x 127 at most."""
    bytes_, shorts = ir.VectorType(ir.IntType(8), 32), ir.VectorType(ir.IntType(16), 16)
    weights, codes = builder.bitcast(weights, bytes_), builder.bitcast(codes, bytes_)
    if signed:  # |w| x (x with the sign of w)
        codes = simd.call(builder, "llvm.x86.avx2.psign.b", bytes_, [codes, weights])
        negative = builder.icmp_signed("<", weights, ir.Constant(bytes_, [0] * 32))
        weights = builder.select(negative, builder.neg(weights), weights)
    pairs = simd.call(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, [weights, codes])
    ones = ir.Constant(shorts, [1] * 16)
    return builder.add(sums, simd.call(builder, "llvm.x86.avx2.pmadd.wd", sums.type, [pairs, ones]))


def _dot(builder, sums, weights, codes, signed):
    """sums [16 lanes] + dot products of 4 bytes each; `signed` weights only without VNNI."""
    if _WIDE:
        return _vnni(builder, sums, weights, codes, LANES)
    halves = []
    for first in (0, 8):
        lanes = ir.Constant(ir.VectorType(I32, 8), list(range(first, first + 8)))
        s, w, c = (builder.shuffle_vector(v, v, lanes) for v in (sums, weights, codes))
        halves.append(_vnni(builder, s, w, c, 8) if _HALF_WIDE else _avx2(builder, s, w, c, signed))
    return builder.shuffle_vector(*halves, ir.Constant(WORDS, list(range(LANES))))


def _groups(builder, bits, codes, vectors, first):
    """(number of four inputs, their weights in `vectors` vectors), for all groups of a block."""
    for word in range(4 if bits == 4 else 8):
        words = [simd.load(builder, WORDS, codes, 4 * TILE * word + 64 * (first + v)) for v in range(vectors)]
        if bits == 4:
            yield word, [builder.and_(w, constant(0x0F0F0F0F, WORDS)) for w in words]
            shifted = [builder.lshr(w, constant(4, WORDS)) for w in words]
            yield word + 4, [builder.and_(w, constant(0x0F0F0F0F, WORDS)) for w in shifted]
        elif _WIDE or _HALF_WIDE:  # VNNI's weights are unsigned: + 128, which -128 x sum of codes takes off
            yield word, [builder.xor(w, constant(0x80808080 - 2**32, WORDS)) for w in words]
        else:
            yield word, words


def _block(builder, bits, record, first, rows, sums):
    """Add one block to the sums of each row; `rows`: addresses of their activations' block."""
    prefetch_record(builder, bits, record, VECTORS)
    offset = bits == 8 and (_WIDE or _HALF_WIDE)
    dots = []
    for row in rows:
        start = simd.splat(builder, simd.load(builder, I32, row, 8)) if offset else constant(0, WORDS)
        dots.append([start] * VECTORS)
    codes = builder.add(record, I64(HEAD_BYTES[bits]))
    for group, weights in _groups(builder, bits, codes, VECTORS, first):
        for row, totals in zip(rows, dots, strict=True):
            four = simd.splat(builder, simd.load(builder, I32, row, 16 + 4 * group))
            for v, weight in enumerate(weights):
                totals[v] = _dot(builder, totals[v], weight, four, bits == 8)
    head = load_head(builder, bits, record, first, VECTORS)
    for row, totals, out in zip(rows, dots, sums, strict=True):
        d = simd.load_float(builder, row)
        for v, total in enumerate(totals):
            scaled = builder.fmul(builder.sitofp(total, VECTOR), head[0][v])
            value = simd.fma(builder, scaled, d, builder.load(out[v]))
            if bits == 4:
                value = simd.fma(builder, head[1][v], simd.load_float(builder, row, 4), value)
            builder.store(value, out[v])


@intrinsic(prefer_literal=True)
def multiply_codes(typingctx, bits, rows, records, blocks, x, out, out_step):
    """out[r] = x[r] W^T for 1 .. INTEGER_ROWS rows and one tile; `bits` is a literal.

    x: records of `quantize_row`, `blocks` a row; rows of out are `out_step` floats apart.
    """
    width = bits.literal_value

    def several(builder, count, first, records, blocks, x, out, out_step):
        sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(VECTORS)] for _ in range(count)]
        for totals in sums:
            for total in totals:
                builder.store(ZERO, total)
        row_bytes = builder.mul(blocks, I64(CODES_BYTES))
        starts = [builder.add(x, builder.mul(row_bytes, I64(r))) for r in range(count)]
        with cgutils.for_range(builder, blocks) as block:
            record = builder.add(records, builder.mul(block.index, I64(RECORD_BYTES[width])))
            at = builder.mul(block.index, I64(CODES_BYTES))
            _block(builder, width, record, first, [builder.add(start, at) for start in starts], sums)
        for r, totals in enumerate(sums):
            row = builder.add(out, builder.mul(out_step, I64(4 * r)))
            for v, total in enumerate(totals):
                simd.store(builder, builder.load(total), row, 64 * (first + v))

    def codegen(context, builder, signature, args):
        _, rows, *rest = args

        def each(count):
            for first in range(0, 2, VECTORS):
                several(builder, count, first, *rest)

        simd.by_count(builder, rows, 1, INTEGER_ROWS, each)
        return context.get_dummy_value()

    return types.void(bits, *[types.int64] * 6), codegen


@intrinsic
def quantize_row(typingctx, x, blocks, out):
    """Round 32 `blocks` floats to the records above. A block with an infinity or a NaN becomes NaN."""

    def across(builder, vector, combine):
        return builder.extract_element(simd.across(builder, vector, combine), I32(0))

    def codegen(context, builder, signature, args):
        x, blocks, out = args

        def maximum(a, b):  # a NaN wins
            return simd.call(builder, f"llvm.maximum.v{LANES}f32", VECTOR, [a, b])

        with cgutils.for_range(builder, blocks) as block:
            at = builder.add(x, builder.mul(block.index, I64(4 * BLOCK)))
            record = builder.add(out, builder.mul(block.index, I64(CODES_BYTES)))
            parts = [simd.load(builder, VECTOR, at, 64 * v) for v in range(2)]
            sizes = [simd.call(builder, f"llvm.fabs.v{LANES}f32", VECTOR, [part]) for part in parts]
            most = across(builder, maximum(*sizes), maximum)
            some = builder.fcmp_unordered(">=", most, FLOAT(_SMALLEST))
            d = builder.select(some, builder.fdiv(most, FLOAT(127.0)), FLOAT(0.0))
            inverse = builder.select(some, builder.fdiv(FLOAT(127.0), most), FLOAT(0.0))
            inverse = simd.splat(builder, inverse)
            total = constant(0, WORDS)
            for v, part in enumerate(parts):
                scaled = builder.fmul(part, inverse)
                whole = simd.call(builder, f"llvm.rint.v{LANES}f32", VECTOR, [scaled])
                # In range for finite blocks; the others' d makes a NaN of whatever stands here.
                whole = builder.select(builder.fcmp_ordered("ord", whole, whole), whole, ZERO)
                codes = builder.fptosi(whole, WORDS)
                simd.store(builder, builder.trunc(codes, BYTES), record, 16 + 16 * v, 1)
                total = builder.add(total, codes)
            total = across(builder, total, builder.add)
            poison = builder.fmul(d, FLOAT(0.0))  # 0, or NaN where d is not finite
            simd.store(builder, builder.fadd(d, poison), record)
            simd.store(builder, builder.fmul(builder.sitofp(total, FLOAT), d), record, 4)
            simd.store(builder, builder.mul(total, I32(-128)), record, 8)
            simd.store(builder, I32(0), record, 12)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
