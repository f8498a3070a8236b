"""GGUF files of the Llama and Qwen families, turned once into a Hugging Face directory that loads quickly.

    convert_gguf(Path("model.gguf"), Path("model"))

Weights are dequantised to float32; 4-bit and 8-bit blocks are also kept as they are, for `read_blocks`.
llama.cpp stores the rows of a Llama's q and k projections with the two halves of a rotary pair side by side;
they come back in the order that rotate-half needs. Whatever the file asks for that is not implemented raises
`DSparkError`.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QuantType

from dspark.core import DSparkError
from dspark.kernels.lowbit import BLOCK
from dspark.target.blocks import BLOCKS_FILE, STORED
from dspark.target.gguf_tokenizer import build_tokenizer, tokenizer_config
from dspark.target.hf import read_config, weight_shapes

__all__ = ["convert_gguf"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
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


class _Metadata:
    """Key-value section of a GGUF file; errors name the key and the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError, OSError) as error:
            raise DSparkError(f"{path} is damaged or no GGUF file ({error}): download it again") from None
        self.arch = self.get("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise self.refuse("general.architecture", self.arch, f"use one of {', '.join(ARCHITECTURES)}")

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.fields.get(key.format(arch=getattr(self, "arch", "")))
        return default if field is None else field.contents()

    def need(self, key: str, kind: type) -> Any:
        value = self.get(key)
        if not isinstance(value, kind):
            name = key.format(arch=self.arch)
            raise DSparkError(f"{self.path}: {name} must be one {kind.__name__}, got {value!r:.60}")
        return value

    def refuse(self, key: str, value: object, supported: str) -> DSparkError:
        return DSparkError(
            f"{self.path}: {key.format(arch=self.arch)} = {value!r} is not supported; {supported}"
        )


def convert_gguf(gguf_path: Path, directory: Path) -> None:
    """Write `directory` with config, float32 weights, tokenizer and chat template of `gguf_path`.

    Built beside `directory` and renamed into place: it appears complete or not at all. Another process that
    finishes the same conversion first wins quietly.

    Raises:
        DSparkError: not a GGUF file, an unsupported model, `directory` has contents, or the disk is full.
    """
    if directory.exists() and any(directory.iterdir()):
        raise DSparkError(f"{directory} exists and is not empty: name a new directory")
    metadata = _Metadata(gguf_path)
    config = _config(metadata)
    tokenizer = build_tokenizer(metadata)
    if tokenizer.get_vocab_size() > config["vocab_size"]:
        raise DSparkError(f"{gguf_path}: there are more tokenizer.ggml.tokens than rows in token_embd")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
            build = Path(scratch) / "model"
            build.mkdir()
            _write_json(build / "config.json", config)
            _write_json(build / "generation_config.json", _generation_config(metadata))
            (build / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
            _write_json(build / "tokenizer_config.json", tokenizer_config(metadata))
            _write_weights(metadata, build)
            _move(build, directory)
    except OSError as error:
        raise DSparkError(f"cannot write {directory} ({error}): free some space or choose another") from None


def _move(build: Path, directory: Path) -> None:
    try:
        os.rename(build, directory)
    except OSError:
        if not (directory / "config.json").exists():
            raise


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(metadata: _Metadata) -> dict[str, Any]:
    """config.json of the model, in the words of transformers."""
    _refuse_unsupported(metadata)
    hidden = metadata.need("{arch}.embedding_length", int)
    heads = metadata.need("{arch}.attention.head_count", int)
    head_dim = metadata.get("{arch}.attention.key_length", hidden // heads)
    for key in ("{arch}.attention.value_length", "{arch}.rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise metadata.refuse(key, metadata.get(key), f"it must equal the head dimension {head_dim}")
    names = {tensor.name: tensor for tensor in metadata.reader.tensors}
    if "token_embd.weight" not in names:
        raise DSparkError(f"{metadata.path}: tensor token_embd.weight is missing")
    return {
        "architectures": [ARCHITECTURES[metadata.arch]],
        "model_type": metadata.arch,
        "vocab_size": int(names["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": metadata.need("{arch}.feed_forward_length", int),
        "num_hidden_layers": metadata.need("{arch}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(metadata.need("{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(metadata.get("{arch}.rope.freq_base", 10000.0)),
        "max_position_embeddings": metadata.need("{arch}.context_length", int),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _refuse_unsupported(metadata: _Metadata) -> None:
    if metadata.get("{arch}.rope.scaling.type", "none") != "none":
        key = "{arch}.rope.scaling.type"
        raise metadata.refuse(key, metadata.get(key), "only unscaled rotary embeddings are")
    if any(tensor.name.startswith("rope_freqs") for tensor in metadata.reader.tensors):
        raise DSparkError(f"{metadata.path}: tensor rope_freqs (Llama 3.1 rotary scaling) is not supported")
    for key in ("{arch}.expert_count", "{arch}.attention.sliding_window", "{arch}.rope.scale_linear"):
        if metadata.get(key):
            raise metadata.refuse(key, metadata.get(key), "only dense full attention is")
    if metadata.get("split.count", 1) > 1:
        raise metadata.refuse(
            "split.count", metadata.get("split.count"), "merge the parts with gguf-split first"
        )


def _shortest(value: float) -> float:
    """The decimal that was meant: metadata hold float32, 1e-05 comes back as 9.999999747e-06."""
    return float(str(np.float32(value)))


def _generation_config(metadata: _Metadata) -> dict[str, Any]:
    """Every id that the metadata say ends a generation: of the text, of a turn, of a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    eos = list(dict.fromkeys(i for i in found if i is not None))
    if not eos:
        raise DSparkError(f"{metadata.path}: tokenizer.ggml.eos_token_id is missing")
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _write_weights(metadata: _Metadata, build: Path) -> None:
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
