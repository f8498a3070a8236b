# mypy: ignore-errors
"""The compiled kernel behind `attention_cpu`: online softmax over the blocks of the pool, in place.

It takes one structure of arguments (`CALL`), as `store_numba` does. Numba types what is in it, so nothing here is
annotated.
"""

import numpy as np
from numba import carray, from_dtype, njit

from dspark.kernels.attention_simd import (
    MASKED,
    PAIR,
    STATE,
    divide_states,
    merge_states,
    mix_values,
    prefetch,
    scale_floats,
    score_keys,
    softmax_strip,
)
from dspark.kernels.memory import fetch_add, floats, integers
from dspark.kernels.simd import LANES

__all__ = [
    "CALL",
    "CALL_TYPE",
    "CHUNK",
    "STRIP",
    "TILE_ROWS",
    "attend_unit",
    "attend_worker",
    "attention_scratch",
]

TILE_ROWS = 16
VECTORS = 4
STRIP = VECTORS * LANES
CHUNK = 256

_INTEGERS = (
    "q k v out k_pool v_pool query_start context_lens tables items partial slots "  # addresses
    "next_unit finished "  # addresses of counters
    "num_units num_rows num_requests heads kv_heads head_dim block_size max_blocks kv_bytes causal window"
)
CALL = np.dtype([*((name, np.int64) for name in _INTEGERS.split()), ("scale", np.float64)])
CALL_TYPE = from_dtype(CALL)
# `kv_bytes`: of a number in the pool: 4 for float32, 2 for float16. Sums are float32 either way.


@njit
def _load_queries(call, item, kv_head, queries):
    """Copy the item's queries to [rows x group, head_dim], scaled for base-2 exponentials."""
    group = call.heads // call.kv_heads
    scale = np.float32(call.scale * 1.4426950408889634)
    numbers = group * call.head_dim
    for row in range(item[1], item[2]):
        source = call.q + 4 * (row * call.heads + kv_head * group) * call.head_dim
        scale_floats(source, scale, queries + 4 * (row - item[1]) * numbers, numbers)


@njit
def _visible(call, item, low, high):
    """The visible positions low .. high of each of the item's queries."""
    group, m = call.heads // call.kv_heads, 0
    starts = integers(call.query_start, call.num_requests + 1)
    context = integers(call.context_lens, call.num_requests)[item[0]]
    first, stop = starts[item[0]], starts[item[0] + 1]
    for row in range(item[1], item[2]):
        position = context + row - first
        for _ in range(group):
            low[m] = max(0, position + 1 - call.window)
            high[m] = position + 1 if call.causal else context + stop - first
            m += 1


