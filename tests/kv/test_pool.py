"""Blocks are owned once, rollback returns the tail, and what does not fit changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core import DSparkError
from dspark.kv import BlockTable, KVPool, LayerKV

SPEC = LayerKV(num_heads=2, head_dim=4)


def test_reserve_is_all_or_nothing():
    pool, a, b = KVPool([SPEC], 4, 4), BlockTable(), BlockTable()
    assert pool.reserve(a, 9)
    assert len(a.blocks) == 3
    assert not pool.reserve(b, 5)
    assert b.blocks == []
    assert pool.reserve(b, 4)
    assert pool.num_free == 0


def test_truncate_returns_tail_blocks_and_keeps_the_front():
    pool, table = KVPool([SPEC], 4, 4), BlockTable()
    pool.reserve(table, 16)
    front = table.blocks[:2]
    pool.truncate(table, 5)
    assert table.blocks == front
    pool.truncate(table, 8)
    assert table.blocks == front
    pool.release(table)
    assert pool.num_free == 4


def test_slots_and_read_follow_the_block_table():
    pool, table = KVPool([SPEC], 8, 4), BlockTable()
    other = BlockTable()
    pool.reserve(table, 4)
    pool.reserve(other, 4)
    pool.reserve(table, 10)  # not contiguous any more
    slots = torch.from_numpy(pool.slots(table, 0, 10))
    k = torch.randn(10, 2, 4)
    pool.k[0][slots // 4, :, :, slots % 4] = k
    pool.v[0][slots // 4, :, slots % 4] = 2 * k
    got_k, got_v = pool.read(0, table, 10)
    torch.testing.assert_close(got_k, k)
    torch.testing.assert_close(got_v, 2 * k)


def test_a_layer_may_share_an_earlier_one():
    pool = KVPool([SPEC, LayerKV(2, 4, shares=0)], 2)
    assert pool.k[1] is pool.k[0]
    assert pool.bytes() == pool.k[0].nbytes + pool.v[0].nbytes
    with pytest.raises(DSparkError, match="does not precede"):
        KVPool([LayerKV(2, 4, shares=0)], 2)
    with pytest.raises(DSparkError, match="at least one block"):
        KVPool([SPEC], 0)


def test_integrity_check_sees_a_shared_block():
    pool, a, b = KVPool([SPEC], 4, 4), BlockTable(), BlockTable()
    pool.reserve(a, 4)
    pool.check_integrity([a, b])
    b.blocks.append(a.blocks[0])
    with pytest.raises(AssertionError, match="lost or shared"):
        pool.check_integrity([a, b])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.booleans()), max_size=30))
def test_any_history_of_reserves_and_truncations_keeps_integrity(history):
    pool, tables = KVPool([SPEC], 12, 4), [BlockTable() for _ in range(4)]
    for which, tokens, grow in history:
        before = list(tables[which].blocks)
        if grow:
            fits = pool.reserve(tables[which], tokens)
            assert fits or tables[which].blocks == before
        else:
            pool.truncate(tables[which], tokens)
        pool.check_integrity(tables)
