"""The compiled path of `attention`: float32 on a CPU, online softmax over blocks in place.

A tile is up to 16 rows of one request; its work for one KV head covers all grouped query heads. Positions are
taken in strips of 64 (scores, softmax, values while the strip is in the first-level cache) and chunks of 256.
Chunks are always computed apart and merged in order, by one worker or by several: results are the same to the
last bit whatever else is in the batch and however many threads work.

Threads are those of PyTorch's own OpenMP pool (`GOMP_parallel` of the library PyTorch loaded): a second pool,
such as Numba's, would fight the first one's spinning workers for the cores. Workers draw units of work from an
atomic counter, so a core that is busy elsewhere does not hold up the rest.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import carray, cfunc, from_dtype, njit, types

from dspark.kernels.simd import LANES, MASKED, fetch_add, mix_values, pointer, score_keys, softmax_strip

__all__ = ["Work", "attend", "store", "supports"]

TILE_ROWS = 16
VECTORS = 4
STRIP = VECTORS * LANES
CHUNK = 256
ENOUGH_TILES = 16  # with fewer, chunks of one tile are spread over the workers
PARALLEL_WORK = 6000  # query rows x heads x positions below which waking workers costs more than it saves

_INTEGERS = (
    "q k v out query_start context_lens tables items partial partial_stats slots "  # addresses
    "next_unit finished "  # addresses of counters
    "num_units num_rows num_requests heads kv_heads head_dim block_size max_blocks causal window"
)
_CALL = np.dtype([*((name, np.int64) for name in _INTEGERS.split()), ("scale", np.float64)])
_CALL_TYPE = from_dtype(_CALL)


def supports(head_dim: int, block_size: int) -> bool:
    """Whether rows and blocks fill whole vectors and blocks tile a strip."""
    return head_dim % LANES == 0 and block_size % LANES == 0 and STRIP % block_size == 0


@dataclass(eq=False)
class Work:
    """One forward pass cut into items, and the memory the kernel needs. Serves one pass at a time.

    An item is (request, first row, stop row, first chunk, stop chunk, chunks of its tile, offset of the tile's
    partial results, tile).
    """

    call: np.ndarray  # _CALL [1]: arguments that do not change between layers
    items: np.ndarray  # [items, 8] int64
    amount: int  # sum of rows x positions
    num_partials: int
    keep: tuple[np.ndarray, ...]  # arrays whose addresses are in `call`
    counters: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    partial: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32))

    @staticmethod
    def of(
        query_start: np.ndarray,
        context_lens: np.ndarray,
        tables: np.ndarray,
        slots: np.ndarray,
        causal: bool,
        block_size: int,
    ) -> Work:
        """Arguments as in `AttentionPlan`: contiguous int64 arrays."""
        items, amount, num_partials = _cut(query_start, context_lens, causal)
        call = np.zeros(1, dtype=_CALL)
        arrays = {"query_start": query_start, "context_lens": context_lens, "tables": tables, "items": items}
        for name, array in (*arrays.items(), ("slots", slots)):
            call[name] = array.ctypes.data
        call["num_rows"], call["num_requests"] = query_start[-1], len(context_lens)
        call["block_size"], call["max_blocks"], call["causal"] = block_size, tables.shape[1], causal
        return Work(call, items, amount, num_partials, (query_start, context_lens, tables, items, slots))

    def bind(self, heads: int, kv_heads: int, head_dim: int) -> None:
        """Set the layer's shape. Layers of one shape share the scratch memory."""
        row = self.call[0]
        if (row["heads"], row["kv_heads"], row["head_dim"]) == (heads, kv_heads, head_dim):
            return
        row["heads"], row["kv_heads"], row["head_dim"] = heads, kv_heads, head_dim
        row["num_units"] = len(self.items) * kv_heads
        tiles = int(self.items[-1, 7]) + 1 if len(self.items) else 0
        self.counters = np.zeros(1 + tiles * kv_heads, dtype=np.int64)
        self.partial = np.empty(self.num_partials * heads * (head_dim + 2), dtype=np.float32)
        row["next_unit"] = self.counters.ctypes.data
        row["finished"] = row["next_unit"] + 8
        row["partial"] = self.partial.ctypes.data
        row["partial_stats"] = row["partial"] + 4 * self.num_partials * heads * head_dim


