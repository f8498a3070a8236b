"""A multi-token-prediction module in the manner of DeepSeek-V3 (arXiv 2412.19437, eqs. 21-23), depth 1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.drafters.autoregressive import AutoregressiveModel
from dspark.drafters.config import DrafterConfig
from dspark.target.layer import Attend, DecoderLayer, RMSNorm

__all__ = ["MTPModel"]


class MTPModel(AutoregressiveModel):
    """h' = M [norm(h); norm(Emb(x))], one decoder layer, the target's LM head.

    h is the target's state after its last layer, before the final norm. Longer drafts chain the module: the
    state behind the layer takes the place of h.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.embed_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = DecoderLayer(config.layer_config)

    def fuse(self, taps: Tensor) -> Tensor:
        return taps

    def kv_rows(self, token_ids: Tensor, feature: Tensor) -> Tensor:
        return self.layer.input_norm(self._enter(token_ids, feature))

    def advance(
        self, token_ids: Tensor, feature: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        return self.layer(self._enter(token_ids, feature), rotary, attend)

    def join(self, token_ids: Tensor, feature: Tensor) -> Tensor:
        """What `proj` reads: [N], [N, H] -> [N, 2 * H]."""
        return torch.cat((self.hidden_norm(feature), self.embed_norm(self.embed(token_ids))), -1)

    def _enter(self, token_ids: Tensor, feature: Tensor) -> Tensor:
        return self.proj(self.join(token_ids, feature))
