"""Serving form of the block drafters (DSpark and DFlash): draft a block from the KV that commits left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from dspark.compilation import compiled
from dspark.core import Draft, Request
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.drafters.deferred import DeferredRows
from dspark.drafters.heads import MarkovHead
from dspark.drafters.quantise import can_quantise, quantise
from dspark.drafters.slots import SlotSampler
from dspark.drafters.storage import context_bias, context_weight
from dspark.kernels.attention import AttentionPlan, is_fast, paged_attention, store_kv
from dspark.kernels.draft import BlockRows, CompiledDraft, ContextRows, ContextWeights
from dspark.kernels.linear import pack_linear, pack_linears
from dspark.kernels.lowbit import LowBitLinear, QuantizedWeight, packed_table, supports_integers
from dspark.kernels.slots import ChainOutput, HeadWeights
from dspark.kv import KVPool
from dspark.target.layer import Attend, DecoderLayer, layer_stack

__all__ = ["BlockDrafter", "pack_blocks"]


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
        self._device = model.vocab.device
        self.kv_specs = config.layer_config.kv_specs
        self._context_kv: Callable[[Tensor], Tensor]
        if model.context_projection is not None:  # its checkpoint is in few bits
            self._context_kv = model.context_projection
            quantise(model)
        elif quantised and can_quantise(projection := context_weight(model)):
            self._context_kv = LowBitLinear(
                QuantizedWeight.from_float(projection), context_bias(model), supports_integers()
            )
            quantise(model)
        else:
            self._context_kv = pack_linear(context_weight(model), context_bias(model))
        pack_linears(model)
        identity = torch.equal(model.vocab, torch.arange(config.vocab_size, device=model.vocab.device))
        self.vocab = None if identity else model.vocab
        self._compiled = compiled_draft(model, self._context_kv, self.vocab)
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
        if self._behind.add(batch):
            return
        self.catch_up()
        if not self._behind.add(batch):  # part of a long prompt: more than is ever put off
            assert batch.taps is not None
            self._follow(batch.positions, batch.slots, batch.taps)

    def catch_up(self) -> None:
        """Write the draft KV of all rows observed so far."""
        if (rows := self._behind.take()) is not None:
            self._follow(*rows)

    @torch.inference_mode()
    def _follow(self, positions: Tensor, slots: Tensor, taps: Tensor) -> None:
        """Write the draft KV of committed rows from their taps [N, m * H]."""
        keys, values = self._layers()
        if self._compiled is not None and is_fast(keys[0], keys[0].shape[2], self.pool.block_size):
            self._compiled(keys, values, ContextRows(positions, slots, taps))
            return
        plan = AttentionPlan.for_store(slots, self.pool.block_size)
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
            return Draft.empty(len(batch.lengths), self._device)
        block, sampler = self._rows(batch, active), SlotSampler(batch, active, self.vocab, self._device)
        keys, values = self._layers()
        if self._compiled is None or not is_fast(keys[0], keys[0].shape[2], self.pool.block_size):
            self.catch_up()
            hidden = self._backbone(block)
            return self._fill(sampler, block.anchors, hidden, self.model.lm_head(hidden))
        if self._compiled.head.embedding is None:
            block = replace(block, inputs=self.model.embed(block.inputs))
        behind = self._behind.take()
        chain = self._compiled.head.chained and sampler.plain
        rows = None if behind is None else ContextRows(*behind)
        out = self._compiled(keys, values, rows, block, chain, sampler.draws if chain else None)
        if isinstance(out, ChainOutput):
            return sampler.chosen(out.tokens, out.confidence, out.probs)
        assert out is not None
        return self._fill(sampler, block.anchors, out.hidden, out.logits)

    def forget(self, request: Request) -> None:
        self._behind.forget(request)

    def _layers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the draft layers in the pool."""
        layers = slice(self._first_layer, self._first_layer + len(self.kv_specs))
        return self.pool.k[layers], self.pool.v[layers]

    def _rows(self, batch: ProposeBatch, active: np.ndarray) -> BlockRows:
        """The blocks of the active requests side by side: each its anchor and masks behind it."""
        requests = [batch.requests[r] for r in active.tolist()]
        context = np.array([r.cached for r in requests], dtype=np.int64)
        anchors = np.array([r.token_ids[-1] for r in requests], dtype=np.int64)
        lengths, tables, size = batch.lengths[active], batch.block_tables[active], self.pool.block_size
        mask = self.model.config.mask_token_id
        assert mask is not None, "block drafters have a mask token"
        query_start, *rows = pack_blocks(context, anchors, lengths, tables, size, mask)
        tokens, positions, slots = (torch.from_numpy(values).to(self._device) for values in rows)
        # A block's own KV lies where `observe` will write the committed rows': beyond the valid length, so nobody
        # else reads it. It sees itself in both directions.
        plan = AttentionPlan(query_start, context, tables, slots, causal=False, block_size=size)
        return BlockRows(tokens, positions, plan, lengths, anchors)

    def _backbone(self, block: BlockRows) -> Tensor:
        """One pass over all blocks by modules: h [sum(lengths), H]."""
        keys, values = self._layers()

        def attend_in(layer: int) -> Attend:
            k_pool, v_pool = keys[layer], values[layer]

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                store_kv(k, v, k_pool, v_pool, block.plan)
                return paged_attention(q, k_pool, v_pool, block.plan, q.shape[-1] ** -0.5)

            return attend

        return self.model.run_blocks(self.model.embed(block.inputs), block.positions, attend_in)

    def _fill(self, sampler: SlotSampler, anchors: np.ndarray, hidden: Tensor, logits: Tensor) -> Draft:
        """All slots, left to right, from the anchors and the backbone's rows [sum(lengths), H] and [.., Vd]."""
        hidden, logits = sampler.padded(hidden), sampler.padded(logits)
        head, embeddings = self.model.head, []
        previous = torch.from_numpy(anchors).to(self._device)
        state = head.initial_state(hidden[:, 0]) if head is not None else None
        for k in range(hidden.shape[1]):
            scores = logits[:, k]
            if head is not None and state is not None:
                embeddings.append(head.w1(previous))
                features, state = head.step(embeddings[-1], hidden[:, k], state)
                scores = scores + head.w2(features)
            previous = sampler.choose(scores)
        confidence = None
        if self.model.confidence is not None:
            confidence = self.model.confidence(hidden, torch.stack(embeddings, 1) if embeddings else None)
        return sampler.draft(confidence)


