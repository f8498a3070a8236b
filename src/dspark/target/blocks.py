"""Quantised blocks of a converted GGUF file: the weights of model.safetensors as they were stored.

    blocks = read_blocks(directory)      # name -> QuantizedWeight, or None
    blocks[name].dequantize()            # equals read_weights(directory)[name]

Names and order of rows are those of model.safetensors; tensors that were not quantised are absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from dspark.core import DSparkError
from dspark.kernels.lowbit import BLOCK, QuantizedWeight
from dspark.target.config import DecoderConfig

__all__ = [
    "BLOCKS_FILE",
    "STORED",
    "Blocks",
    "QuantizedWeight",
    "check_blocks",
    "fuse_blocks",
    "hollow_weights",
    "read_blocks",
]

BLOCKS_FILE = "blocks.safetensors"  # <name>.codes, <name>.scale and, of 4-bit tensors, <name>.minimum
STORED = {"F32": "<f4", "F16": "<f2", "U8": "u1", "I8": "i1"}  # safetensors' word -> NumPy's


class Blocks(Mapping[str, QuantizedWeight]):
    """The quantised tensors of a file, each read when it is asked for: a mapped file would stay in memory beside what
    its tensors are laid out to.

    Raises:
        DSparkError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                self._header: dict[str, Any] = (
                    json.loads(file.read(size)) if size < path.stat().st_size else {}
                )
        except (OSError, ValueError) as error:
            raise self._damaged(error) from None
        self._start = 8 + size
        self._names = [name.removesuffix(".codes") for name in self._header if name.endswith(".codes")]
        last = max(
            (entry["data_offsets"][1] for entry in self._header.values() if "dtype" in entry), default=0
        )
        if not self._names or self._start + last > path.stat().st_size:
            raise self._damaged("its end is missing")

    def __getitem__(self, name: str) -> QuantizedWeight:
        return self.joined([name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return f"{name}.codes" in self._header

    def bits(self, name: str) -> int:
        return 8 if self._header[f"{name}.codes"]["dtype"] == "I8" else 4

    def shape(self, name: str) -> tuple[int, int]:
        """(out, in)."""
        out, blocks = self._header[f"{name}.scale"]["shape"]
        return out, blocks * BLOCK

    def joined(self, names: Sequence[str]) -> QuantizedWeight:
        """The rows of several tensors with the same inputs and bits."""
        for name in names:
            if name not in self:
                raise KeyError(name)
        return self._weight(names, None)

    def row(self, name: str, index: int) -> QuantizedWeight:
        """One row of a tensor."""
        return self._weight([name], index)

    def _weight(self, names: Sequence[str], row: int | None) -> QuantizedWeight:
        bits = self.bits(names[0])
        try:
            with self.path.open("rb") as file:
                minimum = self._read(file, names, "minimum", row) if bits == 4 else None
                codes = self._read(file, names, "codes", row)
                return QuantizedWeight(codes, self._read(file, names, "scale", row), minimum, bits)
        except (OSError, KeyError, ValueError) as error:
            raise self._damaged(error) from None

    def _read(self, file: BinaryIO, names: Sequence[str], part: str, row: int | None) -> torch.Tensor:
        """A part of each tensor, or one row of it, below each other."""
        entries = [self._header[f"{name}.{part}"] for name in names]
        kind, size = np.dtype(STORED[entries[0]["dtype"]]), entries[0]["shape"][1]
        counts = [entry["shape"][0] if row is None else 1 for entry in entries]
        values = np.empty((sum(counts), size), kind)
        for entry, rows in zip(entries, np.split(values, np.cumsum(counts)[:-1]), strict=True):
            file.seek(self._start + entry["data_offsets"][0] + (row or 0) * values.strides[0])
            if file.readinto(rows.data.cast("B")) < rows.nbytes:  # type: ignore[attr-defined]
                raise ValueError("its end is missing")
        return torch.from_numpy(values)

    def _damaged(self, error: object) -> DSparkError:
        return DSparkError(f"{self.path} is damaged ({error}): delete its folder to convert the model anew")


def read_blocks(directory: Path) -> Blocks | None:
    """The quantised tensors of `directory`; None where there are none.

    Raises:
        DSparkError: the file is damaged.
    """
    path = directory / BLOCKS_FILE
    return Blocks(path) if path.exists() else None


def fuse_blocks(config: DecoderConfig, blocks: Blocks) -> Iterator[tuple[str, QuantizedWeight]]:
    """Names of a `Decoder`'s linear layers (and `embed`, if it is not the head's) and their blocks, concatenated as
    `fuse_weights` does.

    Left out are layers with a part that was not quantised, or parts of different kinds.
    """
    for layer, names in _covered(config, blocks).items():
        yield layer, blocks.joined(names)


def hollow_weights(
    config: DecoderConfig, weights: Mapping[str, torch.Tensor], blocks: Blocks
) -> dict[str, torch.Tensor]:
    """`weights` without the values (on the meta device) of what a decoder will read from `blocks`.

    So the float32 copies are never read from disk.

    Raises:
        DSparkError: `blocks` do not belong to `weights`.
    """
    hollow = dict(weights)
    for names in _covered(config, blocks).values():
        for name in names:
            _check_row(name, blocks.shape(name), blocks.row(name, len(weights[name]) // 2), weights[name])
            hollow[name] = torch.empty_like(weights[name], device="meta")
    return hollow


def _covered(config: DecoderConfig, blocks: Blocks) -> dict[str, list[str]]:
    """Linear layers of a decoder that blocks can make up, in its order, and the tensors they consist of."""
    parts = {}
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        parts[f"layers.{i}.qkv_proj"] = [f"{attention}.{n}_proj" for n in "qkv"]
        parts[f"layers.{i}.o_proj"] = [f"{attention}.o_proj"]
        parts[f"layers.{i}.gate_up_proj"] = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        parts[f"layers.{i}.down_proj"] = [f"{mlp}.down_proj"]
    parts["lm_head"] = ["model.embed_tokens" if config.tie_embeddings else "lm_head"]
    if not config.tie_embeddings:
        parts["embed"] = ["model.embed_tokens"]
    covered = {}
    for layer, modules in parts.items():
        names = [f"{module}.weight" for module in modules]
        kinds = {blocks.bits(name) if name in blocks else None for name in names}
        if len(kinds) == 1 and None not in kinds:
            covered[layer] = names
    return covered


def check_blocks(name: str, blocks: QuantizedWeight, weight: torch.Tensor) -> None:
    """Raise DSparkError unless `blocks` belong to `weight` [out, in]: equal shapes and middle rows."""
    row = min(len(weight), len(blocks.codes)) // 2
    minimum = None if blocks.minimum is None else blocks.minimum[row : row + 1]
    middle = QuantizedWeight(blocks.codes[row : row + 1], blocks.scale[row : row + 1], minimum, blocks.bits)
    _check_row(name, blocks.shape, middle, weight)


def _check_row(name: str, shape: tuple[int, int], middle: QuantizedWeight, weight: torch.Tensor) -> None:
    if shape != weight.shape or not torch.equal(middle.dequantize()[0], weight[len(weight) // 2]):
        raise DSparkError(f"{BLOCKS_FILE} does not match model.safetensors in {name}: delete it")
