"""Run a compiled function on several threads at once: on PyTorch's own, where possible.

A second thread pool, such as Numba's, would fight the spinning workers of PyTorch's OpenMP pool for the cores
(and Numba's default one may not be entered from two Python threads). So functions are handed to the OpenMP
library that PyTorch loaded; without one (macOS, Windows) to plain Python threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

__all__ = ["WORKER", "parallel", "python_threads"]

WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # what is run: C function of one address


@cache
def parallel() -> Callable[[int, int, int], object]:
    """run(function, argument, threads): call function(argument) on so many threads at once and wait.

    `function` is the address of a `WORKER`; it must be right for any number of threads, one included.
    """
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        fork = ctypes.CDLL(str(path)).GOMP_parallel
        fork.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        fork.restype = None
        return lambda function, argument, threads: fork(function, argument, threads, 0)
    return python_threads()


def python_threads() -> Callable[[int, int, int], None]:
    """`parallel` without OpenMP."""
    pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="kernel")

    def run(function: int, argument: int, threads: int) -> None:
        worker = WORKER(function)  # releases the GIL while it runs
        others = [pool.submit(worker, argument) for _ in range(threads - 1)]
        worker(argument)
        for other in others:
            other.result()

    return run
