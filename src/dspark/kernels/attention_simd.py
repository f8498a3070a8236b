"""The inner loops of attention as LLVM IR on 16 floats at a time; see `simd`.

All data are float32, but for keys and values, which may be float16. The arithmetic of one query does not depend on how
many are processed together, so results do not depend on the batch.
"""

from __future__ import annotations

from functools import reduce
from itertools import chain
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
    typingctx: Any,
    count: Any,
    half: Any,
    q: Any,
    head_dim: Any,
    first: Any,
    second: Any,
    k_step: Any,
    s: Any,
    s_step: Any,
) -> Any:
    """s[m, j] = sum_d q[m, d] k[d, j] for `count` (a literal) queries and two groups of 16 positions.

    q [count, head_dim]; k begins at `first` and `second`, its rows are `k_step` numbers apart, s rows `s_step`. `half`
    (a literal): k is float16. Two groups, because few queries make too few sums that do not wait for each other.
    """
    queries, narrow = count.literal_value, bool(half.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, q, head_dim, first, second, k_step, s, s_step = args
        sums = [[cgutils.alloca_once(builder, VECTOR) for _ in range(2)] for _ in range(queries)]
        for total in chain(*sums):
            builder.store(ZERO, total)
        with cgutils.for_range(builder, head_dim) as loop:
            row = builder.mul(loop.index, k_step)
            keys = [load_lanes(builder, k, row, narrow) for k in (first, second)]
            for m, totals in enumerate(sums):
                at = builder.add(builder.mul(head_dim, I64(m)), loop.index)
                query = load_float(builder, nth(builder, q, at))
                for key, total in zip(keys, totals, strict=True):
                    builder.store(fma(builder, query, key, builder.load(total)), total)
        for m, totals in enumerate(sums):
            for group, total in enumerate(totals):
                at = builder.add(builder.mul(s_step, I64(m)), I64(group * LANES))
                store_lanes(builder, builder.load(total), s, at)
        return context.get_dummy_value()

    return types.void(count, half, *[types.int64] * 7), codegen


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

        def columns(first: Any, vectors: int) -> None:
            """All positions for `vectors` x 16 columns from `first` on."""
            parts = [builder.add(first, I64(LANES * i)) for i in range(vectors)]
            where = [[builder.add(builder.mul(head_dim, I64(m)), at) for at in parts] for m in range(queries)]
            sums = [[cgutils.alloca_once(builder, VECTOR) for _ in parts] for _ in range(queries)]
            for at, total in zip(chain(*where), chain(*sums), strict=True):
                builder.store(load_lanes(builder, acc, at), total)
            with cgutils.for_range(builder, positions) as loop:
                row = builder.mul(loop.index, head_dim)
                values = [load_lanes(builder, v, builder.add(row, at), narrow) for at in parts]
                for m, totals in enumerate(sums):
                    at = builder.add(builder.mul(p_step, I64(m)), loop.index)
                    weight = load_float(builder, nth(builder, p, at))
                    for value, total in zip(values, totals, strict=True):
                        builder.store(fma(builder, weight, value, builder.load(total)), total)
            for at, total in zip(chain(*where), chain(*sums), strict=True):
                store_lanes(builder, builder.load(total), acc, at)

        with cgutils.for_range(builder, builder.sdiv(head_dim, I64(2 * LANES))) as pair:
            columns(builder.mul(pair.index, I64(2 * LANES)), 2)
        rest = builder.srem(head_dim, I64(2 * LANES))
        with builder.if_then(builder.icmp_signed("!=", rest, I64(0))):
            columns(builder.sub(head_dim, I64(LANES)), 1)
        return context.get_dummy_value()

    return types.void(count, half, *[types.int64] * 6), codegen


@intrinsic(prefer_literal=True)
def softmax_strip(
    typingctx: Any,
    count: Any,
    vectors: Any,
    s: Any,
    low: Any,
    high: Any,
    stats: Any,
    acc: Any,
    head_dim: Any,
) -> Any:
    """One online-softmax step of `count` queries, in base 2, over `vectors` x 16 scores of each (both literals).

    s [count, 16 vectors]: s[m, j] becomes 2^(s[m, j] - peak), and 0 outside low[m] <= j < high[m] (int64).
    Updates in place stats [count, 32] (the peak, and from 16 on the mass as 16 partial sums), and shrinks the
    accumulators acc [count, head_dim] to the new peak. Step by step for all queries: each of a query's own steps
    waits for the last.
    """
    queries, parts = count.literal_value, vectors.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, s, low, high, stats, acc, head_dim = args
        bounds = [
            [splat(builder, builder.trunc(load(builder, I64, x, 8 * m), I32)) for x in (low, high)]
            for m in range(queries)
        ]

        def score(m: int, i: int) -> tuple[Any, Any]:
            """16 scores of a query, and which of them count."""
            at = ir.Constant(WORDS, list(range(i * LANES, (i + 1) * LANES)))
            first, end = bounds[m]
            inside = builder.and_(builder.icmp_signed(">=", at, first), builder.icmp_signed("<", at, end))
            values = load(builder, VECTOR, s, 4 * (m * parts + i) * LANES)
            return builder.select(inside, values, constant(MASKED)), inside

        def larger(a: Any, b: Any) -> Any:
            return maximum(builder, a, b)

        old = [load_float(builder, stats, 128 * m) for m in range(queries)]
        peaks = [reduce(larger, (score(m, i)[0] for i in range(parts)), old[m]) for m in range(queries)]
        peaks = [across(builder, peak, larger) for peak in peaks]
        shrink = [exp2(builder, builder.fsub(a, b)) for a, b in zip(old, peaks, strict=True)]
        for m in range(queries):
            total = builder.fmul(load(builder, VECTOR, stats, 128 * m + 64), shrink[m])
            for i in range(parts):
                value, inside = score(m, i)
                power = builder.select(inside, exp2(builder, builder.fsub(value, peaks[m])), ZERO)
                store(builder, power, s, 4 * (m * parts + i) * LANES)
                total = builder.fadd(total, power)
            store(builder, total, stats, 128 * m + 64)
            store(builder, builder.extract_element(peaks[m], I32(0)), stats, 128 * m)
        with cgutils.for_range(builder, builder.sdiv(head_dim, I64(LANES))) as part:
            for m in range(queries):
                at = builder.add(builder.mul(head_dim, I64(m)), builder.mul(part.index, I64(LANES)))
                store_lanes(builder, builder.fmul(load_lanes(builder, acc, at), shrink[m]), acc, at)
        return context.get_dummy_value()

    return types.void(count, vectors, *[types.int64] * 6), codegen
