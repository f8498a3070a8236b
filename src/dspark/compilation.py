"""Compilations by Numba that are kept on disk, and who waits for one is told so, once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba

from dspark.cache import cache_directory

__all__ = ["compiled", "told_once"]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compiled at its first call, and kept on disk for later processes."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


@contextmanager
def told_once(sources: Path, message: str, report: Callable[[str], None]) -> Iterator[None]:
    """Around loading what is compiled from the .py files in `sources`: `report` gets `message` before a compilation
    that a new version or processor needs, and nothing where Numba's cache has it."""
    marker = cache_directory() / f"{sources.name}-{_key(sources)}"
    if not marker.exists():
        report(message)
    yield
    if not marker.exists():
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _key(sources: Path) -> str:
    """What a compilation is valid for: sources, where they lie, Numba, processor."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.binding.get_host_cpu_name()}".encode())
    for path in sorted(sources.glob("*.py")):
        digest.update(f"{path} {path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
