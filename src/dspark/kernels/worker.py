"""Machine code of a Numba worker: a C function of one address, to be called or handed to threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cfunc, types

from dspark.compilation import kept_compilations
from dspark.kernels.parallel import WORKER

__all__ = ["Worker", "load_worker"]


@dataclass(frozen=True)
class Worker:
    """`work` runs it here, `address` is for `parallel`. `keep` owns the code."""

    work: Any
    address: int
    keep: Any


@cache
def load_worker(function: Callable[[Any], None], call_type: Any) -> Worker:
    """Compile (seconds), or read from Numba's cache on disk (tens of milliseconds); once in a process.

    Args:
        function: takes a pointer to records of the Numba type `call_type`.
    """
    with kept_compilations():
        compiled = cfunc(types.void(types.CPointer(call_type)), cache=True)(function)
    address = int(compiled.address or 0)
    return Worker(WORKER(address), address, compiled)
