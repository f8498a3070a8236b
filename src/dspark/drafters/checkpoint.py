"""Drafter checkpoints: an HF-style directory that describes itself (config.json and model.safetensors).

Two dialects are read: our own (`"dspark_format": 1`), and DeepSpec's (FORMATS: Qwen3DSparkModel). Loading is
strict: every missing, unexpected or misshapen key is an error that names it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark import __version__
from dspark.core import DSparkError
from dspark.drafters.config import DrafterConfig
from dspark.drafters.deepspec import is_deepspec, read_deepspec_config, rename_deepspec_weights
from dspark.drafters.methods import AUTOREGRESSIVE
from dspark.drafters.model import DrafterModel
from dspark.drafters.models import build_model
from dspark.target.base import Target
from dspark.target.decoder import Decoder

__all__ = ["FORMAT", "load_drafter_model", "read_drafter_config", "save_drafter_model"]

FORMAT = 1
_HEADER = {"dspark_format", "slot_convention", "written_by", "provenance"}
_BLOCK_SLOTS = (
    "anchor_first"  # the anchor's row, the first of the block, predicts the token behind the anchor
)
_CHAIN_SLOTS = "feature_before_token"  # the feature of position t goes with the token at t + 1
_SHARED = ("embed.weight", "lm_head.weight")  # the target's; not stored in our dialect
_SCALE = ".scale"  # suffix of per-row scales of int8 tensors


def save_drafter_model(
    model: DrafterModel, directory: Path, provenance: Mapping[str, Any], int8: bool = True
) -> None:
    """Write a checkpoint in our dialect.

    Matrices are stored as int8 with one scale a row (`int8`) or float16, everything else as float32; the
    embedding and LM head are the target's and are left out. `provenance` (command, data, versions) is kept
    in config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if name in _SHARED:
            continue
        if name == "vocab":
            if model.config.draft_vocab_size is not None:
                tensors["vocab"] = value.to(torch.int32)
        elif value.ndim == 2 and int8:
            tensors[name], tensors[name + _SCALE] = _quantize(value.float())
        elif value.ndim == 2:
            tensors[name] = value.half()
        else:
            tensors[name] = value.float()
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(model.config).items()}
    header = {
        "dspark_format": FORMAT,
        "slot_convention": _slot_convention(model.config.method),
        "written_by": f"dspark {__version__}",
    }
    config = {**header, **values, "provenance": dict(provenance)}
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def read_drafter_config(directory: Path) -> DrafterConfig:
    """The configuration of a checkpoint in either dialect."""
    raw = _read_json(directory / "config.json")
    if is_deepspec(raw):
        return read_deepspec_config(raw)
    if raw.get("dspark_format") != FORMAT:
        raise DSparkError(
            f"{directory / 'config.json'} is no drafter checkpoint this version reads: it needs "
            f'"dspark_format": {FORMAT}, or DeepSpec\'s "architectures": ["Qwen3DSparkModel"]'
        )
    convention = _slot_convention(raw.get("method"))
    if raw.get("slot_convention") != convention:
        raise DSparkError(
            f'{directory}: slot_convention must be "{convention}", got {raw.get("slot_convention")!r}'
        )
    known = {field.name: field for field in dataclasses.fields(DrafterConfig)}
    unknown = sorted(raw.keys() - known.keys() - _HEADER)
    if unknown:
        raise DSparkError(
            f"{directory / 'config.json'} has the unknown key {unknown[0]!r}: a newer version wrote it?"
        )
    for name, field in known.items():
        if name not in raw and field.default is dataclasses.MISSING:
            raise DSparkError(
                f"{directory / 'config.json'} lacks the key {name!r}: save the checkpoint again"
            )
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if k in known}
    return DrafterConfig(**values)


def _slot_convention(method: Any) -> str:
    return _CHAIN_SLOTS if method in AUTOREGRESSIVE else _BLOCK_SLOTS


