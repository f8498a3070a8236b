"""Blocks behind many anchors of several sequences, and the training form of a block drafter: one dense pass.

Rows of all blocks lie side by side, so projections are single products without padding; attention runs per
sequence, where every block sees that sequence's context strictly before its anchor, and itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dspark.drafters.backbone import BlockDrafterModel
from dspark.target.layer import Attend
from dspark.train.attention import attend_blocks
from dspark.train.data import Sequence
from dspark.train.features import Features

__all__ = ["BlockBatch", "BlockOutput", "block_forward", "draw_anchors", "make_batch", "slot_mask"]

# hidden h [n, gamma, H] (input of the LM head), logits [n, gamma, Vd], confidence logits [n, gamma] or None
BlockOutput = tuple[Tensor, Tensor, Tensor | None]


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
    next_tokens: Tensor  # [T] int64: the token behind each context position (0 behind a sequence's last)

    def to(self, device: torch.device) -> BlockBatch:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        return dataclasses.replace(self, **moved)

    @property
    def gamma(self) -> int:
        return self.mask.shape[1]

    @cached_property
    def starts(self) -> Tensor:
        """[n] int64: where each block's sequence begins among the context rows."""
        lens = torch.tensor([0, *self.seq_lens[:-1]])
        return torch.repeat_interleave(lens.cumsum(0), torch.tensor(self.counts)).to(self.anchors.device)


def draw_anchors(sequence: Sequence, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` distinct anchors of a sequence, in random order. Shape [<= count] int64."""
    order = torch.randperm(sequence.num_anchors, generator=generator)[:count]
    return order.sort().values + sequence.answer_start


def slot_mask(anchors: Tensor, length: int, gamma: int) -> Tensor:
    """Slots of the blocks at `anchors` [a] that have a label in a sequence of `length` tokens: [a, gamma] bool."""
    return anchors[:, None] + torch.arange(1, gamma + 1) < length


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
        masks.append(slot_mask(anchor, len(ids), gamma))
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
        next_tokens=torch.tensor([t for s in sequences for t in (*s.token_ids[1:], 0)]),
    )


def block_forward(model: BlockDrafterModel, batch: BlockBatch) -> BlockOutput:
    """Teacher-forced pass; the logits are U + B (eq. 4)."""
    n, gamma = batch.mask.shape
    context = model.context(batch.taps)
    context_rotary = model.rotary(batch.context_positions, context.dtype)
    positions = (batch.anchors[:, None] + torch.arange(gamma, device=batch.anchors.device)).flatten()

    def attend_in(layer: int) -> Attend:
        keys, values = model.context_kv(layer, context, context_rotary)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_blocks(q, k, v, keys, values, batch.anchors, batch.seq_lens, batch.counts)

        return attend

    inputs = model.block_inputs(batch.tokens[:, 0], gamma)
    hidden = model.run_blocks(model.embed(inputs.flatten()), positions, attend_in).unflatten(0, (n, gamma))
    logits, embedded = model.lm_head(hidden), None
    if model.head is not None:
        bias, embedded = model.head.block(batch.tokens[:, :-1], hidden)
        logits = logits + bias
    confidence = model.confidence(hidden, embedded) if model.confidence is not None else None
    return hidden, logits, confidence
