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
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dspark import __version__
from dspark.core import DSparkError
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.config import DrafterConfig
from dspark.drafters.deepspec import is_deepspec, read_deepspec_config, rename_deepspec_weights
from dspark.drafters.methods import AUTOREGRESSIVE
from dspark.drafters.model import DrafterModel
from dspark.drafters.models import build_model
from dspark.drafters.quantise import serves_blocks
from dspark.drafters.storage import (
    CONTEXT,
    STORAGES,
    context_bias,
    decode_rows,
    encode,
    float_weights,
    take_blocks,
)
from dspark.kernels.lowbit import (
    LowBitEmbedding,
    LowBitLinear,
    QuantizedWeight,
    WeightMemory,
    packed_bytes,
    supports_integers,
)
from dspark.target.base import Target
from dspark.target.decoder import Decoder

__all__ = ["FORMAT", "load_drafter_model", "read_drafter_config", "save_drafter_model", "stored_precision"]

FORMAT = 1
_HEADER = {"dspark_format", "slot_convention", "written_by", "storage", "provenance"}
_BLOCK_SLOTS = (
    "anchor_first"  # the anchor's row, the first of the block, predicts the token behind the anchor
)
_CHAIN_SLOTS = "feature_before_token"  # the feature of position t goes with the token at t + 1


