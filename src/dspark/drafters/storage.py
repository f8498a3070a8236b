"""How a drafter's checkpoint stores matrices: in 16 bits, in 8 with a scale a row, or in the blocks that serve.

    tensors = encode(model, "blocks")            # what the file holds
    blocks = take_blocks(model, tensors, path)   # and back: the matrices in blocks leave `tensors` ...
    plain = decode_rows(tensors, path)           # ... and the others come back as floats

Blocks (`QuantizedWeight`) are `<name>.codes`, `<name>.scale` and, with 4 bits, `<name>.minimum`; which matrices have
them, and how many bits, `low_bits` says. Of block drafters, `context_kv` holds the rows of all layers that make keys
and values once more, in 8 bits: context is projected by these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dspark.core import DSparkError
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.model import DrafterModel
from dspark.drafters.quantise import low_bits
from dspark.kernels.lowbit import BLOCK, QuantizedWeight
from dspark.target.layer import DecoderLayer

__all__ = [
    "CONTEXT",
    "SHARED",
    "STORAGES",
    "context_bias",
    "context_weight",
    "decode_rows",
    "encode",
    "float_weights",
    "take_blocks",
]

STORAGES = {
    "blocks": "4 or 8 bits, as served",
    "int8": "8 bits",
    "float16": "16 bits",
}  # what of a matrix is kept
SHARED = ("embed.weight", "lm_head.weight")  # the target's; not stored in our dialect
CONTEXT = "context_kv"
_SCALE = ".scale"
_INCOMPLETE = "the checkpoint is incomplete, save it again"


def encode(model: DrafterModel, storage: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint of `model`, which is in floats.

    Raises:
        DSparkError: blocks of another drafter than a block drafter.
    """
    tensors: dict[str, Tensor] = {}
    bits: dict[str, int] = {}
    if storage == "blocks":
        if not isinstance(model, BlockDrafterModel):
            raise DSparkError(f"{model.config.method} drafters are not stored in blocks: use int8")
        bits = _stored_bits(model)
        tensors |= _parts(CONTEXT, QuantizedWeight.from_float(context_weight(model)))
    for name, value in model.state_dict().items():
        if name in SHARED:
            continue
        if name == "vocab":
            if model.config.draft_vocab_size is not None:
                tensors["vocab"] = value.to(torch.int32)
        elif name in bits:
            tensors |= _parts(name, QuantizedWeight.from_float(value, bits[name]))
        elif value.ndim == 2 and storage == "float16":
            tensors[name] = value.half()
        elif value.ndim == 2:
            tensors[name], tensors[name + _SCALE] = _rounded_rows(value.float())
        else:
            tensors[name] = value.float()
    return {name: value.contiguous() for name, value in tensors.items()}


def context_weight(model: BlockDrafterModel) -> Tensor:
    """What projects context to the keys and values of all layers: [layers * 2 * kvh * d, H]."""
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    return torch.cat([layer.kv_parts()[0] for layer in layers])


def context_bias(model: BlockDrafterModel) -> Tensor | None:
    """What `context_weight` goes with, [layers * 2 * kvh * d]; also where the layers are in few bits."""
    if not model.config.attention_bias:
        return None
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    return torch.cat([layer.qkv_proj.bias[layer.heads * layer.head_dim :] for layer in layers])


def take_blocks(model: DrafterModel, tensors: dict[str, Tensor], path: Path) -> dict[str, QuantizedWeight]:
    """Take the matrices in blocks out of `tensors`, by the names of `model`'s weights and `CONTEXT`.

    Raises:
        DSparkError: a part is missing, or has another shape than `model` asks for.
    """
    wanted = {name: (model.get_parameter(name).shape, bits) for name, bits in _stored_bits(model).items()}
    if isinstance(model, BlockDrafterModel):
        layer = model.config.layer_config
        rows = model.config.num_layers * 2 * layer.num_kv_heads * layer.head_dim
        wanted[CONTEXT] = torch.Size((rows, layer.hidden_size)), 8
    return {name: _take(name, shape, bits, tensors, path) for name, (shape, bits) in wanted.items()}


def _take(
    name: str, shape: Sequence[int], bits: int, tensors: dict[str, Tensor], path: Path
) -> QuantizedWeight:
    out, size = shape
    heads = (torch.float16, (out, size // BLOCK))
    codes = (torch.int8, (out, size)) if bits == 8 else (torch.uint8, (out, size // 2))
    parts = {"codes": codes, "scale": heads} | ({"minimum": heads} if bits == 4 else {})
    found = {}
    for part, (dtype, need) in parts.items():
        tensor = tensors.pop(f"{name}.{part}", None)
        if tensor is None:
            raise DSparkError(f"{path} lacks the key '{name}.{part}': {_INCOMPLETE}")
        if tensor.dtype != dtype or tensor.shape != need:
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise DSparkError(f"{path}: '{name}.{part}' is {got}, config.json asks for {dtype} {need}")
        found[part] = tensor
    return QuantizedWeight(found["codes"], found["scale"], found.get("minimum"), bits)


def float_weights(model: DrafterModel, blocks: Mapping[str, QuantizedWeight]) -> dict[str, Tensor]:
    """The matrices of `take_blocks` in floats; keys and values as `CONTEXT` has them, which is nearer the original."""
    weights = {name: block.dequantize() for name, block in blocks.items() if name != CONTEXT}
    if CONTEXT in blocks:
        each = blocks[CONTEXT].dequantize().chunk(model.config.num_layers)
        for i, rows in enumerate(each):
            weights[f"layers.{i}.qkv_proj.weight"][-len(rows) :] = rows
    return weights


def decode_rows(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Matrices in 8 bits with a scale a row, or in 16 bits, as floats.

    Raises:
        DSparkError: a matrix without scales.
    """
    plain: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in tensors:
            continue
        if value.dtype == torch.int8:
            scale = tensors.get(name + _SCALE)
            if scale is None:
                raise DSparkError(f"{path} lacks the key {name + _SCALE!r}: {_INCOMPLETE}")
            plain[name] = value * scale[:, None]
        else:
            # A copy: a view of the mapped file would keep it in memory.
            plain[name] = value.to(torch.int64 if name == "vocab" else torch.float32, copy=True)
    return plain


def _stored_bits(model: DrafterModel) -> dict[str, int]:
    """Bits of each weight that is stored in blocks."""
    named = {f"{name}.weight": bits for name, bits in low_bits(model).items()}
    return {name: bits for name, bits in named.items() if name not in SHARED}


def _parts(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    parts = {f"{name}.codes": weight.codes, f"{name}.scale": weight.scale}
    return parts if weight.minimum is None else parts | {f"{name}.minimum": weight.minimum}


def _rounded_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [out, in] int8 and scales [out]. What `decode_rows` gave comes back bit for bit: a / 127 x 127 / 127 in
    float32 is a / 127 for every a.
    """
    scale = weight.abs().amax(1).clamp(min=1e-12) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale
