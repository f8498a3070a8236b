"""Random models small enough for float64: a decoder of each family, and block drafters over it."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch

from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.block import BlockDrafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.model import DrafterModel
from dspark.target.config import DecoderConfig
from dspark.target.decoder import Decoder
from dspark.target.tokenizer import Tokenizer

__all__ = ["drafter_shape", "randomise", "tiny_decoder", "tiny_drafter", "tiny_tokenizer"]

Kind = Literal["llama", "qwen2", "qwen3"]


def tiny_decoder(
    seed: int = 0,
    kind: Kind = "llama",
    dtype: torch.dtype = torch.float64,
    vocab_size: int = 64,
    layers: int = 3,
    hidden: int = 32,
    eos_token_ids: tuple[int, ...] = (),
    max_context: int = 256,
    windows: tuple[int | None, ...] = (),
) -> Decoder:
    """A random decoder whose logits spread (about 3 nats) so that greedy text neither repeats nor ties."""
    config = DecoderConfig(
        model_type=kind,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden // 4,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_context=max_context,
        tie_embeddings=False,
        attention_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        windows=windows,
        eos_token_ids=eos_token_ids,
    )
    weights = _random_weights(config, torch.Generator().manual_seed(seed))
    converted = {name: w.to(dtype) for name, w in weights.items()}
    return Decoder.from_weights(config, converted, identity=f"tiny-{kind}-{seed}")


def _random_weights(config: DecoderConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Weights under HF names; matrices keep the scale of what goes through them."""

    def matrix(out: int, into: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(out, into, generator=generator, dtype=torch.float64) * (gain * into**-0.5)

    def gain(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator, dtype=torch.float64)

    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = {"q": config.num_heads * config.head_dim}
    sizes |= dict.fromkeys("kv", config.num_kv_heads * config.head_dim)
    weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden, hidden**0.5),
        "model.norm.weight": gain(hidden),
        "lm_head.weight": matrix(config.vocab_size, hidden, 3.0),
    }
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        weights |= {f"{layer}{name}_layernorm.weight": gain(hidden) for name in ("input", "post_attention")}
        for name, size in sizes.items():
            # Peaked attention: the text depends on all of its history, not on the last token alone.
            weights[f"{layer}self_attn.{name}_proj.weight"] = matrix(size, hidden, 1.5)
            if config.attention_bias:
                weights[f"{layer}self_attn.{name}_proj.bias"] = gain(size) - 1
        weights[f"{layer}self_attn.o_proj.weight"] = matrix(hidden, sizes["q"], 1.5)
        if config.qk_norm:
            weights |= {f"{layer}self_attn.{n}_norm.weight": gain(config.head_dim) for n in "qk"}
        for name in ("gate", "up"):
            weights[f"{layer}mlp.{name}_proj.weight"] = matrix(inner, hidden, 1.5)
        weights[f"{layer}mlp.down_proj.weight"] = matrix(hidden, inner, 1.5)
    return weights


def tiny_drafter(
    target: Decoder,
    method: Literal["dspark", "dflash"] = "dspark",
    head: Literal["vanilla", "gated", "rnn"] = "vanilla",
    block_size: int = 7,
    draft_vocab_size: int | None = None,
    seed: int = 0,
) -> BlockDrafter:
    """A random block drafter in the target's dtype, with the target's embedding and LM head."""
    config = DrafterConfig(
        **drafter_shape(target),
        method=method,
        block_size=block_size,
        num_layers=2,
        qk_norm=True,
        mask_token_id=target.vocab_size - 1,
        taps=(-1, len(target.layers) - 1),
        markov_rank=min(8, draft_vocab_size or target.vocab_size) if method == "dspark" else 0,
        markov_head_type=head,
        confidence_head=method == "dspark",
        draft_vocab_size=draft_vocab_size,
    )
    model = BlockDrafterModel(config).to(target.dtype)
    randomise(model, target, seed)
    return BlockDrafter(model.requires_grad_(False).eval())


def drafter_shape(target: Decoder) -> dict[str, Any]:
    """What a drafter over the target takes from it: for `DrafterConfig`."""
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": target.hidden_size // 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_context": target.max_context,
        "vocab_size": target.vocab_size,
        "attention_bias": target.config.attention_bias,
        "target_identity": target.identity,
    }


@torch.no_grad()
def randomise(model: DrafterModel, target: Decoder, seed: int) -> None:
    """Random weights and draft vocabulary; the target's embedding and LM head."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim > 1:
            parameter.copy_(noise * parameter.shape[1] ** -0.5)
        else:
            parameter.copy_(0.1 * noise + (0 if name.endswith("bias") else 1))
    if model.config.draft_vocab_size is not None:
        chosen = torch.randperm(target.vocab_size, generator=generator)[: model.config.draft_vocab_size]
        model.vocab.copy_(chosen.sort()[0])
    model.embed.weight.copy_(target.embed.weight)
    model.lm_head.weight.copy_(target.output_weight[model.vocab])


def tiny_tokenizer(directory: Path, vocab_size: int = 64) -> Tokenizer:
    """A byte-level tokenizer, saved in `directory`, token i is one character: a, b, ... (64 at most)."""
    characters = (string.ascii_letters + string.digits + "-_")[:vocab_size]
    vocab = {character: i for i, character in enumerate(characters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)
