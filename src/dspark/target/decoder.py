"""The dense decoder: Llama / SmolLM, Mistral, Qwen2 and Qwen3 over a flat ragged batch.

Rows of any number of requests lie side by side, [N, hidden]; only attention knows which row belongs to whom.
The same layers run in two ways: `forward` over the paged KV pool (serving), `hidden_states` over whole
sequences without a cache (training features, reference).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.core import DSparkError
from dspark.kernels.attention import AttentionPlan, is_fast, paged_attention, store_kv
from dspark.kernels.layers import LayerStack, LayerWeights
from dspark.kernels.linear import pack_linears
from dspark.kernels.lowbit import (
    LowBitEmbedding,
    LowBitLinear,
    WeightMemory,
    packed_bytes,
    packed_table,
    supports,
)
from dspark.kernels.program import Rotation
from dspark.kernels.target import CompiledTarget
from dspark.kv import KVPool
from dspark.target.base import ForwardBatch, TargetOutput
from dspark.target.blocks import Blocks, check_blocks, fuse_blocks
from dspark.target.config import DecoderConfig
from dspark.target.fuse import fuse_weights
from dspark.target.rotary import Rotary, apply_rotary

__all__ = ["Decoder", "DecoderLayer", "RMSNorm", "causal_attention"]

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

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q [N, h, d], rotated k and plain v [N, kvh, d] of normed rows [N, hidden]."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            return apply_rotary(self.q_norm(q), rotary), apply_rotary(self.k_norm(k), rotary), v
        rotated = apply_rotary(heads[:, : self.heads + self.kv_heads], rotary)
        return rotated[:, : self.heads], rotated[:, self.heads :], v


class Decoder(nn.Module):
    """A decoder-only language model; implements the `Target` protocol.

    Build one with `target.load`, or `from_weights` on a mapping with HF names.
    """

    def __init__(self, config: DecoderConfig, identity: str = "") -> None:
        super().__init__()
        self.config = config
        self.identity = identity
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.max_context = config.max_context
        self.eos_token_ids = config.eos_token_ids
        self.kv_specs = config.kv_specs
        # Not initialised, for the same reason as in `Rotary`.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed: nn.Embedding | LowBitEmbedding
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.max_context)
        self._output_weight: Tensor | None = self.lm_head.weight.detach()  # None: in `lm_head`, in few bits
        self._compiled: CompiledTarget | None = None
        self.kv_cache_dtype: torch.dtype | None = None  # None: that of the weights
        self.activation_dtype = "float32"  # of the products' inputs, where weights are quantised

    @classmethod
    def from_weights(
        cls, config: DecoderConfig, weights: Mapping[str, Tensor], identity: str = ""
    ) -> Decoder:
        """Weights as `hf.read_weights` gives them; shapes and names were checked there."""
        with torch.device("meta"):
            model = cls(config, identity)
        model.load_state_dict(fuse_weights(config, weights), strict=True, assign=True)
        if config.tie_embeddings:
            model.lm_head.weight = model.embed.weight
        model._output_weight = model.lm_head.weight.detach()  # packing hides it; drafters share its rows
        return model.requires_grad_(False).eval()

    def prepare(
        self,
        device: torch.device | str = "cpu",
        blocks: Blocks | None = None,
        integer: bool = False,
    ) -> Decoder:
        """Move to `device` and lay the weights out for few-row products (serving only, no gradients).

        `blocks` (`read_blocks`) hold the same weights in fewer bits. float32 on a CPU reads those instead, and
        multiplies them by activations in 8 bits if `integer`.
        """
        on_cpu = torch.device(device).type == "cpu"
        if blocks and self.dtype == torch.float32 and on_cpu and supports():
            self._take_blocks(blocks, integer)
            self.activation_dtype = "int8" if integer else "float32"
        self.to(device)
        if self._output_weight is not None:
            self._output_weight = self._output_weight.to(device)
        pack_linears(self)
        self._compiled = self._compile()
        return self

    def _take_blocks(self, blocks: Blocks, integer: bool) -> None:
        """Replace every layer that `blocks` make up; the embedding shares what it is tied to."""
        memory = WeightMemory(sum(packed_bytes(blocks.shape(name), blocks.bits(name)) for name in blocks))
        for name, weight in fuse_blocks(self.config, blocks):
            layer = self.get_submodule(name)
            assert isinstance(layer, nn.Linear | nn.Embedding)
            if not layer.weight.is_meta:  # `hollow_weights` checked those
                check_blocks(name, weight, layer.weight)
            bias = layer.bias if isinstance(layer, nn.Linear) else None
            low_bit = LowBitLinear(weight, bias, integer, memory)
            if name != "embed":
                self.set_submodule(name, low_bit)
            if name == "embed" or (name == "lm_head" and self.config.tie_embeddings):
                self.embed = LowBitEmbedding(low_bit)
            if name == "lm_head":
                self._output_weight = None

    def _compile(self) -> CompiledTarget | None:
        """The one-call form of a pass, where the layers' products are all low-bit."""
        windows = [spec.window for spec in self.kv_specs]
        stack, head = layer_stack(self.layers, self.norm, self.rotary, windows), self.lm_head
        if stack is None:
            return None
        if not (isinstance(head, LowBitLinear) and CompiledTarget.has_head(stack, head)):
            return CompiledTarget(stack, embedding=packed_table(self.embed))
        return CompiledTarget(stack, head, packed_table(self.embed))

    @property
    def output_weight(self) -> Tensor:
        """Rows of the LM head [V, H], also after `prepare`; made anew at each use where it is kept in few bits."""
        return (
            self.output_rows(torch.arange(self.vocab_size))
            if self._output_weight is None
            else self._output_weight
        )

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the LM head for some tokens [n]: [n, H]."""
        if self._output_weight is not None:
            return self._output_weight[token_ids]
        assert isinstance(self.lm_head, LowBitLinear)
        return LowBitEmbedding(self.lm_head)(token_ids.cpu())

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.kv_cache_dtype or self.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KVPool, taps: tuple[int, ...] = ()) -> TargetOutput:
        """One pass over ragged rows; see `Target.forward`."""
        plan = AttentionPlan.of(batch, pool.block_size)
        if self._compiled is not None and is_fast(pool.k[0], self.config.head_dim, pool.block_size):
            self._check_taps(taps)
            inputs = batch.token_ids if self._compiled.embedding is not None else self.embed(batch.token_ids)
            keys, values = pool.k[: len(self.layers)], pool.v[: len(self.layers)]  # a drafter's lie behind
            out, features, best = self._compiled(
                inputs, batch.positions, plan, keys, values, taps, batch.logit_rows, batch.argmax
            )
            logits = out if self._compiled.head is not None else self.lm_head(out)
            return TargetOutput(logits, features if taps else None, best)
        scale = self.config.head_dim**-0.5

        def attend_in(layer: int) -> Attend:
            k_pool, v_pool, window = pool.k[layer], pool.v[layer], self.kv_specs[layer].window

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                store_kv(k, v, k_pool, v_pool, plan)
                return paged_attention(q, k_pool, v_pool, plan, scale, window)

            return attend

        x, tapped = self._run(batch.token_ids, batch.positions, attend_in, taps)
        if batch.logit_rows is not None:
            x = x[batch.logit_rows]
        return TargetOutput(logits=self.lm_head(self.norm(x)), taps=torch.cat(tapped, -1) if taps else None)

    def hidden_states(self, token_ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Features of whole sequences, token_ids [B, S] padded on the right where lengths differ.

        Returns taps [B, S, m * hidden] and the last hidden state after the final norm [B, S, hidden]. Causal
        attention never looks at padding on the right, so rows of real tokens are exact.
        """
        batch, size = token_ids.shape
        positions = torch.arange(size, device=token_ids.device).repeat(batch)
        scale = self.config.head_dim**-0.5

        def attend_in(layer: int) -> Attend:
            window = self.kv_specs[layer].window

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k, v = (t.unflatten(0, (batch, size)).transpose(1, 2) for t in (q, k, v))
                return causal_attention(q, k, v, scale, window).transpose(1, 2).flatten(0, 1)

            return attend

        x, tapped = self._run(token_ids.flatten(), positions, attend_in, taps)
        features = torch.cat(tapped, -1) if taps else x[:, :0]
        return features.unflatten(0, (batch, size)), self.norm(x).unflatten(0, (batch, size))

    def _run(
        self, token_ids: Tensor, positions: Tensor, attend_in: Callable[[int], Attend], taps: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        self._check_taps(taps)
        x = self.embed(token_ids)
        rotary = self.rotary(positions, x.dtype)
        states = {-1: x}
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, attend_in(i))
            if i in taps:
                states[i] = x
        return x, [states[t] for t in taps]

    def _check_taps(self, taps: tuple[int, ...]) -> None:
        if taps and not (min(taps) >= -1 and max(taps) < len(self.layers)):
            raise DSparkError(f"taps {taps} are outside this model's layers -1..{len(self.layers) - 1}")


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


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Dense causal attention q [B, h, S, d], k, v [B, kvh, S, d] -> [B, h, S, d]; `window` limits the look-back."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    i = torch.arange(q.shape[2], device=q.device)
    visible = (i[:, None] >= i) & (i[:, None] - i < window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
