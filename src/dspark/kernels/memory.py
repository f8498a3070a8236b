"""Memory that Numba kernels are given as addresses, and the counters in it that threads share."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]
from numba.core import cgutils, types
from numba.extending import intrinsic

from dspark.kernels.simd import I32, I64, call

__all__ = ["doubles", "fetch_add", "floats", "integers", "record_pointer", "wait_for"]

SPINS = 20_000  # about 0.1 ms: longer than any step of a pass on an idle machine


@intrinsic
def pointer(typingctx: Any, address: Any, like: Any) -> Any:
    """`address` as a pointer to values of the type of `like`, for `carray`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), codegen


@njit(inline="always")
def floats(address: Any, count: Any) -> Any:
    """`count` float32 numbers at `address`."""
    return carray(pointer(address, np.float32(0)), count)  # type: ignore[call-arg]


@njit(inline="always")
def doubles(address: Any, count: Any) -> Any:
    """`count` float64 numbers at `address`."""
    return carray(pointer(address, np.float64(0)), count)  # type: ignore[call-arg]


@njit(inline="always")
def integers(address: Any, count: Any) -> Any:
    """`count` int64 numbers at `address`."""
    return carray(pointer(address, np.int64(0)), count)  # type: ignore[call-arg]


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
                call(builder, "sched_yield", I32, [])
        builder.branch(check)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
