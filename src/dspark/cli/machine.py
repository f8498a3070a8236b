"""What a measurement depends on: versions and the machine."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["machine", "versions"]


def versions() -> dict[str, str | None]:
    """Versions of dspark and of what computes; None where it is not installed."""
    from dspark import __version__

    return {
        "dspark": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numba", "numpy", "tokenizers")},
    }


def machine() -> dict[str, Any]:
    """Processor, memory (10^9 bytes) and accelerators; `cores` are those that this process may use."""
    import torch

    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory_gb(),
        "cuda": cuda,
        "mps": torch.backends.mps.is_available(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "unknown"


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1)
    except (AttributeError, OSError, ValueError):  # not on Windows
        return None
