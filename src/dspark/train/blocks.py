"""The training form of a block drafter: many anchors of several sequences in one dense pass.

Rows of all blocks lie side by side, so projections are single products without padding; attention runs per
sequence, where every block sees that sequence's context strictly before its anchor, and itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.drafters.backbone import BlockDrafterModel
from dspark.target.decoder import Attend
from dspark.train.data import Sequence
from dspark.train.features import Features

__all__ = ["BlockBatch", "block_forward", "draw_anchors", "make_batch"]


@dataclass(frozen=True)
class BlockBatch:
    """Blocks of several sequences. n blocks in all; `counts[s]` of them belong to sequence s, in order."""

    taps: Tensor  # [T, m * H] context features of all sequences, end to end
    context_positions: Tensor  # [T] int64
    seq_lens: list[int]
    counts: list[int]
    anchors: Tensor  # [n] int64: position of each anchor in its sequence
    tokens: Tensor  # [n, gamma + 1] int64: anchor and the gamma tokens behind it (0 past the end)
    mask: Tensor  # [n, gamma] bool: slots that have a label
    last_hidden: Tensor  # [n, gamma, H]: input of the LM head that predicts each slot
    log_normalizer: Tensor  # [n, gamma]

    @property
    def gamma(self) -> int:
        return self.mask.shape[1]


def draw_anchors(sequence: Sequence, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` distinct anchors of a sequence, in random order. Shape [<= count] int64."""
    order = torch.randperm(sequence.num_anchors, generator=generator)[:count]
    return order.sort().values + sequence.answer_start


def make_batch(
    sequences: Seq[Sequence], features: Seq[Features], anchors: Seq[Tensor], gamma: int
) -> BlockBatch:
    """Gather everything a step needs."""
    tokens, masks, hidden, norms = [], [], [], []
    for sequence, feature, anchor in zip(sequences, features, anchors, strict=True):
        ids = torch.tensor(sequence.token_ids)
        at = anchor[:, None] + torch.arange(gamma + 1)  # [a, gamma + 1]
        inside = at < len(ids)
        tokens.append(ids[at.clamp(max=len(ids) - 1)] * inside)
        masks.append(inside[:, 1:])
        before = at[:, :-1].clamp(max=len(ids) - 1)  # slot k's token is predicted at the position before it
        hidden.append(feature.last_hidden[before])
        norms.append(feature.log_normalizer[before])
    lens = [len(s.token_ids) for s in sequences]
    return BlockBatch(
        taps=torch.cat([f.taps for f in features]),
        context_positions=torch.cat([torch.arange(n) for n in lens]),
        seq_lens=lens,
        counts=[len(a) for a in anchors],
        anchors=torch.cat(list(anchors)),
        tokens=torch.cat(tokens),
        mask=torch.cat(masks),
        last_hidden=torch.cat(hidden),
        log_normalizer=torch.cat(norms),
    )


def block_forward(model: BlockDrafterModel, batch: BlockBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Teacher-forced pass: hidden h [n, gamma, H], logits U + B [n, gamma, Vd], confidence logits [n, gamma]."""
    n, gamma = batch.mask.shape
    context = model.context(batch.taps)
    context_rotary = model.rotary(batch.context_positions, context.dtype)
    positions = (batch.anchors[:, None] + torch.arange(gamma, device=batch.anchors.device)).flatten()

    def attend_in(layer: int) -> Attend:
        keys, values = model.context_kv(layer, context, context_rotary)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _attend(q, k, v, keys, values, batch)

        return attend

    inputs = model.block_inputs(batch.tokens[:, 0], gamma)
    hidden = model.run_blocks(inputs.flatten(), positions, attend_in).unflatten(0, (n, gamma))
    logits, embedded = model.lm_head(hidden), None
    if model.head is not None:
        bias, embedded = model.head.block(batch.tokens[:, :-1], hidden)
        logits = logits + bias
    confidence = model.confidence(hidden, embedded) if model.confidence is not None else None
    return hidden, logits, confidence


def _attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, batch: BlockBatch) -> Tensor:
    """Attention of all blocks: q [n * gamma, h, d], k, v [n * gamma, kvh, d], context keys, values [T, kvh, d]."""
    outs, row, at = [], 0, 0
    gamma = batch.gamma
    for length, count in zip(batch.seq_lens, batch.counts, strict=True):
        rows = slice(row * gamma, (row + count) * gamma)
        anchors = batch.anchors[row : row + count]
        last = int(anchors.max()) if count else 0  # nothing behind the last anchor is visible
        context = slice(at, at + last)
        outs.append(
            _attend_sequence(q[rows], k[rows], v[rows], keys[context], values[context], anchors, gamma)
        )
        row, at = row + count, at + length
    return torch.cat(outs)


def _attend_sequence(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, anchors: Tensor, gamma: int
) -> Tensor:
    """Blocks of one sequence. Two score parts share one softmax, so no block x block mask is materialised."""
    kv_heads, groups, d = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    a, visible_len = len(anchors), len(keys)
    q = (q * d**-0.5).unflatten(1, (kv_heads, groups)).permute(1, 2, 0, 3)  # [kvh, g, a * gamma, d]
    q_flat = q.flatten(1, 2)
    to_context = q_flat @ keys.permute(1, 2, 0)  # [kvh, g * a * gamma, S]
    blocks = q.reshape(kv_heads, groups, a, gamma, d).transpose(1, 2).flatten(2, 3)  # [kvh, a, g * gamma, d]
    k_blocks = k.unflatten(0, (a, gamma)).permute(2, 0, 3, 1)  # [kvh, a, d, gamma]
    to_block = (blocks @ k_blocks).unflatten(2, (groups, gamma)).transpose(1, 2)  # [kvh, g, a, gamma, gamma]
    hidden_from = torch.arange(visible_len, device=q.device) >= anchors[:, None]  # [a, S]
    to_context = to_context.view(kv_heads, groups, a, gamma, visible_len)
    to_context = to_context.masked_fill(hidden_from[:, None], float("-inf"))
    wide = torch.promote_types(v.dtype, torch.float32)
    p = torch.cat((to_context, to_block), -1).softmax(-1, dtype=wide).to(v.dtype)
    p_context, p_block = p.split((visible_len, gamma), -1)
    out = p_context.reshape(kv_heads, -1, visible_len) @ values.transpose(0, 1)  # [kvh, g * a * gamma, d]
    p_block = p_block.transpose(1, 2).flatten(2, 3)  # [kvh, a, g * gamma, gamma]
    v_blocks = v.unflatten(0, (a, gamma)).permute(2, 0, 1, 3)  # [kvh, a, gamma, d]
    within = (p_block @ v_blocks).unflatten(2, (groups, gamma)).transpose(1, 2)  # [kvh, g, a, gamma, d]
    out = out.view(kv_heads, groups, a * gamma, d) + within.reshape(kv_heads, groups, a * gamma, d)
    return out.permute(2, 0, 1, 3).flatten(1, 2)  # [a * gamma, h, d]
