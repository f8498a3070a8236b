"""Vector instructions on whole rows of floats: what a decoder layer does between its matrix products.

Counts are multiples of `LANES`; addresses are integers (bytes); see `simd`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from dspark.kernels.simd import (
    FLOAT,
    I32,
    I64,
    LANES,
    VECTOR,
    WORDS,
    ZERO,
    call,
    constant,
    each_vector,
    exp2,
    fma,
    load_lanes,
    maximum,
    nth,
    splat,
    store_lanes,
)

__all__ = [
    "add_rows",
    "dot_rows",
    "exp_row",
    "keep_near",
    "largest_lanes",
    "largest_sum",
    "multiply_row",
    "rotate_row",
    "scale_row",
    "square_sum",
    "swiglu_row",
]

_LOG2_E = 1.4426950408889634


@intrinsic
def add_rows(typingctx: Any, x: Any, y: Any, out: Any, count: Any) -> Any:
    """out = x + y."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, y, out, count = args
        with each_vector(builder, count) as at:
            store_lanes(
                builder, builder.fadd(load_lanes(builder, x, at), load_lanes(builder, y, at)), out, at
            )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _dot(builder: Any, x: Any, y: Any, count: Any) -> Any:
    """sum_i x[i] y[i], lane by lane and then across the lanes."""
    sums = cgutils.alloca_once_value(builder, ZERO)
    builder.store(ZERO, sums)
    with each_vector(builder, count) as at:
        value = fma(builder, load_lanes(builder, x, at), load_lanes(builder, y, at), builder.load(sums))
        builder.store(value, sums)
    total, lanes = FLOAT(0.0), builder.load(sums)
    for lane in range(LANES):
        total = builder.fadd(total, builder.extract_element(lanes, I32(lane)))
    return total


@intrinsic
def square_sum(typingctx: Any, x: Any, count: Any) -> Any:
    """sum_i x[i]^2."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, count = args
        return _dot(builder, x, x, count)

    return types.float32(*[types.int64] * 2), codegen


@intrinsic
def dot_rows(typingctx: Any, x: Any, y: Any, count: Any) -> Any:
    """sum_i x[i] y[i]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _dot(builder, *args)

    return types.float32(*[types.int64] * 3), codegen


@intrinsic
def largest_sum(typingctx: Any, x: Any, y: Any, count: Any) -> Any:
    """argmax_i x[i] + y[i], the first of equals; 0 if no sum is a number. y may be 0: of x alone."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, y, count = args
        lanes = [ir.Constant(WORDS, list(range(LANES))), constant(0, WORDS)]
        lowest = constant(float("-inf"))
        best, best_at = (cgutils.alloca_once_value(builder, v) for v in (lowest, lanes[1]))
        builder.store(lowest, best)
        builder.store(lanes[0], best_at)
        added = builder.icmp_signed("!=", y, I64(0))
        other = builder.select(added, y, x)  # something to read where there is nothing to add
        with each_vector(builder, count) as at:
            value = load_lanes(builder, x, at)
            value = builder.select(added, builder.fadd(value, load_lanes(builder, other, at)), value)
            here = builder.add(splat(builder, builder.trunc(at, I32)), lanes[0])
            more = builder.fcmp_ordered(">", value, builder.load(best))
            builder.store(builder.select(more, value, builder.load(best)), best)
            builder.store(builder.select(more, here, builder.load(best_at)), best_at)
        values, places = builder.load(best), builder.load(best_at)
        top, place = FLOAT(float("-inf")), I32(0)
        for lane in range(LANES):
            number = I32(lane)
            value, at = builder.extract_element(values, number), builder.extract_element(places, number)
            more = builder.fcmp_ordered(">", value, top)
            first = builder.and_(builder.fcmp_ordered("==", value, top), builder.icmp_signed("<", at, place))
            first = builder.and_(first, builder.fcmp_ordered(">", value, FLOAT(float("-inf"))))
            take = builder.or_(more, first)
            top, place = builder.select(more, value, top), builder.select(take, at, place)
        return builder.sext(place, I64)

    return types.int64(*[types.int64] * 3), codegen


@intrinsic
def largest_lanes(typingctx: Any, x: Any, out: Any, count: Any) -> Any:
    """out[lane] = the largest of x[lane], x[lane + LANES], ..., for each of the LANES lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, out, count = args
        lowest = constant(float("-inf"))
        best = cgutils.alloca_once_value(builder, lowest)
        builder.store(lowest, best)
        with each_vector(builder, count) as at:
            builder.store(maximum(builder, load_lanes(builder, x, at), builder.load(best)), best)
        store_lanes(builder, builder.load(best), out, I64(0))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def keep_near(
    typingctx: Any, x: Any, top: Any, unit: Any, limit: Any, places: Any, gaps: Any, count: Any
) -> Any:
    """Where x lies at most `limit` below `top`, in multiples of `unit`: places (int32) and gaps (top - x) / unit, one
    behind the other, `gaps` may be x; returns how many."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, top, unit, limit, places, gaps, count = args
        far = builder.fmul(builder.fmul(limit, unit), FLOAT(1.000001))  # a vector beyond it needs no division
        top, unit, limit, far = (splat(builder, value) for value in (top, unit, limit, far))
        lanes, mask_kind = ir.Constant(WORDS, list(range(LANES))), ir.IntType(LANES)
        kept = cgutils.alloca_once_value(builder, I64(0))
        builder.store(I64(0), kept)
        with each_vector(builder, count) as at:
            below = builder.fadd(builder.fsub(top, load_lanes(builder, x, at)), ZERO)  # -0 becomes 0
            close = builder.bitcast(builder.fcmp_ordered("<=", below, far), mask_kind)
            with builder.if_then(builder.icmp_signed("!=", close, mask_kind(0))):
                gap, number = builder.fdiv(below, unit), builder.load(kept)
                near = builder.fcmp_ordered("<=", gap, limit)
                here = builder.add(splat(builder, builder.trunc(at, I32)), lanes)
                for kind, values, out in (("f32", gap, gaps), ("i32", here, places)):
                    pointer = builder.inttoptr(nth(builder, out, number), values.type.element.as_pointer())
                    name = f"llvm.masked.compressstore.v{LANES}{kind}"
                    call(builder, name, ir.VoidType(), [values, pointer, near])
                found = call(builder, f"llvm.ctpop.i{LANES}", mask_kind, [builder.bitcast(near, mask_kind)])
                builder.store(builder.add(number, builder.zext(found, I64)), kept)
        return builder.load(kept)

    kinds = [types.int64, types.float32, types.float32, types.float32, *[types.int64] * 3]
    return types.int64(*kinds), codegen


@intrinsic
def scale_row(typingctx: Any, x: Any, factor: Any, w: Any, out: Any, count: Any) -> Any:
    """out = x factor w."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, factor, w, out, count = args
        factor = splat(builder, factor)
        with each_vector(builder, count) as at:
            scaled = builder.fmul(load_lanes(builder, x, at), factor)
            store_lanes(builder, builder.fmul(scaled, load_lanes(builder, w, at)), out, at)
        return context.get_dummy_value()

    kinds = [types.int64, types.float32, types.int64, types.int64, types.int64]
    return types.void(*kinds), codegen