@njit(inline="always")
def _micro(count, half, call, start, low, high, keys, values, q, s, state):
    """One strip for `count` queries: scores, softmax, values. `low`, `high` [count] are what they see."""
    seen = min(STRIP, high[count - 1] - start)
    for group in range(0, (seen + LANES - 1) // LANES, PAIR):
        at = s + 4 * group * LANES
        score_keys(count, half, q, call.head_dim, keys + 8 * group, call.block_size, at, STRIP)
    for m in range(count):
        at = state + 4 * m * (STATE + call.head_dim)
        softmax_strip(VECTORS, s + 4 * m * STRIP, low[m] - start, high[m] - start, at)
    mix_values(count, half, s, STRIP, values, seen, call.head_dim, state)


@njit(inline="always")
def _queries(half, call, start, num_queries, low, high, keys, values, q, s, state):
    """One strip for all queries, six, three or one at a time."""
    m = 0
    while m < num_queries:
        left = num_queries - m
        count = 6 if left >= 6 else (3 if left >= 3 else 1)
        if high[m + count - 1] > start and low[m] < start + STRIP:
            mine = (q + 4 * m * call.head_dim, state + 4 * m * (STATE + call.head_dim))
            if count == 6:
                _micro(6, half, call, start, low[m:], high[m:], keys, values, mine[0], s, mine[1])
            elif count == 3:
                _micro(3, half, call, start, low[m:], high[m:], keys, values, mine[0], s, mine[1])
            else:
                _micro(1, half, call, start, low[m:], high[m:], keys, values, mine[0], s, mine[1])
        m += count


@njit
def _float_queries(call, start, num_queries, low, high, keys, values, q, s, state):
    _queries(0, call, start, num_queries, low, high, keys, values, q, s, state)


@njit
def _half_queries(call, start, num_queries, low, high, keys, values, q, s, state):
    _queries(1, call, start, num_queries, low, high, keys, values, q, s, state)


@njit
def _find_blocks(call, request, kv_head, start, stop, keys, values):
    """Addresses of the keys and values of positions start .. stop, 16 at a time."""
    table = integers(call.tables + 8 * request * call.max_blocks, call.max_blocks)
    dim, size, group = call.head_dim, call.block_size, 0
    for place in range(start // size, (stop + size - 1) // size):
        block = (table[place] * call.kv_heads + kv_head) * dim * size
        for offset in range(0, size, LANES):
            keys[group] = call.k + call.kv_bytes * (block + offset)
            values[group] = call.v + call.kv_bytes * (block + offset * dim)
            group += 1
    keys[group] = keys[group - 1]  # keys are taken in pairs


@njit
def _ask_ahead(call, request, kv_head, start, stop):
    """Have the blocks of positions start .. stop brought near."""
    table = integers(call.tables + 8 * request * call.max_blocks, call.max_blocks)
    numbers = call.head_dim * call.block_size
    for place in range(start // call.block_size, (stop + call.block_size - 1) // call.block_size):
        at = call.kv_bytes * (table[place] * call.kv_heads + kv_head) * numbers
        prefetch(call.k + at, call.kv_bytes * numbers // 4)
        prefetch(call.v + at, call.kv_bytes * numbers // 4)


@njit
def _attend_chunk(call, item, kv_head, chunk, scratch, state):
    """All queries of an item over one chunk of positions, into their states."""
    queries, scores, low, high, keys, values = scratch
    num_queries = (item[2] - item[1]) * (call.heads // call.kv_heads)
    numbers = floats(state, num_queries * (STATE + call.head_dim))
    numbers[:] = np.float32(0)
    for m in range(num_queries):
        numbers[m * (STATE + call.head_dim)] = np.float32(MASKED)
    highest = high[num_queries - 1]
    k, v, q, s = keys.ctypes.data, values.ctypes.data, queries.ctypes.data, scores.ctypes.data
    for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, highest), STRIP):
        stop = start + STRIP
        if stop > low[0]:
            _find_blocks(call, item[0], kv_head, start, min(stop, highest), keys, values)
            _ask_ahead(call, item[0], kv_head, stop, min(stop + STRIP, highest))
            if call.kv_bytes == 2:
                _half_queries(call, start, num_queries, low, high, k, v, q, s, state)
            else:
                _float_queries(call, start, num_queries, low, high, k, v, q, s, state)


@njit
def _write(call, item, kv_head, state):
    """Write the item's rows of the output."""
    dim, group = call.head_dim, call.heads // call.kv_heads
    for row in range(item[1], item[2]):
        out = call.out + 4 * (row * call.heads + kv_head * group) * dim
        divide_states(group, dim, state + 4 * (row - item[1]) * group * (STATE + dim), out)


@njit
def _partial(call, item, kv_head, chunk):
    """Address of the states that a chunk of a tile ends with, if several workers share the tile."""
    group, rows = call.heads // call.kv_heads, item[2] - item[1]
    at = (item[6] + chunk * rows) * call.heads + kv_head * rows * group
    return call.partial + 4 * at * (STATE + call.head_dim)


@njit
def attention_scratch(call):
    """A worker's memory for `attend_unit`."""
    size = TILE_ROWS * (call.heads // call.kv_heads)
    strip = (
        np.empty(size * call.head_dim, np.float32),  # queries
        np.empty(6 * STRIP, np.float32),  # scores, then probabilities
        np.empty(size, np.int64),  # first visible position of a query
        np.empty(size, np.int64),  # end of its visible positions
        np.empty(VECTORS + 1, np.int64),  # addresses of the strip's keys, 16 positions each
        np.empty(VECTORS + 1, np.int64),  # and of its values
    )
    return strip, np.empty(2 * size * (STATE + call.head_dim), np.float32)  # states: so far, of one chunk


@njit
def attend_unit(call, unit, scratch, running):
    """Unit `unit` of `num_units`: one item for one KV head. Whoever ends a tile merges its chunks."""
    number, kv_head = unit // call.kv_heads, unit % call.kv_heads
    item = integers(call.items + 64 * number, 8)
    num_queries = (item[2] - item[1]) * (call.heads // call.kv_heads)
    _load_queries(call, item, kv_head, scratch[0].ctypes.data)
    _visible(call, item, scratch[2], scratch[3])
    if item[4] - item[3] == item[5]:
        state = running.ctypes.data
        more = state + 4 * num_queries * (STATE + call.head_dim)
        for chunk in range(item[5]):
            _attend_chunk(call, item, kv_head, chunk, scratch, more if chunk else state)
            if chunk:
                merge_states(num_queries, call.head_dim, state, more)
        _write(call, item, kv_head, state)
        return
    _attend_chunk(call, item, kv_head, item[3], scratch, _partial(call, item, kv_head, item[3]))
    counter = call.finished + 8 * (item[7] * call.kv_heads + kv_head)
    if fetch_add(counter, 1) == item[5] - 1:
        state = _partial(call, item, kv_head, 0)
        for chunk in range(1, item[5]):
            merge_states(num_queries, call.head_dim, state, _partial(call, item, kv_head, chunk))
        _write(call, item, kv_head, state)
        integers(counter, 1)[0] = 0


def attend_worker(pointer_to_call):
    """Draw units of work until there are none. Any number of workers may run it on the same call."""
    call = carray(pointer_to_call, 1)[0]
    unit = fetch_add(call.next_unit, 1)
    if unit >= call.num_units:
        return
    scratch, running = attention_scratch(call)
    while unit < call.num_units:
        attend_unit(call, unit, scratch, running)
        unit = fetch_add(call.next_unit, 1)
