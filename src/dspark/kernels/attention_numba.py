# mypy: ignore-errors
"""The compiled kernel behind `attention_cpu`: online softmax over the blocks of the pool, in place.

It takes one structure of arguments (`CALL`), as `store_numba` does. Numba types what is in it, so nothing here is
annotated.
"""

import numpy as np
from numba import carray, from_dtype, njit

from dspark.kernels.attention_simd import (
    MASKED,
    mix_values,
    prefetch,
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
    "q k v out k_pool v_pool query_start context_lens tables items partial partial_stats slots "  # addresses
    "next_unit finished "  # addresses of counters
    "num_units num_rows num_requests heads kv_heads head_dim block_size max_blocks kv_bytes causal window"
)
CALL = np.dtype([*((name, np.int64) for name in _INTEGERS.split()), ("scale", np.float64)])
CALL_TYPE = from_dtype(CALL)
# `kv_bytes`: of a number in the pool: 4 for float32, 2 for float16. Sums are float32 either way.


@njit
def _load_queries(call, item, kv_head, queries):
    """Copy the item's queries to [rows x group, head_dim], scaled for base-2 exponentials."""
    group, dim = call.heads // call.kv_heads, call.head_dim
    q = floats(call.q, call.num_rows * call.heads * dim)
    scale = np.float32(call.scale * 1.4426950408889634)
    for row in range(item[1], item[2]):
        source = (row * call.heads + kv_head * group) * dim
        target = (row - item[1]) * group * dim
        for i in range(group * dim):
            queries[target + i] = q[source + i] * scale


@njit(inline="always")
def _micro(count, half, call, blocks, strip_blocks, low, high, q, s, stats, acc):
    """One strip for `count` queries: scores, softmax, values. `low`, `high` [count] count from its start."""
    dim, size = call.head_dim, call.block_size
    highest = 0
    for m in range(count):
        highest = max(highest, high[m])
    for b in range(strip_blocks):
        if b * size < highest:
            for j in range(0, size, LANES):
                at = call.k + call.kv_bytes * (blocks[b] * dim * size + j)
                score_keys(count, half, q, dim, at, size, s + 4 * (b * size + j), STRIP)
    for m in range(count):
        shrink = softmax_strip(
            VECTORS, s + 4 * m * STRIP, low[m], high[m], stats + 128 * m, stats + 128 * m + 64
        )
        if shrink != np.float32(1.0):
            values = floats(acc + 4 * m * dim, dim)
            for i in range(dim):
                values[i] *= shrink
    for b in range(strip_blocks):
        seen = min(size, highest - b * size)
        if seen > 0:
            at = call.v + call.kv_bytes * blocks[b] * dim * size
            mix_values(count, half, s + 4 * b * size, STRIP, at, dim, seen, acc)


@njit(inline="always")
def _queries(half, call, blocks, strip_blocks, low, high, num_queries, q, s, stats, acc):
    """One strip for all queries, six, three or one at a time."""
    row_bytes = 4 * call.head_dim
    m = 0
    while m < num_queries:
        left = num_queries - m
        count = 6 if left >= 6 else (3 if left >= 3 else 1)
        if high[m + count - 1] > 0 and low[m] < STRIP:
            at = (q + m * row_bytes, stats + m * 128, acc + m * row_bytes)
            if count == 6:
                _micro(6, half, call, blocks, strip_blocks, low[m:], high[m:], at[0], s, at[1], at[2])
            elif count == 3:
                _micro(3, half, call, blocks, strip_blocks, low[m:], high[m:], at[0], s, at[1], at[2])
            else:
                _micro(1, half, call, blocks, strip_blocks, low[m:], high[m:], at[0], s, at[1], at[2])
        m += count


@njit
def _float_queries(call, blocks, strip_blocks, low, high, num_queries, q, s, stats, acc):
    _queries(0, call, blocks, strip_blocks, low, high, num_queries, q, s, stats, acc)


@njit
def _half_queries(call, blocks, strip_blocks, low, high, num_queries, q, s, stats, acc):
    _queries(1, call, blocks, strip_blocks, low, high, num_queries, q, s, stats, acc)


