"""The inner loops of attention as LLVM IR on 16 floats at a time; see `simd`.

All data are float32, but for keys and values, which may be float16. The arithmetic of one query does not depend on how
many are processed together, so results do not depend on the batch.

A query's `state` after some positions is STATE + head_dim floats: the highest score (PEAK), the factor by which the
last step shrank what was summed before it (SHRINK), 16 partial sums of the softmax's denominator (MASS), and from
STATE on the weighted sum of the values.
"""

from __future__ import annotations

import itertools
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
    each_vector,
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
    "PAIR",
    "STATE",
    "divide_states",
    "merge_states",
    "mix_values",
    "prefetch",
    "scatter_halves",
    "score_keys",
    "softmax_strip",
    "store_halves",
]

MASKED = -1e30  # finite stand-in for -inf: differences of two stay finite
PAIR = (
    2  # vectors of keys or values at once: 3 queries' sums are then enough to hide the latency of additions
)
PEAK, SHRINK, MASS, STATE = 0, 1, 16, 32  # places in a query's state, in floats


@intrinsic
def prefetch(typingctx: Any, address: Any, count: Any) -> Any:
    """Ask for `count` floats behind `address` to be brought near: blocks are scattered in memory."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        with each_vector(builder, args[1]) as at:
            simd.prefetch(builder, nth(builder, args[0], at), locality=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store_halves(typingctx: Any, x: Any, out: Any, count: Any) -> Any:
    """`count` floats, a multiple of 16, rounded to float16."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, out, count = args
        with each_vector(builder, count) as at:
            store_lanes(builder, load_lanes(builder, x, at), out, at, half=True)
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
    typingctx: Any, count: Any, half: Any, q: Any, head_dim: Any, keys: Any, k_step: Any, s: Any, s_step: Any
) -> Any:
    """s[m, j] = sum_d q[m, d] k[d, j] for `count` (a literal) queries and 2 x 16 positions.

    q [count, head_dim]; `keys`: two addresses of k [head_dim, 16], whose rows are `k_step` numbers apart; s rows are
    `s_step` apart. `half` (a literal): k is float16.
    """
    queries, narrow = count.literal_value, bool(half.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, q, head_dim, keys, k_step, s, s_step = args
        groups = [load(builder, I64, keys, 8 * i) for i in range(PAIR)]
        sums = [[cgutils.alloca_once(builder, VECTOR) for _ in groups] for _ in range(queries)]
        for total in itertools.chain(*sums):
            builder.store(ZERO, total)
        with cgutils.for_range(builder, head_dim) as loop:
            row = builder.mul(loop.index, k_step)
            columns = [load_lanes(builder, group, row, narrow) for group in groups]
            for m, totals in enumerate(sums):
                at = builder.add(builder.mul(head_dim, I64(m)), loop.index)
                _add_products(builder, load_float(builder, nth(builder, q, at)), columns, totals)
        for m, totals in enumerate(sums):
            for i, total in enumerate(totals):
                at = builder.add(builder.mul(s_step, I64(m)), I64(i * LANES))
                store_lanes(builder, builder.load(total), s, at)
        return context.get_dummy_value()

    return types.void(count, half, *[types.int64] * 6), codegen


def _add_products(builder: Any, factor: Any, vectors: list[Any], sums: list[Any]) -> None:
    """sums[i] += factor * vectors[i]."""
    for vector, total in zip(vectors, sums, strict=True):
        builder.store(fma(builder, factor, vector, builder.load(total)), total)


@intrinsic(prefer_literal=True)
def mix_values(
    typingctx: Any,
    count: Any,
    half: Any,
    p: Any,
    p_step: Any,
    values: Any,
    positions: Any,
    head_dim: Any,
    state: Any,
) -> Any:
    """acc[m] = shrink[m] acc[m] + sum_j p[m, j] v[j] for `count` (a literal) queries, in their states.

    p rows are `p_step` floats apart; `values`: addresses of v [16, head_dim], float16 if `half` (a literal), of which
    the first `positions` rows in all are read.
    """
    queries, narrow = count.literal_value, bool(half.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, _, p, p_step, values, positions, head_dim, state = args
        weights = [nth(builder, p, builder.mul(p_step, I64(m))) for m in range(queries)]
        states = [_state(builder, state, head_dim, I64(m)) for m in range(queries)]
        wide = PAIR * LANES
        with cgutils.for_range(builder, builder.sdiv(head_dim, I64(wide))) as part:
            first = builder.mul(part.index, I64(wide))
            _mix_columns(builder, PAIR, narrow, weights, values, positions, head_dim, first, states)
        with builder.if_then(builder.trunc(builder.sdiv(head_dim, I64(LANES)), ir.IntType(1))):
            first = builder.sub(head_dim, I64(LANES))
            _mix_columns(builder, 1, narrow, weights, values, positions, head_dim, first, states)
        return context.get_dummy_value()

    return types.void(count, half, *[types.int64] * 6), codegen


def _mix_columns(
    builder: Any,
    width: int,
    narrow: bool,
    weights: list[Any],
    values: Any,
    positions: Any,
    head_dim: Any,
    first: Any,
    states: list[Any],
) -> None:
    """`mix_values` for `width` x 16 columns of v from column `first` on."""
    columns = [builder.add(first, I64(i * LANES)) for i in range(width)]
    sums = [[cgutils.alloca_once(builder, VECTOR) for _ in columns] for _ in states]
    for state, totals in zip(states, sums, strict=True):
        shrink = load_float(builder, state, 4 * SHRINK)
        for at, total in zip(columns, totals, strict=True):
            old = load_lanes(builder, state, builder.add(at, I64(STATE)))
            builder.store(builder.fmul(old, shrink), total)
    groups = builder.sdiv(builder.add(positions, I64(LANES - 1)), I64(LANES))
    with cgutils.for_range(builder, groups) as group:
        start = builder.mul(group.index, I64(LANES))
        rows = load(builder, I64, nth(builder, values, group.index, 8))
        with cgutils.for_range(builder, _least(builder, builder.sub(positions, start), I64(LANES))) as loop:
            row = builder.mul(loop.index, head_dim)
            vectors = [load_lanes(builder, rows, builder.add(row, at), narrow) for at in columns]
            position = builder.add(start, loop.index)
            for weight, totals in zip(weights, sums, strict=True):
                _add_products(builder, load_float(builder, nth(builder, weight, position)), vectors, totals)
    for state, totals in zip(states, sums, strict=True):
        for at, total in zip(columns, totals, strict=True):
            store_lanes(builder, builder.load(total), state, builder.add(at, I64(STATE)))


def _least(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _state(builder: Any, states: Any, head_dim: Any, index: Any) -> Any:
    """Address of the state of query `index`."""
    return nth(builder, states, builder.mul(index, builder.add(head_dim, I64(STATE))))


@intrinsic(prefer_literal=True)
def softmax_strip(typingctx: Any, vectors: Any, s: Any, low: Any, high: Any, state: Any) -> Any:
    """One online-softmax step of one query, in base 2, over `vectors` (a literal) x 16 scores.

    Replaces s[j] by 2^(s[j] - peak), and by 0 outside low <= j < high; updates the peak and the mass of the
    query's state, and leaves there by how much `mix_values` must shrink the sum of the values.
    """
    count = vectors.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, s, low, high, state = args
        low, high = (splat(builder, builder.trunc(x, I32)) for x in (low, high))
        old = load_float(builder, state, 4 * PEAK)
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
        total = builder.fmul(load(builder, VECTOR, state, 4 * MASS), shrink)
        for i, (score, inside) in enumerate(zip(scores, seen, strict=True)):
            power = builder.select(inside, exp2(builder, builder.fsub(score, new)), ZERO)
            store(builder, power, s, 4 * i * LANES)
            total = builder.fadd(total, power)
        store(builder, total, state, 4 * MASS)
        for place, value in ((PEAK, new), (SHRINK, shrink)):
            store(builder, builder.extract_element(value, I32(0)), state, 4 * place)
        return context.get_dummy_value()

    return types.void(vectors, *[types.int64] * 4), codegen


@intrinsic
def merge_states(typingctx: Any, count: Any, head_dim: Any, states: Any, more: Any) -> Any:
    """Add to the states of `count` queries what `more` says about the same queries and later positions."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count, head_dim, states, more = args
        with cgutils.for_range(builder, count) as query:
            ours, theirs = (_state(builder, x, head_dim, query.index) for x in (states, more))
            old, other = (load_float(builder, x, 4 * PEAK) for x in (ours, theirs))
            new = maximum(builder, old, other)
            share, other_share = (exp2(builder, builder.fsub(peak, new)) for peak in (old, other))
            store(builder, builder.extract_element(new, I32(0)), ours, 4 * PEAK)
            with each_vector(builder, builder.add(head_dim, I64(STATE - MASS))) as behind_mass:
                at = builder.add(behind_mass, I64(MASS))
                added = builder.fmul(load_lanes(builder, theirs, at), other_share)
                store_lanes(builder, fma(builder, load_lanes(builder, ours, at), share, added), ours, at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


@intrinsic
def divide_states(typingctx: Any, count: Any, head_dim: Any, states: Any, out: Any) -> Any:
    """Divide by the softmax's denominator: out [count, head_dim] of the states of `count` queries."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        count, head_dim, states, out = args
        with cgutils.for_range(builder, count) as query:
            state = _state(builder, states, head_dim, query.index)
            mass = across(builder, load(builder, VECTOR, state, 4 * MASS), builder.fadd)
            inverse = builder.fdiv(constant(1.0), mass)
            row = nth(builder, out, builder.mul(query.index, head_dim))
            with each_vector(builder, head_dim) as at:
                mixed = load_lanes(builder, state, builder.add(at, I64(STATE)))
                store_lanes(builder, builder.fmul(mixed, inverse), row, at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen
