"""The operations that a program is made of, as data: each a record for the compiled worker, and how it is cut.

A step works on the rows of one *group*: a drafter's program has one for the context it catches up with, one for
its blocks, and one for each slot of them. How many rows a group has is said at each run; none leaves its steps out.
See `program_numba` for what a step does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dspark.kernels.lowbit import LowBitLinear
from dspark.kernels.program_numba import ATTEND, CHOOSE, EMBED, GATHER, NORM, PRODUCT, ROTARY, SWIGLU
from dspark.kernels.records import TILE

__all__ = [
    "Confidence",
    "Rotation",
    "Step",
    "address",
    "attend",
    "choose",
    "embed",
    "gather",
    "norm",
    "product",
    "product_input",
    "rotate",
    "swiglu",
    "width",
]


@dataclass(frozen=True)
class Step:
    """One step: its record, units of work for each row (or in all, for products), and the call it refers to."""

    fields: Mapping[str, int | float]
    units: int
    per_row: bool = True
    product: LowBitLinear | None = None
    group: int = 0

    def of(self, group: int) -> Step:
        """The same for the rows of another group."""
        return replace(self, group=group)


@dataclass(frozen=True)
class Rotation:
    """Shapes of a rotary step: of the q, k and v heads that lie side by side in a row."""

    heads: int
    kv_heads: int
    head_dim: int
    cos: Tensor  # [max_context, head_dim / 2]
    sin: Tensor


def width(product: LowBitLinear) -> int:
    """Floats from one row of a product's output to the next: its last tile is filled up."""
    return -(-product.out_features // TILE) * TILE


def product(layer: LowBitLinear, x: Tensor, out: Tensor) -> Step:
    """out [N, width] = x [N, in] W^T; of an integer layer x are the codes [N, code_bytes] uint8."""
    assert out.shape[1] == width(layer)
    assert x.shape[1] == (layer.code_bytes if layer.integer else layer.in_features)
    fields = {"kind": PRODUCT, "x": x.data_ptr(), "out": out.data_ptr()}
    return Step(fields, layer.call_fields()["tiles"], per_row=False, product=layer)


def product_input(
    layer: LowBitLinear, rows: int, floats: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """What a product reads: floats (those given, or new memory), or codes, which are then returned twice."""
    if layer.integer:
        codes = torch.empty(rows, layer.code_bytes, dtype=torch.uint8)
        return codes, codes
    return torch.empty(rows, layer.in_features) if floats is None else floats, None


def embed(table: LowBitLinear, ids: Tensor, out: Tensor) -> Step:
    """out [N, in] = rows `ids` [N] int64 of the weight of `table`, dequantised."""
    call = table.call_fields()
    fields = {"kind": EMBED, "x": call["records"], "x_step": call["blocks"] * call["record_bytes"]}
    fields |= {"size": call["blocks"], "bits": table.bits, "index": ids.data_ptr()}
    return Step({**fields, "out": out.data_ptr(), "out_step": out.shape[1]}, 1)


def gather(
    x: Tensor, index: Tensor | None = None, out: Tensor | None = None, codes: Tensor | None = None
) -> Step:
    """Rows of x [n, size] that `index` [N] int64 names, or the first N: to `out`, and rounded to 8 bits to `codes`
    [N, code_bytes] uint8 (see `integers_numba`)."""
    size = x.shape[1]
    fields = {"kind": GATHER, "x": x.data_ptr(), "x_step": size, "size": size, "index": address(index)}
    return Step({**fields, "out": address(out), "out_step": size, "codes": address(codes)}, 1)


@dataclass(frozen=True)
class Confidence:
    """What a choice's confidence is computed from: weight [H + r] over a row's hidden state and the token before it."""

    weight: Tensor
    bias: float
    hidden: Tensor  # [n, H], rows as those of the scores
    embedding: Tensor | None  # [V, r]
    previous: Tensor  # [N] int64
    out: Tensor  # [N]


def choose(
    scores: Tensor,
    size: int,
    index: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    vocab: Tensor | None = None,
    confidence: Confidence | None = None,
) -> Step:
    """out [N] int64 = vocab[argmax(scores[index] + bias)] over the first `size` columns, the first of equals; with
    `probs` set for a run (see `slots`) a draw from their distribution."""
    fields: dict[str, int | float] = {
        "kind": CHOOSE,
        "x": scores.data_ptr(),
        "x_step": scores.shape[1],
        "size": size,
        "index": index.data_ptr(),
        "out": out.data_ptr(),
        "y": address(bias),
        "out_step": 0 if bias is None else bias.shape[1],
        "vocab": address(vocab),
    }
    if (c := confidence) is not None:
        fields |= {"confidence": c.out.data_ptr(), "weight": c.weight.data_ptr(), "bias": c.bias}
        fields |= {"hidden": c.hidden.data_ptr(), "hidden_size": c.hidden.shape[1]}
        fields |= {"embedding": address(c.embedding), "previous": c.previous.data_ptr()}
        fields |= {"embedding_size": 0 if c.embedding is None else c.embedding.shape[1]}
    return Step(fields, 1)


def norm(
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    x: Tensor | None = None,
    add: Tensor | None = None,
    codes: Tensor | None = None,
) -> Step:
    """x += add; out = RMSNorm(x), [N, H]; codes of `out`. `x` and `out` may be given later, pass by pass."""
    step = out if out is not None else x
    fields: dict[str, int | float] = {
        "kind": NORM,
        "x": address(x),
        "y": address(add),
        "out": address(out),
        "weight": weight.data_ptr(),
        "codes": address(codes),
        "eps": eps,
    }
    fields |= {"size": len(weight), "x_step": step.shape[1] if step is not None else len(weight)}
    return Step({**fields, "out_step": add.shape[1] if add is not None else 0}, 1)


def rotate(
    x: Tensor,
    column: int,
    shape: Rotation,
    keys: Tensor,
    values: Tensor,
    q: Tensor | None = None,
    bias: Tensor | None = None,
    norms: tuple[Tensor | None, Tensor | None] = (None, None),
    eps: float = 0.0,
) -> Step:
    """Heads of x [N, ...] from `column` on: + bias; q and k normed and rotated; k and v to their slots, q to `q`."""
    fields: dict[str, int | float] = {
        "kind": ROTARY,
        "x": x.data_ptr() + 4 * column,
        "x_step": x.shape[1],
        "out": address(q),
        "y": address(bias),
    }
    fields |= {"q_norm": address(norms[0]), "k_norm": address(norms[1]), "eps": eps}
    fields |= {
        "k_pool": keys.data_ptr(),
        "v_pool": values.data_ptr(),
        "block_size": keys.shape[-1],
        "kv_bytes": keys.itemsize,
    }
    fields |= {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    return Step(fields, shape.heads + 2 * shape.kv_heads)


def attend(call: np.ndarray) -> Step:
    """Attention of an `attention_numba.CALL` that is filled in pass by pass."""
    return Step({"kind": ATTEND, "call": call.ctypes.data}, 0, per_row=False)


def swiglu(x: Tensor, out: Tensor, codes: Tensor | None = None) -> Step:
    """out [N, I] = silu(gate) up, for gate and up side by side in x; and its codes."""
    fields = {"kind": SWIGLU, "x": x.data_ptr(), "x_step": x.shape[1], "codes": address(codes)}
    return Step({**fields, "out": out.data_ptr(), "out_step": out.shape[1], "size": out.shape[1]}, 1)


def address(tensor: Tensor | None) -> int:
    """Of its data; 0 of nothing."""
    return 0 if tensor is None else tensor.data_ptr()
