"""Attention of a ragged batch over paged KV history, read in place through block tables.

    plan = AttentionPlan.of(batch, pool.block_size)                # once a forward pass
    store_kv(k, v, pool.k[layer], pool.v[layer], plan)             # each layer
    out = paged_attention(q, pool.k[layer], pool.v[layer], plan, scale)

float32 on a CPU takes the compiled path (`attention_cpu`); everything else the torch reference beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dspark.core import DSparkError
from dspark.kernels import attention_cpu as fast
from dspark.kernels.bounds import largest, longest_total
from dspark.kernels.floats_numba import runs_here as converts_halves
from dspark.target.base import ForwardBatch

__all__ = [
    "AttentionPlan",
    "check_pool",
    "is_fast",
    "paged_attention",
    "paged_attention_reference",
    "store_kv",
    "store_kv_reference",
]


@dataclass(frozen=True)
class AttentionPlan:
    """What all layers of one forward pass share. Row and request conventions are `ForwardBatch`'s."""

    query_start: np.ndarray  # [R + 1] int64
    context_lens: np.ndarray  # [R] int64
    block_tables: np.ndarray  # [R, max_blocks] int64
    slots: torch.Tensor  # [N] int64
    causal: bool
    block_size: int

    @staticmethod
    def of(batch: ForwardBatch, block_size: int) -> AttentionPlan:
        """Plan the attention of `batch` over a pool with blocks of `block_size` positions.

        Raises:
            DSparkError: a block table is too short for its request's history and rows.
        """
        plan = AttentionPlan(
            query_start=np.ascontiguousarray(batch.query_start, dtype=np.int64),
            context_lens=np.ascontiguousarray(batch.context_lens, dtype=np.int64),
            block_tables=np.ascontiguousarray(batch.block_tables, dtype=np.int64),
            slots=batch.slots,
            causal=batch.causal,
            block_size=block_size,
        )
        longest = longest_total(plan.query_start, plan.context_lens)
        if longest > plan.block_tables.shape[1] * block_size:
            raise DSparkError(
                f"block tables hold fewer than {longest} positions; reserve blocks before the pass"
            )
        return plan

    @staticmethod
    def for_store(slots: torch.Tensor, block_size: int) -> AttentionPlan:
        """A plan that only writes rows to their slots."""
        start, none = np.array([0, len(slots)], dtype=np.int64), np.zeros(1, dtype=np.int64)
        return AttentionPlan(start, none, none.reshape(1, 1), slots, causal=True, block_size=block_size)

    @cached_property
    def totals(self) -> np.ndarray:
        """[R] positions of each request once its rows are stored."""
        return self.context_lens + np.diff(self.query_start)

    @cached_property
    def num_blocks_needed(self) -> int:
        """Least number of blocks a pool must have for these tables and slots to lie inside it."""
        last_slot = largest(self.slots.cpu().numpy())
        return max(largest(self.block_tables), last_slot // self.block_size) + 1

    @cached_property
    def block_index(self) -> tuple[torch.Tensor, ...]:
        """Blocks of each request on the device of `slots`: what the reference gathers."""
        counts = -(-self.totals // self.block_size)
        rows = zip(self.block_tables, counts, strict=True)
        return tuple(torch.from_numpy(row[:count].copy()).to(self.slots.device) for row, count in rows)

    @cached_property
    def work(self) -> fast.Work:
        """The pass cut into pieces of parallel work, for the compiled path."""
        slots = np.ascontiguousarray(self.slots.numpy())
        return fast.Work.of(
            self.query_start, self.context_lens, self.block_tables, slots, self.causal, self.block_size
        )


def is_fast(pool: torch.Tensor, head_dim: int, block_size: int) -> bool:
    """Whether the compiled path handles this pool: on a CPU, float32, or float16 where the processor converts it,
    sizes that fill vector registers."""
    kinds = (torch.float32, torch.float16) if converts_halves() else (torch.float32,)
    on_cpu = pool.device.type == "cpu" and pool.dtype in kinds
    return on_cpu and fast.supports(head_dim, block_size)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, plan: AttentionPlan
) -> None:
    """Write each row's key and value to its slot.

    Args:
        k, v: [N, kv_heads, head_dim].
        k_pool: [num_blocks, kv_heads, head_dim, block_size].
        v_pool: [num_blocks, kv_heads, block_size, head_dim].
    """
    if is_fast(k_pool, k.shape[-1], plan.block_size) and k.dtype == torch.float32:
        check_pool(k_pool, v_pool, plan)
        fast.store(k, v, k_pool, v_pool, plan.work)
    else:
        store_kv_reference(k, v, k_pool, v_pool, plan)


def store_kv_reference(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, plan: AttentionPlan
) -> None:
    """`store_kv` in torch, any dtype and device."""
    block = plan.slots // plan.block_size
    offset = plan.slots % plan.block_size
    k_pool[block, :, :, offset] = k.to(k_pool.dtype)
    v_pool[block, :, offset] = v.to(v_pool.dtype)


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T) v over each row's visible positions. Rows' own K and V must have been stored.

    Row i of request r is at position p = context_lens[r] + i. It sees positions 0 .. p (causal), or all
    stored positions of the request, those of its rows included (not causal). With `window`, positions up to
    p - window are hidden. The result of a row does not depend, to the last bit, on the other rows of the
    batch nor on the number of threads (compiled path).

    Args:
        q: [N, heads, head_dim]; heads are a multiple of the pool's, neighbours share a KV head.
        k_pool, v_pool: one layer of the pool, see `store_kv`.

    Returns:
        [N, heads, head_dim], dtype of `q`.
    """
    if is_fast(k_pool, q.shape[-1], plan.block_size) and q.dtype == torch.float32:
        check_pool(k_pool, v_pool, plan)
        return fast.attend(q, k_pool, v_pool, plan.work, scale, window)
    return paged_attention_reference(q, k_pool, v_pool, plan, scale, window)


def paged_attention_reference(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """`paged_attention` in torch, any dtype and device. Gathers the history of one request at a time."""
    out = torch.empty_like(q)
    compute = q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32
    group = q.shape[1] // k_pool.shape[1]
    for r, blocks in enumerate(plan.block_index):
        start, stop = int(plan.query_start[r]), int(plan.query_start[r + 1])
        context, total = int(plan.context_lens[r]), int(plan.totals[r])
        if start == stop:
            continue
        k = (
            k_pool[blocks].permute(1, 2, 0, 3).flatten(2)[:, :, :total].to(compute)
        )  # [kv_heads, head_dim, total]
        v = (
            v_pool[blocks].permute(1, 0, 2, 3).flatten(1, 2)[:, :total].to(compute)
        )  # [kv_heads, total, head_dim]
        rows = q[start:stop].to(compute).unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        scores = (rows * scale) @ k[:, None]  # [kv_heads, group, q_len, total]
        key = torch.arange(total, device=q.device)
        row = torch.arange(context, total, device=q.device)[:, None]
        hidden = (key > row) if plan.causal else torch.zeros_like(key > row)
        if window is not None:
            hidden |= key <= row - window
        mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v[:, None]
        out[start:stop] = mixed.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out


def check_pool(k_pool: torch.Tensor, v_pool: torch.Tensor, plan: AttentionPlan) -> None:
    """The compiled path trusts its indices: they must lie inside the pool."""
    assert k_pool.is_contiguous(), "pool layers are contiguous"
    assert v_pool.is_contiguous(), "pool layers are contiguous"
    assert k_pool.shape[0] >= plan.num_blocks_needed, "a block table or slot points outside the pool"
