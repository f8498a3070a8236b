"""Models that draft token by token (EAGLE-3, MTP): what one decoder layer makes of a feature and a token.

Pairing: the feature of position t goes with the token at t + 1, and their row predicts the token at t + 2; the
row lies at position t. The target's features end before the anchor, so the anchor's row takes the feature of the
position before it. Behind it, a row takes the state of the row before in the feature's place.

With a single layer, keys and values of a row depend on its feature and token alone: the draft KV of any
committed position can be rebuilt from the target's features.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig
from dspark.drafters.heads import ConfidenceHead
from dspark.drafters.model import DrafterModel
from dspark.target.layer import Attend, DecoderLayer, RMSNorm
from dspark.target.rotary import Rotary, apply_rotary

__all__ = ["AutoregressiveModel"]


class AutoregressiveModel(DrafterModel):
    """One decoder layer over (token, feature) rows; subclasses say how the two enter it."""

    layer: DecoderLayer

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.head = None
        self.confidence = ConfidenceHead(config) if config.confidence_head else None
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.max_context)
        self.embed = nn.Embedding(config.vocab_size, hidden)
        self.lm_head = nn.Linear(hidden, config.output_vocab_size, bias=False)
        self.register_buffer("vocab", torch.arange(config.output_vocab_size))

    @abstractmethod
    def fuse(self, taps: Tensor) -> Tensor:
        """The target's tapped states [N, m * H] -> features [N, H]."""

    @abstractmethod
    def kv_rows(self, token_ids: Tensor, feature: Tensor) -> Tensor:
        """What the layer projects to q, k and v: token_ids [N], feature [N, H] -> [N, in]."""

    @abstractmethod
    def advance(
        self, token_ids: Tensor, feature: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Rows through the layer: the state [N, H] that is the next row's feature. Predictions: `norm(state)`."""

    def split_kv(self, kv: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Projected [N, 2 * kvh * d] -> rotated k, v [N, kvh, d]."""
        k, v = kv.unflatten(-1, (2, self.layer.kv_heads, self.layer.head_dim)).unbind(1)
        k = self.layer.k_norm(k) if self.layer.k_norm is not None else k
        return apply_rotary(k, rotary), v

    def context_kv(
        self, token_ids: Tensor, feature: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values of rows whose features are known: [N], [N, H] -> k, v [N, kvh, d]."""
        rows = self.kv_rows(token_ids, feature)
        return self.split_kv(nn.functional.linear(rows, *self.layer.kv_parts()), rotary)
