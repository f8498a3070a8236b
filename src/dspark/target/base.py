"""What the engine needs of a target model: one ragged forward pass with taps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dspark.kv import KVPool, LayerKV

__all__ = ["ForwardBatch", "Target", "TargetOutput"]


@dataclass(frozen=True)
class ForwardBatch:
    """Rows of R requests side by side: request r owns rows query_start[r] .. query_start[r + 1].

    Its rows continue a history of `context_lens[r]` cached positions. Attention is causal among a request's
    rows (`causal`), or full within them (a drafter's block).
    """

    token_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    query_start: np.ndarray  # [R + 1] int64
    context_lens: np.ndarray  # [R] int64
    block_tables: np.ndarray  # [R, max_blocks] int64, rows padded with 0
    slots: torch.Tensor  # [N] int64: where each row's KV goes
    logit_rows: torch.Tensor | None = None  # [n] int64 rows whose logits are wanted; None = all
    causal: bool = True
    argmax: bool = False  # whether the largest logit's token of each of these rows is wanted, too

    @property
    def num_rows(self) -> int:
        return int(self.query_start[-1])

    @property
    def num_requests(self) -> int:
        return len(self.context_lens)


@dataclass(frozen=True)
class TargetOutput:
    logits: torch.Tensor  # [n, V], rows as in ForwardBatch.logit_rows
    taps: torch.Tensor | None  # [N, m * hidden]: hidden states of the tapped layers, concatenated
    argmax: torch.Tensor | None = None  # [n] int64, if it was wanted and the pass found it on its way


class Target(Protocol):
    """A language model over a paged KV pool.

    `forward` writes the KV of every row into `batch.slots` of the pool's layers 0..len(kv_specs)-1, attends to
    the history in place, and returns logits for `batch.logit_rows`. `taps` are layer ids: L means the hidden
    state after layer L, -1 the embedding output, before any final norm.
    """

    vocab_size: int
    hidden_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    kv_specs: tuple[LayerKV, ...]
    identity: str  # names the weights: drafter checkpoints are bound to it

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the KV pool."""
        ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: ForwardBatch, pool: KVPool, taps: tuple[int, ...] = ()) -> TargetOutput: ...
