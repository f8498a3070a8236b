"""Runs the target over the rows of a step, and tells the drafter which of them were committed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dspark.core import Draft, Plan
from dspark.drafters.base import ObserveBatch
from dspark.engine.packing import PackedRows, draft_rows, kept_rows, pack_rows
from dspark.engine.scheduler import Batch
from dspark.kernels.copies import take_rows
from dspark.kv import KVPool
from dspark.target.base import ForwardBatch, Target, TargetOutput

__all__ = ["Runner", "Verification"]


@dataclass(frozen=True)
class Verification:
    """Target outputs of a step, and what row is what. Logits are those of the S sampling requests, ragged: request s
    owns logit_start[s] .. + lengths[s], the last one being its bonus row."""

    output: TargetOutput
    rows: PackedRows
    positions: torch.Tensor  # [N] int64
    slots: torch.Tensor  # [N] int64

    @property
    def sampling(self) -> np.ndarray:
        """[S] indices into the batch."""
        return self.rows.sampling

    @property
    def lengths(self) -> np.ndarray:
        """[S] scheduled lengths."""
        return self.rows.lengths

    @property
    def logit_start(self) -> np.ndarray:
        """[S]"""
        return self.rows.logit_start

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Values of the sampling requests [S] over the batch [R], 0 for the others."""
        out = np.zeros(len(self.rows.query_start) - 1, dtype=np.int64)
        out[self.sampling] = values
        return out


class Runner:
    """Runs the target over a step's rows: pending tokens, then the scheduled drafts, of every request."""

    def __init__(self, target: Target, pool: KVPool, taps: tuple[int, ...]) -> None:
        self.target, self.pool, self.taps = target, pool, taps
        self.device = target.device

    def verify(self, batch: Batch, draft: Draft, plan: Plan, follow: bool = True) -> Verification:
        """One pass for all requests: sum(rows + scheduled length) rows. `follow`: keep what a drafter learns from."""
        cached = np.array([r.cached for r in batch.requests], dtype=np.int64)
        tables = batch.block_tables
        rows = pack_rows(cached, batch.rows, plan.lengths, batch.samples, tables, self.pool.block_size)
        positions, slots = (
            torch.from_numpy(rows.positions).to(self.device),
            torch.from_numpy(rows.slots).to(self.device),
        )
        all_wanted = len(rows.logit_rows) == len(rows.positions)  # as where all requests decode
        forward = ForwardBatch(
            token_ids=self._tokens(batch, draft, plan, rows.query_start),
            positions=positions,
            query_start=rows.query_start,
            context_lens=cached,
            block_tables=tables,
            slots=slots,
            logit_rows=None if all_wanted else torch.from_numpy(rows.logit_rows).to(self.device),
            argmax=all(r.request.params.greedy and r.shaper is None for r in batch.running),
        )
        output = self.target.forward(forward, self.pool, self.taps if follow else ())
        return Verification(output, rows, positions, slots)

    def _tokens(self, batch: Batch, draft: Draft, plan: Plan, query_start: np.ndarray) -> torch.Tensor:
        """Token ids of all rows [N]. Drafts stay on their device."""
        ids = np.zeros(query_start[-1], dtype=np.int64)
        for request, start, count in zip(
            batch.requests, query_start.tolist(), batch.rows.tolist(), strict=False
        ):
            ids[start : start + count] = request.token_ids[request.cached : request.cached + count]
        tokens = torch.from_numpy(ids).to(self.device)
        if plan.budget:
            row, r, slot = draft_rows(query_start, batch.rows, plan.lengths)
            if self.device.type == "cpu":
                ids[row] = draft.tokens.numpy()[r, slot]
            else:
                index = [torch.from_numpy(i).to(self.device) for i in (row, r, slot)]
                tokens[index[0]] = draft.tokens[index[1], index[2]]
        return tokens

    def observed(self, batch: Batch, seen: Verification, accepted: np.ndarray) -> ObserveBatch | None:
        """The rows a drafter learns of: pending rows and accepted drafts of requests that it may draft for.

        Requests that ended in this round are left out: of an accepted block they may have taken a part.
        """
        counts = batch.rows + accepted
        learns = [
            r.followed and r.request.params.speculative and not r.request.finished for r in batch.running
        ]
        if not all(learns):
            counts *= np.array(learns)
        total = int(counts.sum())
        if not total:
            return None
        rows, taps = seen.rows, seen.output.taps
        if total == len(rows.positions):  # as in a round without drafts
            return ObserveBatch(batch.requests, rows.query_start, seen.positions, seen.slots, taps)
        start, index, *kept = kept_rows(rows.query_start, rows.positions, rows.slots, counts)
        positions, slots = (torch.from_numpy(values).to(self.device) for values in kept)
        taps = None if taps is None else take_rows(taps, index)
        return ObserveBatch(batch.requests, start, positions, slots, taps)
