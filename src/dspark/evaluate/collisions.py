"""Deciding collision suspects: one more target pass, with other tokens in the place of the first draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dspark.core import Request, SamplingParams
from dspark.evaluate.rounds import CollisionThresholds
from dspark.kv import BlockTable, KVPool
from dspark.sampling import SamplingRows, log_probabilities
from dspark.target.base import ForwardBatch, Target

__all__ = ["Suspect", "count_collisions"]

BLOCK_SIZE = 16
MAX_ROWS = 256  # of one pass


@dataclass(frozen=True)
class Suspect:
    """An adjacent draft pair whose second token the first makes improbable; see `CollisionThresholds`.

    `position` of the pair's first token in the sequence (prompt included): its context is everything before.
    `known` is p_t(x_k | h) p_t(x_k+1 | h, x_k); `weights` are p_t(y | h) of the `alternatives` y.
    """

    position: int
    token: int  # x_k+1
    known: float
    alternatives: tuple[int, ...]
    weights: tuple[float, ...]


@torch.inference_mode()
def count_collisions(
    target: Target,
    token_ids: Sequence[int],
    suspects: Sequence[Suspect],
    params: SamplingParams,
    thresholds: CollisionThresholds,
) -> int:
    """How many `suspects` of one answer collide.

    Args:
        token_ids: the committed sequence, prompt and answer; a suspect's context is a prefix of it.
        params: what the answer was sampled with (temperature and filters; no penalties).
    """
    # Where even certainty behind every alternative would not do, there is nothing to look at.
    possible = [s for s in suspects if s.known + sum(s.weights) >= thresholds.probable]
    possible = [s for s in possible if s.alternatives]
    if not possible:
        return 0
    history = _History(target, token_ids[: max(s.position for s in possible)])
    queries = [(s.position, y) for s in possible for y in s.alternatives]
    tokens = [s.token for s in possible for _ in s.alternatives]
    behind = []
    for i in range(0, len(queries), MAX_ROWS):
        logits = history.ask(queries[i : i + MAX_ROWS])
        rows = _rows(params, logits.device).repeat([len(logits)])
        index = torch.tensor(tokens[i : i + MAX_ROWS], device=logits.device)
        behind += log_probabilities(logits, rows).exp().gather(1, index[:, None])[:, 0].tolist()
    found, at = 0, 0
    for s in possible:
        mass = s.known + sum(w * p for w, p in zip(s.weights, behind[at:], strict=False))
        at += len(s.alternatives)
        found += mass >= thresholds.probable
    return found


def _rows(params: SamplingParams, device: torch.device) -> SamplingRows:
    return SamplingRows.of([Request(0, "collisions", [0], params, 0, 1)], device)


class _History:
    """A sequence in a KV pool of its own, which many one-token continuations can branch from."""

    def __init__(self, target: Target, token_ids: Sequence[int]) -> None:
        self.target, self.table = target, BlockTable()
        blocks = -(-len(token_ids) // BLOCK_SIZE)
        self.pool = KVPool(target.kv_specs, blocks + MAX_ROWS, BLOCK_SIZE, target.kv_dtype, target.device)
        self.pool.reserve(self.table, len(token_ids))
        for start in range(0, len(token_ids), MAX_ROWS):
            part = list(token_ids[start : start + MAX_ROWS])
            stop = start + len(part)
            slots = self.pool.slots(self.table, start, stop)
            starts = np.array([0, len(part)], dtype=np.int64)
            tables = np.array([self.table.blocks], dtype=np.int64)
            last = torch.tensor([len(part) - 1], device=target.device)
            self._forward(part, np.arange(start, stop), starts, np.array([start]), tables, slots, last)

    def ask(self, queries: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Logits [n, V] behind `token` at `position` of the sequence, for each (position, token).

        Every query writes into a block of its own, a copy of the one its position lies in.
        """
        n, size = len(queries), BLOCK_SIZE
        positions = np.array([position for position, _ in queries], dtype=np.int64)
        tables = np.zeros((n, int(positions.max()) // size + 1), dtype=np.int64)
        own = BlockTable()
        reserved = self.pool.reserve(own, n * size)
        assert reserved, "a free block for every query"
        for row, (position, block) in enumerate(zip(positions.tolist(), own.blocks, strict=True)):
            whole, within = divmod(position, size)
            tables[row, :whole] = self.table.blocks[:whole]
            tables[row, whole] = block
            if within:
                for layer in (*self.pool.k, *self.pool.v):
                    layer[block] = layer[self.table.blocks[whole]]
        slots = np.array(own.blocks, dtype=np.int64) * size + positions % size
        tokens = [token for _, token in queries]
        logits = self._forward(tokens, positions, np.arange(n + 1), positions, tables, slots, None)
        self.pool.release(own)
        return logits

    def _forward(
        self,
        tokens: list[int],
        positions: np.ndarray,
        query_start: np.ndarray,
        context_lens: np.ndarray,
        tables: np.ndarray,
        slots: np.ndarray,
        logit_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        device = self.target.device
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens, dtype=torch.int64, device=device),
            positions=torch.from_numpy(positions).to(device),
            query_start=query_start,
            context_lens=context_lens,
            block_tables=tables,
            slots=torch.from_numpy(slots).to(device),
            logit_rows=logit_rows,
        )
        return self.target.forward(batch, self.pool).logits
