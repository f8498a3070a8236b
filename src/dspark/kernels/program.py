"""A list of small operations that runs in one call, inside one parallel region.

Called one by one from Python, the dozen operations between the products of a decoder layer take as long as
reading its weights. Here they are steps of a program that is made once; see `program_numba` for what a step can do.
Products and attention are those of `lowbit` and `attention`, and like theirs a row's result is bitwise the same
alone, in any batch and with any number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.kernels.attention_numba import CALL as ATTENTION_CALL
from dspark.kernels.lowbit import LowBitLinear
from dspark.kernels.lowbit_numba import CALL as PRODUCT_CALL
from dspark.kernels.parallel import parallel
from dspark.kernels.program_numba import (
    ATTEND,
    NORM,
    PASS,
    PASS_TYPE,
    PRODUCT,
    QUANTIZE,
    ROTARY,
    STEP,
    SWIGLU,
    program_worker,
)
from dspark.kernels.records import TILE
from dspark.kernels.worker import load_worker

__all__ = [
    "Program",
    "Rotation",
    "Step",
    "attend",
    "compile_worker",
    "norm",
    "product",
    "quantize",
    "rotate",
    "swiglu",
    "width",
]

PARALLEL_WORK = 1_000_000  # weights x rows below which waking workers costs more than it saves
COUNTER_STEP = 8  # int64 from one step's counters to the next: a cache line


def compile_worker() -> None:
    """Compile now rather than at the first call."""
    load_worker(program_worker, PASS_TYPE)


@dataclass(frozen=True)
class Step:
    """One step: its record, units of work for each row (or in all, for products), and the call it refers to."""

    fields: Mapping[str, int | float]
    units: int
    per_row: bool = True
    product: LowBitLinear | None = None


@dataclass(frozen=True)
class Rotation:
    """Shapes of a rotary step: of the q, k and v heads that lie side by side in a row."""

    heads: int
    kv_heads: int
    head_dim: int
    cos: Tensor  # [max_context, head_dim / 2]
    sin: Tensor


def width(product: LowBitLinear) -> int:
    """Floats from one row of a product's output to the next: its last tile is filled up."""
    return -(-product.out_features // TILE) * TILE


def product(layer: LowBitLinear, x: Tensor, out: Tensor) -> Step:
    """out [N, width] = x [N, in] W^T; of an integer layer x are the codes [N, code_bytes] uint8."""
    assert out.shape[1] == width(layer)
    assert x.shape[1] == (layer.code_bytes if layer.integer else layer.in_features)
    fields = {"kind": PRODUCT, "x": x.data_ptr(), "out": out.data_ptr()}
    return Step(fields, layer.call_fields()["tiles"], per_row=False, product=layer)


def quantize(x: Tensor, codes: Tensor) -> Step:
    """codes [N, code_bytes] uint8 of x [N, size], rounded to 8 bits: see `integers_numba`."""
    fields = {"kind": QUANTIZE, "x": x.data_ptr(), "x_step": x.shape[1], "size": x.shape[1]}
    return Step({**fields, "codes": codes.data_ptr()}, 1)


def norm(
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    x: Tensor | None = None,
    add: Tensor | None = None,
    codes: Tensor | None = None,
) -> Step:
    """x += add; out = RMSNorm(x), [N, H]; codes of `out`. `x` and `out` may be given later, pass by pass."""
    step = out if out is not None else x
    fields: dict[str, int | float] = {
        "kind": NORM,
        "x": _at(x),
        "y": _at(add),
        "out": _at(out),
        "weight": weight.data_ptr(),
        "codes": _at(codes),
        "eps": eps,
    }
    fields |= {"size": len(weight), "x_step": step.shape[1] if step is not None else len(weight)}
    return Step({**fields, "out_step": add.shape[1] if add is not None else 0}, 1)


def rotate(
    x: Tensor,
    column: int,
    shape: Rotation,
    keys: Tensor,
    values: Tensor,
    q: Tensor | None = None,
    bias: Tensor | None = None,
    norms: tuple[Tensor | None, Tensor | None] = (None, None),
    eps: float = 0.0,
) -> Step:
    """Heads of x [N, ...] from `column` on: + bias; q and k normed and rotated; k and v to their slots, q to `q`."""
    fields: dict[str, int | float] = {
        "kind": ROTARY,
        "x": x.data_ptr() + 4 * column,
        "x_step": x.shape[1],
        "out": _at(q),
        "y": _at(bias),
    }
    fields |= {"q_norm": _at(norms[0]), "k_norm": _at(norms[1]), "eps": eps}
    fields |= {
        "k_pool": keys.data_ptr(),
        "v_pool": values.data_ptr(),
        "block_size": keys.shape[-1],
        "kv_bytes": keys.itemsize,
    }
    fields |= {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return Step(fields, shape.heads + 2 * shape.kv_heads)


def attend(call: np.ndarray) -> Step:
    """Attention of an `attention_numba.CALL` that is filled in pass by pass."""
    return Step({"kind": ATTEND, "call": call.ctypes.data}, 0, per_row=False)


def swiglu(x: Tensor, out: Tensor, codes: Tensor | None = None) -> Step:
    """out [N, I] = silu(gate) up, for gate and up side by side in x; and its codes."""
    fields = {"kind": SWIGLU, "x": x.data_ptr(), "x_step": x.shape[1], "codes": _at(codes)}
    return Step({**fields, "out": out.data_ptr(), "out_step": out.shape[1], "size": out.shape[1]}, 1)


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Program:
    """Steps, ready to run. Memory that they refer to has to outlive it.

    `steps` is the array of their records, in order, for what differs from pass to pass.
    """

    def __init__(self, steps: Sequence[Step], shape: Rotation) -> None:
        products = [step.product for step in steps if step.product is not None]
        self.num_weights = sum(p.in_features * p.out_features for p in products)
        self.steps = np.zeros(len(steps), dtype=STEP)
        self._units = np.array([step.units for step in steps])
        self._per_row = np.array([step.per_row for step in steps])
        self._calls = np.zeros(len(products), dtype=PRODUCT_CALL)
        calls = iter(range(len(products)))
        for record, step in zip(self.steps, steps, strict=True):
            for name, value in step.fields.items():
                record[name] = value
            if step.product is not None:
                call = self._calls[(i := next(calls)) : i + 1]
                for name, value in step.product.call_fields().items():
                    call[name] = value
                call["x"], call["out"] = record["x"], record["out"]
                record["call"] = call.ctypes.data
        self._counters = np.zeros((len(steps), COUNTER_STEP), dtype=np.int64)
        self.steps["next_unit"] = self._counters.ctypes.data + 8 * COUNTER_STEP * np.arange(len(steps))
        self.steps["finished"] = self.steps["next_unit"] + 8
        # Workers take the size of their scratch memory from here.
        self._scratch = np.zeros(1, dtype=ATTENTION_CALL)
        for name in ("heads", "kv_heads", "head_dim"):
            self._scratch[name] = max(1, getattr(shape, name))
        self._pass = np.zeros(1, dtype=PASS)
        self._pass["steps"], self._pass["num_steps"] = self.steps.ctypes.data, len(steps)
        self._pass["attention"] = self._scratch.ctypes.data
        self._pass["cos"], self._pass["sin"] = shape.cos.data_ptr(), shape.sin.data_ptr()
        self._keep = (steps, shape)

    def of_kind(self, kind: int) -> np.ndarray:
        """Numbers of the steps of a kind."""
        return np.flatnonzero(self.steps["kind"] == kind)

    def run(self, rows: int, positions: Tensor, slots: Tensor, attention_units: int = 0) -> None:
        """Run over `rows` rows at `positions` [rows], whose keys and values go to `slots` [rows]; int64."""
        assert positions.is_contiguous()
        assert slots.is_contiguous()
        units = np.where(self._per_row, self._units * rows, self._units)
        self.steps["units"] = np.where(self.steps["kind"] == ATTEND, attention_units, units)
        self._calls["rows"] = rows
        self._counters[:] = 0
        self._pass["positions"], self._pass["slots"] = positions.data_ptr(), slots.data_ptr()
        threads, address = torch.get_num_threads(), self._pass.ctypes.data
        compiled = load_worker(program_worker, PASS_TYPE)
        if threads == 1 or rows * self.num_weights < PARALLEL_WORK:
            compiled.work(address)
        else:
            parallel()(compiled.address, address, threads)
