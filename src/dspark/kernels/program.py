"""A list of small operations that runs in one call, inside one parallel region.

Called one by one from Python, the dozen operations between the products of a decoder layer take as long as
reading its weights. Here they are steps (`steps`) of a program that is made once. Products and attention are those of
`lowbit` and `attention`, and like theirs a row's result is bitwise the same alone, in any batch and with any number of
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.compilation import compiled
from dspark.kernels.attention_numba import CALL as ATTENTION_CALL
from dspark.kernels.lowbit_numba import CALL as PRODUCT_CALL
from dspark.kernels.parallel import parallel
from dspark.kernels.program_numba import ATTEND, LINE, PASS, PASS_TYPE, PRODUCT, ROTARY, STEP, program_worker
from dspark.kernels.steps import Rotation, Step, address
from dspark.kernels.worker import load_worker

__all__ = ["Program", "Rows", "compile_worker"]

FEW_RUNS = 4  # of steps that read little: counters for many threads would take longer to reset than they save
PARALLEL_WORK = 1_000_000  # weights x rows below which waking workers costs more than it saves


def compile_worker() -> None:
    """Compile now rather than at the first call."""
    load_worker(program_worker, PASS_TYPE)
    nothing = np.zeros((1, 3), dtype=np.int64)
    _set_rows(np.zeros(1, STEP), np.zeros(1, PRODUCT_CALL), nothing, nothing, nothing[0], nothing, 0)


@dataclass(frozen=True)
class Rows:
    """A group's rows in one run; those that are rotated state positions and slots, [count] int64."""

    count: int
    positions: Tensor | None = None
    slots: Tensor | None = None


class Program:
    """Steps, ready to run. Memory that they refer to has to outlive it.

    `steps` is the array of their records, in order, for what differs from pass to pass; `cut` [steps, 3] int64 says how
    each is cut into units of work: its group, units, and whether so many a row or in all.
    """

    def __init__(self, steps: Sequence[Step], shape: Rotation) -> None:
        products = [step for step in steps if step.product is not None]
        layers = [step.product for step in products if step.product is not None]
        self._weights = np.array([layer.in_features * layer.out_features for layer in layers], dtype=np.int64)
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
        numbers = self.of_kind(PRODUCT)
        self.steps["ahead"][numbers[:-1]] = self.steps["call"][numbers[1:]]
        self._call_of = np.cumsum(self.steps["kind"] == PRODUCT) - 1
        # Workers take the size of their scratch memory from here.
        self._scratch = np.zeros(1, dtype=ATTENTION_CALL)
        for name in ("heads", "kv_heads", "head_dim"):
            self._scratch[name] = max(1, getattr(shape, name))
        self._pass = np.zeros(1, dtype=PASS)
        self._pass["steps"], self._pass["num_steps"] = self.steps.ctypes.data, len(steps)
        self._pass["attention"] = self._scratch.ctypes.data
        self._argument = self._pass.ctypes.data
        self._pass["cos"], self._pass["sin"] = shape.cos.data_ptr(), shape.sin.data_ptr()
        self._keep = (steps, shape)
        self._threads = 0

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
        threads = torch.get_num_threads()
        if threads != self._threads:
            self._share_among(threads)
        rows = np.array([_place(rows) for rows in groups], dtype=np.int64)
        work = _set_rows(
            self.steps, self._calls, self._counters, self.cut, self._weights, rows, attention_units
        )
        worker = load_worker(program_worker, PASS_TYPE)
        if threads == 1 or work < PARALLEL_WORK:
            worker.work(self._argument)
        else:
            parallel()(worker.address, self._argument, threads)

    def _share_among(self, threads: int) -> None:
        """Cut products into a run for each thread, and make the counters for that."""
        self._threads = threads
        self.steps["runs"] = np.where(self.steps["kind"] == PRODUCT, threads, min(threads, FEW_RUNS))
        lines = 1 + self.steps["runs"]
        self._counters = np.zeros((int(lines.sum()) + 1, LINE // 8), dtype=np.int64)
        self._pass["workers"] = self._counters.ctypes.data
        self.steps["counters"] = self._counters.ctypes.data + LINE * (1 + np.cumsum(lines) - lines)


def _place(rows: Rows) -> tuple[int, int, int]:
    """Count, and where positions and slots lie."""
    for side in (rows.positions, rows.slots):
        assert side is None or (side.is_contiguous() and len(side) == rows.count)
    return rows.count, address(rows.positions), address(rows.slots)


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
