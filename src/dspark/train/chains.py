"""The training form of an autoregressive drafter: its own states fed back over a block (EAGLE-3's training-time test).

All anchors of a batch advance together, slot by slot. A slot's rows attend to the context rows strictly before
their anchor, made of true features, and to the rows of their own chain so far: the growing diagonal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.drafters.autoregressive import AutoregressiveModel
from dspark.train.attention import attend_blocks
from dspark.train.blocks import BlockBatch, BlockOutput

__all__ = ["chain_forward"]


def chain_forward(model: AutoregressiveModel, batch: BlockBatch) -> BlockOutput:
    """Teacher-forced pass over all slots of `batch`."""
    # The residual stream stays in the weights' precision, whatever that of the features and products.
    features = model.fuse(batch.taps).to(model.norm.weight.dtype)  # [T, H]
    context = model.context_kv(
        batch.next_tokens, features, model.rotary(batch.context_positions, features.dtype)
    )
    own: tuple[list[Tensor], list[Tensor]] = (
        [],
        [],
    )  # keys, values of each slot behind the first: [n, kvh, d]
    state = features[batch.starts + batch.anchors - 1]
    hidden = []
    for slot in range(batch.gamma):

        def attend(q: Tensor, k: Tensor, v: Tensor, slot: int = slot) -> Tensor:
            if slot:  # the first row is a context row already
                own[0].append(k)
                own[1].append(v)
            mine = [torch.stack(rows, 1).flatten(0, 1) if rows else k[:0] for rows in own]
            keys, values = context
            return attend_blocks(
                q, mine[0], mine[1], keys, values, batch.anchors, batch.seq_lens, batch.counts
            )

        rotary = model.rotary(batch.anchors - 1 + slot, state.dtype)
        state = model.advance(batch.tokens[:, slot], state, rotary, attend)
        hidden.append(model.norm(state))
    h = torch.stack(hidden, 1)
    return h, model.lm_head(h), model.confidence(h, None) if model.confidence is not None else None
