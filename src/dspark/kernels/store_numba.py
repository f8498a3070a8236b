# mypy: ignore-errors
"""The compiled kernel that puts new keys and values into their slots of the pool; `attention_numba` reads them."""

from numba import carray, njit

from dspark.kernels.attention_simd import scatter_halves, store_halves
from dspark.kernels.memory import floats, integers

__all__ = ["store_key", "store_value", "store_worker"]


@njit
def store_key(call, x, head, offset):
    """x [head_dim] to position `offset` of a block of keys [head_dim, block_size]; `head` numbers such blocks."""
    dim, size = call.head_dim, call.block_size
    at = head * dim * size + offset
    if call.kv_bytes == 2:
        scatter_halves(x, call.k_pool + 2 * at, dim, size)
        return
    key, keys = floats(x, dim), floats(call.k_pool + 4 * at, dim * size)
    for i in range(dim):
        keys[i * size] = key[i]


@njit
def store_value(call, x, head, offset):
    """x [head_dim] to position `offset` of a block of values [block_size, head_dim]."""
    dim = call.head_dim
    at = (head * call.block_size + offset) * dim
    if call.kv_bytes == 2:
        store_halves(x, call.v_pool + 2 * at, dim)
        return
    value, values = floats(x, dim), floats(call.v_pool + 4 * at, dim)
    for i in range(dim):
        values[i] = value[i]


def store_worker(pointer_to_call):
    """k, v [N, kv_heads, head_dim] of the call to their slots in `k_pool` and `v_pool`."""
    call = carray(pointer_to_call, 1)[0]
    dim, size, kv_heads = call.head_dim, call.block_size, call.kv_heads
    slots = integers(call.slots, call.num_rows)
    for row in range(call.num_rows):
        block, offset = slots[row] // size, slots[row] % size
        for head in range(kv_heads):
            source = 4 * (row * kv_heads + head) * dim
            store_key(call, call.k + source, block * kv_heads + head, offset)
            store_value(call, call.v + source, block * kv_heads + head, offset)
