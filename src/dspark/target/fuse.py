"""From the names of Hugging Face checkpoints to the decoder's: q|k|v and gate|up become one matrix each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dspark.target.config import DecoderConfig

__all__ = ["fuse_layer", "fuse_weights"]


def fuse_weights(config: DecoderConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """HF names -> the names of `Decoder`, with q|k|v and gate|up concatenated."""
    fused = {
        "embed.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"],
    }
    head = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    fused["lm_head.weight"] = weights[head]
    for i in range(config.num_layers):
        fused |= fuse_layer(f"model.layers.{i}.", f"layers.{i}.", config, weights)
    return fused


def fuse_layer(
    source: str, to: str, config: DecoderConfig, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """One layer's tensors, renamed from prefix `source` to prefix `to`."""

    def joined(block: str, names: tuple[str, ...], kind: str) -> Tensor:
        parts = [weights[f"{source}{block}.{n}_proj.{kind}"] for n in names]
        if parts[0].is_meta:  # `hollow_weights`; see `decoder.Rotary` about computing there
            return torch.empty(sum(map(len, parts)), *parts[0].shape[1:], device="meta")
        return torch.cat(parts)

    fused = {
        f"{to}input_norm.weight": weights[f"{source}input_layernorm.weight"],
        f"{to}post_norm.weight": weights[f"{source}post_attention_layernorm.weight"],
        f"{to}qkv_proj.weight": joined("self_attn", ("q", "k", "v"), "weight"),
        f"{to}o_proj.weight": weights[f"{source}self_attn.o_proj.weight"],
        f"{to}gate_up_proj.weight": joined("mlp", ("gate", "up"), "weight"),
        f"{to}down_proj.weight": weights[f"{source}mlp.down_proj.weight"],
    }
    if config.attention_bias:
        fused[f"{to}qkv_proj.bias"] = joined("self_attn", ("q", "k", "v"), "bias")
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            fused[f"{to}{name}.weight"] = weights[f"{source}self_attn.{name}.weight"]
    return fused
