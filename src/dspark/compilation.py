"""Compilations by Numba that are kept on disk, and who waits for one is told so, once."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba

from dspark.cache import cache_directory

__all__ = ["compiled", "kept_compilations", "told_once"]

Function = TypeVar("Function", bound=Callable[..., Any])

# Of functions that are compiled into each other across files.
_SOURCES = ("kernels/*.py", "schedule/*.py", "randomness.py")
_KEPT = 8  # states of the sources whose compilations are kept


def compiled(function: Function) -> Function:
    """Compiled at its first call, and kept on disk for later processes."""
    with kept_compilations():
        return cast(Function, numba.njit(cache=True, nogil=True)(function))


@contextmanager
def kept_compilations() -> Iterator[None]:
    """What is decorated with `cache=True` inside is kept in a directory for this very state of the sources.

    Numba itself watches the file of the function that is called, and not those of the functions that it calls: after
    a change in one of them it would go on with what it compiled before.
    """
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = str(_directory() or before)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


@contextmanager
def told_once(name: str, message: str, report: Callable[[str], None]) -> Iterator[None]:
    """Around loading what is compiled: `report` gets `message` before a compilation that a new version or processor
    needs, and nothing where it is kept already.

    `name`: of the part that is loaded.
    """
    directory = _directory()
    marker = (
        directory / f"{name}.complete" if directory is not None else cache_directory() / f"{name}-{_key()}"
    )
    if not marker.exists():
        report(message)
    yield
    if not marker.exists():
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


@cache
def _directory() -> Path | None:
    """Where compilations are kept: in $NUMBA_CACHE_DIR, else beside the sources; None where that cannot be written,
    and Numba finds a place of its own."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    base = Path(chosen) if chosen else Path(__file__).parent / "__pycache__"
    directory = base / f"compiled-{_key()}"
    if not directory.is_dir():
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        others = sorted(base.glob("compiled-*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in others[_KEPT:]:
            shutil.rmtree(old, ignore_errors=True)
    return directory if os.access(directory, os.W_OK) else None


@cache
def _key() -> str:
    """What a compilation is valid for: sources, where they lie, Numba, processor."""
    root = Path(__file__).parent
    digest = hashlib.sha256(f"{root} {numba.__version__} {llvmlite.binding.get_host_cpu_name()}".encode())
    for pattern in _SOURCES:
        for path in sorted(root.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
