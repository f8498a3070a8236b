"""Quantised blocks of a converted GGUF file: the weights of model.safetensors as they were stored.

    blocks = read_blocks(directory)      # name -> QuantizedWeight, or None
    blocks[name].dequantize()            # equals read_weights(directory)[name]

Names and order of rows are those of model.safetensors; tensors that were not quantised are absent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dspark.core import DSparkError
from dspark.kernels.lowbit import QuantizedWeight
from dspark.target.config import DecoderConfig

__all__ = ["BLOCKS_FILE", "QuantizedWeight", "check_blocks", "fuse_blocks", "hollow_weights", "read_blocks"]

BLOCKS_FILE = "blocks.safetensors"  # <name>.codes, <name>.scale and, of 4-bit tensors, <name>.minimum


def read_blocks(directory: Path) -> dict[str, QuantizedWeight] | None:
    """The quantised tensors of `directory`, mapped from disk; None where there are none.

    Raises:
        DSparkError: the file is damaged.
    """
    path = directory / BLOCKS_FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        names = [name.removesuffix(".codes") for name in stored if name.endswith(".codes")]
        return {name: _weight(name, stored) for name in names}
    except (SafetensorError, OSError, KeyError) as error:
        raise DSparkError(
            f"{path} is damaged ({error}): delete its folder to convert the model anew"
        ) from None


def _weight(name: str, stored: dict[str, torch.Tensor]) -> QuantizedWeight:
    codes = stored[f"{name}.codes"]
    bits = 8 if codes.dtype == torch.int8 else 4
    return QuantizedWeight(codes, stored[f"{name}.scale"], stored.get(f"{name}.minimum"), bits)


def fuse_blocks(
    config: DecoderConfig, blocks: Mapping[str, QuantizedWeight]
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Names of a `Decoder`'s linear layers and their blocks, concatenated as `fuse_weights` does.

    Left out are layers with a part that was not quantised, or parts of different kinds.
    """
    for layer, names in _covered(config, blocks).items():
        parts = [blocks[name] for name in names]
        yield layer, parts[0] if len(parts) == 1 else QuantizedWeight.cat(parts)


def hollow_weights(
    config: DecoderConfig, weights: Mapping[str, torch.Tensor], blocks: Mapping[str, QuantizedWeight]
) -> dict[str, torch.Tensor]:
    """`weights` without the values (on the meta device) of what a decoder will read from `blocks`.

    So the float32 copies are never read from disk. Embedding and head are kept: drafters use their rows.

    Raises:
        DSparkError: `blocks` do not belong to `weights`.
    """
    hollow = dict(weights)
    for layer, names in _covered(config, blocks).items():
        for name in names:
            check_blocks(name, blocks[name], weights[name])
            if layer != "lm_head":
                hollow[name] = torch.empty_like(weights[name], device="meta")
    return hollow


def _covered(config: DecoderConfig, blocks: Mapping[str, QuantizedWeight]) -> dict[str, list[str]]:
    """Linear layers of a decoder that blocks can make up, and the tensors they consist of."""
    parts = {"lm_head": ["model.embed_tokens" if config.tie_embeddings else "lm_head"]}
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        parts[f"layers.{i}.qkv_proj"] = [f"{attention}.{n}_proj" for n in "qkv"]
        parts[f"layers.{i}.o_proj"] = [f"{attention}.o_proj"]
        parts[f"layers.{i}.gate_up_proj"] = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        parts[f"layers.{i}.down_proj"] = [f"{mlp}.down_proj"]
    covered = {}
    for layer, modules in parts.items():
        names = [f"{module}.weight" for module in modules]
        kinds = {blocks[name].bits if name in blocks else None for name in names}
        if len(kinds) == 1 and None not in kinds:
            covered[layer] = names
    return covered


def check_blocks(name: str, blocks: QuantizedWeight, weight: torch.Tensor) -> None:
    """Raise DSparkError unless `blocks` belong to `weight` [out, in]: equal shapes and middle rows."""
    row = len(weight) // 2
    minimum = None if blocks.minimum is None else blocks.minimum[row : row + 1]
    if blocks.shape == weight.shape:
        middle = QuantizedWeight(
            blocks.codes[row : row + 1], blocks.scale[row : row + 1], minimum, blocks.bits
        )
        if torch.equal(middle.dequantize()[0], weight[row]):
            return
    raise DSparkError(f"{BLOCKS_FILE} does not match model.safetensors in {name}: delete it")
