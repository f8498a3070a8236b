"""One paged KV pool for the target's and the drafter's layers.

A block holds `block_size` consecutive positions of one request, in every layer. One block table a request
addresses them all, so rolling back is moving a length and returning tail blocks (DESIGN seam 11).

Layouts are chosen for attention that reads blocks in place: keys are transposed within a block
([head, head_dim, position]) so that scores of neighbouring positions are computed side by side; values are
[head, position, head_dim].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dspark.core import DSparkError

__all__ = ["BlockTable", "KVPool", "LayerKV"]


@dataclass(frozen=True)
class LayerKV:
    """KV need of one layer. `window`: only the last so many positions are visible. `shares`: reads layer j's KV."""

    num_heads: int
    head_dim: int
    window: int | None = None
    shares: int | None = None


@dataclass(eq=False)
class BlockTable:
    """Physical blocks of one request, in order of position."""

    blocks: list[int] = field(default_factory=list)

    def capacity(self, block_size: int) -> int:
        return len(self.blocks) * block_size


class KVPool:
    """KV storage for `specs` layers, handed out in blocks.

    Args:
        specs: one per layer; target layers first, drafter layers behind them.
        num_blocks: blocks in the pool; `num_blocks * block_size` positions in all.
        block_size: positions in a block.
    """

    def __init__(
        self,
        specs: Sequence[LayerKV],
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_blocks < 1:
            raise DSparkError(f"the KV pool needs at least one block, got {num_blocks}; give it more memory")
        self.specs = tuple(specs)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.k: list[torch.Tensor] = []  # per layer [num_blocks, heads, head_dim, block_size]
        self.v: list[torch.Tensor] = []  # per layer [num_blocks, heads, block_size, head_dim]
        for i, spec in enumerate(self.specs):
            if spec.shares is not None:
                if not 0 <= spec.shares < i:
                    raise DSparkError(
                        f"layer {i} shares the KV of layer {spec.shares}, which does not precede it"
                    )
                self.k.append(self.k[spec.shares])
                self.v.append(self.v[spec.shares])
                continue
            shape = (num_blocks, spec.num_heads, spec.head_dim, block_size)
            try:  # not filled: what is beyond a valid length is never read, and untouched pages take no memory
                self.k.append(torch.empty(shape, dtype=dtype, device=device))
                self.v.append(
                    torch.empty((*shape[:2], block_size, spec.head_dim), dtype=dtype, device=device)
                )
            except RuntimeError:
                raise DSparkError(
                    f"no memory for a KV pool of {num_blocks * block_size} positions: lower kv_cache_tokens"
                ) from None
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low blocks first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """Grow `table` to hold `num_tokens` positions. False, and nothing changed, if the pool cannot."""
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        if missing > len(self._free):
            return False
        table.blocks.extend(self._free.pop() for _ in range(missing))
        return True

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Roll back: keep the blocks of the first `num_tokens` positions, return the others."""
        keep = self.blocks_for(num_tokens)
        while len(table.blocks) > keep:
            self._free.append(table.blocks.pop())

    def release(self, table: BlockTable) -> None:
        self.truncate(table, 0)

    def slots(self, table: BlockTable, start: int, stop: int) -> np.ndarray:
        """Flat slot (block * block_size + offset) of each position in [start, stop). Shape [stop - start] int64."""
        positions = np.arange(start, stop, dtype=np.int64)
        blocks = np.asarray(table.blocks, dtype=np.int64)[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def read(self, layer: int, table: BlockTable, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy of the first `length` positions of a layer: k, v [length, heads, head_dim] (for tests)."""
        index = torch.as_tensor(
            table.blocks[: self.blocks_for(length)], device=self.k[layer].device, dtype=torch.int64
        )
        k = self.k[layer][index].permute(0, 3, 1, 2).flatten(0, 1)[:length]
        v = self.v[layer][index].permute(0, 2, 1, 3).flatten(0, 1)[:length]
        return k, v

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Assert that every block is either free or owned by exactly one table."""
        owned = [b for table in tables for b in table.blocks]
        seen = sorted(owned + self._free)
        assert seen == list(range(self.num_blocks)), "KV blocks were lost or shared"

    def bytes(self) -> int:
        own = [i for i, spec in enumerate(self.specs) if spec.shares is None]
        return sum(self.k[i].nbytes + self.v[i].nbytes for i in own)
