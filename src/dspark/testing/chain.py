"""Random autoregressive drafters over a tiny decoder."""

from __future__ import annotations

from typing import Literal

from dspark.drafters.autoregressive import AutoregressiveModel
from dspark.drafters.chain import ChainDrafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.models import build_model
from dspark.target.decoder import Decoder
from dspark.testing.tiny import drafter_shape, randomise

__all__ = ["tiny_chain_drafter", "tiny_chain_model"]


def tiny_chain_model(
    target: Decoder,
    method: Literal["eagle3", "mtp"] = "eagle3",
    block_size: int = 7,
    draft_vocab_size: int | None = None,
    confidence_head: bool = False,
    seed: int = 0,
) -> AutoregressiveModel:
    """A random model in the target's dtype, with the target's embedding and LM head, ready to be trained."""
    last = len(target.layers) - 1
    config = DrafterConfig(
        **drafter_shape(target),
        method=method,
        block_size=block_size,
        num_layers=1,
        qk_norm=target.config.qk_norm,
        taps=(last,) if method == "mtp" else (-1, 0, last),
        confidence_head=confidence_head,
        draft_vocab_size=draft_vocab_size,
    )
    model = build_model(config).to(target.dtype)
    assert isinstance(model, AutoregressiveModel)
    randomise(model, target, seed)
    model.embed.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    return model


def tiny_chain_drafter(
    target: Decoder,
    method: Literal["eagle3", "mtp"] = "eagle3",
    block_size: int = 7,
    draft_vocab_size: int | None = None,
    confidence_head: bool = False,
    seed: int = 0,
) -> ChainDrafter:
    """`tiny_chain_model`, served."""
    model = tiny_chain_model(target, method, block_size, draft_vocab_size, confidence_head, seed)
    return ChainDrafter(model)
