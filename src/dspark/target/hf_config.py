"""config.json of a Hugging Face directory, read strictly or refused by key.

Nothing here guesses: a key that changes the computation and is not implemented raises `DSparkError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.core import DSparkError
from dspark.target.config import DecoderConfig
from dspark.target.rotary import RopeScaling

__all__ = ["read_config", "read_eos_token_ids", "read_json"]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Where a config.json states no rope_theta, the published models of these types were trained with this one.
DEFAULT_ROPE_THETA = 10000.0
# Where a Mistral's config.json has no sliding_window at all, transformers takes this; null is full attention.
MISTRAL_WINDOW = 4096


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises DSparkError if it is absent, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DSparkError(f"{path} does not exist: is its folder a Hugging Face model directory?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DSparkError(f"{path} cannot be read as JSON ({error}): fetch it again") from None
    if not isinstance(value, dict):
        raise DSparkError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


class _Keys:
    """Typed access to a config.json whose errors name the key and the file."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.raw, self.path = raw, path

    def refuse(self, key: str, supported: str) -> DSparkError:
        return DSparkError(f"{self.path}: {key} = {self.raw.get(key)!r:.80} is not supported; {supported}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise DSparkError(f"{self.path}: the key {key} is missing and is needed to build the model")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DSparkError(f"{self.path}: {key} must be a whole number above 0, got {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self.raw.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise DSparkError(f"{self.path}: {key} must be a number above 0, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise DSparkError(f"{self.path}: {key} must be true or false, got {value!r}")
        return value


def read_config(directory: Path) -> DecoderConfig:
    """The decoder described by `directory`/config.json; eos ids from generation_config.json first.

    Raises:
        DSparkError: a file or key is missing, malformed, or asks for something not implemented.
    """
    path = directory / "config.json"
    keys = _Keys(read_json(path), path)
    model_type = keys.raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise keys.refuse("model_type", f"use one of {', '.join(MODEL_TYPES)}")
    _refuse_unsupported(keys, model_type)
    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    # NOTE: Mistral's default is 8 whatever num_attention_heads is, so it has to be stated.
    num_kv_heads = keys.integer("num_key_value_heads", default=None if model_type == "mistral" else num_heads)
    if num_heads % num_kv_heads:
        raise keys.refuse("num_key_value_heads", f"it must divide num_attention_heads = {num_heads}")
    num_layers = keys.integer("num_hidden_layers")
    rope_theta, rope_scaling = _rope(keys)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(keys, model_type, hidden_size, num_heads),
        rms_norm_eps=keys.number("rms_norm_eps"),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_context=keys.integer("max_position_embeddings"),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        attention_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        windows=_windows(keys, model_type, num_layers),
        eos_token_ids=read_eos_token_ids(directory),
        bos_token_id=_bos_token_id(directory, keys),
    )


def _refuse_unsupported(keys: _Keys, model_type: str) -> None:
    if keys.raw.get("hidden_act", "silu") != "silu":
        raise keys.refuse("hidden_act", "only silu is")
    # Qwen2's q, k, v bias is part of its type; the key elsewhere also puts a bias on o_proj.
    for key in ("attention_bias", "mlp_bias"):
        if keys.flag(key):
            raise keys.refuse(key, "only projections without bias are (q, k, v of qwen2 aside)")
    if keys.raw.get("quantization_config") is not None:
        raise keys.refuse("quantization_config", "use the unquantised checkpoint, or a GGUF file")
    if model_type == "llama" and keys.raw.get("sliding_window") is not None:
        raise keys.refuse("sliding_window", "llama models attend to the whole context")


def _head_dim(keys: _Keys, model_type: str, hidden_size: int, num_heads: int) -> int:
    if keys.raw.get("head_dim") is not None or model_type == "qwen3" or hidden_size % num_heads:
        # NOTE: Qwen3's default is 128 whatever hidden_size / num_attention_heads is, so it has to be stated.
        head_dim = keys.integer("head_dim")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise DSparkError(f"{keys.path}: head_dim = {head_dim} is odd, rotary embedding needs an even one")
    return head_dim


def _rope(keys: _Keys) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from `rope_parameters` (transformers 5), `rope_scaling` and the top level."""
    theta: float | None = None
    scaling: RopeScaling | None = None
    for key in ("rope_parameters", "rope_scaling"):
        rope = keys.raw.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise keys.refuse(key, "one rotary embedding for all layers is")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise keys.refuse(key, "only rotation of the whole head is")
        scaling = scaling or _rope_scaling(keys, key, _Keys(rope, keys.path))
        if theta is None and rope.get("rope_theta") is not None:
            theta = _Keys(rope, keys.path).number("rope_theta")
    if keys.raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise keys.refuse("partial_rotary_factor", "only 1.0 is")
    if theta is None:
        theta = keys.number("rope_theta") if keys.raw.get("rope_theta") is not None else DEFAULT_ROPE_THETA
    return theta, scaling


def _rope_scaling(keys: _Keys, key: str, rope: _Keys) -> RopeScaling | None:
    match rope.raw.get("rope_type", rope.raw.get("type", "default")):
        case "default":
            return None
        case "linear":
            return RopeScaling(rope.number("factor"))
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if low >= high:
                raise keys.refuse(key, "low_freq_factor has to be below high_freq_factor")
            original = rope.integer("original_max_position_embeddings")
            return RopeScaling(rope.number("factor"), low, high, original)
        case _:
            raise keys.refuse(key, "rope_type default, linear and llama3 are")


def _windows(keys: _Keys, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer; () where every layer attends to everything."""
    if model_type == "mistral":
        return _mistral_windows(keys, num_layers)
    types = keys.raw.get("layer_types")
    if types is not None:
        good = isinstance(types, list) and set(types) <= {"full_attention", "sliding_attention"}
        if not good or len(types) != num_layers:
            raise keys.refuse(
                "layer_types", f"it must list {num_layers} times full_attention or sliding_attention"
            )
    # As in transformers, layer_types asks for windows only where use_sliding_window grants them.
    if not keys.flag("use_sliding_window") or keys.raw.get("sliding_window") is None:
        if model_type == "llama" and types is not None and "sliding_attention" in types:
            raise keys.refuse("layer_types", "llama models attend to the whole context")
        return ()
    window = keys.integer("sliding_window")
    if types is None:
        first = keys.raw.get("max_window_layers")
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise DSparkError(f"{keys.path}: use_sliding_window needs max_window_layers, got {first!r}")
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return windows if any(windows) else ()


def _mistral_windows(keys: _Keys, num_layers: int) -> tuple[int | None, ...]:
    """One window for all layers, whatever use_sliding_window says; transformers does not look at layer_types."""
    if keys.raw.get("layer_types") is not None:
        raise keys.refuse("layer_types", "the layers of mistral models are alike")
    if keys.raw.get("sliding_window", MISTRAL_WINDOW) is None:
        return ()
    return (keys.integer("sliding_window", default=MISTRAL_WINDOW),) * num_layers


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Ids that end a generation: generation_config.json's, else config.json's (each an int or a list)."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        value = read_json(path).get("eos_token_id") if path.exists() else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise DSparkError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
        return tuple(ids)
    return ()


def _bos_token_id(directory: Path, keys: _Keys) -> int | None:
    path = directory / "generation_config.json"
    value = read_json(path).get("bos_token_id") if path.exists() else None
    value = keys.raw.get("bos_token_id") if value is None else value
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise DSparkError(f"{keys.path}: bos_token_id must be a token id, got {value!r}")
    return value
