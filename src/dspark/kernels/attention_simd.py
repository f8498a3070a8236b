"""The inner loops of attention as LLVM IR on 16 floats at a time; see `simd`.

All data are float32, but for keys and values, which may be float16. The arithmetic of one query does not depend on how
many are processed together, so results do not depend on the batch.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from dspark.kernels import simd
from dspark.kernels.simd import (
    FLOAT,
    HALF,
    I32,
    I64,
    LANES,
    VECTOR,
    WORDS,
    ZERO,
    across,
    constant,
    exp2,
    fma,
    load,
    load_float,
    load_lanes,
    maximum,
    nth,
    splat,
    store,
    store_lanes,
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


@intrinsic
def prefetch(typingctx: Any, address: Any, count: Any) -> Any:
    """Ask for `count` floats behind `address` to be brought near: blocks are scattered in memory."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with cgutils.for_range(builder, builder.sdiv(args[1], I64(LANES))) as loop:
            line = nth(builder, args[0], loop.index, 4 * LANES)
            simd.prefetch(builder, line, locality=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store_halves(typingctx: Any, x: Any, out: Any, count: Any) -> Any:
    """`count` floats, a multiple of 16, rounded to float16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, out, count = args
        with cgutils.for_range(builder, builder.sdiv(count, I64(LANES))) as part:
            first = builder.mul(part.index, I64(LANES))
            store_lanes(builder, load_lanes(builder, x, first), out, first, half=True)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def scatter_halves(typingctx: Any, x: Any, out: Any, count: Any, step: Any) -> Any:
    """`count` floats rounded to float16, `step` numbers apart."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, out, count, step = args
        with cgutils.for_range(builder, count) as loop:
            value = builder.fptrunc(load(builder, FLOAT, nth(builder, x, loop.index)), HALF)
            store(builder, value, nth(builder, out, builder.mul(loop.index, step), 2), align=2)
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
        sums = [cgutils.alloca_once_value(builder, ZERO) for _ in range(queries)]
        for total in sums:
            builder.store(ZERO, total)
        with cgutils.for_range(builder, head_dim) as loop:
            keys = load_lanes(builder, k, builder.mul(loop.index, k_step), narrow)
            for m, total in enumerate(sums):
                at = builder.add(builder.mul(head_dim, I64(m)), loop.index)
                query = load_float(builder, nth(builder, q, at))
                builder.store(fma(builder, query, keys, builder.load(total)), total)
        for m, total in enumerate(sums):
            store_lanes(builder, builder.load(total), s, builder.mul(s_step, I64(m)))
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
                builder.store(load_lanes(builder, acc, at), total)
            with cgutils.for_range(builder, positions) as loop:
                at = builder.add(builder.mul(loop.index, head_dim), first)
                values = load_lanes(builder, v, at, narrow)
                for m, total in enumerate(sums):
                    at = builder.add(builder.mul(p_step, I64(m)), loop.index)
                    weight = load_float(builder, nth(builder, p, at))
                    builder.store(fma(builder, weight, values, builder.load(total)), total)
            for at, total in zip(where, sums, strict=True):
                store_lanes(builder, builder.load(total), acc, at)
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
        low, high = (splat(builder, builder.trunc(x, I32)) for x in (low, high))
        old = load_float(builder, peak)
        new, scores, seen = old, [], []
        for i in range(count):
            at = ir.Constant(WORDS, list(range(i * LANES, (i + 1) * LANES)))
            inside = builder.and_(builder.icmp_signed(">=", at, low), builder.icmp_signed("<", at, high))
            score = builder.select(inside, load(builder, VECTOR, s, 4 * i * LANES), constant(MASKED))
            new = maximum(builder, score, new)
            scores.append(score)
            seen.append(inside)
        new = across(builder, new, lambda a, b: maximum(builder, a, b))
        shrink = exp2(builder, builder.fsub(old, new))
        total = builder.fmul(load(builder, VECTOR, mass), shrink)
        for i, (score, inside) in enumerate(zip(scores, seen, strict=True)):
            power = builder.select(inside, exp2(builder, builder.fsub(score, new)), ZERO)
            store(builder, power, s, 4 * i * LANES)
            total = builder.fadd(total, power)
        store(builder, total, mass)
        store(builder, builder.extract_element(new, I32(0)), peak)
        return builder.extract_element(shrink, I32(0))

    return types.float32(vectors, *[types.int64] * 5), codegen
