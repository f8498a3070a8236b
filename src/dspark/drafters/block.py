"""Serving form of the block drafters (DSpark and DFlash): draft a block from the KV that commits left behind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dspark.core import Draft, Request
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.kernels.attention import AttentionPlan, paged_attention, store_kv
from dspark.kernels.linear import pack_linear, pack_linears
from dspark.kernels.lowbit import LowBitLinear, QuantizedWeight, lowbit_linears, supports
from dspark.kv import KVPool
from dspark.randomness import Purpose
from dspark.sampling import probabilities, sample
from dspark.target.decoder import Attend, DecoderLayer

__all__ = ["BlockDrafter"]


class BlockDrafter:
    """Serves a `BlockDrafterModel`.

    `observe` projects the target's features of committed rows into the draft layers' KV (eqs. 2-3), so the
    draft cache follows commits and, sharing the block table, rollbacks. `propose` runs one parallel pass over
    all blocks, then the sequential head slot by slot (eq. 4).

    `int8` quantises the drafter's matrices where a kernel for that exists (float32 on a CPU). Output stays
    exact: p_d is whatever the served drafter computes.
    """

    def __init__(self, model: BlockDrafterModel, int8: bool = False) -> None:
        config = model.config
        self.model = model.requires_grad_(False).eval()
        self.name = config.method
        self.deterministic = False
        self.max_draft = config.block_size
        self.taps = config.taps
        self.kv_specs = config.layer_config.kv_specs
        weights = []
        for layer in model.layers:
            assert isinstance(layer, DecoderLayer)
            weights.append(layer.qkv_proj.weight[layer.heads * layer.head_dim :])
        projection = torch.cat(weights)  # all draft layers in one product
        self._context_kv: Callable[[Tensor], Tensor]
        if int8 and can_quantise(projection):
            self._context_kv = LowBitLinear(QuantizedWeight.from_float(projection))
            lowbit_linears(model)
        else:
            self._context_kv = pack_linear(projection)
        pack_linears(model)
        identity = torch.equal(model.vocab, torch.arange(config.vocab_size, device=model.vocab.device))
        self.vocab = None if identity else model.vocab
        self._pool: KVPool | None = None
        self._first_layer = 0

    def attach(self, pool: KVPool, first_layer: int) -> None:
        self._pool, self._first_layer = pool, first_layer

    @property
    def pool(self) -> KVPool:
        assert self._pool is not None, "attach the drafter to a pool first"
        return self._pool

    @torch.inference_mode()
    def observe(self, batch: ObserveBatch) -> None:
        assert batch.taps is not None
        plan = AttentionPlan(
            query_start=np.array([0, len(batch.positions)]),
            context_lens=np.zeros(1, np.int64),
            block_tables=np.zeros((1, 1), np.int64),
            slots=batch.slots,
            causal=True,
            block_size=self.pool.block_size,
        )
        projected = self._context_kv(self.model.context(batch.taps)).chunk(len(self.kv_specs), -1)
        rotary = self.model.rotary(batch.positions, projected[0].dtype)
        for i, kv in enumerate(projected):
            k, v = self.model.split_kv(i, kv, rotary)
            store_kv(k, v, *self._layer(i), plan)

    @torch.inference_mode()
    def propose(self, batch: ProposeBatch) -> Draft:
        """Draft `lengths[r]` tokens for each request; see `Drafter.propose`."""
        lengths = batch.lengths
        active = np.flatnonzero(lengths)
        width = int(lengths.max(initial=0))
        draft = _Slots(len(lengths), width, batch, self.model, self.vocab)
        if not len(active):
            return draft.finish(lengths)
        hidden, starts = self._backbone(batch, active)
        logits = self.model.lm_head(hidden)
        for k in range(width):
            rows = np.flatnonzero(lengths > k)
            draft.fill(k, rows, hidden, logits, torch.from_numpy(starts[rows] + k))
        return draft.finish(lengths)

    def forget(self, request: Request) -> None:
        """Nothing is kept outside the pool."""

    def _layer(self, layer: int) -> tuple[Tensor, Tensor]:
        at = self._first_layer + layer
        return self.pool.k[at], self.pool.v[at]

    def _backbone(self, batch: ProposeBatch, active: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """One pass over the blocks of the active requests: h [sum(lengths), H], first row of each request [R]."""
        lengths, device = batch.lengths[active], self.model.vocab.device
        query_start = np.concatenate(([0], np.cumsum(lengths)))
        context = np.array([batch.requests[r].cached for r in active], dtype=np.int64)
        offset = np.arange(query_start[-1]) - np.repeat(query_start[:-1], lengths)
        positions = np.repeat(context, lengths) + offset
        tables = batch.block_tables[active]
        size = self.pool.block_size
        slots = (
            np.take_along_axis(np.repeat(tables, lengths, 0), (positions // size)[:, None], 1)[:, 0] * size
        )
        tokens = np.full(len(positions), self.model.config.mask_token_id, dtype=np.int64)
        tokens[query_start[:-1]] = [batch.requests[r].token_ids[-1] for r in active]
        plan = AttentionPlan(
            query_start=query_start,
            context_lens=context,
            block_tables=np.ascontiguousarray(tables),
            slots=torch.from_numpy(slots + positions % size).to(device),
            causal=False,  # a block sees itself in both directions
            block_size=size,
        )

        def attend_in(layer: int) -> Attend:
            k_pool, v_pool = self._layer(layer)

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                # The block's own KV lies where `observe` will write the committed rows': beyond the valid
                # length, so nobody else reads it.
                store_kv(k, v, k_pool, v_pool, plan)
                return paged_attention(q, k_pool, v_pool, plan, q.shape[-1] ** -0.5)

            return attend

        ids, at = torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)
        starts = np.zeros(len(batch.lengths), dtype=np.int64)
        starts[active] = query_start[:-1]
        return self.model.run_blocks(ids, at, attend_in), starts


def can_quantise(weight: Tensor) -> bool:
    """Whether the low-bit kernels take this weight."""
    fits = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.shape[1] % 32 == 0
    return fits and supports()


class _Slots:
    """The block under construction: the head's state, the tokens so far, and what they were sampled from."""

    def __init__(
        self, count: int, width: int, batch: ProposeBatch, model: BlockDrafterModel, vocab: Tensor | None
    ) -> None:
        device = model.vocab.device
        self.batch, self.model, self.vocab = batch, model, vocab
        self.tokens = torch.zeros(count, width, dtype=torch.int64, device=device)
        self.confidence = torch.zeros(count, width, device=device) if model.confidence is not None else None
        self.probs: Tensor | None = None
        self.uniforms: Tensor | None = None
        if not batch.rows.all_greedy:
            self.probs = torch.zeros(count, width, model.config.output_vocab_size, device=device)
            self.uniforms = batch.rows.uniform(torch.arange(width, device=device), Purpose.DRAFT)
        self.previous = torch.tensor([r.token_ids[-1] for r in batch.requests], device=device)
        rank = model.head.rank if model.head is not None else 0
        self.state = torch.zeros(count, rank, dtype=model.norm.weight.dtype, device=device)

    def fill(self, k: int, rows: np.ndarray, hidden: Tensor, logits: Tensor, at: Tensor) -> None:
        """Slot k of the requests `rows`, whose backbone rows are `at`."""
        index = torch.from_numpy(rows)
        h, scores, embedded = hidden[at], logits[at], None
        if self.model.head is not None:
            head = self.model.head
            embedded = head.w1(self.previous[index])
            features, self.state[index] = head.step(embedded, h, self.state[index])
            scores = scores + head.w2(features)
        if self.confidence is not None and self.model.confidence is not None:
            self.confidence[index, k] = self.model.confidence(h, embedded).to(self.confidence.dtype)
        for i, r in enumerate(rows):
            shaper = self.batch.shapers[r]
            if shaper is not None:
                shaper.shape_draft(scores[i], self.vocab, self.tokens[r, :k].tolist())
        chosen = self._choose(k, rows, index, scores)
        if self.vocab is not None:
            chosen = self.vocab[chosen]
        self.tokens[index, k] = chosen
        self.previous[index] = chosen

    def _choose(self, k: int, rows: np.ndarray, index: Tensor, scores: Tensor) -> Tensor:
        if self.probs is None or self.uniforms is None:
            return scores.argmax(-1)
        whole = len(rows) == len(self.tokens)
        p = probabilities(scores, self.batch.rows if whole else self.batch.rows.select(rows))
        self.probs[index, k] = p.to(self.probs.dtype)
        # Sample from what is stored: the ratio rule divides by that very array.
        return sample(self.probs[index, k], self.uniforms[index, k])

    def finish(self, lengths: np.ndarray) -> Draft:
        return Draft(self.tokens, lengths, self.probs, self.vocab, self.confidence)
