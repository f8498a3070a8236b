"""One decoder layer, of a target as of a drafter, and layers as steps of a compiled program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from dspark.kernels.layers import LayerStack, LayerWeights
from dspark.kernels.lowbit import LowBitLinear
from dspark.kernels.steps import Rotation
from dspark.target.config import DecoderConfig
from dspark.target.rotary import Rotary, apply_rotary

__all__ = ["Attend", "DecoderLayer", "RMSNorm", "layer_stack"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [N, h, d], k, v [N, kvh, d] -> [N, h, d]


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the rows' precision: the fused kernel needs gain and rows of one dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU MLP. q, k, v are one product, gate and up another."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
        qkv_size = q_size + 2 * config.num_kv_heads * config.head_dim
        self.input_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.qkv_proj = nn.Linear(hidden, qkv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, hidden, bias=False)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        q, k, v = self.project(self.input_norm(x), rotary)
        x = x + self.o_proj(attend(q, k, v).flatten(1))
        gate, up = self.gate_up_proj(self.post_norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)

    def kv_parts(self) -> tuple[Tensor, Tensor | None]:
        """What makes keys and values of normed rows: weight [2 * kvh * d, in] and bias [2 * kvh * d] or None."""
        first, bias = self.heads * self.head_dim, self.qkv_proj.bias
        return self.qkv_proj.weight[first:], None if bias is None else bias[first:]

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [N, h, d], rotated k and plain v [N, kvh, d] of normed rows [N, hidden]."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            return apply_rotary(self.q_norm(q), rotary), apply_rotary(self.k_norm(k), rotary), v
        rotated = apply_rotary(heads[:, : self.heads + self.kv_heads], rotary)
        return rotated[:, : self.heads], rotated[:, self.heads :], v


def layer_stack(
    layers: Iterable[nn.Module], norm: RMSNorm, rotary: Rotary, windows: Sequence[int | None]
) -> LayerStack | None:
    """Layers whose products are all low-bit, for a program; None where there is none for them."""
    weights: list[LayerWeights] = []
    decoder_layers = [layer for layer in layers if isinstance(layer, DecoderLayer)]
    for layer, window in zip(decoder_layers, windows, strict=True):
        qkv, o, gate_up, down = layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj
        low_bit = isinstance(qkv, LowBitLinear) and isinstance(o, LowBitLinear)
        if not (low_bit and isinstance(gate_up, LowBitLinear) and isinstance(down, LowBitLinear)):
            return None
        q_norm, k_norm = (None if n is None else n.weight for n in (layer.q_norm, layer.k_norm))
        norms = layer.input_norm.weight, layer.post_norm.weight
        weights.append(LayerWeights(norms[0], qkv, o, norms[1], gate_up, down, q_norm, k_norm, window))
    first, eps = decoder_layers[0], norm.eps
    assert eps is not None
    if not LayerStack.supports(weights, norm.weight, first.head_dim):
        return None
    rotation = Rotation(first.heads, first.kv_heads, first.head_dim, rotary.cos, rotary.sin)
    return LayerStack(weights, norm.weight, rotation, eps)
