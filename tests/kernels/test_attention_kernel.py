"""Paged attention: an independent softmax == the reference == the compiled path."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.core import DSparkError
from dspark.kernels import attention_cpu
from dspark.kernels.attention import (
    AttentionPlan,
    is_fast,
    paged_attention,
    paged_attention_reference,
    store_kv,
    store_kv_reference,
)
from dspark.kernels.parallel import python_threads
from dspark.kv import BlockTable, KVPool, LayerKV
from dspark.target.base import ForwardBatch

RAGGED = [
    (1, 0),
    (1, 15),
    (130, 40),
    (8, 16),
    (1, 700),
    (3, 255),
    (17, 256),
    (5, 47),
    (2, 511),
]  # (rows, context)


class Case:
    """Requests with a written history in a pool with shuffled blocks, and new rows of q, k, v."""

    def __init__(
        self,
        requests: list[tuple[int, int]],
        group: int = 3,
        kv_heads: int = 2,
        head_dim: int = 16,
        causal: bool = True,
        dtype: torch.dtype = torch.float32,
        garbage: float = 1e4,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        blocks = sum(-(-(rows + context) // 16) for rows, context in requests)
        self.pool = KVPool([LayerKV(kv_heads, head_dim)], blocks + 3, dtype=kv_dtype or dtype)
        random.Random(seed).shuffle(self.pool._free)
        self.pool.k[0].fill_(garbage)
        self.pool.v[0].fill_(garbage)
        self.tables = [BlockTable() for _ in requests]
        for table, (rows, context) in zip(self.tables, requests, strict=True):
            assert self.pool.reserve(table, rows + context)
        width = max(len(table.blocks) for table in self.tables)
        tables = np.array([table.blocks + [0] * (width - len(table.blocks)) for table in self.tables])
        bounds = zip(self.tables, requests, strict=True)
        slots = [self.pool.slots(table, context, context + rows) for table, (rows, context) in bounds]
        history = [
            self.pool.slots(t, 0, context) for t, (_, context) in zip(self.tables, requests, strict=True)
        ]
        num_rows = sum(rows for rows, _ in requests)
        empty = torch.zeros(num_rows, dtype=torch.int64)
        self.requests = requests
        self.batch = ForwardBatch(
            token_ids=empty,
            positions=empty,
            query_start=np.cumsum([0, *(rows for rows, _ in requests)]),
            context_lens=np.array([context for _, context in requests]),
            block_tables=tables,
            slots=torch.from_numpy(np.concatenate(slots)),
            causal=causal,
        )
        self.plan = AttentionPlan.of(self.batch, 16)
        self.scale = head_dim**-0.5

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.q = 2 * normal(num_rows, kv_heads * group, head_dim)
        self.k, self.v = normal(num_rows, kv_heads, head_dim), normal(num_rows, kv_heads, head_dim)
        past = replace(self.plan, slots=torch.from_numpy(np.concatenate(history)))
        size = (len(past.slots), kv_heads, head_dim)
        store_kv_reference(normal(*size), normal(*size), self.pool.k[0], self.pool.v[0], past)
        store_kv_reference(self.k, self.v, self.pool.k[0], self.pool.v[0], self.plan)

    def attend(self, window: int | None = None) -> torch.Tensor:
        return paged_attention(self.q, self.pool.k[0], self.pool.v[0], self.plan, self.scale, window)

    def reference(self, window: int | None = None) -> torch.Tensor:
        k, v = self.pool.k[0], self.pool.v[0]
        return paged_attention_reference(self.q, k, v, self.plan, self.scale, window)


def plain_attention(case: Case, window: int | None) -> torch.Tensor:
    """Row by row, head by head: softmax over the visible positions only."""
    out = torch.empty_like(case.q)
    row = 0
    for table, (rows, context) in zip(case.tables, case.requests, strict=True):
        k, v = case.pool.read(0, table, context + rows)
        group = case.q.shape[1] // k.shape[1]
        for position in range(context, context + rows):
            stop = position + 1 if case.batch.causal else context + rows
            start = 0 if window is None else max(0, position + 1 - window)
            for head in range(case.q.shape[1]):
                scores = k[start:stop, head // group] @ case.q[row, head] * case.scale
                out[row, head] = torch.softmax(scores, dim=0) @ v[start:stop, head // group]
            row += 1
    return out


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Many small products: on busy cores, waiting for other threads would take longer than all of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_reference_is_softmax_attention(causal: bool, window: int | None) -> None:
    case = Case([(1, 0), (5, 30), (20, 16), (2, 70)], causal=causal, dtype=torch.float64)
    assert not is_fast(case.pool.k[0], 16, 16)
    torch.testing.assert_close(case.attend(window), plain_attention(case, window), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (3, 64), (5, 32)])
@pytest.mark.parametrize("window", [None, 1, 64, 300])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_compiled_equals_reference(
    causal: bool, group: int, head_dim: int, window: int | None, kv_dtype: torch.dtype
) -> None:
    case = Case(RAGGED, group=group, head_dim=head_dim, causal=causal, kv_dtype=kv_dtype)
    assert is_fast(case.pool.k[0], head_dim, 16)
    torch.testing.assert_close(case.attend(window), case.reference(window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [32, 48, 96, 128])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_other_head_sizes(head_dim: int, kv_dtype: torch.dtype) -> None:
    """An even or odd number of vectors: the values of two are summed at once."""
    case = Case([(1, 15), (7, 40), (2, 300)], head_dim=head_dim, kv_dtype=kv_dtype)
    torch.testing.assert_close(case.attend(), case.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [1, 3, 6])
@pytest.mark.parametrize("window", [None, 10, 100])
def test_a_strip_may_end_anywhere(group: int, window: int | None) -> None:
    """Keys are read 32 positions at a time, values 16: what lies behind the last position counts for nothing."""
    lengths = [*range(0, 81, 5), 127, 128, 144, 255, 256, 257, 272]
    requests = [(1, length) for length in lengths]
    case = Case(requests, group=group, garbage=float("nan"), kv_dtype=torch.float16)
    torch.testing.assert_close(case.attend(window), case.reference(window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [32, 64])
def test_other_block_sizes(block_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    pool = KVPool([LayerKV(2, 32)], 8, block_size=block_size)
    pool.k[0].normal_(generator=generator)
    pool.v[0].normal_(generator=generator)
    context, rows = 2 * block_size - 3, 9
    table = BlockTable([5, 2, 7])
    batch = ForwardBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.zeros(rows, dtype=torch.int64),
        query_start=np.array([0, rows]),
        context_lens=np.array([context]),
        block_tables=np.array([table.blocks]),
        slots=torch.from_numpy(pool.slots(table, context, context + rows)),
    )
    plan = AttentionPlan.of(batch, block_size)
    q = torch.randn(rows, 4, 32, generator=generator)
    expected = paged_attention_reference(q, pool.k[0], pool.v[0], plan, 0.2)
    torch.testing.assert_close(
        paged_attention(q, pool.k[0], pool.v[0], plan, 0.2), expected, rtol=1e-5, atol=1e-5
    )


def test_random_batches() -> None:
    rng = random.Random(7)
    for seed in range(12):
        requests = [
            (rng.choice([1, 2, 7, 33]), rng.choice([0, 1, 16, 63, 64, 65, 300]))
            for _ in range(rng.randint(1, 20))
        ]
        case = Case(requests, causal=bool(seed % 3), seed=seed)
        torch.testing.assert_close(case.attend(), case.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_slots_beyond_the_length_are_never_read(window: int | None) -> None:
    results = [Case(RAGGED, garbage=garbage).attend(window) for garbage in (0.0, 1e30, float("nan"))]
    assert torch.isfinite(results[0]).all()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(("group", "head_dim"), [(3, 16), (1, 64), (5, 96)])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_a_row_does_not_depend_on_its_batch(
    group: int, head_dim: int, window: int | None, kv_dtype: torch.dtype
) -> None:
    """One request of 6 rows: alone, row by row, among many others and on several threads, to the last bit."""
    requests = [(6, 1021), *[(1, 30)] * 20]  # enough tiles: one worker per tile
    together = Case(requests, group=group, head_dim=head_dim, kv_dtype=kv_dtype)
    expected = together.attend(window)[:6]
    alone = AttentionPlan.of(
        replace(
            together.batch,
            query_start=np.array([0, 6]),
            context_lens=np.array([1021]),
            block_tables=together.batch.block_tables[:1],
            slots=together.batch.slots[:6],
        ),
        16,
    )
    q, scale, pool = together.q, together.scale, (together.pool.k[0], together.pool.v[0])
    assert torch.equal(paged_attention(q[:6], *pool, alone, scale, window), expected)
    for i in range(6):
        step = replace(alone, query_start=np.array([0, 1]), context_lens=np.array([1021 + i]))
        row = paged_attention(q[i : i + 1], *pool, step, scale, window)
        assert torch.equal(row, expected[i : i + 1])


def test_threads_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(6, 1500), (40, 300)])
    runs = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        runs.append(case.attend())
    monkeypatch.setattr(attention_cpu, "parallel", python_threads)
    runs.extend(case.attend() for _ in range(3))
    assert all(torch.equal(runs[0], other) for other in runs[1:])


def test_layers_of_different_shape_share_a_plan() -> None:
    wide, narrow = Case([(2, 700), (1, 5)], head_dim=64), Case([(2, 700), (1, 5)], kv_heads=1, group=2)
    for case in (wide, narrow, wide):
        case.plan = wide.plan if case.tables[0].blocks == wide.tables[0].blocks else case.plan
        torch.testing.assert_close(case.attend(), case.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_store_writes_each_row_to_its_slot(kv_dtype: torch.dtype) -> None:
    case = Case([(3, 14), (1, 0), (18, 33)], kv_dtype=kv_dtype)
    assert is_fast(case.pool.k[0], 16, 16)
    mine, theirs = (case.pool.k[0], case.pool.v[0]), (case.pool.k[0].clone(), case.pool.v[0].clone())
    k, v = torch.rand_like(case.k), torch.rand_like(case.v)
    wide = torch.cat([k, v], dim=1)  # rows of a fused projection: not contiguous
    store_kv(wide[:, :2], wide[:, 2:], *mine, case.plan)
    store_kv_reference(k, v, *theirs, case.plan)
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
    stored, _ = case.pool.read(0, case.tables[2], 51)
    assert torch.equal(stored[33:], k[4:].to(kv_dtype))


def test_extreme_scores() -> None:
    """Scores far apart neither overflow nor lose the winner."""
    case = Case([(4, 300)], head_dim=64)
    case.q *= 500
    torch.testing.assert_close(case.attend(), case.reference(), rtol=1e-3, atol=1e-3)


def test_empty_batch() -> None:
    batch = replace(
        Case([(1, 0)]).batch,
        query_start=np.array([0]),
        context_lens=np.zeros(0, dtype=np.int64),
        block_tables=np.zeros((0, 0), dtype=np.int64),
        slots=torch.zeros(0, dtype=torch.int64),
    )
    pool = KVPool([LayerKV(2, 16)], 1)
    plan = AttentionPlan.of(batch, 16)
    assert paged_attention(torch.zeros(0, 6, 16), pool.k[0], pool.v[0], plan, 1.0).shape == (0, 6, 16)


def test_bfloat16_goes_to_the_reference() -> None:
    case = Case([(3, 40)], dtype=torch.bfloat16)
    assert case.attend().dtype == torch.bfloat16
    exact = Case([(3, 40)], dtype=torch.float64)
    torch.testing.assert_close(case.attend().double(), plain_attention(exact, None), rtol=0.05, atol=0.05)


def test_short_block_table_is_refused() -> None:
    batch = Case([(1, 40)]).batch
    with pytest.raises(DSparkError, match="reserve blocks"):
        AttentionPlan.of(replace(batch, block_tables=batch.block_tables[:, :2]), 16)


def test_index_outside_the_pool_is_caught() -> None:
    case = Case([(1, 40)])
    case.plan = AttentionPlan.of(replace(case.batch, block_tables=case.batch.block_tables + 100), 16)
    with pytest.raises(AssertionError, match="outside the pool"):
        case.attend()
