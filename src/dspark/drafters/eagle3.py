"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): fused features and the token side by side into one decoder layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafters.autoregressive import AutoregressiveModel
from dspark.drafters.config import DrafterConfig
from dspark.target.config import DecoderConfig
from dspark.target.layer import Attend, DecoderLayer, RMSNorm

__all__ = ["Eagle3Model"]


class Eagle3Layer(DecoderLayer):
    """A decoder layer that projects [norm(embedding); norm(feature)] and adds to the feature."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        size, bias = self.qkv_proj.out_features, config.attention_bias
        self.qkv_proj = nn.Linear(2 * config.hidden_size, size, bias)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def join(self, embedding: Tensor, feature: Tensor) -> Tensor:
        """[N, H] twice -> [N, 2 * H]."""
        return torch.cat((self.input_norm(embedding), self.hidden_norm(feature)), -1)

    def run(
        self, embedding: Tensor, feature: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        q, k, v = self.project(self.join(embedding, feature), rotary)
        x = feature + self.o_proj(attend(q, k, v).flatten(1))
        gate, up = self.gate_up_proj(self.post_norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class Eagle3Model(AutoregressiveModel):
    """Features of several target layers (three in the paper) fused by `fc`; state before the final norm fed back."""

    layer: Eagle3Layer

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.layer = Eagle3Layer(config.layer_config)

    def fuse(self, taps: Tensor) -> Tensor:
        return self.fc(taps)

    def kv_rows(self, token_ids: Tensor, feature: Tensor) -> Tensor:
        return self.layer.join(self.embed(token_ids), feature)

    def advance(
        self, token_ids: Tensor, feature: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        return self.layer.run(self.embed(token_ids), feature, rotary, attend)
