"""Load a target and its tokenizer from a name or a path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dspark.kernels.lowbit import supports
from dspark.target.blocks import hollow_weights, read_blocks
from dspark.target.decoder import Decoder
from dspark.target.hf import read_config, read_weights, weights_identity
from dspark.target.tokenizer import Tokenizer
from dspark.target.zoo import resolve

__all__ = ["LoadedTarget", "load_decoder", "load_target"]


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
) -> LoadedTarget:
    """Resolve, load and prepare `model`: a known name, an HF directory or a .gguf file.

    Raises:
        DSparkError: unknown name, unsupported architecture, missing or wrong weights.
    """
    directory = resolve(model, report)
    decoder = _decoder_on_blocks(directory, dtype, device)
    if decoder is None:
        decoder = load_decoder(directory, dtype).prepare(device)
    tokenizer = Tokenizer(directory)
    decoder.eos_token_ids = decoder.eos_token_ids or tokenizer.eos_token_ids
    return LoadedTarget(str(model), directory, decoder, tokenizer)


def _decoder_on_blocks(directory: Path, dtype: torch.dtype, device: torch.device | str) -> Decoder | None:
    """A prepared decoder that reads quantised blocks; None where there are none or the machine cannot."""
    if dtype != torch.float32 or torch.device(device).type != "cpu" or not supports():
        return None
    blocks = read_blocks(directory)
    if not blocks:
        return None
    config = read_config(directory)
    weights = hollow_weights(config, read_weights(directory), blocks)
    return Decoder.from_weights(config, weights, weights_identity(directory)).prepare(device, blocks)
