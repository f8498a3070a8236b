"""DeepSpec's checkpoint dialect (deepseek-ai/dspark_*): keys of config.json and tensor names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.core import DSparkError
from dspark.drafters.config import DrafterConfig
from dspark.target.fuse import fuse_layer

__all__ = ["is_deepspec", "read_deepspec_config", "rename_deepspec_weights"]

_ARCHITECTURES = {"Qwen3DSparkModel": True}  # architecture -> per-head q/k norm
_NAMES = {
    "embed_tokens.weight": "embed.weight",
    "lm_head.weight": "lm_head.weight",
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "hidden_norm.weight",
    "norm.weight": "norm.weight",
    "markov_head.markov_w1.weight": "head.w1.weight",
    "markov_head.markov_w2.weight": "head.w2.weight",
    "markov_head.gate_proj.weight": "head.gate_proj.weight",
    "markov_head.gate_proj.bias": "head.gate_proj.bias",
    "markov_head.joint_proj.weight": "head.joint_proj.weight",
    "markov_head.joint_proj.bias": "head.joint_proj.bias",
    "confidence_head.proj.weight": "confidence.proj.weight",
    "confidence_head.proj.bias": "confidence.proj.bias",
}
_LAYER_KEY = re.compile(
    r"layers\.\d+\.(self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj|(input|post_attention)_layernorm)\.weight"
)


def is_deepspec(raw: Mapping[str, Any]) -> bool:
    return any(name.endswith("DSparkModel") for name in raw.get("architectures") or ())


def read_deepspec_config(raw: Mapping[str, Any]) -> DrafterConfig:
    """DeepSpec's config.json. Its layer id L is the state after layer L (-1 the embedding), as ours.

    Raises:
        DSparkError: an unsupported architecture or a missing key, by name.
    """
    architecture = raw["architectures"][0]
    if architecture not in _ARCHITECTURES:
        raise DSparkError(
            f"drafter architecture {architecture} is not supported; supported: {', '.join(_ARCHITECTURES)}"
        )

    def need(key: str) -> Any:
        if key not in raw:
            raise DSparkError(f"the drafter's config.json lacks the key {key!r}")
        return raw[key]

    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or raw.get("rope_scaling"):
        raise DSparkError("the drafter's rope scaling is not supported; only the default rotary embedding is")
    if raw.get("attention_bias"):
        raise DSparkError("the drafter's attention_bias is not supported; it must be false")
    if set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise DSparkError("the drafter's layer_types are not supported; all must be full_attention")
    rank = raw.get("markov_rank", 0)
    return DrafterConfig(
        method="dspark" if rank else "dflash",
        block_size=need("block_size"),
        num_layers=need("num_hidden_layers"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_heads=need("num_attention_heads"),
        num_kv_heads=need("num_key_value_heads"),
        head_dim=need("head_dim"),
        rms_norm_eps=need("rms_norm_eps"),
        rope_theta=rope["rope_theta"] if "rope_theta" in rope else need("rope_theta"),
        max_context=need("max_position_embeddings"),
        qk_norm=_ARCHITECTURES[architecture],
        vocab_size=need("vocab_size"),
        mask_token_id=need("mask_token_id"),
        taps=tuple(need("target_layer_ids")),
        markov_rank=rank,
        markov_head_type=raw.get("markov_head_type", "vanilla"),
        confidence_head=bool(raw.get("enable_confidence_head", False)),
        confidence_with_markov=bool(raw.get("confidence_head_with_markov", False)),
    )


def rename_deepspec_weights(
    config: DrafterConfig, weights: Mapping[str, Tensor], path: Path
) -> dict[str, Tensor]:
    """DeepSpec's tensors under this package's names."""
    out: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name in _NAMES:
            out[_NAMES[name]] = value
        elif not _LAYER_KEY.fullmatch(name):
            raise DSparkError(
                f"{path} has the unexpected key {name!r}: config.json describes another drafter"
            )
    try:
        for i in range(config.num_layers):
            out |= fuse_layer(f"layers.{i}.", f"layers.{i}.", config.layer_config, weights)
    except KeyError as error:
        raise DSparkError(f"{path} lacks the key {error}: the checkpoint is incomplete") from None
    return out
