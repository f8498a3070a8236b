# mypy: ignore-errors
"""The compiled kernel behind `program`: a pass of a target or a drafter as a list of steps.

A step is cut into units that any worker may draw (a row, a tile of outputs, a piece of attention). A worker goes
on to the next step when all units of this one are done, not when all workers are there: one that the system has
put aside between two units holds nobody up.

The units of a product are cut into one run for each worker, which draws from its own first and then from the others':
weights that it asked the memory for in advance are then its own next ones, in its own core's cache.
"""

import numpy as np
from numba import carray, from_dtype, njit

from dspark.kernels.attention_numba import CALL_TYPE as ATTENTION_TYPE
from dspark.kernels.attention_numba import attend_unit, attention_scratch
from dspark.kernels.attention_simd import prefetch
from dspark.kernels.distributions_numba import PARAMETERS, distribution_row, draw_row
from dspark.kernels.floats_numba import unpack_row
from dspark.kernels.integers_numba import CODES_BYTES, quantize_row
from dspark.kernels.lowbit_numba import CALL_TYPE as PRODUCT_TYPE
from dspark.kernels.lowbit_numba import SCRATCH, multiply_tile
from dspark.kernels.memory import doubles, fetch_add, floats, integers, record_pointer, wait_for
from dspark.kernels.records import BLOCK, TILE
from dspark.kernels.rows import (
    add_rows,
    dot_rows,
    largest_sum,
    rotate_row,
    scale_row,
    square_sum,
    swiglu_row,
)
from dspark.kernels.store_numba import store_key, store_value

__all__ = [
    "ATTEND",
    "CHOOSE",
    "EMBED",
    "GATHER",
    "LINE",
    "NORM",
    "PASS",
    "PASS_TYPE",
    "PRODUCT",
    "ROTARY",
    "STEP",
    "SWIGLU",
    "program_worker",
]

NORM, PRODUCT, ROTARY, ATTEND, SWIGLU, GATHER, CHOOSE, EMBED = range(8)

# One record serves all kinds of steps; addresses that a step has no use for are 0. `counters` is the address of what
# workers share, each number in a cache line of its own: units done, then for each of `runs` runs the units drawn.
# `call` is the address of the CALL of a product or an attention, `ahead` that of the product behind this one.
_STEP = "kind units runs counters ahead call x y out weight tap x_step out_step tap_step codes size"
_ROTARY = "positions slots q_norm k_norm k_pool v_pool heads kv_heads head_dim block_size kv_bytes"
_CHOICE = "bits index vocab confidence hidden hidden_size embedding embedding_size previous"
_DRAW = "probs probs_step parameters uniform uniform_step"
_FIELDS = f"{_STEP} {_ROTARY} {_CHOICE} {_DRAW}".split()
STEP = np.dtype([*((name, np.int64) for name in _FIELDS), ("eps", np.float64), ("bias", np.float64)])
# What all steps of a pass share. `attention`: a CALL that states the shape; `workers`: address of how many have begun.
PASS = np.dtype([(name, np.int64) for name in ["steps", "num_steps", "attention", "cos", "sin", "workers"]])
PASS_TYPE = from_dtype(PASS)
LINE = 64  # bytes between numbers that different workers write
FIRST_BYTES = 16384  # of a run's weights: what memory delivers while the few small steps before a product run

_step_at = record_pointer(from_dtype(STEP))
_attention_at = record_pointer(ATTENTION_TYPE)
_product_at = record_pointer(PRODUCT_TYPE)


@njit(inline="always")
def _integer(address, index):
    return integers(address, index + 1)[index]


@njit
def _norm_row(x, weight, out, size, eps):
    """RMSNorm of `size` floats."""
    mean = square_sum(x, size) / np.float32(size)
    scale_row(x, np.float32(1.0) / np.sqrt(mean + np.float32(eps)), weight, out, size)


@njit
def _quantize(step, row, x):
    """The codes of a row x of `size` floats, where a product wants them."""
    if step.codes:
        blocks = step.size // BLOCK
        quantize_row(x, blocks, step.codes + CODES_BYTES * blocks * row)


@njit
def _norm(step, row):
    """x += y; a copy to `tap`; out = RMSNorm(x), and its codes."""
    x = step.x + 4 * step.x_step * row
    if step.y:
        add_rows(x, step.y + 4 * step.out_step * row, x, step.size)
    if step.tap:
        tapped = floats(step.tap + 4 * step.tap_step * row, step.size)
        tapped[:] = floats(x, step.size)
    out = step.out + 4 * step.x_step * row
    _norm_row(x, step.weight, out, step.size, step.eps)
    _quantize(step, row, out)


@njit
def _rotary(shared, step, row, head):
    """One head of one row: q is rotated to `out`, k rotated to its slot of the pool, v copied there."""
    dim, half = step.head_dim, step.head_dim // 2
    x = step.x + 4 * (step.x_step * row + head * dim)
    if step.y:
        add_rows(x, step.y + 4 * head * dim, x, dim)
    position = _integer(step.positions, row)
    cos, sin = shared.cos + 4 * half * position, shared.sin + 4 * half * position
    if head < step.heads:
        if step.q_norm:
            _norm_row(x, step.q_norm, x, dim, step.eps)
        rotate_row(x, cos, sin, step.out + 4 * (step.heads * row + head) * dim, half)
        return
    slot = _integer(step.slots, row)
    kv_head, block, offset = head - step.heads, slot // step.block_size, slot % step.block_size
    if kv_head >= step.kv_heads:
        store_value(step, x, (block - 1) * step.kv_heads + kv_head, offset)
        return
    if step.k_norm:
        _norm_row(x, step.k_norm, x, dim, step.eps)
    rotate_row(x, cos, sin, x, half)
    store_key(step, x, block * step.kv_heads + kv_head, offset)


