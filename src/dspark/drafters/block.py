"""Serving form of the block drafters (DSpark and DFlash): draft a block from the KV that commits left behind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dspark.core import Draft, Request
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.drafters.deferred import DeferredRows
from dspark.drafters.quantise import can_quantise, quantise
from dspark.kernels.attention import AttentionPlan, is_fast, paged_attention, store_kv
from dspark.kernels.layers import CompiledContext
from dspark.kernels.linear import pack_linear, pack_linears
from dspark.kernels.lowbit import LowBitLinear, QuantizedWeight, supports_integers
from dspark.kernels.program import Rotation
from dspark.kv import KVPool
from dspark.randomness import Purpose
from dspark.sampling import argmax, probabilities, sample
from dspark.target.decoder import Attend, DecoderLayer, compiled_layers

__all__ = ["BlockDrafter"]


class BlockDrafter:
    """Serves a `BlockDrafterModel`.

    `observe` takes the target's features of committed rows and `catch_up`, at the latest before the next draft,
    projects them into the draft layers' KV (eqs. 2-3), so the draft cache follows commits and, sharing the block table,
    rollbacks. `propose` runs one parallel pass over all blocks, then the sequential head slot by slot (eq. 4).

    `quantised` rounds the drafter's matrices where a kernel for that exists (float32 on a CPU): those of its layers to
    4 bits, the others to 8. Output stays exact: p_d is whatever the served drafter computes.
    """

    def __init__(self, model: BlockDrafterModel, quantised: bool = False) -> None:
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
        if quantised and can_quantise(projection):
            self._context_kv = LowBitLinear(
                QuantizedWeight.from_float(projection), integer=supports_integers()
            )
            quantise(model)
        else:
            self._context_kv = pack_linear(projection)
        pack_linears(model)
        windows = [spec.window for spec in self.kv_specs]
        self._compiled = compiled_layers(model.layers, model.norm, model.rotary, windows)
        self._compiled_context = compiled_context(model, self._context_kv)
        identity = torch.equal(model.vocab, torch.arange(config.vocab_size, device=model.vocab.device))
        self.vocab = None if identity else model.vocab
        self._behind = DeferredRows()
        self._pool: KVPool | None = None
        self._first_layer = 0

    def attach(self, pool: KVPool, first_layer: int) -> None:
        self._pool, self._first_layer = pool, first_layer
        self._behind = DeferredRows()  # slots of another pool mean nothing here

    @property
    def pool(self) -> KVPool:
        assert self._pool is not None, "attach the drafter to a pool first"
        return self._pool

    def observe(self, batch: ObserveBatch) -> None:
        self._behind.add(batch)
        if self._behind.full:
            self.catch_up()

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Write the draft KV of all rows observed so far."""
        if (rows := self._behind.take()) is None:
            return
        positions, slots, taps = rows
        plan = AttentionPlan.for_store(slots, self.pool.block_size)
        keys, values = self._layers()
        if self._compiled_context is not None and is_fast(keys[0], keys[0].shape[2], plan.block_size):
            self._compiled_context.store(taps, positions, plan, keys, values)
            return
        projected = self._context_kv(self.model.context(taps)).chunk(len(self.kv_specs), -1)
        rotary = self.model.rotary(positions, projected[0].dtype)
        for i, kv in enumerate(projected):
            k, v = self.model.split_kv(i, kv, rotary)
            store_kv(k, v, keys[i], values[i], plan)

    @torch.inference_mode()
    def propose(self, batch: ProposeBatch) -> Draft:
        """Draft `lengths[r]` tokens for each request; see `Drafter.propose`."""
        active = np.flatnonzero(batch.lengths)
        if not len(active):
            return Draft.empty(len(batch.lengths), self.model.vocab.device)
        self.catch_up()
        hidden = self._backbone(batch, active)
        block = _Block(self.model, self.vocab, batch, active)
        block.fill(hidden, self.model.lm_head(hidden))
        return block.finish(batch.lengths)

    def forget(self, request: Request) -> None:
        self._behind.forget(request)

    def _layers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the draft layers in the pool."""
        layers = slice(self._first_layer, self._first_layer + len(self.kv_specs))
        return self.pool.k[layers], self.pool.v[layers]

    def _backbone(self, batch: ProposeBatch, active: np.ndarray) -> Tensor:
        """One pass over the blocks of the active requests, side by side: h [sum(lengths), H]."""
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

        ids, at = torch.from_numpy(tokens).to(device), torch.from_numpy(positions).to(device)
        # The block's own KV lies where `observe` will write the committed rows': beyond the valid length, so nobody
        # else reads it.
        keys, values = self._layers()
        if self._compiled is not None and is_fast(keys[0], self.model.config.head_dim, size):
            return self._compiled(self.model.embed(ids), at, plan, keys, values)[0]

        def attend_in(layer: int) -> Attend:
            k_pool, v_pool = keys[layer], values[layer]

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                store_kv(k, v, k_pool, v_pool, plan)
                return paged_attention(q, k_pool, v_pool, plan, q.shape[-1] ** -0.5)

            return attend

        return self.model.run_blocks(ids, at, attend_in)


def compiled_context(
    model: BlockDrafterModel, context_kv: Callable[[Tensor], Tensor]
) -> CompiledContext | None:
    """The one-call form of `observe` where all its products are low-bit."""
    fc, gain = model.fc, model.hidden_norm.weight
    if not (isinstance(fc, LowBitLinear) and isinstance(context_kv, LowBitLinear)):
        return None
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    if not CompiledContext.supports(fc, gain, context_kv, layers[0].head_dim):
        return None
    norms = [None if layer.k_norm is None else layer.k_norm.weight for layer in layers]
    rotary = model.rotary
    rotation = Rotation(0, layers[0].kv_heads, layers[0].head_dim, rotary.cos, rotary.sin)
    assert model.hidden_norm.eps is not None
    return CompiledContext(fc, gain, context_kv, norms, rotation, model.hidden_norm.eps)


class _Block:
    """The sequential stage over A active requests: the tokens so far, and what they were sampled from."""

    def __init__(
        self, model: BlockDrafterModel, vocab: Tensor | None, batch: ProposeBatch, active: np.ndarray
    ) -> None:
        self.model, self.vocab, self.active = model, vocab, active
        self.count = len(batch.lengths)
        self.lengths = batch.lengths[active]
        self.rows = batch.rows if len(active) == self.count else batch.rows.select(active)
        self.shapers = [batch.shapers[r] for r in active]
        self.anchors = torch.tensor(
            [batch.requests[r].token_ids[-1] for r in active], device=model.vocab.device
        )
        self.tokens: list[Tensor] = []  # per slot [A]
        self.probs: list[Tensor] = []  # per slot [A, Vd]
        self.confidence: Tensor | None = None  # [A, width]

    def fill(self, hidden: Tensor, logits: Tensor) -> None:
        """All slots, left to right, from the backbone's ragged rows [sum(lengths), H] and [sum(lengths), Vd]."""
        hidden, logits = self._padded(hidden), self._padded(logits)
        head, width = self.model.head, hidden.shape[1]
        uniforms = None
        if not self.rows.all_greedy:
            uniforms = self.rows.uniform(torch.arange(width, device=hidden.device), Purpose.DRAFT)
        previous, embeddings = self.anchors, []
        state = head.initial_state(hidden[:, 0]) if head is not None else None
        for k in range(width):
            scores = logits[:, k]
            if head is not None and state is not None:
                embeddings.append(head.w1(previous))
                features, state = head.step(embeddings[-1], hidden[:, k], state)
                scores = scores + head.w2(features)
            previous = self._choose(self._shaped(scores), None if uniforms is None else uniforms[:, k])
            self.tokens.append(previous)
        if self.model.confidence is not None:
            previous_tokens = torch.stack(embeddings, 1) if embeddings else None
            self.confidence = self.model.confidence(hidden, previous_tokens)

    def finish(self, lengths: np.ndarray) -> Draft:
        probs = torch.stack(self.probs, 1) if self.probs else None
        tokens, confidence = torch.stack(self.tokens, 1), self.confidence
        if len(self.active) < self.count:
            tokens = self._spread(tokens)
            probs = None if probs is None else self._spread(probs)
            confidence = None if confidence is None else self._spread(confidence)
        return Draft(tokens, lengths.copy(), probs, self.vocab, confidence)

    def _padded(self, rows: Tensor) -> Tensor:
        """Ragged rows [sum(lengths), d] -> [A, width, d]; slots past a length repeat its last row."""
        width = int(self.lengths.max())
        if (self.lengths == width).all():
            return rows.unflatten(0, (-1, width))
        starts = np.cumsum(self.lengths) - self.lengths
        index = starts[:, None] + np.minimum(np.arange(width), self.lengths[:, None] - 1)
        return rows[torch.from_numpy(index).to(rows.device)]

    def _shaped(self, scores: Tensor) -> Tensor:
        """Penalties, bias and masks of the requests that have any, [A, Vd]."""
        if any(s is not None for s in self.shapers):
            scores = scores.clone()
            for i, shaper in enumerate(self.shapers):
                if shaper is not None:
                    shaper.shape_draft(scores[i], self.vocab, [int(t[i]) for t in self.tokens])
        return scores

    def _choose(self, scores: Tensor, u: Tensor | None) -> Tensor:
        """Target ids [A]: argmax, or a sample from the array that the ratio rule will divide by."""
        if u is None:
            chosen = argmax(scores)
        else:
            self.probs.append(probabilities(scores, self.rows))
            chosen = sample(self.probs[-1], u)
        return chosen if self.vocab is None else self.vocab[chosen]

    def _spread(self, values: Tensor) -> Tensor:
        """[A, ...] -> [R, ...], zeros for requests that draft nothing."""
        out = values.new_zeros(self.count, *values.shape[1:])
        out[torch.from_numpy(self.active).to(values.device)] = values
        return out
