# mypy: ignore-errors
"""The filters of one row of logits, compiled: min-p, top-k, top-p, in the order and with the ties of `dspark.sampling`.

A token's *gap* is (largest logit - its logit) / temperature, in float32: its weight is e^-gap. Each filter keeps the
tokens up to some gap: min-p up to -log(min_p), top-k up to the k-th smallest, top-p up to the one at which the weights
reach their share. Nothing is sorted: a bound that surely lies beyond the gap looked for leaves few candidates, and
among those `_reach` finds it digit by digit, which a flat row of 50,000 candidates takes as well.
"""

import math

import numpy as np
from numba import njit

from dspark.kernels.memory import floats
from dspark.kernels.rows import exp_row, keep_near, largest_lanes
from dspark.kernels.simd import LANES

__all__ = ["filtered_row"]

_LOG2_E = math.log2(math.e)
_FAINTEST = 2.0**-126  # weights below are 0
_GROUP = 16 * LANES  # logits whose largest, lane by lane, bound the k-th largest of all
_DIGIT = 10  # bits of a gap that `_reach` looks at in one go


@njit
def filtered_row(x, top, p, size, temperature, top_k, top_p, min_p):
    """p = softmax(x / temperature) of the tokens that the filters keep, 0 elsewhere; p may be x.

    `top` is the largest of the `size` floats x, above -inf. +inf and NaN make the whole row NaN.
    """
    weights, places, gaps = np.empty(size, np.float32), np.empty(size, np.int32), np.empty(size, np.float32)
    total = exp_row(x, top, np.float32(min(_LOG2_E / temperature, 3e38)), weights.ctypes.data, size)
    if not total >= 1:
        floats(p, size)[:] = np.nan
        return
    unit, limit = np.float32(temperature), np.float32(-math.log(max(min_p, _FAINTEST)))
    if top_k > 0:
        limit = _top_k_bound(x, top, unit, size, top_k, limit, places, gaps)
    elif top_p < 1 and min_p == 0:  # all that is beyond weighs less than half of what top-p leaves out
        limit = min(limit, np.float32(math.log(2 * size / ((1 - top_p) * total))))
    count = keep_near(x, top, unit, limit, places.ctypes.data, gaps.ctypes.data, size)
    if 0 < top_k < count:
        limit, _ = _reach(gaps, np.ones(count, np.float32), count, top_k)
    near, kept = _gather(weights, places, gaps[:count], limit)
    if top_p < 1:
        limit, kept = _reach(gaps, near, count, top_p * (total if top_k == 0 and min_p == 0 else kept))
    scale, row = np.float32(1.0 / kept), floats(p, size)
    row[:] = 0
    for i in range(count):
        if gaps[i] <= limit:
            row[places[i]] = near[i] * scale


@njit
def _top_k_bound(x, top, unit, size, top_k, limit, places, gaps):
    """A gap within which at least `top_k` tokens lie, if that many lie within `limit`; else `limit`.

    It is the k-th smallest of some tokens' gaps. `places` and `gaps` are scratch.
    """
    at = gaps.ctypes.data
    lanes = 0
    for first in range(0, size, _GROUP):
        largest_lanes(x + 4 * first, at + 4 * lanes, min(_GROUP, size - first))
        lanes += LANES
    count = keep_near(at, top, unit, limit, places.ctypes.data, at, lanes)
    return limit if count < top_k else _reach(gaps, np.ones(count, np.float32), count, top_k)[0]


@njit
def _reach(gaps, amounts, count, goal):
    """The largest of `count` gaps such that the amounts at all smaller ones sum to less than `goal`; the sum up to it.

    Of floats >= 0 the bits have the order of the numbers: the sums of ever lower digits lead to it.
    """
    keys, sums = gaps.view(np.int32), np.empty(2 << _DIGIT, np.float64)
    before, chosen = 0.0, 0
    for shift in (2 * _DIGIT, _DIGIT, 0):
        base = chosen << _DIGIT
        sums[:] = 0
        for i in range(count):
            digit = (keys[i] >> shift) - base
            if 0 <= digit < len(sums):
                sums[digit] += amounts[i]
        reached = before
        for digit in range(len(sums)):
            if sums[digit] > 0:
                if reached >= goal:
                    break
                chosen, before, reached = base + digit, reached, reached + sums[digit]
    return np.int32(chosen).view(np.float32), reached


@njit(fastmath={"reassoc"})
def _gather(weights, places, gaps, limit):
    """Weights [count] of the candidates, 0 for those beyond `limit`, and their sum."""
    near = np.empty(len(gaps), np.float32)
    for i in range(len(gaps)):
        near[i] = weights[places[i]] if gaps[i] <= limit else 0
    total = 0.0
    for weight in near:
        total += weight
    return near, total
