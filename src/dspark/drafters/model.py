"""What every trained drafter's model has, whatever its method."""

from __future__ import annotations

from torch import Tensor, nn

from dspark.drafters.config import DrafterConfig
from dspark.drafters.heads import ConfidenceHead, MarkovHead
from dspark.kernels.lowbit import LowBitEmbedding, LowBitLinear
from dspark.target.layer import RMSNorm
from dspark.target.rotary import Rotary

__all__ = ["DrafterModel"]


class DrafterModel(nn.Module):
    """A drafter's weights.

    `embed` [V, H] and `lm_head` [Vd, H] are the target's, frozen and not part of the checkpoint unless it
    brings its own. `vocab` [Vd] maps draft ids to target ids. `head` and `confidence` are None where the
    method or the configuration has none. `context_projection`: what makes context's keys and values of all layers of
    a block drafter, where its checkpoint brings that in few bits.
    """

    config: DrafterConfig
    embed: nn.Embedding | LowBitEmbedding
    lm_head: nn.Linear
    norm: RMSNorm
    rotary: Rotary
    head: MarkovHead | None
    confidence: ConfidenceHead | None
    vocab: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.context_projection: LowBitLinear | None = None
