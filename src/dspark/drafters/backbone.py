"""The parallel stage: a KV-injection backbone (DFlash) that reads the target's hidden states as context.

Context keys and values of a position are projections of the target's features at that position alone, never
of a draft layer's output (eqs. 2-3); so the draft KV of any position can be rebuilt from the features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig
from dspark.drafters.heads import ConfidenceHead, build_head
from dspark.drafters.model import DrafterModel
from dspark.target.layer import Attend, DecoderLayer, RMSNorm
from dspark.target.rotary import Rotary, apply_rotary

__all__ = ["BlockDrafterModel"]


class BlockDrafterModel(DrafterModel):
    """Backbone, sequential head and confidence head of a DSpark or DFlash drafter."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config.layer_config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.head = build_head(config)
        self.confidence = ConfidenceHead(config) if config.confidence_head else None
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.max_context)
        self.embed = nn.Embedding(config.vocab_size, hidden)
        self.lm_head = nn.Linear(hidden, config.output_vocab_size, bias=False)
        self.register_buffer("vocab", torch.arange(config.output_vocab_size))

    def context(self, taps: Tensor) -> Tensor:
        """H_ctx = RMSNorm(W_c [H^(l1); ...; H^(lm)]) (eq. 2): [N, m * H] -> [N, H]."""
        return self.hidden_norm(self.fc(taps))

    def context_kv(self, layer: int, context: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Context keys (rotated) and values of one draft layer (eq. 3): H_ctx [N, H] -> k, v [N, kvh, d]."""
        block: DecoderLayer = self.layers[layer]  # type: ignore[assignment]
        return self.split_kv(layer, F.linear(context, *block.kv_parts()), rotary)

    def split_kv(self, layer: int, kv: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Projected [N, 2 * kvh * d] -> rotated k, v [N, kvh, d]."""
        block: DecoderLayer = self.layers[layer]  # type: ignore[assignment]
        k, v = kv.unflatten(-1, (2, block.kv_heads, block.head_dim)).unbind(1)
        return apply_rotary(block.k_norm(k) if block.k_norm is not None else k, rotary), v

    def block_inputs(self, anchors: Tensor, width: int) -> Tensor:
        """Token ids of anchor-first blocks: anchors [n] -> [n, width], masks behind the anchor."""
        assert self.config.mask_token_id is not None, "the configuration of a block drafter states one"
        masks = anchors.new_full((len(anchors), width - 1), self.config.mask_token_id)
        return torch.cat((anchors[:, None], masks), 1)

    def run_blocks(self, x: Tensor, positions: Tensor, attend_in: Callable[[int], Attend]) -> Tensor:
        """Embedded rows x [N, H] of any number of blocks through the draft layers: h [N, H] after the final norm."""
        rotary = self.rotary(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, attend_in(i))
        return self.norm(x)
