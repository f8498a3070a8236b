"""Vector instructions for Numba kernels: LLVM IR on 16 floats at a time, and what threads share.

Numba cannot promise LLVM that arrays do not overlap, so plain loops this short pay more for checks than for
arithmetic, and its `exp` is a scalar call. Here accumulators live in registers; LLVM maps <16 x float> to
AVX-512, AVX2 or NEON. All addresses are integers (bytes), offsets count floats.

NOTE: Numba's disk cache watches the file of the *calling* function. After editing this, touch the callers.
"""

from __future__ import annotations

import os
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = ["LANES", "fetch_add", "pointer", "record_pointer", "wait_for"]

LANES = 16
SPINS = 20_000  # about 0.1 ms: longer than any step of a pass on an idle machine

FLOAT = ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
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
