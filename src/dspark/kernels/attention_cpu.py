"""The CPU path of `attention`, float32: cuts a pass into work, runs the kernels of `attention_numba` on it.

A tile is up to 16 rows of one request; its work for one KV head covers all grouped query heads. Positions are
taken in strips of 64 (scores, softmax, values while the strip is in the first-level cache) and chunks of 256.
Chunks are always computed apart and merged in order, by one worker or by several: results are the same to the
last bit whatever else is in the batch and however many threads work.

Workers draw units of work from an atomic counter, so a core that is busy elsewhere does not hold up the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from dspark.compilation import compiled
from dspark.kernels.attention_numba import (
    CALL,
    CALL_TYPE,
    CHUNK,
    STRIP,
    TILE_ROWS,
    attend_worker,
)
from dspark.kernels.attention_simd import STATE
from dspark.kernels.parallel import parallel
from dspark.kernels.simd import LANES
from dspark.kernels.store_numba import store_worker
from dspark.kernels.worker import load_worker

__all__ = ["Work", "attend", "compile_workers", "set_words", "store", "supports"]

ENOUGH_TILES = 16  # with fewer, chunks of one tile are spread over the workers
PARALLEL_WORK = 6000  # query rows x heads x positions below which waking workers costs more than it saves


def _words(names: str) -> np.ndarray:
    """Places of integer fields in a CALL; set together they take a tenth of the time of one by one."""
    assert CALL.names is not None
    return np.array([CALL.names.index(name) for name in names.split()])


_OF_PASS = _words(  # in the order of `_set_pass`
    "query_start context_lens tables items slots num_rows num_requests block_size max_blocks causal"
)
_OF_SHAPE = _words("heads kv_heads head_dim num_units next_unit finished partial")


def supports(head_dim: int, block_size: int) -> bool:
    """Whether rows and blocks fill whole vectors and blocks tile a strip."""
    return head_dim % LANES == 0 and block_size % LANES == 0 and STRIP % block_size == 0


@dataclass(eq=False)
class Work:
    """One forward pass cut into items, and the memory the kernel needs. Serves one pass at a time.

    An item is (request, first row, stop row, first chunk, stop chunk, chunks of its tile, offset of its
    tile's partial results, tile).
    """

    call: np.ndarray  # CALL [1]: arguments that do not change between layers
    items: np.ndarray  # [items, 8] int64
    amount: int  # sum of rows x positions
    num_partials: int
    keep: tuple[np.ndarray, ...]  # arrays whose addresses are in `call`
    counters: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    partial: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    shape: tuple[int, int, int] | None = None  # heads, kv_heads, head_dim

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
        call = np.zeros(1, dtype=CALL)
        _set_pass(
            call.view(np.int64), _OF_PASS, query_start, context_lens, tables, items, slots, block_size, causal
        )
        return Work(call, items, amount, num_partials, (query_start, context_lens, tables, items, slots))

    def bind(self, heads: int, kv_heads: int, head_dim: int) -> None:
        """Set the layer's shape. Layers of one shape share the scratch memory."""
        if self.shape == (heads, kv_heads, head_dim):
            return
        self.shape = (heads, kv_heads, head_dim)
        tiles = int(self.items[-1, 7]) + 1 if len(self.items) else 0
        self.counters = np.zeros(1 + tiles * kv_heads, dtype=np.int64)
        self.partial = np.empty(self.num_partials * heads * (STATE + head_dim), dtype=np.float32)
        units = len(self.items) * kv_heads
        _set_shape(
            self.call.view(np.int64), _OF_SHAPE, heads, kv_heads, head_dim, units, self.counters, self.partial
        )


@compiled
def _cut(query_start: np.ndarray, context_lens: np.ndarray, causal: bool) -> tuple[np.ndarray, int, int]:
    """Items of a pass [items, 8], the amount of work in them, and how many partial results they leave."""
    tiles, most = 0, 0  # chunks of all tiles, at least one each
    for r in range(len(context_lens)):
        rows = query_start[r + 1] - query_start[r]
        tiles += -(-rows // TILE_ROWS)
        most += -(-rows // TILE_ROWS) * max(1, -(-(context_lens[r] + rows) // CHUNK))
    split = tiles < ENOUGH_TILES
    items = np.empty((most if split else tiles, 8), np.int64)
    count, tile, amount, partials = 0, 0, 0, 0
    for r in range(len(context_lens)):
        start, stop = query_start[r], query_start[r + 1]
        for first in range(start, stop, TILE_ROWS):
            last = min(first + TILE_ROWS, stop)
            positions = context_lens[r] + ((last if causal else stop) - start)
            amount += (last - first) * positions
            chunks = -(-positions // CHUNK)
            apart = split and chunks > 1
            for c in range(chunks if apart else 1):
                items[count, :3] = r, first, last
                items[count, 3], items[count, 4] = c, (c + 1 if apart else chunks)
                items[count, 5:] = chunks, (partials if apart else 0), tile
                count += 1
            if apart:
                partials += chunks * (last - first)
            tile += 1
    return items[:count], amount, partials


@compiled
def _set_pass(
    words: np.ndarray,
    places: np.ndarray,
    query_start: np.ndarray,
    context_lens: np.ndarray,
    tables: np.ndarray,
    items: np.ndarray,
    slots: np.ndarray,
    block_size: int,
    causal: bool,
) -> None:
    """Addresses and sizes into a call's words, to the `places` of `_OF_PASS`: Python would take longer than a layer."""
    words[places[0]], words[places[1]] = query_start.ctypes.data, context_lens.ctypes.data
    words[places[2]], words[places[3]], words[places[4]] = (
        tables.ctypes.data,
        items.ctypes.data,
        slots.ctypes.data,
    )
    words[places[5]], words[places[6]] = query_start[-1], len(context_lens)
    words[places[7]], words[places[8]], words[places[9]] = block_size, tables.shape[1], causal


@compiled
def _set_shape(
    words: np.ndarray,
    places: np.ndarray,
    heads: int,
    kv_heads: int,
    head_dim: int,
    units: int,
    counters: np.ndarray,
    partial: np.ndarray,
) -> None:
    """As `_set_pass`, to the places of `_OF_SHAPE`."""
    words[places[0]], words[places[1]], words[places[2]] = heads, kv_heads, head_dim
    words[places[3]], words[places[4]], words[places[5]] = (
        units,
        counters.ctypes.data,
        counters.ctypes.data + 8,
    )
    words[places[6]] = partial.ctypes.data


@compiled
def set_words(calls: np.ndarray, places: np.ndarray, call: np.ndarray) -> None:
    """The words of one call at `places` to all `calls` [layers, words]."""
    for words in calls:
        for place in places:
            words[place] = call[place]


def compile_workers() -> None:
    """Compile now rather than at the first call."""
    load_worker(attend_worker, CALL_TYPE)
    load_worker(store_worker, CALL_TYPE)
    start, none = np.array([0, 1]), np.zeros(1, dtype=np.int64)
    Work.of(start, none, none[None], none, causal=True, block_size=LANES).bind(1, 1, LANES)
    set_words(none[None], none, none)


def attend(
    q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, work: Work, scale: float, window: int | None
) -> torch.Tensor:
    """`paged_attention` for float32 rows on a CPU; pools float32 or float16, contiguous, indices within them."""
    q = q.contiguous()
    out = torch.empty_like(q)
    if not len(work.items):
        return out
    num_rows, heads, head_dim = q.shape
    assert num_rows == work.call["num_rows"][0]
    assert heads % k_pool.shape[1] == 0
    work.bind(heads, k_pool.shape[1], head_dim)
    call = work.call[0]
    call["q"], call["k"], call["v"], call["out"] = (
        q.data_ptr(),
        k_pool.data_ptr(),
        v_pool.data_ptr(),
        out.data_ptr(),
    )
    call["kv_bytes"] = k_pool.itemsize
    call["scale"], call["window"] = scale, 2**62 if window is None else window
    work.counters[0] = 0
    threads = torch.get_num_threads()
    address = work.call.ctypes.data
    worker = load_worker(attend_worker, CALL_TYPE)
    if threads == 1 or work.amount * heads < PARALLEL_WORK:
        worker.work(address)
    else:
        parallel()(worker.address, address, threads)
    return out


def store(k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, work: Work) -> None:
    """`store_kv` for float32 rows on a CPU; pools float32 or float16, contiguous, slots within them."""
    k, v = k.contiguous(), v.contiguous()
    call = work.call.copy()  # the shape belongs to the layer's attention
    call["kv_heads"], call["head_dim"] = k.shape[1:]
    call["k"], call["v"], call["kv_bytes"] = k.data_ptr(), v.data_ptr(), k_pool.itemsize
    call["k_pool"], call["v_pool"] = k_pool.data_ptr(), v_pool.data_ptr()
    load_worker(store_worker, CALL_TYPE).work(call.ctypes.data)
