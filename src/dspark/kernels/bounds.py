"""Whether indices lie inside what they index: the compiled path trusts them. Compiled, since every pass asks."""

from __future__ import annotations

import numpy as np

from dspark.compilation import compiled

__all__ = ["compile_checks", "inside", "largest", "longest_total"]


@compiled
def inside(values: np.ndarray, size: int) -> bool:
    """Whether all of `values` [n] int64 lie in 0 .. size - 1."""
    for value in values:  # noqa: SIM110 - a loop compiles to one
        if not 0 <= value < size:
            return False
    return True


@compiled
def largest(values: np.ndarray) -> int:
    """The largest of `values`, int64 of any shape, 0 at the least."""
    most = 0
    for value in values.flat:
        most = max(most, value)
    return most


@compiled
def longest_total(query_start: np.ndarray, context_lens: np.ndarray) -> int:
    """Most positions that a request has once its rows are stored."""
    most = 0
    for r in range(len(context_lens)):
        most = max(most, context_lens[r] + query_start[r + 1] - query_start[r])
    return most


def compile_checks() -> None:
    """Compile now rather than at the first call."""
    none = np.zeros(1, dtype=np.int64)
    inside(none, 1)
    largest(none)
    largest(none[None])
    longest_total(np.array([0, 1]), none)
