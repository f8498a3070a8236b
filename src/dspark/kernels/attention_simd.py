"""The inner loops of attention as LLVM IR on 16 floats at a time; see `simd`.

All data are float32, but for keys and values, which may be float16. The arithmetic of one query does not depend on how
many are processed together, so results do not depend on the batch.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from dspark.kernels.simd import (
    FLOAT,
    I64,
    INDEX,
    LANES,
    VECTOR,
    at_offset,
    constant,
    exp2,
    fma,
    load,
    maximum,
    splat,
    store,
)

__all__ = [
    "MASKED",
    "mix_values",
    "prefetch",
    "scatter_halves",
    "score_keys",
    "softmax_strip",
    "store_halves",
]

MASKED = -1e30  # finite stand-in for -inf: differences of two stay finite
HALF = ir.HalfType()
HALVES = ir.VectorType(HALF, LANES)


def load_lanes(builder: Any, half: bool, address: Any, offset: Any) -> Any:
    """16 floats, `offset` numbers behind `address`, where numbers are float16 (`half`) or float32."""
    if not half:
        return load(builder, address, offset)
    where = builder.add(address, builder.mul(offset, I64(2)))
    return builder.fpext(builder.load(builder.inttoptr(where, HALVES.as_pointer()), align=2), VECTOR)


def _horizontal_max(builder: Any, vector: Any) -> Any:
    """The maximum in every lane."""
    step = LANES // 2
    while step:
        swap = ir.Constant(INDEX, [lane ^ step for lane in range(LANES)])
        vector = maximum(builder, vector, builder.shuffle_vector(vector, vector, swap))
        step //= 2
    return vector


@intrinsic
def prefetch(typingctx: Any, address: Any, count: Any) -> Any:
    """Ask for `count` floats behind `address` to be brought near: blocks are scattered in memory."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        with cgutils.for_range(builder, builder.sdiv(args[1], I64(LANES))) as loop:
            where = at_offset(builder, args[0], builder.mul(loop.index, I64(LANES)), ir.IntType(8))
            builder.call(ask, [where, i32(0), i32(2), i32(1)])  # read, second-level cache, data
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store_halves(typingctx: Any, x: Any, out: Any, count: Any) -> Any:
    """`count` floats, a multiple of 16, rounded to float16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, out, count = args
        with cgutils.for_range(builder, builder.sdiv(count, I64(LANES))) as part:
            first = builder.mul(part.index, I64(LANES))
            halves = builder.fptrunc(load(builder, x, first), HALVES)
            where = builder.add(out, builder.mul(first, I64(2)))
            builder.store(halves, builder.inttoptr(where, HALVES.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def scatter_halves(typingctx: Any, x: Any, out: Any, count: Any, step: Any) -> Any:
    """`count` floats rounded to float16, `step` numbers apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, out, count, step = args
        with cgutils.for_range(builder, count) as loop:
            value = builder.fptrunc(load(builder, x, loop.index, FLOAT), HALF)
            where = builder.add(out, builder.mul(builder.mul(loop.index, step), I64(2)))
            builder.store(value, builder.inttoptr(where, HALF.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic(prefer_literal=True)
def score_keys(
    typingctx: Any, count: Any, half: Any, q: Any, head_dim: Any, k: Any, k_step: Any, s: Any, s_step: Any
) -> Any:
    """s[m, j] = sum_d q[m, d] k[d, j] for `count` (a literal) queries and 16 positions.

    q [count, head_dim]; k rows are `k_step` numbers apart, s rows `s_step`. `half` (a literal): k is float16.
    """
    queries, narrow = count.literal_value, bool(half.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, q, head_dim, k, k_step, s, s_step = args
        sums = [cgutils.alloca_once_value(builder, constant(0.0)) for _ in range(queries)]
        for total in sums:
            builder.store(constant(0.0), total)
        with cgutils.for_range(builder, head_dim) as loop:
            keys = load_lanes(builder, narrow, k, builder.mul(loop.index, k_step))
            for m, total in enumerate(sums):
                at = builder.add(builder.mul(head_dim, I64(m)), loop.index)
                query = splat(builder, load(builder, q, at, FLOAT))
                builder.store(fma(builder, query, keys, builder.load(total)), total)
        for m, total in enumerate(sums):
            store(builder, builder.load(total), s, builder.mul(s_step, I64(m)))
        return context.get_dummy_value()

    return types.void(count, half, *[types.int64] * 6), codegen


@intrinsic(prefer_literal=True)
def mix_values(
    typingctx: Any,
    count: Any,
    half: Any,
    p: Any,
    p_step: Any,
    v: Any,
    head_dim: Any,
    positions: Any,
    acc: Any,
) -> Any:
    """acc[m] += sum_j p[m, j] v[j] for `count` (a literal) queries and the first `positions` rows of v.

    p rows are `p_step` floats apart; v [positions, head_dim], float16 if `half` (a literal); acc [count, head_dim].
    """
    queries, narrow = count.literal_value, bool(half.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, p, p_step, v, head_dim, positions, acc = args
        sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(queries)]
        with cgutils.for_range(builder, builder.sdiv(head_dim, I64(LANES))) as part:
            first = builder.mul(part.index, I64(LANES))
            where = [builder.add(builder.mul(head_dim, I64(m)), first) for m in range(queries)]
            for at, total in zip(where, sums, strict=True):
                builder.store(load(builder, acc, at), total)
            with cgutils.for_range(builder, positions) as loop:
                at = builder.add(builder.mul(loop.index, head_dim), first)
                values = load_lanes(builder, narrow, v, at)
                for m, total in enumerate(sums):
                    at = builder.add(builder.mul(p_step, I64(m)), loop.index)
                    weight = splat(builder, load(builder, p, at, FLOAT))
                    builder.store(fma(builder, weight, values, builder.load(total)), total)
            for at, total in zip(where, sums, strict=True):
                store(builder, builder.load(total), acc, at)
        return context.get_dummy_value()

    return types.void(count, half, *[types.int64] * 6), codegen


@intrinsic(prefer_literal=True)
def softmax_strip(typingctx: Any, vectors: Any, s: Any, low: Any, high: Any, peak: Any, mass: Any) -> Any:
    """One online-softmax step of one query, in base 2, over `vectors` (a literal) x 16 scores.

    Replaces s[j] by 2^(s[j] - peak), and by 0 outside low <= j < high; updates the peak (1 float) and
    the mass (16 partial sums) in place. Returns the factor by which earlier accumulators shrink.
    """
    count = vectors.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, s, low, high, peak, mass = args
        i32 = ir.IntType(32)
        low, high = (splat(builder, builder.trunc(x, i32), INDEX) for x in (low, high))
        old = splat(builder, load(builder, peak, I64(0), FLOAT))
        new, scores, seen = old, [], []
        for i in range(count):
            at = ir.Constant(INDEX, list(range(i * LANES, (i + 1) * LANES)))
            inside = builder.and_(builder.icmp_signed(">=", at, low), builder.icmp_signed("<", at, high))
            score = builder.select(inside, load(builder, s, I64(i * LANES)), constant(MASKED))
            new = maximum(builder, score, new)
            scores.append(score)
            seen.append(inside)
        new = _horizontal_max(builder, new)
        shrink = exp2(builder, builder.fsub(old, new))
        total = builder.fmul(load(builder, mass, I64(0)), shrink)
        for i, (score, inside) in enumerate(zip(scores, seen, strict=True)):
            power = builder.select(inside, exp2(builder, builder.fsub(score, new)), constant(0.0))
            store(builder, power, s, I64(i * LANES))
            total = builder.fadd(total, power)
        store(builder, total, mass, I64(0))
        store(builder, builder.extract_element(new, i32(0)), peak, I64(0))
        return builder.extract_element(shrink, i32(0))

    return types.float32(vectors, *[types.int64] * 5), codegen
