"""Starting fast: what slows down imports and loading, put off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["nothing_collected"]


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No garbage collection inside, and what is alive behind it is never searched for garbage again.

    Importing PyTorch and Numba makes a quarter of a million objects that stay: searching them over and over takes a
    twelfth of the start.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
