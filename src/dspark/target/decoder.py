"""The dense decoder: Llama / SmolLM, Mistral, Qwen2 and Qwen3 over a flat ragged batch.

Rows of any number of requests lie side by side, [N, hidden]; only attention knows which row belongs to whom.
The same layers run in two ways: `forward` over the paged KV pool (serving), `hidden_states` over whole
sequences without a cache (training features, reference).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.core import DSparkError
from dspark.kernels.attention import AttentionPlan, is_fast, paged_attention, store_kv
from dspark.kernels.linear import pack_linears
from dspark.kernels.lowbit import (
    LowBitEmbedding,
    LowBitLinear,
    WeightMemory,
    packed_bytes,
    packed_table,
    supports,
)
from dspark.kernels.target import CompiledTarget
from dspark.kv import KVPool
from dspark.target.base import ForwardBatch, TargetOutput
from dspark.target.blocks import Blocks, check_blocks, fuse_blocks
from dspark.target.config import DecoderConfig
from dspark.target.fuse import fuse_weights
from dspark.target.layer import Attend, DecoderLayer, RMSNorm, layer_stack
from dspark.target.rotary import Rotary

__all__ = ["Decoder", "causal_attention"]


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
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.max_context, config.rope_scaling)
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


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Dense causal attention q [B, h, S, d], k, v [B, kvh, S, d] -> [B, h, S, d]; `window` limits the look-back."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if window is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    i = torch.arange(q.shape[2], device=q.device)
    visible = (i[:, None] >= i) & (i[:, None] - i < window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
