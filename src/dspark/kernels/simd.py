"""Vector instructions as LLVM IR, 16 lanes at a time: what kernels are written with where Numba's own code is slow.

Numba cannot promise LLVM that arrays do not overlap, so plain loops this short pay more for checks than for
arithmetic, and its `exp` is a scalar call. Here accumulators live in registers; LLVM maps <16 x float> to
AVX-512, AVX2 or NEON. All addresses are integers (bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features

__all__ = [
    "BYTES",
    "FEATURES",
    "FLOAT",
    "HALF",
    "HALVES",
    "I32",
    "I64",
    "LANES",
    "VECTOR",
    "WORDS",
    "ZERO",
    "across",
    "by_count",
    "call",
    "constant",
    "each_vector",
    "exp2",
    "fma",
    "load",
    "load_float",
    "load_lanes",
    "maximum",
    "nth",
    "prefetch",
    "splat",
    "store",
    "store_lanes",
]

FEATURES = frozenset((config.CPU_FEATURES or get_host_cpu_features()).split(","))  # type: ignore[attr-defined]  # "+avx2", ...

LANES = 16
FLOAT, HALF = ir.FloatType(), ir.HalfType()
I32, I64 = ir.IntType(32), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
HALVES = ir.VectorType(HALF, LANES)
WORDS = ir.VectorType(I32, LANES)
BYTES = ir.VectorType(ir.IntType(8), LANES)

# 2^f on [-1/2, 1/2] as sum_i c[i] f^i, the Taylor series: relative error up to 2.2e-7 in float32.
_EXP2 = (1.0, 0.69314718, 0.24022651, 0.05550411, 0.00961813, 0.00133336, 0.00015403)


def constant(value: float, kind: Any = VECTOR) -> Any:
    """The number in all lanes."""
    return ir.Constant(kind, [value] * LANES)


ZERO = constant(0.0)


def load(builder: Any, kind: Any, address: Any, offset: int = 0, align: int = 4) -> Any:
    """A `kind`, `offset` bytes behind `address`."""
    where = builder.add(address, I64(offset))
    return builder.load(builder.inttoptr(where, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any, offset: int = 0, align: int = 4) -> None:
    where = builder.add(address, I64(offset))
    builder.store(value, builder.inttoptr(where, value.type.as_pointer()), align=align)


def nth(builder: Any, address: Any, index: Any, size: int = 4) -> Any:
    """Address of number `index` of an array of numbers of `size` bytes."""
    return builder.add(address, builder.mul(index, I64(size)))


def load_lanes(builder: Any, address: Any, index: Any, half: bool = False) -> Any:
    """16 numbers from number `index` of an array on, as floats; `half`: they are float16."""
    if half:
        return builder.fpext(load(builder, HALVES, nth(builder, address, index, 2), align=2), VECTOR)
    return load(builder, VECTOR, nth(builder, address, index))


def store_lanes(builder: Any, vector: Any, address: Any, index: Any, half: bool = False) -> None:
    """16 floats to the numbers from number `index` of an array on; `half`: rounded to float16."""
    if half:
        store(builder, builder.fptrunc(vector, HALVES), nth(builder, address, index, 2), align=2)
    else:
        store(builder, vector, nth(builder, address, index))


def load_float(builder: Any, address: Any, offset: int = 0) -> Any:
    """One float in all lanes."""
    return splat(builder, load(builder, FLOAT, address, offset))


def prefetch(builder: Any, address: Any, offset: int = 0, locality: int = 3) -> None:
    """Ask for the cache line at `offset` bytes behind `address`; to the nearest cache, or with 2 to the second."""
    where = builder.inttoptr(builder.add(address, I64(offset)), ir.IntType(8).as_pointer())
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [where, I32(0), I32(locality), I32(1)])  # to read data


def splat(builder: Any, scalar: Any) -> Any:
    """The scalar in all lanes."""
    kind = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), constant(0, WORDS))


def across(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """`combine` over all lanes, in every lane."""
    step = LANES // 2
    while step:
        swap = ir.Constant(WORDS, [lane ^ step for lane in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, swap))
        step //= 2
    return vector


def call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """One of LLVM's own functions, or one that the process has."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call(builder, f"llvm.fma.v{LANES}f32", VECTOR, [a, b, c])


def maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def exp2(builder: Any, x: Any) -> Any:
    """2^x for x <= 0, at least 2^-126: round to a whole exponent, polynomial for the rest."""
    x = maximum(builder, x, constant(-126.0))
    whole = call(builder, f"llvm.rint.v{LANES}f32", VECTOR, [x])
    rest = builder.fsub(x, whole)
    power = constant(_EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        power = fma(builder, power, rest, constant(coefficient))
    biased = builder.add(builder.fptosi(whole, WORDS), constant(127, WORDS))
    scale = builder.bitcast(builder.shl(biased, constant(23, WORDS)), VECTOR)
    return builder.fmul(power, scale)


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


@contextmanager
def each_vector(builder: Any, count: Any) -> Iterator[Any]:
    """Loop over `count` floats a vector at a time; gives the number of its first float."""
    with cgutils.for_range(builder, builder.sdiv(count, I64(LANES))) as loop:
        yield builder.mul(loop.index, I64(LANES))
