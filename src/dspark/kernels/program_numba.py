# mypy: ignore-errors
"""The compiled kernel behind `program`: a pass through decoder layers as a list of steps.

A step is cut into units that any worker may draw (a row, a tile of outputs, a piece of attention). A worker goes
on to the next step when all units of this one are done, not when all workers are there: one that the system has
put aside between two units holds nobody up.
"""

import numpy as np
from numba import carray, from_dtype, njit

from dspark.kernels.attention_numba import CALL_TYPE as ATTENTION_TYPE
from dspark.kernels.attention_numba import attend_unit, attention_scratch
from dspark.kernels.lowbit_numba import CALL_TYPE as PRODUCT_TYPE
from dspark.kernels.lowbit_numba import SCRATCH, multiply_tile
from dspark.kernels.rows import add_rows, rotate_row, scale_row, square_sum, swiglu_row
from dspark.kernels.simd import fetch_add, pointer, record_pointer, wait_for

__all__ = ["ATTEND", "NORM", "PASS", "PASS_TYPE", "PRODUCT", "ROTARY", "STEP", "SWIGLU", "program_worker"]

NORM, PRODUCT, ROTARY, ATTEND, SWIGLU = range(5)

# One record serves all kinds of steps; addresses that a step has no use for are 0. `next_unit` and `finished` are
# addresses of counters, `call` that of the CALL of a product or an attention.
_STEP = "kind units next_unit finished call x y out weight tap x_step out_step tap_step size"
_ROTARY = "q_norm k_norm k_pool v_pool heads kv_heads head_dim block_size"
STEP = np.dtype([*((name, np.int64) for name in f"{_STEP} {_ROTARY}".split()), ("eps", np.float64)])
# What all steps of a pass share. `attention`: a CALL that states the shape, 0 without attention.
PASS = np.dtype(
    [(n, np.int64) for n in ["steps", "num_steps", "attention", "positions", "slots", "cos", "sin"]]
)
PASS_TYPE = from_dtype(PASS)

_step_at = record_pointer(from_dtype(STEP))
_attention_at = record_pointer(ATTENTION_TYPE)
_product_at = record_pointer(PRODUCT_TYPE)


@njit(inline="always")
def _floats(address, count):
    return carray(pointer(address, np.float32(0)), count)


@njit(inline="always")
def _integer(address, index):
    return carray(pointer(address, np.int64(0)), index + 1)[index]


@njit
def _norm_row(x, weight, out, size, eps):
    """RMSNorm of `size` floats."""
    mean = square_sum(x, size) / np.float32(size)
    scale_row(x, np.float32(1.0) / np.sqrt(mean + np.float32(eps)), weight, out, size)


@njit
def _norm(step, row):
    """x += y; a copy to `tap`; out = RMSNorm(x)."""
    x = step.x + 4 * step.x_step * row
    if step.y:
        add_rows(x, step.y + 4 * step.out_step * row, x, step.size)
    if step.tap:
        tapped = _floats(step.tap + 4 * step.tap_step * row, step.size)
        tapped[:] = _floats(x, step.size)
    _norm_row(x, step.weight, step.out + 4 * step.x_step * row, step.size, step.eps)


@njit
def _rotary(shared, step, row, head):
    """One head of one row: q is rotated to `out`, k rotated to its slot of the pool, v copied there."""
    dim, half = step.head_dim, step.head_dim // 2
    x = step.x + 4 * (step.x_step * row + head * dim)
    if step.y:
        add_rows(x, step.y + 4 * head * dim, x, dim)
    position = _integer(shared.positions, row)
    cos, sin = shared.cos + 4 * half * position, shared.sin + 4 * half * position
    if head < step.heads:
        if step.q_norm:
            _norm_row(x, step.q_norm, x, dim, step.eps)
        rotate_row(x, cos, sin, step.out + 4 * (step.heads * row + head) * dim, half)
        return
    slot = _integer(shared.slots, row)
    kv_head, size = head - step.heads, step.block_size
    block, offset = slot // size, slot % size
    if kv_head >= step.kv_heads:
        at = (block * step.kv_heads + kv_head - step.kv_heads) * dim * size
        values = _floats(step.v_pool + 4 * (at + offset * dim), dim)
        values[:] = _floats(x, dim)
        return
    if step.k_norm:
        _norm_row(x, step.k_norm, x, dim, step.eps)
    rotate_row(x, cos, sin, x, half)
    key = _floats(x, dim)
    keys = _floats(step.k_pool + 4 * (block * step.kv_heads + kv_head) * dim * size, dim * size)
    for i in range(dim):
        keys[i * size + offset] = key[i]


@njit
def _swiglu(step, row):
    """out = silu(gate) up, gate and up side by side in x."""
    gate = step.x + 4 * step.x_step * row
    swiglu_row(gate, gate + 4 * step.size, step.out + 4 * step.out_step * row, step.size)


@njit
def _unit(shared, step, unit, product_scratch, scratch, running):
    if step.kind == PRODUCT:
        multiply_tile(carray(_product_at(step.call), 1)[0], unit, product_scratch)
    elif step.kind == ATTEND:
        attend_unit(carray(_attention_at(step.call), 1)[0], unit, scratch, running)
    elif step.kind == NORM:
        _norm(step, unit)
    elif step.kind == ROTARY:
        heads = step.heads + 2 * step.kv_heads
        _rotary(shared, step, unit // heads, unit % heads)
    else:
        _swiglu(step, unit)


def program_worker(pointer_to_pass):
    """Do all steps of a pass, in order. Any number of workers may run it on the same pass."""
    shared = carray(pointer_to_pass, 1)[0]
    product_scratch = np.empty(SCRATCH, np.float32)
    scratch, running = attention_scratch(carray(_attention_at(shared.attention), 1)[0])
    steps = carray(_step_at(shared.steps), shared.num_steps)
    for number in range(shared.num_steps):
        step = steps[number]
        unit, done = fetch_add(step.next_unit, 1), 0
        while unit < step.units:
            _unit(shared, step, unit, product_scratch, scratch, running)
            done += 1
            unit = fetch_add(step.next_unit, 1)
        if done:
            fetch_add(step.finished, done)
        wait_for(step.finished, step.units)
