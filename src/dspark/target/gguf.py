"""GGUF files of the Llama and Qwen families, turned once into a Hugging Face directory that loads quickly.

    convert_gguf(Path("model.gguf"), Path("model"))

Weights are dequantised to float32; 4-bit and 8-bit blocks are also kept as they are, for `read_blocks`. Whatever the
file asks for that is not implemented raises `DSparkError`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark.core import DSparkError
from dspark.target.gguf_metadata import ARCHITECTURES, Metadata
from dspark.target.gguf_tokenizer import build_tokenizer, tokenizer_config
from dspark.target.gguf_weights import write_weights

__all__ = ["convert_gguf"]


def convert_gguf(gguf_path: Path, directory: Path) -> None:
    """Write `directory` with config, float32 weights, tokenizer and chat template of `gguf_path`.

    Built beside `directory` and renamed into place: it appears complete or not at all. Another process that
    finishes the same conversion first wins quietly.

    Raises:
        DSparkError: not a GGUF file, an unsupported model, `directory` has contents, or the disk is full.
    """
    if directory.exists() and any(directory.iterdir()):
        raise DSparkError(f"{directory} exists and is not empty: name a new directory")
    metadata = Metadata(gguf_path)
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
            write_weights(metadata, build)
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


def _config(metadata: Metadata) -> dict[str, Any]:
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


def _refuse_unsupported(metadata: Metadata) -> None:
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


def _generation_config(metadata: Metadata) -> dict[str, Any]:
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
