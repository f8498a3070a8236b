"""Linear layers whose weights are laid out once for the CPU's matrix kernels (oneDNN).

    model = pack_linears(model)                # every nn.Linear inside, in place
    project = pack_linear(weight, bias)        # one matrix: project(x [n, in]) -> [n, out]

`torch.nn.functional.linear` re-lays or strides through the weight in every call, which for the few rows of
decoding and verification costs more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["PackedLinear", "can_pack", "pack_linear", "pack_linears"]

BATCH_HINT = 16  # rows the layout is chosen for


def can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN packs this weight: float32 or bfloat16 on a CPU, in a PyTorch built with it."""
    kind = weight.dtype in (torch.float32, torch.bfloat16)
    return weight.device.type == "cpu" and kind and torch.backends.mkldnn.is_available()


class PackedLinear(nn.Module):
    """y = x W^T + b for inference. Weights that cannot be packed are kept and go to `nn.functional.linear`.

    Args:
        weight: [out, in]; not kept when packed.
        bias: [out] or None.
        batch_hint: rows the layout is chosen for; other numbers work too.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, batch_hint: int = BATCH_HINT
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = can_pack(weight)
        self.dtype = weight.dtype
        self.bias = None if bias is None else bias.detach()
        # A plain attribute: the packed layout is opaque to state_dict() and to().
        weight = weight.detach()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, batch_hint) if self.packed else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], in the dtype of the weight."""
        if not self.packed:
            return nn.functional.linear(x, self.weight, self.bias)
        # oneDNN sums a single row in another order than several. Two rows cost the same (the weight is read
        # once) and give a row the same bits alone and in a batch: plain and speculative decoding agree.
        alone = x.shape[:-1].numel() == 1
        rows = x.reshape(1, -1).expand(2, -1) if alone else x
        out = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return out[:1].reshape(*x.shape[:-1], -1) if alone else out

    def extra_repr(self) -> str:
        where = "packed" if self.packed else "plain"
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.dtype}, {where}"


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, batch_hint: int = BATCH_HINT
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function x [n, in] -> x W^T + b [n, out] for weight [out, in] and bias [out]."""
    return PackedLinear(weight, bias, batch_hint)


def pack_linears(module: nn.Module, batch_hint: int = BATCH_HINT) -> nn.Module:
    """Replace every `nn.Linear` inside `module` (itself included) by a `PackedLinear`; returns the module.

    Original weights are freed, unless something else holds them: an embedding tied to a packed head keeps its
    table. A layer that occurs twice is packed once.
    """
    done: dict[int, PackedLinear] = {}
    originals: list[nn.Linear] = []  # ids stay unique while these live

    def pack(layer: nn.Linear) -> PackedLinear:
        if id(layer) not in done:
            done[id(layer)] = PackedLinear(layer.weight, layer.bias, batch_hint)
            originals.append(layer)
        return done[id(layer)]

    if type(module) is nn.Linear:
        return pack(module)
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is nn.Linear and child.out_features > 1:  # a dot product gains nothing
                parent._modules[name] = pack(child)
    return module