def save_drafter_model(
    model: DrafterModel, directory: Path, provenance: Mapping[str, Any], storage: str = "int8"
) -> None:
    """Write a checkpoint in our dialect.

    Args:
        model: in floats: one that was not served.
        provenance: command, data, versions; kept in config.json.
        storage: of matrices. "int8" with one scale a row, "float16", or "blocks" (block drafters): those that serving
            rounds to 4 or 8 bits as it rounds them, so that loading need not. Everything else is float32; the
            embedding and LM head are the target's and are left out.

    Raises:
        DSparkError: no such storage, or none for this method.
    """
    if storage not in STORAGES:
        raise DSparkError(f"storage {storage!r} is not supported; choose from {', '.join(STORAGES)}")
    tensors = encode(model, storage)
    directory.mkdir(parents=True, exist_ok=True)
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(model.config).items()}
    header = {
        "dspark_format": FORMAT,
        "slot_convention": _slot_convention(model.config.method),
        "written_by": f"dspark {__version__}",
        "storage": storage,
    }
    config = {**header, **values, "provenance": dict(provenance)}
    save_file(tensors, directory / "model.safetensors")
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
    if raw.get("storage", "int8") not in STORAGES:
        raise DSparkError(
            f"{directory / 'config.json'}: storage must be one of {', '.join(STORAGES)}, got {raw['storage']!r}"
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


def stored_precision(directory: Path) -> str | None:
    """What of its matrices a checkpoint keeps, in words; None where its writer is not ours, and may keep all."""
    return STORAGES.get(str(_read_json(directory / "config.json").get("storage")))


def _slot_convention(method: Any) -> str:
    return _CHAIN_SLOTS if method in AUTOREGRESSIVE else _BLOCK_SLOTS


def load_drafter_model(directory: Path, target: Target, served: bool = False) -> DrafterModel:
    """Load a checkpoint and bind it to `target`, whose embedding and LM head it shares.

    `served`: layers that are stored in blocks stay so, where this target's drafters run on them. Otherwise all weights
    are floats.

    Raises:
        DSparkError: missing files; a missing, unexpected or misshapen key; a drafter trained for another target.
    """
    config = read_drafter_config(directory)
    # Positions go as far as the target's; the rotary table of a drafter trained on less simply goes on.
    config = dataclasses.replace(config, max_context=max(config.max_context, target.max_context))
    _check_target(config, target, directory)
    path = directory / "model.safetensors"
    tensors = _read_tensors(path)
    with _Uninitialised():
        model = build_model(config)  # weights are assigned below
    raw, blocks = _read_json(directory / "config.json"), {}
    if is_deepspec(raw):
        weights = rename_deepspec_weights(config, tensors, path)
    else:
        if raw.get("storage") == "blocks":
            blocks = take_blocks(model, tensors, path)
        weights = decode_rows(tensors, path)
    if config.draft_vocab_size is None:
        weights.setdefault("vocab", model.vocab)
    else:
        _check_vocab(weights, config, path)
    low_bit = blocks if served and serves_blocks(target) else {}
    weights |= _hollow(low_bit) if low_bit else float_weights(model, blocks)
    if not {"embed.weight", "lm_head.weight"} <= weights.keys():
        low_bit = low_bit | _share(model, weights, target, bool(low_bit))
    _check_keys(model, weights, path)
    model.load_state_dict(
        {k: v.to(target.dtype) if v.is_floating_point() else v for k, v in weights.items()}, assign=True
    )
    _lay_out(model, low_bit)
    return model.to(target.device)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise DSparkError(f"{path} does not exist: a drafter checkpoint is config.json and model.safetensors")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DSparkError(
            f"{path} is damaged, truncated or no safetensors file ({error}): copy or save it again"
        ) from None


class _Uninitialised(TorchFunctionMode):
    """New modules get no random weights: drawing a drafter's takes a second, and its embedding's 100 MB."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawing = func in (nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_)
        return None if drawing else func(*args, **(kwargs or {}))


def _hollow(blocks: Mapping[str, QuantizedWeight]) -> dict[str, Tensor]:
    """Weights of the shapes of `blocks`, without values."""
    return {
        name: torch.empty(block.shape, device="meta") for name, block in blocks.items() if name != CONTEXT
    }


def _share(
    model: DrafterModel, weights: dict[str, Tensor], target: Target, in_blocks: bool
) -> dict[str, QuantizedWeight]:
    """Use the target's embedding and LM head where the checkpoint brings none; returns the head's rows in blocks.

    That is where the target keeps them so, and `in_blocks`.
    """
    if not isinstance(target, Decoder):
        raise DSparkError(
            "this drafter shares the target's embedding and LM head: it needs a decoder as its target"
        )
    if "embed.weight" not in weights and isinstance(target.embed, LowBitEmbedding):
        model.set_submodule("embed", target.embed)
    else:
        weights.setdefault("embed.weight", target.embed.weight)
    if "lm_head.weight" in weights:
        return {}
    ids = weights["vocab"].long()
    if in_blocks and isinstance(target.lm_head, LowBitLinear) and target.lm_head.packed is not None:
        rows = target.lm_head.rows(ids)
        weights |= _hollow({"lm_head.weight": rows})
        return {"lm_head.weight": rows}
    whole = model.config.draft_vocab_size is None  # all rows in order: shared, not copied
    weights["lm_head.weight"] = target.output_weight if whole else target.output_rows(ids)
    return {}


def _lay_out(model: DrafterModel, blocks: Mapping[str, QuantizedWeight]) -> None:
    """Give `model` the layers that `blocks` make up, in its order, and the projection of context."""
    memory = WeightMemory(sum(packed_bytes(block.shape, block.bits) for block in blocks.values()))
    for name, layer in list(model.named_modules()):
        if (block := blocks.get(f"{name}.weight")) is not None:
            assert isinstance(layer, nn.Linear)
            model.set_submodule(name, LowBitLinear(block, layer.bias, supports_integers(), memory))
    if CONTEXT in blocks:
        assert isinstance(model, BlockDrafterModel)
        model.context_projection = LowBitLinear(
            blocks[CONTEXT], context_bias(model), supports_integers(), memory
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError:
        raise DSparkError(
            f"{path} does not exist: a drafter checkpoint is config.json and model.safetensors"
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DSparkError(f"{path} is not valid JSON ({error}): copy or save it again") from None
    if not isinstance(raw, dict):
        raise DSparkError(f"{path} must hold a JSON object")
    return raw
