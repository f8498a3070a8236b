"""Compile the CPU kernels at a moment of our choosing, and say so when it takes long."""

from __future__ import annotations

from collections.abc import Callable

from dspark.compilation import told_once
from dspark.kernels import attention_cpu, bounds, lowbit, program, slots

__all__ = ["compile_kernels"]


def compile_kernels(report: Callable[[str], None] = lambda message: None) -> None:
    """Compile all kernels, or load them from Numba's cache (0.3 s); idempotent within a process.

    `report` gets a line before the one compilation of about 30 s that a new version or processor needs.
    """
    with told_once("kernels", "compiling the CPU kernels, once (about 30 s) ...", report):
        attention_cpu.compile_workers()
        bounds.compile_checks()
        if lowbit.supports():
            lowbit.compile_worker()
            program.compile_worker()
            slots.compile_loop()
