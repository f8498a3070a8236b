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
    score_keys,
    softmax_strip,
)
from dspark.kernels.memory import fetch_add, floats, integers
from dspark.kernels.rows import multiply_row
from dspark.kernels.simd import FEATURES, LANES

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
MOST_QUERIES = (
    6 if "+avx512f" in FEATURES else 3
)  # at once: with pairs of vectors, their sums fit into registers

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
        multiply_row(source, scale, queries + 4 * (row - item[1]) * numbers, numbers)


@njit
def _visible(call, item, low, high):
    """The positions low .. high that each of the item's queries sees."""
    group, m = call.heads // call.kv_heads, 0
    starts = integers(call.query_start, call.num_requests + 1)
    context = integers(call.context_lens, call.num_requests)[item[0]]
    first, stop = starts[item[0]], starts[item[0] + 1]
    lows, highs = integers(low, (item[2] - item[1]) * group), integers(high, (item[2] - item[1]) * group)
    for row in range(item[1], item[2]):
        position = context + row - first
        for _ in range(group):
            lows[m] = max(0, position + 1 - call.window)
            highs[m] = position + 1 if call.causal else context + stop - first
            m += 1


@njit(inline="always")
def _micro(count, half, call, start, low, high, memory, q, state):
    """One strip for `count` queries: scores, softmax, values. They see positions low[m] .. high[m]."""
    s, _, keys, values, _, _ = memory
    lows, highs = integers(low, count), integers(high, count)
    seen = min(STRIP, highs[count - 1] - start)
    for group in range(0, (seen + LANES - 1) // LANES, PAIR):
        at = s + 4 * group * LANES
        score_keys(count, half, q, call.head_dim, keys + 8 * group, call.block_size, at, STRIP)
    for m in range(count):
        at = state + 4 * m * (STATE + call.head_dim)
        softmax_strip(VECTORS, s + 4 * m * STRIP, lows[m] - start, highs[m] - start, at)
    mix_values(count, half, s, STRIP, values, seen, call.head_dim, state)


@njit(inline="always")
def _queries(half, call, start, num_queries, memory, states):
    """One strip for all queries: six (if there are registers for them), three or one at a time."""
    _, q, _, _, low, high = memory
    m = 0
    while m < num_queries:
        left = num_queries - m
        count = MOST_QUERIES if left >= MOST_QUERIES else (3 if left >= 3 else 1)
        if integers(high, num_queries)[m + count - 1] > start and integers(low, m + 1)[m] < start + STRIP:
            bounds = low + 8 * m, high + 8 * m
            query, state = q + 4 * m * call.head_dim, states + 4 * m * (STATE + call.head_dim)
            if count == 6:
                _micro(6, half, call, start, bounds[0], bounds[1], memory, query, state)
            elif count == 3:
                _micro(3, half, call, start, bounds[0], bounds[1], memory, query, state)
            else:
                _micro(1, half, call, start, bounds[0], bounds[1], memory, query, state)
        m += count


@njit
def _float_queries(call, start, num_queries, memory, states):
    _queries(0, call, start, num_queries, memory, states)


@njit
def _half_queries(call, start, num_queries, memory, states):
    _queries(1, call, start, num_queries, memory, states)


@njit
def _find_blocks(call, request, kv_head, start, stop, memory):
    """Addresses of the keys and values of positions start .. stop, 16 at a time."""
    keys, values = integers(memory[2], VECTORS + 1), integers(memory[3], VECTORS)
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
def _attend_chunk(call, item, kv_head, chunk, memory, states):
    """All queries of an item over one chunk of positions, into their states."""
    num_queries = (item[2] - item[1]) * (call.heads // call.kv_heads)
    numbers = floats(states, num_queries * (STATE + call.head_dim))
    numbers[:] = np.float32(0)
    for m in range(num_queries):
        numbers[m * (STATE + call.head_dim)] = np.float32(MASKED)
    lowest, highest = integers(memory[4], 1)[0], integers(memory[5], num_queries)[num_queries - 1]
    for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, highest), STRIP):
        stop = start + STRIP
        if stop > lowest:
            _find_blocks(call, item[0], kv_head, start, min(stop, highest), memory)
            _ask_ahead(call, item[0], kv_head, stop, min(stop + STRIP, highest))
            if call.kv_bytes == 2:
                _half_queries(call, start, num_queries, memory, states)
            else:
                _float_queries(call, start, num_queries, memory, states)


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
    """A worker's memory for `attend_unit`, to be divided by `_divide`."""
    size, dim = TILE_ROWS * (call.heads // call.kv_heads), call.head_dim
    numbers = np.empty(MOST_QUERIES * STRIP + size * (dim + 2 * (STATE + dim)), np.float32)
    return numbers, np.empty(2 * VECTORS + 1 + 2 * size, np.int64)


@njit
def _divide(call, num_queries, numbers, places):
    """Addresses in a worker's memory, as counting references to arrays would cost more than a strip.

    Of an item: the strip's scores, then probabilities [MOST_QUERIES, STRIP]; queries; addresses of the strip's keys and
    values, 16 positions each; first position and end that each query sees; then its states so far and those of a chunk.
    """
    scores, keys = numbers.ctypes.data, places.ctypes.data
    queries, values = scores + 4 * MOST_QUERIES * STRIP, keys + 8 * (VECTORS + 1)
    states, low = queries + 4 * num_queries * call.head_dim, values + 8 * VECTORS
    more = states + 4 * num_queries * (STATE + call.head_dim)
    return (scores, queries, keys, values, low, low + 8 * num_queries), states, more


@njit
def attend_unit(call, unit, numbers, places):
    """Unit `unit` of `num_units`: one item for one KV head. Whoever ends a tile merges its chunks.

    `numbers`, `places`: of `attention_scratch`.
    """
    number, kv_head = unit // call.kv_heads, unit % call.kv_heads
    item = integers(call.items + 64 * number, 8)
    num_queries = (item[2] - item[1]) * (call.heads // call.kv_heads)
    memory, states, more = _divide(call, num_queries, numbers, places)
    _load_queries(call, item, kv_head, memory[1])
    _visible(call, item, memory[4], memory[5])
    if item[4] - item[3] == item[5]:
        _attend_chunk(call, item, kv_head, 0, memory, states)
        for chunk in range(1, item[5]):
            _attend_chunk(call, item, kv_head, chunk, memory, more)
            merge_states(num_queries, call.head_dim, states, more)
        _write(call, item, kv_head, states)
        return
    _attend_chunk(call, item, kv_head, item[3], memory, _partial(call, item, kv_head, item[3]))
    counter = call.finished + 8 * (item[7] * call.kv_heads + kv_head)
    if fetch_add(counter, 1) == item[5] - 1:
        states = _partial(call, item, kv_head, 0)
        for chunk in range(1, item[5]):
            merge_states(num_queries, call.head_dim, states, _partial(call, item, kv_head, chunk))
        _write(call, item, kv_head, states)
        integers(counter, 1)[0] = 0


def attend_worker(pointer_to_call):
    """Draw units of work until there are none. Any number of workers may run it on the same call."""
    call = carray(pointer_to_call, 1)[0]
    unit = fetch_add(call.next_unit, 1)
    if unit >= call.num_units:
        return
    numbers, places = attention_scratch(call)
    while unit < call.num_units:
        attend_unit(call, unit, numbers, places)
        unit = fetch_add(call.next_unit, 1)
