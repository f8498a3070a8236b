"""Shape of a dense decoder, independent of the file format it came from."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.kv import LayerKV
from dspark.target.rotary import RopeScaling

__all__ = ["DecoderConfig"]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Llama / SmolLM, Mistral (one window for all layers), Qwen2 (attention bias), Qwen3 (per-head q/k norm).

    `windows[i]`: the attention window of layer i, None for full attention.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_context: int
    tie_embeddings: bool
    attention_bias: bool = False  # on q, k, v (Qwen2)
    qk_norm: bool = False  # RMSNorm over each head of q and k (Qwen3)
    windows: tuple[int | None, ...] = ()
    rope_scaling: RopeScaling | None = None  # Llama 3.1 and later; drafters have none of their own
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def kv_specs(self) -> tuple[LayerKV, ...]:
        windows = self.windows or (None,) * self.num_layers
        return tuple(LayerKV(self.num_kv_heads, self.head_dim, window=w) for w in windows)