@njit
def _strip(call, item, kv_head, start, scratch):
    """All queries of an item over positions start .. start + STRIP."""
    queries, scores, stats, acc, blocks, low, high = scratch
    group, size = call.heads // call.kv_heads, call.block_size
    first = integers(call.query_start, call.num_requests + 1)[item[0]]
    stop = integers(call.query_start, call.num_requests + 1)[item[0] + 1]
    context = integers(call.context_lens, call.num_requests)[item[0]]
    tables = integers(call.tables, call.num_requests * call.max_blocks)
    num_queries = (item[2] - item[1]) * group
    for m in range(num_queries):
        position = context + item[1] + m // group - first
        high[m] = (position + 1 if call.causal else context + stop - first) - start
        low[m] = max(0, position + 1 - call.window) - start
    strip_blocks = min(STRIP // size, call.max_blocks - start // size)
    for b in range(strip_blocks):
        blocks[b] = tables[item[0] * call.max_blocks + start // size + b] * call.kv_heads + kv_head
    behind = start // size + STRIP // size
    for b in range(behind, min(behind + STRIP // size, call.max_blocks)):
        block = tables[item[0] * call.max_blocks + b] * call.kv_heads + kv_head
        block_bytes = call.kv_bytes * call.head_dim * size
        prefetch(call.k + block * block_bytes, block_bytes // 4)
        prefetch(call.v + block * block_bytes, block_bytes // 4)
    q, s, st, a = queries.ctypes.data, scores.ctypes.data, stats.ctypes.data, acc.ctypes.data
    if call.kv_bytes == 2:
        _half_queries(call, blocks, strip_blocks, low, high, num_queries, q, s, st, a)
    else:
        _float_queries(call, blocks, strip_blocks, low, high, num_queries, q, s, st, a)


@njit
def _merge(acc, stats, more, peak, mass):
    """Add a chunk's (more, peak, mass) to the running (acc, stats = [peak, mass]) of one query."""
    new = max(stats[0], peak)
    old_share, new_share = np.exp2(stats[0] - new), np.exp2(peak - new)
    stats[0], stats[1] = new, stats[1] * old_share + mass * new_share
    for i in range(len(acc)):
        acc[i] = acc[i] * old_share + more[i] * new_share


@njit
def _finish(call, row, head, acc, mass):
    """Divide by the softmax's denominator and write the output of one query."""
    dim = call.head_dim
    out = floats(call.out + 4 * (row * call.heads + head) * dim, dim)
    inverse = np.float32(1.0) / mass
    for i in range(dim):
        out[i] = acc[i] * inverse


@njit
def _merge_tile(call, item, kv_head, acc, stats):
    """Merge the partial results of a tile, in order of chunks, once the last of them is written."""
    dim, group, rows = call.head_dim, call.heads // call.kv_heads, item[2] - item[1]
    for row in range(rows):
        for head in range(kv_head * group, (kv_head + 1) * group):
            for chunk in range(item[5]):
                at = (item[6] + chunk * rows + row) * call.heads + head
                more = floats(call.partial + 4 * at * dim, dim)
                seen = floats(call.partial_stats + 8 * at, 2)
                if chunk == 0:
                    acc[:dim] = more
                    stats[:2] = seen
                else:
                    _merge(acc[:dim], stats[:2], more, seen[0], seen[1])
            _finish(call, item[1] + row, head, acc, stats[1])


@njit
def _attend_item(call, item, kv_head, scratch, running):
    """One unit of work: the chunks of one item for the query heads of one KV head."""
    queries, _, stats, acc, _, _, _ = scratch
    running_acc, running_stats = running
    dim, group, rows = call.head_dim, call.heads // call.kv_heads, item[2] - item[1]
    _load_queries(call, item, kv_head, queries)
    for chunk in range(item[3], item[4]):
        acc[: rows * group * dim] = np.float32(0)
        stats[: rows * group * 32] = np.float32(0)
        for m in range(rows * group):
            stats[32 * m] = np.float32(MASKED)
        for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, STRIP):
            if start < call.max_blocks * call.block_size:
                _strip(call, item, kv_head, start, scratch)
        for m in range(rows * group):
            row, head = m // group, kv_head * group + m % group
            mass = np.float32(0)
            for lane in range(LANES):
                mass += stats[32 * m + 16 + lane]
            mine, state = running_acc[m * dim : (m + 1) * dim], running_stats[2 * m : 2 * m + 2]
            if item[4] - item[3] < item[5]:  # others work on this tile
                at = (item[6] + chunk * rows + row) * call.heads + head
                mine = floats(call.partial + 4 * at * dim, dim)
                state = floats(call.partial_stats + 8 * at, 2)
            if chunk == item[3]:
                mine[:] = acc[m * dim : (m + 1) * dim]
                state[0], state[1] = stats[32 * m], mass
            else:
                _merge(mine, state, acc[m * dim : (m + 1) * dim], stats[32 * m], mass)
    if item[4] - item[3] == item[5]:
        for m in range(rows * group):
            head = kv_head * group + m % group
            _finish(call, item[1] + m // group, head, running_acc[m * dim :], running_stats[2 * m + 1])


@njit
def attention_scratch(call):
    """A worker's memory for `attend_unit`."""
    size = TILE_ROWS * (call.heads // call.kv_heads)
    strip = (
        np.empty(size * call.head_dim, np.float32),  # queries
        np.empty(6 * STRIP, np.float32),  # scores, then probabilities
        np.empty(size * 32, np.float32),  # a query's peak (1 of 16 floats) and partial masses (16)
        np.empty(size * call.head_dim, np.float32),  # accumulated values
        np.empty(STRIP // LANES, np.int64),  # blocks of the strip, in units of [head_dim, block_size]
        np.empty(size, np.int64),  # first visible position, relative to the strip
        np.empty(size, np.int64),  # end of the visible positions
    )
    running = (np.empty(size * call.head_dim, np.float32), np.empty(size * 2, np.float32))
    return strip, running


@njit
def attend_unit(call, unit, scratch, running):
    """Unit `unit` of `num_units`: one item for one KV head. Whoever ends a tile merges its chunks."""
    number, kv_head = unit // call.kv_heads, unit % call.kv_heads
    item = integers(call.items + 64 * number, 8)
    _attend_item(call, item, kv_head, scratch, running)
    if item[4] - item[3] < item[5]:
        counter = call.finished + 8 * (item[7] * call.kv_heads + kv_head)
        if fetch_add(counter, 1) == item[5] - 1:
            _merge_tile(call, item, kv_head, running[0], running[1])
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