@intrinsic
def multiply_row(typingctx: Any, x: Any, factor: Any, out: Any, count: Any) -> Any:
    """out = x factor; out may be x."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, factor, out, count = args
        factor = splat(builder, factor)
        with each_vector(builder, count) as at:
            store_lanes(builder, builder.fmul(load_lanes(builder, x, at), factor), out, at)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), codegen


@intrinsic
def exp_row(typingctx: Any, x: Any, top: Any, scale: Any, out: Any, count: Any) -> Any:
    """out = 2^((x - top) scale), for top the largest and scale > 0; returns their sum, in float64.

    Below 2^-126 it is 0, also for x = -inf. NaN stays NaN, in the sum too.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, top, scale, out, count = args
        top, scale = splat(builder, top), splat(builder, scale)
        wide = ir.VectorType(ir.DoubleType(), LANES)
        total = cgutils.alloca_once_value(builder, ir.Constant(wide, [0.0] * LANES))
        with each_vector(builder, count) as at:
            power = builder.fmul(builder.fsub(load_lanes(builder, x, at), top), scale)
            counts = builder.fcmp_ordered(">=", power, constant(-126.0))
            rest = builder.select(builder.fcmp_unordered("uno", power, power), power, ZERO)
            value = builder.select(counts, exp2(builder, power), rest)
            store_lanes(builder, value, out, at)
            builder.store(builder.fadd(builder.load(total), builder.fpext(value, wide)), total)
        lanes, result = builder.load(total), ir.Constant(ir.DoubleType(), 0.0)
        for lane in range(LANES):
            result = builder.fadd(result, builder.extract_element(lanes, I32(lane)))
        return result

    kinds = [types.int64, types.float32, types.float32, types.int64, types.int64]
    return types.float64(*kinds), codegen


@intrinsic
def rotate_row(typingctx: Any, x: Any, cos: Any, sin: Any, out: Any, half: Any) -> Any:
    """Rotate one head by halves: out[i] = x[i] cos[i] - x[h + i] sin[i], out[h + i] = x[h + i] cos[i] + x[i] sin[i]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, cos, sin, out, half = args
        with each_vector(builder, half) as at:
            behind = builder.add(at, half)
            first, second = load_lanes(builder, x, at), load_lanes(builder, x, behind)
            c, s = load_lanes(builder, cos, at), load_lanes(builder, sin, at)
            low = builder.fsub(builder.fmul(first, c), builder.fmul(second, s))
            high = builder.fadd(builder.fmul(second, c), builder.fmul(first, s))
            store_lanes(builder, low, out, at)
            store_lanes(builder, high, out, behind)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def swiglu_row(typingctx: Any, gate: Any, up: Any, out: Any, count: Any) -> Any:
    """out = gate sigmoid(gate) up, with e^-|gate| so that nothing overflows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate, up, out, count = args
        with each_vector(builder, count) as at:
            g = load_lanes(builder, gate, at)
            size = call(builder, f"llvm.fabs.v{LANES}f32", VECTOR, [g])
            power = exp2(builder, builder.fmul(size, constant(-_LOG2_E)))
            positive = builder.fcmp_ordered(">=", g, ZERO)
            share = builder.select(positive, constant(1.0), power)
            sigmoid = builder.fdiv(share, builder.fadd(constant(1.0), power))
            value = builder.fmul(builder.fmul(g, sigmoid), load_lanes(builder, up, at))
            store_lanes(builder, value, out, at)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen
