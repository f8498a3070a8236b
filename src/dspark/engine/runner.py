"""Ragged packing: the rows of a step, and which of them decide a token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dspark.core import Draft, Plan
from dspark.drafters.base import ObserveBatch
from dspark.engine.scheduler import Batch
from dspark.kv import KVPool
from dspark.target.base import ForwardBatch, Target, TargetOutput

__all__ = ["Runner", "Verification"]


@dataclass(frozen=True)
class Verification:
    """Target outputs of a step. Logits are those of the S sampling requests, ragged: request s owns
    logit_start[s] .. + lengths[s], the last one being its bonus row."""

    output: TargetOutput
    query_start: np.ndarray  # [R + 1]
    positions: np.ndarray  # [N]
    slots: np.ndarray  # [N]
    sampling: np.ndarray  # [S] indices into the batch
    lengths: np.ndarray  # [S] scheduled lengths
    logit_start: np.ndarray  # [S]

    def spread(self, values: torch.Tensor) -> np.ndarray:
        """Values of the sampling requests [S] over the batch [R], 0 for the others, on the host."""
        out = np.zeros(len(self.query_start) - 1, dtype=np.int64)
        out[self.sampling] = values.cpu().numpy()
        return out


class Runner:
    """Runs the target over a step's rows: pending tokens, then the scheduled drafts, of every request."""

    def __init__(self, target: Target, pool: KVPool, taps: tuple[int, ...]) -> None:
        self.target, self.pool, self.taps = target, pool, taps

    def verify(self, batch: Batch, draft: Draft, plan: Plan) -> Verification:
        """One pass for all requests: sum(rows + scheduled length) rows."""
        counts = batch.rows + plan.lengths
        query_start = np.concatenate(([0], np.cumsum(counts)))
        cached = np.array([r.cached for r in batch.requests], dtype=np.int64)
        within = np.arange(query_start[-1]) - np.repeat(query_start[:-1], counts)
        positions = np.repeat(cached, counts) + within
        tables, size = batch.block_tables(), self.pool.block_size
        owner = np.repeat(np.arange(len(counts)), counts)
        slots = tables[owner, positions // size] * size + positions % size

        sampling = np.flatnonzero(batch.samples)
        lengths = plan.lengths[sampling]
        first = query_start[:-1][sampling] + batch.rows[sampling] - 1  # the anchor's row
        logit_start = np.concatenate(([0], np.cumsum(lengths + 1)))[:-1]
        logit_rows = np.arange(int((lengths + 1).sum())) + np.repeat(first - logit_start, lengths + 1)

        device = self.target.device
        forward = ForwardBatch(
            token_ids=self._tokens(batch, draft, plan, query_start),
            positions=torch.from_numpy(positions).to(device),
            query_start=query_start,
            context_lens=cached,
            block_tables=tables,
            slots=torch.from_numpy(slots).to(device),
            # Decoding requests want all their rows.
            logit_rows=None if len(logit_rows) == len(positions) else torch.from_numpy(logit_rows).to(device),
        )
        output = self.target.forward(forward, self.pool, self.taps)
        return Verification(output, query_start, positions, slots, sampling, lengths, logit_start)

    def _tokens(self, batch: Batch, draft: Draft, plan: Plan, query_start: np.ndarray) -> torch.Tensor:
        """Token ids of all rows [N]. Drafts stay on their device."""
        ids = np.zeros(query_start[-1], dtype=np.int64)
        for i, request in enumerate(batch.requests):
            start, count = query_start[i], batch.rows[i]
            ids[start : start + count] = request.token_ids[request.cached : request.cached + count]
        device = self.target.device
        tokens = torch.from_numpy(ids).to(device)
        if plan.budget:
            r = np.repeat(np.arange(len(plan.lengths)), plan.lengths)
            slot = np.arange(len(r)) - np.repeat(np.cumsum(plan.lengths) - plan.lengths, plan.lengths)
            row = query_start[:-1][r] + batch.rows[r] + slot
            if device.type == "cpu":
                ids[row] = draft.tokens.numpy()[r, slot]
            else:
                index = [torch.from_numpy(i).to(device) for i in (row, r, slot)]
                tokens[index[0]] = draft.tokens[index[1], index[2]]
        return tokens

    def observed(self, batch: Batch, seen: Verification, accepted: np.ndarray) -> ObserveBatch | None:
        """The rows a drafter learns of: pending rows and accepted drafts of unfinished speculative requests."""
        keep = np.array([not r.finished and r.params.speculative for r in batch.requests], dtype=bool)
        counts = np.where(keep, batch.rows + accepted, 0)
        if not counts.any():
            return None
        row_start = np.concatenate(([0], np.cumsum(counts)))
        positions, slots, taps, device = seen.positions, seen.slots, seen.output.taps, self.target.device
        if row_start[-1] < len(positions):  # else all rows are kept, as in a round without drafts
            index = np.arange(row_start[-1]) + np.repeat(seen.query_start[:-1] - row_start[:-1], counts)
            positions, slots = positions[index], slots[index]
            taps = None if taps is None else taps[torch.from_numpy(index).to(device)]
        return ObserveBatch(
            requests=batch.requests,
            row_start=row_start,
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(slots).to(device),
            taps=taps,
        )