def load_drafter_model(directory: Path, target: Target) -> DrafterModel:
    """Load a checkpoint and bind it to `target`, whose embedding and LM head it shares.

    Raises:
        DSparkError: missing files; a missing, unexpected or misshapen key; a drafter trained for another target.
    """
    config = read_drafter_config(directory)
    # Positions go as far as the target's; the rotary table of a drafter trained on less simply goes on.
    config = dataclasses.replace(config, max_context=max(config.max_context, target.max_context))
    _check_target(config, target, directory)
    path = directory / "model.safetensors"
    if not path.is_file():
        raise DSparkError(f"{path} does not exist: a drafter checkpoint is config.json and model.safetensors")
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise DSparkError(f"{path} cannot be read ({error}): copy or save it again") from None
    if is_deepspec(_read_json(directory / "config.json")):
        weights = rename_deepspec_weights(config, weights, path)
    else:
        weights = _dequantize(weights, path)
    model = build_model(config)
    if config.draft_vocab_size is None:
        weights.setdefault("vocab", model.vocab)
    else:
        _check_vocab(weights, config, path)
    _share(weights, target)
    _check_keys(model, weights, path)
    model.load_state_dict(
        {k: v.to(target.dtype) if v.is_floating_point() else v for k, v in weights.items()}, assign=True
    )
    return model.to(target.device)


def _share(weights: dict[str, Tensor], target: Target) -> None:
    """Use the target's embedding and LM head where the checkpoint brings none."""
    if "embed.weight" in weights and "lm_head.weight" in weights:
        return
    if not isinstance(target, Decoder):
        raise DSparkError(
            "this drafter shares the target's embedding and LM head: it needs a decoder as its target"
        )
    weights.setdefault("embed.weight", target.embed.weight)
    rows = target.output_weight
    vocab = weights.get("vocab")
    weights.setdefault(
        "lm_head.weight", rows if vocab is None or len(vocab) == len(rows) else rows[vocab.long()]
    )


def _check_target(config: DrafterConfig, target: Target, directory: Path) -> None:
    for name in ("vocab_size", "hidden_size"):
        if getattr(config, name) != getattr(target, name):
            raise DSparkError(
                f"{directory} was made for a target with {name} {getattr(config, name)}, this one has "
                f"{getattr(target, name)}: use the drafter of this target"
            )
    if config.target_identity and target.identity and config.target_identity != target.identity:
        raise DSparkError(
            f"{directory} was trained for other weights (target identity {config.target_identity}, this model's is "
            f"{target.identity}): use the drafter of this target, or train one"
        )
    num_layers = len(target.kv_specs)
    if max(config.taps) >= num_layers or min(config.taps) < -1:
        raise DSparkError(
            f"{directory} taps layers {config.taps}, the target has layers -1..{num_layers - 1}"
        )


def _check_vocab(weights: Mapping[str, Tensor], config: DrafterConfig, path: Path) -> None:
    vocab = weights.get("vocab")
    if vocab is None:
        raise DSparkError(
            f"{path} lacks the key 'vocab', the map from draft to target ids: save the checkpoint again"
        )
    if len(vocab) != config.draft_vocab_size or len(vocab.unique()) != len(vocab):
        raise DSparkError(f"{path}: 'vocab' must hold {config.draft_vocab_size} distinct target ids")
    if int(vocab.min()) < 0 or int(vocab.max()) >= config.vocab_size:
        raise DSparkError(f"{path}: 'vocab' names ids outside the target's vocabulary of {config.vocab_size}")


def _check_keys(model: DrafterModel, weights: Mapping[str, Tensor], path: Path) -> None:
    wanted = model.state_dict()
    for name in sorted(wanted.keys() - weights.keys()):
        raise DSparkError(f"{path} lacks the key {name!r}: the checkpoint is incomplete, save it again")
    for name in sorted(weights.keys() - wanted.keys()):
        raise DSparkError(f"{path} has the unexpected key {name!r}: config.json describes another drafter")
    for name, value in wanted.items():
        if weights[name].shape != value.shape:
            got, need = tuple(weights[name].shape), tuple(value.shape)
            raise DSparkError(f"{path}: {name!r} has shape {got}, config.json asks for {need}")


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


def _dequantize(weights: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    plain: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name.endswith(_SCALE):
            continue
        if value.dtype == torch.int8:
            scale = weights.get(name + _SCALE)
            if scale is None:
                raise DSparkError(
                    f"{path} lacks the key {name + _SCALE!r}: the checkpoint is incomplete, save it again"
                )
            plain[name] = value.float() * scale[:, None]
        else:
            plain[name] = value.long() if name == "vocab" else value.float()
    return plain


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError:
        raise DSparkError(
            f"{path} does not exist: a drafter checkpoint is config.json and model.safetensors"
        ) from None
    except json.JSONDecodeError as error:
        raise DSparkError(f"{path} is not valid JSON ({error.msg})") from None
    if not isinstance(raw, dict):
        raise DSparkError(f"{path} must hold a JSON object")
    return raw
