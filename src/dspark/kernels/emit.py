"""LLVM IR of single instructions for the product kernels: vectors of 16 lanes, addresses as integers (bytes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features

from dspark.kernels.simd import FLOAT, I64, LANES, VECTOR

__all__ = [
    "BYTES",
    "FEATURES",
    "HALVES",
    "I32",
    "WORDS",
    "ZERO",
    "by_count",
    "call",
    "fma",
    "load",
    "load_float",
    "prefetch",
    "splat",
    "store",
]

FEATURES = frozenset((config.CPU_FEATURES or get_host_cpu_features()).split(","))  # type: ignore[attr-defined]  # "+avx2", ...

I32 = ir.IntType(32)
HALVES = ir.VectorType(ir.HalfType(), LANES)
WORDS = ir.VectorType(I32, LANES)
BYTES = ir.VectorType(ir.IntType(8), LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)


def load(builder: Any, kind: Any, address: Any, offset: int = 0, align: int = 4) -> Any:
    where = builder.add(address, I64(offset))
    return builder.load(builder.inttoptr(where, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any, offset: int = 0, align: int = 4) -> None:
    where = builder.add(address, I64(offset))
    builder.store(value, builder.inttoptr(where, value.type.as_pointer()), align=align)


def prefetch(builder: Any, address: Any, offset: int) -> None:
    """Ask for a cache line: hardware prefetching stops at the end of a page, and a tile is not much longer."""
    where = builder.inttoptr(builder.add(address, I64(offset)), ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [where, I32(0), I32(3), I32(1)])


def splat(builder: Any, scalar: Any) -> Any:
    """The scalar in all 16 lanes."""
    kind = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(WORDS, [0] * LANES))


def call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.v{LANES}f32", VECTOR, [a, b, c])


def load_float(builder: Any, address: Any, offset: int = 0) -> Any:
    """One float in all 16 lanes."""
    return splat(builder, load(builder, FLOAT, address, offset))


def by_count(builder: Any, value: Any, least: int, most: int, each: Callable[[int], None]) -> None:
    """Run each(count) compiled for the count that `value` turns out to be, least .. most."""
    after = builder.append_basic_block("counted")
    switch = builder.switch(value, after)
    for count in range(least, most + 1):
        case = builder.append_basic_block(f"count_{count}")
        switch.add_case(I64(count), case)
        builder.position_at_end(case)
        each(count)
        builder.branch(after)
    builder.position_at_end(after)
