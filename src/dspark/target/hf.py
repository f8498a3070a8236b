"""Hugging Face directories: config.json and safetensors, read strictly or refused by key.

    config = read_config(directory)      # DecoderConfig
    weights = read_weights(directory)    # name -> tensor, mapped from disk, names as in the checkpoint

Nothing here guesses: a key that changes the computation and is not implemented raises `DSparkError`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dspark.core import DSparkError
from dspark.target.config import DecoderConfig
from dspark.target.hf_config import read_config, read_eos_token_ids, read_json

__all__ = [
    "read_config",
    "read_eos_token_ids",
    "read_json",
    "read_weights",
    "weight_shapes",
    "weights_identity",
]

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of `config` holds; matrices are [out, in]."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if config.attention_bias:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, q)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def read_weights(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint in `directory`, named as in the file, exactly as `weight_shapes` says.

    Tensors already stored in `dtype` are views of the mapped file (read on first touch, copied on write);
    others are converted.

    Raises:
        DSparkError: a tensor is missing, unexpected, of the wrong shape or not floating point.
    """
    config = read_config(directory)
    expected = weight_shapes(config)
    weights: dict[str, torch.Tensor] = {}
    for path in _weight_files(directory):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - a safetensors handle, not a dict
                if _ignored(name, config):
                    continue
                if name not in expected or name in weights:
                    what = "stored twice" if name in weights else f"unexpected in a {config.model_type} model"
                    raise DSparkError(
                        f"{path}: tensor {name} is {what}; config.json and weights do not match"
                    )
                stored = file.get_slice(name)
                shape = tuple(stored.get_shape())
                if shape != expected[name]:
                    want = list(expected[name])
                    raise DSparkError(
                        f"{path}: tensor {name} has shape {list(shape)}, config.json wants {want}"
                    )
                if stored.get_dtype() not in FLOAT_DTYPES:
                    kinds = ", ".join(FLOAT_DTYPES)
                    raise DSparkError(f"{path}: tensor {name} is {stored.get_dtype()}, not one of {kinds}")
                weights[name] = file.get_tensor(name).to(dtype)
    _require_all(expected, weights, directory)
    return weights


def weights_identity(directory: Path) -> str:
    """16 hex digits that name the target's weights: equal for equal weights, whatever the files are called.

    Hashes the decoder's shape and, of every tensor, its name and middle row (as float32), so that a fine-tune
    of a model gets an identity of its own. Sharding, storage type and end-of-sequence ids do not matter.
    """
    config = read_config(directory)
    expected = weight_shapes(config)
    rows: dict[str, bytes] = {}
    for path in _weight_files(directory):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118
                if name in expected:
                    stored = file.get_slice(name)
                    middle = stored.get_shape()[0] // 2
                    row = stored[middle : middle + 1] if len(expected[name]) > 1 else stored[:]
                    rows[name] = row.to(torch.float32).numpy().tobytes()
    _require_all(expected, rows, directory)
    digest = hashlib.sha256()
    shape = {k: v for k, v in asdict(config).items() if k not in ("eos_token_ids", "bos_token_id")}
    if config.rope_scaling is None:  # a field that identities are older than
        del shape["rope_scaling"]
    digest.update(json.dumps(shape, sort_keys=True).encode())
    for name in sorted(rows):
        digest.update(name.encode() + b"\0" + rows[name])
    return digest.hexdigest()[:16]


def _ignored(name: str, config: DecoderConfig) -> bool:
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_embeddings)


def _require_all(expected: Mapping[str, object], found: Mapping[str, object], directory: Path) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise DSparkError(f"{directory}: tensor {missing[0]}{more} is missing; fetch the model again")


def _weight_files(directory: Path) -> list[Path]:
    """The single safetensors file, or the shards its index names."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise DSparkError(f"{directory} has neither {single.name} nor {index.name}: it holds no weights")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DSparkError(f"{index}: the key weight_map is missing or empty")
    shards = sorted({str(shard) for shard in weight_map.values()})
    for shard in shards:
        if Path(shard).name != shard or not (directory / shard).exists():
            raise DSparkError(f"{index}: weight_map names {shard!r}, which is not a file in {directory}")
    return [directory / shard for shard in shards]


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise DSparkError(
            f"{path} is damaged, truncated or no safetensors file ({error}): fetch it again"
        ) from None
