"""The weights of a GGUF file: in float32 as model.safetensors, and quantised ones also as they are, for `read_blocks`.

llama.cpp stores the rows of a Llama's q and k projections with the two halves of a rotary pair side by side; they come
back in the order that rotate-half needs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QuantType

from dspark.core import DSparkError
from dspark.kernels.lowbit import BLOCK
from dspark.target.blocks import BLOCKS_FILE, STORED
from dspark.target.gguf_metadata import Metadata
from dspark.target.hf import read_config, weight_shapes

__all__ = ["write_weights"]

BLOCK_BYTES = {QuantType.Q4_0: 18, QuantType.Q4_1: 20, QuantType.Q8_0: 34}  # of 32 weights
ALIGNMENT = 64  # bytes: a cache line, so that mapped rows start on one

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_weights(metadata: Metadata, build: Path) -> None:
    """Stream tensors into build/model.safetensors (float32) and, of quantised ones, the blocks beside it.

    One tensor is in memory at a time.
    """
    config = read_config(build)
    expected = weight_shapes(config)
    tensors = {_hf_name(tensor.name): tensor for tensor in metadata.reader.tensors}
    for name in [*expected, *tensors]:
        if name not in tensors:
            raise DSparkError(f"{metadata.path}: tensor {name} (its Hugging Face name) is missing")
        if name not in expected:
            raise DSparkError(f"{metadata.path}: tensor {tensors[name].name} is not known in {metadata.arch}")
        shape = tuple(reversed(tensors[name].shape.tolist()))  # GGUF lists the fastest axis first
        if shape != expected[name]:
            raise DSparkError(
                f"{metadata.path}: tensor {name} has shape {shape}, metadata need {expected[name]}"
            )

    permuted = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if metadata.arch == "llama" else {}

    def in_order(name: str, rows: np.ndarray) -> np.ndarray:
        heads = permuted.get(name.split(".")[-2])
        return _rotate_half_rows(rows, heads) if heads else rows

    floats = (in_order(name, _dequantize(tensors[name], metadata.path)) for name in expected)
    header = {name: ("F32", shape) for name, shape in expected.items()}
    _write_safetensors(build / "model.safetensors", header, floats)
    quantised = {name: tensors[name] for name in expected if tensors[name].tensor_type in BLOCK_BYTES}
    if quantised:
        _write_blocks(build / BLOCKS_FILE, quantised, in_order)


def _write_blocks(
    path: Path, tensors: Mapping[str, gguf.ReaderTensor], in_order: Callable[[str, np.ndarray], np.ndarray]
) -> None:
    """The file that `read_blocks` reads: the same tensors as stored, three arrays for each at most."""
    header: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        size, out = tensor.shape.tolist()
        eight = tensor.tensor_type == QuantType.Q8_0
        header[f"{name}.codes"] = ("I8", (out, size)) if eight else ("U8", (out, size // 2))
        header[f"{name}.scale"] = ("F16", (out, size // BLOCK))
        if not eight:
            header[f"{name}.minimum"] = ("F16", (out, size // BLOCK))

    def arrays() -> Iterator[np.ndarray]:
        for name, tensor in tensors.items():
            yield from split_blocks(in_order(name, tensor.data), tensor.tensor_type)

    _write_safetensors(path, header, arrays())


def split_blocks(rows: np.ndarray, kind: QuantType) -> list[np.ndarray]:
    """Codes, scales and, of 4-bit kinds, minima of GGUF blocks. `rows`: [out, bytes of a row] uint8.

    Codes stay as they are in a block, whose first two (Q4_1: four) bytes are its scale (and minimum).
    """
    blocks = rows.reshape(rows.shape[0], -1, BLOCK_BYTES[kind])  # [out, in / 32, bytes of a block]
    head = 4 if kind == QuantType.Q4_1 else 2
    halves = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    codes = np.ascontiguousarray(blocks[..., head:]).reshape(rows.shape[0], -1)
    if kind == QuantType.Q8_0:
        return [codes.view(np.int8), halves[..., 0]]
    # Q4_0 is scale x (code - 8), and eight times a float16 is exact
    minimum = halves[..., 1] if kind == QuantType.Q4_1 else halves[..., 0] * np.float16(-8)
    return [codes, halves[..., 0], minimum]


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; other names come back unchanged."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{LAYER_TENSORS[part]}.{kind}" if part in LAYER_TENSORS else name
    part, _, kind = name.rpartition(".")
    return f"{TENSORS[part]}.{kind}" if part in TENSORS else name


def _dequantize(tensor: gguf.ReaderTensor, path: Path) -> np.ndarray:
    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise DSparkError(f"{path}: tensor {tensor.name} has type {kind}, which cannot be read") from None


def _rotate_half_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (0, d/2, 1, d/2 + 1, ...) to (0, 1, ..., d - 1). `rows`: [heads * d, in]."""
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, d / 2, 2, in]
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _write_safetensors(
    path: Path, entries: Mapping[str, tuple[str, tuple[int, ...]]], arrays: Iterator[np.ndarray]
) -> None:
    """A safetensors file: length of the header (u64), header (JSON), then the arrays in order.

    `entries`: name -> (type in safetensors' words, shape).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape) in entries.items():
        start, end = end, end + np.dtype(STORED[kind]).itemsize * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (kind, _), array in zip(entries.values(), arrays, strict=True):
            file.write(np.ascontiguousarray(array, dtype=STORED[kind]).data)
