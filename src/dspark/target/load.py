"""Load a target and its tokenizer from a name or a path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dspark.core import DSparkError
from dspark.kernels.lowbit import supports, supports_integers
from dspark.target.blocks import hollow_weights, read_blocks
from dspark.target.decoder import Decoder
from dspark.target.hf import read_config, read_weights, weights_identity
from dspark.target.tokenizer import Tokenizer
from dspark.target.zoo import resolve

__all__ = ["ACTIVATION_DTYPES", "LoadedTarget", "load_decoder", "load_target"]

ACTIVATION_DTYPES = ("auto", "float32", "int8")
KV_CACHE_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedTarget:
    """A decoder ready to serve, the tokenizer that belongs to it, and the directory both came from."""

    name: str
    directory: Path
    decoder: Decoder
    tokenizer: Tokenizer


def load_decoder(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder of an HF-style directory, unpacked: usable for training features."""
    config = read_config(directory)
    return Decoder.from_weights(config, read_weights(directory, dtype), weights_identity(directory))


def load_target(
    model: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    report: Callable[[str], None] = lambda message: None,
    activation_dtype: str = "auto",
    kv_cache_dtype: str = "auto",
) -> LoadedTarget:
    """Resolve, load and prepare `model`: a known name, an HF directory or a .gguf file.

    Args:
        activation_dtype: of the inputs of products with quantised weights. "int8" rounds them in blocks of 32 and
            multiplies in integers, as llama.cpp does; "float32" keeps them; "auto" takes int8 where the model has
            quantised weights and the processor integer dot products. The model that results is the target.
        kv_cache_dtype: float32, float16, bfloat16, or "auto": float16 beside int8 activations, else `dtype`.

    Raises:
        DSparkError: unknown name, unsupported architecture, missing or wrong weights, int8 activations where
            there are no products for them.
    """
    if activation_dtype not in ACTIVATION_DTYPES:
        names = ", ".join(ACTIVATION_DTYPES)
        raise DSparkError(f"activation_dtype {activation_dtype!r} is not supported; choose from {names}")
    if kv_cache_dtype != "auto" and kv_cache_dtype not in KV_CACHE_DTYPES:
        names = ", ".join(("auto", *KV_CACHE_DTYPES))
        raise DSparkError(f"kv_cache_dtype {kv_cache_dtype!r} is not supported; choose from {names}")
    if activation_dtype == "int8" and not supports_integers():
        raise DSparkError(
            "int8 activations need an x86 processor with AVX2, which this is not: leave activation_dtype out"
        )
    directory = resolve(model, report)
    integer = activation_dtype == "int8" or (activation_dtype == "auto" and supports_integers())
    decoder = _decoder_on_blocks(directory, dtype, device, integer)
    if decoder is None and activation_dtype == "int8":
        raise DSparkError(
            "int8 activations need a model with quantised weights (GGUF) in float32 on a CPU that can multiply them: "
            "leave activation_dtype out"
        )
    if decoder is None:
        decoder = load_decoder(directory, dtype).prepare(device)
    if kv_cache_dtype != "auto":
        decoder.kv_cache_dtype = KV_CACHE_DTYPES[kv_cache_dtype]
    elif decoder.activation_dtype == "int8":
        decoder.kv_cache_dtype = torch.float16
    tokenizer = Tokenizer(directory)
    decoder.eos_token_ids = decoder.eos_token_ids or tokenizer.eos_token_ids
    return LoadedTarget(str(model), directory, decoder, tokenizer)


def _decoder_on_blocks(
    directory: Path, dtype: torch.dtype, device: torch.device | str, integer: bool
) -> Decoder | None:
    """A prepared decoder that reads quantised blocks; None where there are none or the machine cannot."""
    if dtype != torch.float32 or torch.device(device).type != "cpu" or not supports():
        return None
    blocks = read_blocks(directory)
    if not blocks:
        return None
    config = read_config(directory)
    weights = hollow_weights(config, read_weights(directory), blocks)
    # Vectors are copied: views would keep the pages around them in memory.
    weights = {name: weight.clone() if weight.ndim == 1 else weight for name, weight in weights.items()}
    return Decoder.from_weights(config, weights, weights_identity(directory)).prepare(device, blocks, integer)
