"""A list of small operations that runs in one call, inside one parallel region.

Called one by one from Python, the dozen operations between the products of a decoder layer take as long as
reading its weights. Here they are steps of a program that is made once; see `program_numba` for what a step can do.
Products and attention are those of `lowbit` and `attention`, and like theirs a row's result is bitwise the same
alone, in any batch and with any number of threads.

A step works on the rows of one *group*: a drafter's program has one for the context it catches up with, one for
its blocks, and one for each slot of them. How many rows a group has is said at each run; none leaves its steps out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.compilation import compiled
from dspark.kernels.attention_numba import CALL as ATTENTION_CALL
from dspark.kernels.lowbit import LowBitLinear
from dspark.kernels.lowbit_numba import CALL as PRODUCT_CALL
from dspark.kernels.parallel import parallel
from dspark.kernels.program_numba import (
    ATTEND,
    CHOOSE,
    EMBED,
    GATHER,
    NORM,
    PASS,
    PASS_TYPE,
    PRODUCT,
    ROTARY,
    STEP,
    SWIGLU,
    program_worker,
)
from dspark.kernels.records import TILE
from dspark.kernels.worker import load_worker

__all__ = [
    "Confidence",
    "Program",
    "Rotation",
    "Rows",
    "Step",
    "attend",
    "choose",
    "compile_worker",
    "embed",
    "gather",
    "norm",
    "product",
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
    group: int = 0

    def of(self, group: int) -> Step:
        """The same for the rows of another group."""
        return replace(self, group=group)


@dataclass(frozen=True)
class Rows:
    """A group's rows in one run; those that are rotated state positions and slots, [count] int64."""

    count: int
    positions: Tensor | None = None
    slots: Tensor | None = None


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


def embed(table: LowBitLinear, ids: Tensor, out: Tensor) -> Step:
    """out [N, in] = rows `ids` [N] int64 of the weight of `table`, dequantised."""
    call = table.call_fields()
    fields = {"kind": EMBED, "x": call["records"], "x_step": call["blocks"] * call["record_bytes"]}
    fields |= {"size": call["blocks"], "bits": table.bits, "index": ids.data_ptr()}
    return Step({**fields, "out": out.data_ptr(), "out_step": out.shape[1]}, 1)


def gather(
    x: Tensor, index: Tensor | None = None, out: Tensor | None = None, codes: Tensor | None = None
) -> Step:
    """Rows of x [n, size] that `index` [N] int64 names, or the first N: to `out`, and rounded to 8 bits to `codes`
    [N, code_bytes] uint8 (see `integers_numba`)."""
    size = x.shape[1]
    fields = {"kind": GATHER, "x": x.data_ptr(), "x_step": size, "size": size, "index": _at(index)}
    return Step({**fields, "out": _at(out), "out_step": size, "codes": _at(codes)}, 1)


@dataclass(frozen=True)
class Confidence:
    """What a choice's confidence is computed from: weight [H + r] over a row's hidden state and the token before it."""

    weight: Tensor
    bias: float
    hidden: Tensor  # [n, H], rows as those of the scores
    embedding: Tensor | None  # [V, r]
    previous: Tensor  # [N] int64
    out: Tensor  # [N]


def choose(
    scores: Tensor,
    size: int,
    index: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    vocab: Tensor | None = None,
    confidence: Confidence | None = None,
) -> Step:
    """out [N] int64 = vocab[argmax(scores[index] + bias)] over the first `size` columns, the first of equals."""
    fields: dict[str, int | float] = {
        "kind": CHOOSE,
        "x": scores.data_ptr(),
        "x_step": scores.shape[1],
        "size": size,
        "index": index.data_ptr(),
        "out": out.data_ptr(),
        "y": _at(bias),
        "out_step": 0 if bias is None else bias.shape[1],
        "vocab": _at(vocab),
    }
    if (c := confidence) is not None:
        fields |= {"confidence": c.out.data_ptr(), "weight": c.weight.data_ptr(), "bias": c.bias}
        fields |= {"hidden": c.hidden.data_ptr(), "hidden_size": c.hidden.shape[1]}
        fields |= {"embedding": _at(c.embedding), "previous": c.previous.data_ptr()}
        fields |= {"embedding_size": 0 if c.embedding is None else c.embedding.shape[1]}
    return Step(fields, 1)


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

    `steps` is the array of their records, in order, for what differs from pass to pass; `cut` [steps, 3] int64 says how
    each is cut into units of work: its group, units, and whether so many a row or in all.
    """

    def __init__(self, steps: Sequence[Step], shape: Rotation) -> None:
        products = [step for step in steps if step.product is not None]
        layers = [step.product for step in products if step.product is not None]
        self._weights = np.array([layer.in_features * layer.out_features for layer in layers])
        self.steps = np.zeros(len(steps), dtype=STEP)
        self.cut = np.array([(step.group, step.units, step.per_row) for step in steps], dtype=np.int64)
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
        self._call_of = np.cumsum(self.steps["kind"] == PRODUCT) - 1
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

    def direct(self, number: int, out: Tensor) -> None:
        """Have a step write to `out` from now on."""
        self.steps["out"][number] = out.data_ptr()
        if self.steps["kind"][number] == PRODUCT:
            self._calls["out"][self._call_of[number]] = out.data_ptr()

    def run(self, groups: Sequence[Rows], attention_units: int = 0) -> None:
        """Run over the rows of each group; their positions and slots are contiguous."""
        rows = np.array([_address(rows) for rows in groups], dtype=np.int64)
        work = _set_rows(
            self.steps, self._calls, self._counters, self.cut, self._weights, rows, attention_units
        )
        threads, address = torch.get_num_threads(), self._pass.ctypes.data
        worker = load_worker(program_worker, PASS_TYPE)
        if threads == 1 or work < PARALLEL_WORK:
            worker.work(address)
        else:
            parallel()(worker.address, address, threads)


def _address(rows: Rows) -> tuple[int, int, int]:
    """Count, and where positions and slots lie."""
    for side in (rows.positions, rows.slots):
        assert side is None or (side.is_contiguous() and len(side) == rows.count)
    return rows.count, _at(rows.positions), _at(rows.slots)


@compiled
def _set_rows(
    steps: Any,
    calls: Any,
    counters: np.ndarray,
    cut: np.ndarray,
    weights: np.ndarray,
    rows: np.ndarray,
    units: int,
) -> int:
    """Cut the steps for a run over `rows` [groups, 3] and `units` of attention; returns weights x rows in it.

    `calls` and `weights` are those of the products.
    """
    product, work = 0, 0
    counters[:] = 0
    for i in range(len(steps)):
        count, positions, slots = rows[cut[i, 0]]
        kind = steps[i]["kind"]
        if kind == ATTEND:
            steps[i]["units"] = units
        elif cut[i, 2]:
            steps[i]["units"] = count * cut[i, 1]
        else:
            steps[i]["units"] = cut[i, 1] if count else 0
        if kind == PRODUCT:
            calls[product]["rows"] = count
            work += count * weights[product]
            product += 1
        elif kind == ROTARY:
            steps[i]["positions"] = positions
            steps[i]["slots"] = slots
    return work
