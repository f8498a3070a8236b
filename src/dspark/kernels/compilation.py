"""Compile the CPU kernels at a moment of our choosing, and say so when it takes long."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding
import numba

from dspark.cache import cache_directory
from dspark.kernels import attention_cpu, lowbit, program

__all__ = ["compile_kernels"]


def compile_kernels(report: Callable[[str], None] = lambda message: None) -> None:
    """Compile all kernels, or load them from Numba's cache (0.3 s); idempotent within a process.

    `report` gets a line before the one compilation of about 30 s that a new version or processor needs.
    """
    marker = cache_directory() / f"kernels-{_key()}"
    if not marker.exists():
        report("compiling the CPU kernels, once (about 30 s) ...")
    attention_cpu.compile_workers()
    if lowbit.supports():
        lowbit.compile_worker()
        program.compile_worker()
    if not marker.exists():
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _key() -> str:
    """What a compilation is valid for: kernel sources, where they lie, Numba, processor."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.binding.get_host_cpu_name()}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(f"{path} {path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