@compiled
def pack_blocks(
    context: np.ndarray,
    anchors: np.ndarray,
    lengths: np.ndarray,
    tables: np.ndarray,
    block_size: int,
    mask: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Blocks of A requests side by side: each its anchor and masks behind it, from position `context` on.

    Args:
        context, anchors, lengths: [A] int64 cached positions, token ids, rows of each block.
        tables: [A, max_blocks] int64.

    Returns:
        query_start [A + 1]; and of all rows [n] token ids, positions and slots.
    """
    total = lengths.sum()
    query_start, tokens = np.empty(len(lengths) + 1, np.int64), np.full(total, mask, np.int64)
    positions, slots = np.empty(total, np.int64), np.empty(total, np.int64)
    row = 0
    query_start[0] = 0
    for a in range(len(lengths)):
        tokens[row] = anchors[a]
        for position in range(context[a], context[a] + lengths[a]):
            positions[row] = position
            slots[row] = tables[a, position // block_size] * block_size + position % block_size
            row += 1
        query_start[a + 1] = row
    return query_start, tokens, positions, slots


def compiled_draft(
    model: BlockDrafterModel, context_kv: Callable[[Tensor], Tensor], vocab: Tensor | None
) -> CompiledDraft | None:
    """The one-call form of a round where all products are low-bit, or None where there is none for them."""
    windows = [spec.window for spec in model.config.layer_config.kv_specs]
    layers = layer_stack(model.layers, model.norm, model.rotary, windows)
    fc, lm_head, head = model.fc, model.lm_head, model.head
    if layers is None or not isinstance(context_kv, LowBitLinear):
        return None
    if not (isinstance(fc, LowBitLinear) and isinstance(lm_head, LowBitLinear)):
        return None
    norms = [layer.k_norm for layer in model.layers if isinstance(layer, DecoderLayer)]
    k_norms = tuple(None if k_norm is None else k_norm.weight for k_norm in norms)
    context = ContextWeights(fc, model.hidden_norm.weight, context_kv, k_norms)
    confidence = None
    if model.confidence is not None:
        proj = model.confidence.proj
        assert isinstance(proj, nn.Linear)
        confidence = (proj.weight[0].contiguous(), float(proj.bias[0]))
    w1 = w2 = None
    if type(head) is MarkovHead and isinstance(head.w2, LowBitLinear):
        w1, w2 = head.w1.weight, head.w2
    chained = head is None or w2 is not None
    embedding = packed_table(model.embed)
    heads = HeadWeights(lm_head, embedding, vocab, w1, w2, confidence if chained else None, chained)
    if not CompiledDraft.supports(context, layers, heads):
        return None
    return CompiledDraft(context, layers, heads, model.config.block_size)