def _cut(query_start: np.ndarray, context_lens: np.ndarray, causal: bool) -> tuple[np.ndarray, int, int]:
    """Items of a pass, the amount of work in them, and how many partial results they leave."""
    tiles: list[tuple[int, int, int, int]] = []  # request, first row, stop row, chunks
    amount = 0
    for r, context in enumerate(context_lens.tolist()):
        start, stop = int(query_start[r]), int(query_start[r + 1])
        for first in range(start, stop, TILE_ROWS):
            last = min(first + TILE_ROWS, stop)
            positions = context + ((last if causal else stop) - start)
            tiles.append((r, first, last, -(-positions // CHUNK)))
            amount += (last - first) * positions
    split = len(tiles) < ENOUGH_TILES
    items: list[tuple[int, ...]] = []
    partials = 0
    for tile, (r, first, last, chunks) in enumerate(tiles):
        if split and chunks > 1:
            items.extend((r, first, last, c, c + 1, chunks, partials, tile) for c in range(chunks))
            partials += chunks * (last - first)
        else:
            items.append((r, first, last, 0, chunks, chunks, 0, tile))
    return np.array(items, dtype=np.int64).reshape(-1, 8), amount, partials


@njit(inline="always")
def _floats(address, count):  # type: ignore[no-untyped-def]
    return carray(pointer(address, np.float32(0)), count)


@njit(inline="always")
def _integers(address, count):  # type: ignore[no-untyped-def]
    return carray(pointer(address, np.int64(0)), count)


@njit
def _load_queries(call, item, kv_head, queries):  # type: ignore[no-untyped-def]
    """Copy the item's queries to [rows x group, head_dim], scaled for base-2 exponentials."""
    group, dim = call.heads // call.kv_heads, call.head_dim
    q = _floats(call.q, call.num_rows * call.heads * dim)
    scale = np.float32(call.scale * 1.4426950408889634)
    for row in range(item[1], item[2]):
        source = (row * call.heads + kv_head * group) * dim
        target = (row - item[1]) * group * dim
        for i in range(group * dim):
            queries[target + i] = q[source + i] * scale


@njit(inline="always")
def _micro(count, call, blocks, strip_blocks, low, high, q, s, stats, acc):  # type: ignore[no-untyped-def]
    """One strip for `count` queries: scores, softmax, values. `low`/`high` are [count], relative to the strip."""
    dim, size = call.head_dim, call.block_size
    highest = 0
    for m in range(count):
        highest = max(highest, high[m])
    for b in range(strip_blocks):
        if b * size < highest:
            for j in range(0, size, LANES):
                at = call.k + 4 * (blocks[b] * dim * size + j)
                score_keys(count, q, dim, at, size, s + 4 * (b * size + j), STRIP)
    for m in range(count):
        shrink = softmax_strip(
            VECTORS, s + 4 * m * STRIP, low[m], high[m], stats + 128 * m, stats + 128 * m + 64
        )
        if shrink != np.float32(1.0):
            values = _floats(acc + 4 * m * dim, dim)
            for i in range(dim):
                values[i] *= shrink
    for b in range(strip_blocks):
        seen = min(size, highest - b * size)
        if seen > 0:
            mix_values(count, s + 4 * b * size, STRIP, call.v + 4 * blocks[b] * dim * size, dim, seen, acc)


@njit
def _strip(call, item, kv_head, start, scratch):  # type: ignore[no-untyped-def]
    """All queries of an item over positions start .. start + STRIP."""
    queries, scores, stats, acc, blocks, low, high = scratch
    group, size = call.heads // call.kv_heads, call.block_size
    first = _integers(call.query_start, call.num_requests + 1)[item[0]]
    stop = _integers(call.query_start, call.num_requests + 1)[item[0] + 1]
    context = _integers(call.context_lens, call.num_requests)[item[0]]
    tables = _integers(call.tables, call.num_requests * call.max_blocks)
    num_queries = (item[2] - item[1]) * group
    for m in range(num_queries):
        position = context + item[1] + m // group - first
        high[m] = (position + 1 if call.causal else context + stop - first) - start
        low[m] = max(0, position + 1 - call.window) - start
    strip_blocks = min(STRIP // size, call.max_blocks - start // size)
    for b in range(strip_blocks):
        blocks[b] = tables[item[0] * call.max_blocks + start // size + b] * call.kv_heads + kv_head
    q, s, st, a = queries.ctypes.data, scores.ctypes.data, stats.ctypes.data, acc.ctypes.data
    row_bytes = 4 * call.head_dim
    m = 0
    while m < num_queries:
        left = num_queries - m
        count = 6 if left >= 6 else (3 if left >= 3 else 1)
        if high[m + count - 1] > 0 and low[m] < STRIP:
            at = (q + m * row_bytes, st + m * 128, a + m * row_bytes)
            if count == 6:
                _micro(6, call, blocks, strip_blocks, low[m:], high[m:], at[0], s, at[1], at[2])
            elif count == 3:
                _micro(3, call, blocks, strip_blocks, low[m:], high[m:], at[0], s, at[1], at[2])
            else:
                _micro(1, call, blocks, strip_blocks, low[m:], high[m:], at[0], s, at[1], at[2])
        m += count


@njit
def _merge(acc, stats, more, peak, mass):  # type: ignore[no-untyped-def]
    """Add a chunk's (more, peak, mass) to the running (acc, stats = [peak, mass]) of one query."""
    new = max(stats[0], peak)
    old_share, new_share = np.exp2(stats[0] - new), np.exp2(peak - new)
    stats[0], stats[1] = new, stats[1] * old_share + mass * new_share
    for i in range(len(acc)):
        acc[i] = acc[i] * old_share + more[i] * new_share


@njit
def _finish(call, row, head, acc, mass):  # type: ignore[no-untyped-def]
    """Divide by the softmax's denominator and write the output of one query."""
    dim = call.head_dim
    out = _floats(call.out + 4 * (row * call.heads + head) * dim, dim)
    inverse = np.float32(1.0) / mass
    for i in range(dim):
        out[i] = acc[i] * inverse


@njit
def _merge_tile(call, item, kv_head, acc, stats):  # type: ignore[no-untyped-def]
    """Merge the partial results of a tile, in order of chunks, once the last of them is written."""
    dim, group, rows = call.head_dim, call.heads // call.kv_heads, item[2] - item[1]
    for row in range(rows):
        for head in range(kv_head * group, (kv_head + 1) * group):
            for chunk in range(item[5]):
                at = (item[6] + chunk * rows + row) * call.heads + head
                more = _floats(call.partial + 4 * at * dim, dim)
                seen = _floats(call.partial_stats + 8 * at, 2)
                if chunk == 0:
                    acc[:dim] = more
                    stats[:2] = seen
                else:
                    _merge(acc[:dim], stats[:2], more, seen[0], seen[1])
            _finish(call, item[1] + row, head, acc, stats[1])


@njit
def _attend_item(call, item, kv_head, scratch, running):  # type: ignore[no-untyped-def]
    """One unit of work: the chunks of one item for the query heads of one KV head."""
    queries, _, stats, acc, _, low, high = scratch
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
                mine = _floats(call.partial + 4 * at * dim, dim)
                state = _floats(call.partial_stats + 8 * at, 2)
            if chunk == item[3]:
                mine[:] = acc[m * dim : (m + 1) * dim]
                state[0], state[1] = stats[32 * m], mass
            else:
                _merge(mine, state, acc[m * dim : (m + 1) * dim], stats[32 * m], mass)
    if item[4] - item[3] == item[5]:
        for m in range(rows * group):
            head = kv_head * group + m % group
            _finish(call, item[1] + m // group, head, running_acc[m * dim :], running_stats[2 * m + 1])


def _attend_worker(pointer_to_call):  # type: ignore[no-untyped-def]
    """Draw units of work until there are none. Any number of workers may run it on the same call."""
    call = carray(pointer_to_call, 1)[0]
    kv_heads = call.kv_heads
    size = TILE_ROWS * (call.heads // kv_heads)
    unit = fetch_add(call.next_unit, 1)
    if unit >= call.num_units:
        return
    scratch = (
        np.empty(size * call.head_dim, np.float32),  # queries
        np.empty(6 * STRIP, np.float32),  # scores, then probabilities
        np.empty(size * 32, np.float32),  # a query's peak (1 of 16 floats) and partial masses (16)
        np.empty(size * call.head_dim, np.float32),  # accumulated values
        np.empty(STRIP // LANES, np.int64),  # blocks of the strip, in units of [head_dim, block_size]
        np.empty(size, np.int64),  # first visible position, relative to the strip
        np.empty(size, np.int64),  # end of the visible positions
    )
    running = (np.empty(size * call.head_dim, np.float32), np.empty(size * 2, np.float32))
    while unit < call.num_units:
        number, kv_head = unit // kv_heads, unit % kv_heads
        item = _integers(call.items + 64 * number, 8)
        _attend_item(call, item, kv_head, scratch, running)
        if item[4] - item[3] < item[5]:
            counter = call.finished + 8 * (item[7] * kv_heads + kv_head)
            if fetch_add(counter, 1) == item[5] - 1:
                _merge_tile(call, item, kv_head, running[0], running[1])
                _integers(counter, 1)[0] = 0
        unit = fetch_add(call.next_unit, 1)


def _store_worker(pointer_to_call):  # type: ignore[no-untyped-def]
    """k, v [N, kv_heads, head_dim] of the call to their slots in its pool (`out`: keys, `q`: values)."""
    call = carray(pointer_to_call, 1)[0]
    dim, size, kv_heads = call.head_dim, call.block_size, call.kv_heads
    slots = _integers(call.slots, call.num_rows)
    for row in range(call.num_rows):
        block, offset = slots[row] // size, slots[row] % size
        for head in range(kv_heads):
            source = 4 * (row * kv_heads + head) * dim
            key, value = _floats(call.k + source, dim), _floats(call.v + source, dim)
            target = 4 * (block * kv_heads + head) * dim * size
            keys = _floats(call.out + target, dim * size)
            values = _floats(call.q + target + 4 * offset * dim, dim)
            for i in range(dim):
                keys[i * size + offset] = key[i]
                values[i] = value[i]


_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(frozen=True)
class _Compiled:
    """Addresses of the workers' machine code. `keep` owns that code."""

    attend: Any
    store: Any
    attend_address: int
    keep: tuple[Any, ...]

    @staticmethod
    @cache
    def load() -> _Compiled:
        """Compile both workers (seconds), or read them from Numba's cache on disk (tens of milliseconds)."""
        compiler = cfunc(types.void(types.CPointer(_CALL_TYPE)), cache=True)
        both = compiler(_attend_worker), compiler(_store_worker)
        attend, store = (_SIGNATURE(worker.address) for worker in both)
        return _Compiled(attend, store, both[0].address, both)


@cache
def _parallel() -> Callable[[int, int, int], object]:
    """run(function, argument, threads): call function(argument) on so many threads at once and wait."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        fork = ctypes.CDLL(str(path)).GOMP_parallel
        fork.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        fork.restype = None
        return lambda function, argument, threads: fork(function, argument, threads, 0)
    pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="attention")

    def run(function: int, argument: int, threads: int) -> None:
        worker = _SIGNATURE(function)  # releases the GIL while it runs
        others = [pool.submit(worker, argument) for _ in range(threads - 1)]
        worker(argument)
        for other in others:
            other.result()

    return run


def attend(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, work: Work, scale: float, window: int | None
) -> torch.Tensor:
    """`paged_attention` for float32 CPU tensors; pools contiguous, indices within them."""
    q = q.contiguous()
    out = torch.empty_like(q)
    if not len(work.items):
        return out
    num_rows, heads, head_dim = q.shape
    assert num_rows == work.call["num_rows"][0] and heads % k_pool.shape[1] == 0
    work.bind(heads, k_pool.shape[1], head_dim)
    call = work.call[0]
    call["q"], call["k"], call["v"], call["out"] = (
        q.data_ptr(),
        k_pool.data_ptr(),
        v_pool.data_ptr(),
        out.data_ptr(),
    )
    call["scale"], call["window"] = scale, 2**62 if window is None else window
    work.counters[0] = 0
    threads = torch.get_num_threads()
    address = work.call.ctypes.data
    compiled = _Compiled.load()
    if threads == 1 or work.amount * heads < PARALLEL_WORK:
        compiled.attend(address)
    else:
        _parallel()(compiled.attend_address, address, threads)
    return out


def store(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, work: Work) -> None:
    """`store_kv` for float32 CPU tensors; pools contiguous, slots within them."""
    k, v = k.contiguous(), v.contiguous()
    call = work.call.copy()  # the shape belongs to the layer's attention
    call["kv_heads"], call["head_dim"] = k.shape[1:]
    call["k"], call["v"], call["out"], call["q"] = (
        k.data_ptr(),
        v.data_ptr(),
        k_pool.data_ptr(),
        v_pool.data_ptr(),
    )
    _Compiled.load().store(call.ctypes.data)