@njit
def _swiglu(step, row):
    """out = silu(gate) up, gate and up side by side in x; and its codes."""
    gate, out = step.x + 4 * step.x_step * row, step.out + 4 * step.out_step * row
    swiglu_row(gate, gate + 4 * step.size, out, step.size)
    _quantize(step, row, out)


@njit
def _embed(step, unit):
    """out = the row that index[unit] names of a weight in records."""
    row = _integer(step.index, unit)
    records = step.x + step.x_step * (row // TILE)
    out = step.out + 4 * step.out_step * unit
    if step.bits == 4:
        unpack_row(4, records, step.size, row % TILE, out)
    else:
        unpack_row(8, records, step.size, row % TILE, out)


@njit
def _gather(step, unit):
    """Row index[unit] (row `unit` without an index): a copy to `out`, and its codes."""
    row = _integer(step.index, unit) if step.index else unit
    x = step.x + 4 * step.x_step * row
    if step.out:
        copied = floats(step.out + 4 * step.out_step * unit, step.size)
        copied[:] = floats(x, step.size)
    _quantize(step, unit, x)


@njit
def _sample(step, unit, x, y):
    """Row `unit` of `probs` = the distribution of x + y under its parameters; returns a draw from it."""
    p = step.probs + 4 * step.probs_step * unit
    if y:
        add_rows(x, y, p, step.size)
        x = p
    distribution_row(x, p, step.size, step.parameters + 8 * PARAMETERS * unit)
    return draw_row(p, step.size, doubles(step.uniform + 8 * step.uniform_step * unit, 1)[0])


@njit
def _choose(step, unit):
    """out[unit] = vocab[argmax(x + y)] of row index[unit] of x and row `unit` of y, or a draw where there are `probs`
    for it; and the choice's confidence."""
    row = _integer(step.index, unit)
    x, y = step.x + 4 * step.x_step * row, step.y + 4 * step.out_step * unit if step.y else 0
    best = _sample(step, unit, x, y) if step.probs else largest_sum(x, y, step.size)
    integers(step.out, unit + 1)[unit] = _integer(step.vocab, best) if step.vocab else best
    if step.confidence:
        hidden = step.hidden + 4 * step.hidden_size * row
        logit = np.float32(step.bias) + dot_rows(step.weight, hidden, step.hidden_size)
        if step.embedding:
            embedded = step.embedding + 4 * step.embedding_size * _integer(step.previous, unit)
            logit += dot_rows(step.weight + 4 * step.hidden_size, embedded, step.embedding_size)
        floats(step.confidence, unit + 1)[unit] = logit


@njit
def _unit(shared, step, unit, product_scratch, numbers, places):
    if step.kind == PRODUCT:
        multiply_tile(carray(_product_at(step.call), 1)[0], unit, product_scratch)
    elif step.kind == ATTEND:
        attend_unit(carray(_attention_at(step.call), 1)[0], unit, numbers, places)
    elif step.kind == NORM:
        _norm(step, unit)
    elif step.kind == ROTARY:
        heads = step.heads + 2 * step.kv_heads
        _rotary(shared, step, unit // heads, unit % heads)
    elif step.kind == SWIGLU:
        _swiglu(step, unit)
    elif step.kind == GATHER:
        _gather(step, unit)
    elif step.kind == CHOOSE:
        _choose(step, unit)
    else:
        _embed(step, unit)


@njit
def _ask_ahead(call, worker, runs):
    """Have the first weights of a worker's run of the next product brought near while others are still at work."""
    tile = call.tiles * (worker % runs) // runs
    prefetch(call.records + tile * call.blocks * call.record_bytes, FIRST_BYTES // 4)


def program_worker(pointer_to_pass):
    """Do all steps of a pass, in order. Any number of workers may run it on the same pass."""
    shared = carray(pointer_to_pass, 1)[0]
    product_scratch = np.empty(SCRATCH, np.float32)
    numbers, places = attention_scratch(carray(_attention_at(shared.attention), 1)[0])
    steps = carray(_step_at(shared.steps), shared.num_steps)
    worker = fetch_add(shared.workers, 1)
    for number in range(shared.num_steps):
        step, done = steps[number], 0
        for turn in range(step.runs):
            run = (worker + turn) % step.runs
            drawn = step.counters + LINE * (1 + run)
            first, stop = step.units * run // step.runs, step.units * (run + 1) // step.runs
            unit = first + fetch_add(drawn, 1)
            while unit < stop:
                _unit(shared, step, unit, product_scratch, numbers, places)
                done += 1
                unit = first + fetch_add(drawn, 1)
        if done:
            fetch_add(step.counters, done)
        if step.ahead:
            _ask_ahead(carray(_product_at(step.ahead), 1)[0], worker, step.runs)
        wait_for(step.counters, step.units)
