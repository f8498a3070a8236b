"""Random autoregressive drafters over a tiny decoder."""

from __future__ import annotations

from typing import Literal

import torch

from dspark.drafters.autoregressive import AutoregressiveModel
from dspark.drafters.chain import ChainDrafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.models import build_model
from dspark.target.decoder import Decoder

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
        method=method,
        block_size=block_size,
        num_layers=1,
        hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_heads=4,
        num_kv_heads=2,
        head_dim=target.hidden_size // 4,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_context=target.max_context,
        qk_norm=target.config.qk_norm,
        vocab_size=target.vocab_size,
        taps=(last,) if method == "mtp" else (-1, 0, last),
        confidence_head=confidence_head,
        draft_vocab_size=draft_vocab_size,
        target_identity=target.identity,
    )
    generator = torch.Generator().manual_seed(seed)
    model = build_model(config).to(target.dtype)
    assert isinstance(model, AutoregressiveModel)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(0.1 * noise + (0 if name.endswith("bias") else 1))
        if draft_vocab_size is not None:
            chosen = torch.randperm(target.vocab_size, generator=generator)[:draft_vocab_size]
            model.vocab.copy_(chosen.sort()[0])
        model.embed.weight.copy_(target.embed.weight)
        model.lm_head.weight.copy_(target.output_weight[model.vocab])
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
