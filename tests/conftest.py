"""A tiny model as a Hugging Face directory, for whatever starts from a path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

TEMPLATE = "{% for m in messages %}-{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}-{% endif %}"
CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu", "eos_token_id": 63,
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 3 layers and 128 positions over the one-character tokenizer; token 63, "_", ends a text."""
    from dspark.testing import tiny_tokenizer

    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    tiny_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    g = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (64, 32), "model.norm": (32,)}
    for i in range(3):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm": (32,), p + "post_attention_layernorm": (32,)}
        shapes |= {
            p + f"self_attn.{n}_proj": (s, 32) for n, s in (("q", 32), ("k", 16), ("v", 16), ("o", 32))
        }
        shapes |= {p + "mlp.gate_proj": (64, 32), p + "mlp.up_proj": (64, 32), p + "mlp.down_proj": (32, 64)}
    weights = {
        f"{k}.weight": torch.randn(s, generator=g) * (0.3 if len(s) > 1 else 1) for k, s in shapes.items()
    }
    save_file(weights, directory / "model.safetensors")
    return directory
