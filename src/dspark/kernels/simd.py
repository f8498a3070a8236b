"""Vector instructions for Numba kernels: the inner loops of attention as LLVM IR on 16 floats at a time.

Numba cannot promise LLVM that arrays do not overlap, so plain loops this short pay more for checks than for
arithmetic, and its `exp` is a scalar call. Here accumulators live in registers; LLVM maps <16 x float> to
AVX-512, AVX2 or NEON. All addresses are integers (bytes), all data float32, but for keys and values that may be
float16. The arithmetic of one query does not depend on how many are processed together, so results do not depend on
the batch.

NOTE: Numba's disk cache watches the file of the *calling* function. After editing this, touch the callers.
"""

from __future__ import annotations

import os
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = [
    "LANES",
    "MASKED",
    "fetch_add",
    "load_lanes",
    "mix_values",
    "pointer",
    "prefetch",
    "record_pointer",
    "scatter_halves",
    "score_keys",
    "softmax_strip",
    "store_halves",
    "wait_for",
]

LANES = 16
SPINS = 20_000  # about 0.1 ms: longer than any step of a pass on an idle machine
MASKED = -1e30  # finite stand-in for -inf: differences of two stay finite

FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
HALF = ir.HalfType()
HALVES = ir.VectorType(HALF, LANES)
INDEX = ir.VectorType(ir.IntType(32), LANES)
I64 = ir.IntType(64)

# 2^f on [-1/2, 1/2] as sum_i c[i] f^i, the Taylor series: relative error up to 2.2e-7 in float32.
_EXP2 = (1.0, 0.69314718, 0.24022651, 0.05550411, 0.00961813, 0.00133336, 0.00015403)


def at_offset(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """Pointer to a `kind`, `offset` floats behind `address`."""
    where = builder.add(address, builder.mul(offset, I64(4)))
    return builder.inttoptr(where, kind.as_pointer())


def load(builder: Any, address: Any, offset: Any, kind: Any = VECTOR) -> Any:
    return builder.load(at_offset(builder, address, offset, kind), align=4)


def store(builder: Any, value: Any, address: Any, offset: Any) -> None:
    builder.store(value, at_offset(builder, address, offset, value.type), align=4)


def load_lanes(builder: Any, half: bool, address: Any, offset: Any) -> Any:
    """16 floats, `offset` numbers behind `address`, where numbers are float16 (`half`) or float32."""
    if not half:
        return load(builder, address, offset)
    where = builder.add(address, builder.mul(offset, I64(2)))
    return builder.fpext(builder.load(builder.inttoptr(where, HALVES.as_pointer()), align=2), VECTOR)


def splat(builder: Any, scalar: Any, kind: Any = VECTOR) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.IntType(32)(0))
    zeros = ir.Constant(INDEX, [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


def constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return builder.call(
        cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c]
    )


def maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _horizontal_max(builder: Any, vector: Any) -> Any:
    """The maximum in every lane."""
    step = LANES // 2
    while step:
        swap = ir.Constant(INDEX, [lane ^ step for lane in range(LANES)])
        vector = maximum(builder, vector, builder.shuffle_vector(vector, vector, swap))
        step //= 2
    return vector


def exp2(builder: Any, x: Any) -> Any:
    """2^x for x <= 0, at least 2^-126: round to a whole exponent, polynomial for the rest."""
    x = maximum(builder, x, constant(-126.0))
    kind = ir.FunctionType(VECTOR, [VECTOR])
    round_even = cgutils.get_or_insert_function(builder.module, kind, f"llvm.rint.v{LANES}f32")
    whole = builder.call(round_even, [x])
    rest = builder.fsub(x, whole)
    power = constant(_EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        power = fma(builder, power, rest, constant(coefficient))
    biased = builder.add(builder.fptosi(whole, INDEX), ir.Constant(INDEX, [127] * LANES))
    scale = builder.bitcast(builder.shl(biased, ir.Constant(INDEX, [23] * LANES)), VECTOR)
    return builder.fmul(power, scale)


@intrinsic
def pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """`address` as a pointer to values of the type of `like`, for `carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), codegen


@intrinsic
def fetch_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at `address` atomically; returns what it was. Orders memory for both sides."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


def record_pointer(kind: Any) -> Any:
    """A function address -> pointer to records of the Numba type `kind`, for `carray`."""

    @intrinsic
    def cast(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    return cast


@intrinsic
def wait_for(typingctx: Any, address: Any, amount: Any) -> Any:
    """Spin until the int64 at `address` is at least `amount`, giving way to other threads after a while."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = builder.inttoptr(args[0], I64.as_pointer())
        spins = cgutils.alloca_once_value(builder, I64(0))
        check, again, done = (builder.append_basic_block(f"wait_{n}") for n in ("check", "again", "done"))
        builder.branch(check)
        builder.position_at_end(check)
        seen = builder.load_atomic(where, "acquire", 8)
        builder.cbranch(builder.icmp_signed(">=", seen, args[1]), done, again)
        builder.position_at_end(again)
        count = builder.add(builder.load(spins), I64(1))
        builder.store(count, spins)
        if os.name == "posix":
            with builder.if_then(builder.icmp_signed(">", count, I64(SPINS))):
                kind = ir.FunctionType(ir.IntType(32), [])
                builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        builder.branch(check)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


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
