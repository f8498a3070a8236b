# mypy: ignore-errors
"""The distribution of one row and a draw from it, for the loops of `distributions` and the steps of `program_numba`."""

import math

import numpy as np
from numba import njit

from dspark.kernels.filters_numba import filtered_row
from dspark.kernels.memory import doubles, floats
from dspark.kernels.rows import exp_row, largest_sum, multiply_row

__all__ = ["PARAMETERS", "distribution_row", "draw_row"]

PARAMETERS = (
    4  # of a row, float64: temperature (0 = greedy), top_k (0 = off), top_p (1 = off), min_p (0 = off)
)

CHUNK = 512  # probabilities that a draw sums up before it looks where it is
_LOG2_E = math.log2(math.e)


@njit
def distribution_row(x, p, size, parameters):
    """p = softmax(x / temperature) of what the filters keep, `size` floats each, p may be x.

    `parameters` is the address of the row's PARAMETERS. One-hot at the largest, the first of equals, where the
    temperature is 0; at 0 where all of x is -inf. At a temperature NaN and +inf spread over the row.
    """
    row = doubles(parameters, PARAMETERS)
    temperature, top_k, top_p, min_p = row[0], row[1], row[2], row[3]
    best = largest_sum(x, 0, size)
    top = floats(x, size)[best]
    if temperature == 0.0:
        _one_hot(p, best, size)
    elif top == -np.inf:  # nothing is allowed, or nothing is a number
        values = floats(x, size)
        broken = False
        for v in range(size):
            broken |= values[v] != values[v]
        if broken:
            floats(p, size)[:] = np.nan
        else:
            _one_hot(p, 0, size)
    elif top_k > 0 or top_p < 1 or min_p > 0:
        filtered_row(x, top, p, size, temperature, top_k, top_p, min_p)
    else:
        total = exp_row(x, top, np.float32(min(_LOG2_E / temperature, 3e38)), p, size)
        multiply_row(p, np.float32(1.0 / total), p, size)


@njit
def _one_hot(p, at, size):
    values = floats(p, size)
    values[:] = 0.0
    values[at] = 1.0


@njit
def draw_row(p, size, u):
    """The first token of the row p whose cumulative mass exceeds u times the total; see `dspark.sampling.sample`."""
    row = floats(p, size)
    chunks = -(-size // CHUNK)
    before = np.empty(chunks + 1, np.float64)
    before[0] = 0.0
    for c in range(chunks):
        parts = np.zeros(8, np.float64)  # sums that do not wait for each other
        for v in range(c * CHUNK, min(size, (c + 1) * CHUNK), 8):
            for lane in range(8):
                parts[lane] += row[v + lane]
        before[c + 1] = before[c] + parts.sum()
    total = before[chunks]
    point = min(u * total, np.nextafter(total, 0.0))
    c = 0
    while c < chunks - 1 and before[c + 1] <= point:
        c += 1
    # The chunk's sum may round differently when it is taken one by one: go on behind it, and keep the last token
    # that has any probability at all.
    reached, last = before[c], 0
    for v in range(c * CHUNK, size):
        if row[v] > 0:
            last = v
            reached += row[v]
            if reached > point:
                break
    if last == 0 and not row[0] > 0:  # rounding left nothing in this chunk or behind it
        for v in range(c * CHUNK):
            if row[v] > 0:
                last = v
    return last
