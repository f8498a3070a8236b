"""Shape and conventions of a trained drafter: what its checkpoint must state."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.core import DSparkError
from dspark.drafters.methods import AUTOREGRESSIVE, BLOCK, TRAINED
from dspark.target.config import DecoderConfig
from dspark.typed import check_fields

__all__ = ["HEAD_TYPES", "DrafterConfig"]

HEAD_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A drafter over a target with `hidden_size` and `vocab_size`.

    Slot convention of block drafters: anchor-first, `block_size` inputs (anchor and block_size - 1 masks) give
    `block_size` predictions. Of autoregressive ones: the feature of position t goes with the token at t + 1, and
    `block_size` is the longest chain. `taps`: target layer ids, L is the hidden state after layer L, -1 the
    embedding output; an MTP module reads one, the last layer's. `mask_token_id`: block drafters only.
    `num_speculative_tokens`: drafts a round that serve best, where the user names none (None: the whole block).
    `markov_rank` 0 means no sequential head (DFlash). `draft_vocab_size` None means the full vocabulary.

    Raises:
        DSparkError: values that contradict each other.
    """

    method: str
    block_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_context: int
    qk_norm: bool
    vocab_size: int
    attention_bias: bool = False  # on q, k, v
    mask_token_id: int | None = None
    taps: tuple[int, ...]
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = True
    draft_vocab_size: int | None = None
    target_identity: str = ""
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "the drafter's")
        sizes = ("block_size", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_context", "vocab_size"):
            if getattr(self, name) < 1:
                raise DSparkError(f"the drafter's {name} must be 1 or more, got {getattr(self, name)}")
        for ok, message in (*self._shape_checks(), *self._method_checks()):
            if not ok:
                raise DSparkError(message)

    def _shape_checks(self) -> tuple[tuple[bool, str], ...]:
        mask, size = self.mask_token_id, self.draft_vocab_size
        return (
            (self.rope_theta > 0, f"rope_theta must be above 0, got {self.rope_theta}"),
            (self.head_dim % 2 == 0, f"head_dim must be even, got {self.head_dim}"),
            (self.num_heads % self.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads"),
            (
                size is None or 1 <= size <= self.vocab_size,
                f"draft_vocab_size must lie in 1..{self.vocab_size}, got {size}",
            ),
            (
                self.num_speculative_tokens is None or 1 <= self.num_speculative_tokens <= self.block_size,
                f"num_speculative_tokens must lie in 1..{self.block_size}, got {self.num_speculative_tokens}",
            ),
            (bool(self.taps), "taps must name at least one target layer"),
            (mask is None or 0 <= mask < self.vocab_size, f"mask_token_id {mask} is outside the vocabulary"),
            (
                0 <= self.markov_rank <= (size or self.vocab_size),
                f"markov_rank must lie in 0..{size or self.vocab_size}, the size of the draft vocabulary, "
                f"got {self.markov_rank}",
            ),
            (
                self.markov_head_type in HEAD_TYPES,
                f"markov_head_type must be one of {HEAD_TYPES}, got {self.markov_head_type!r}",
            ),
        )

    def _method_checks(self) -> tuple[tuple[bool, str], ...]:
        method, chained = self.method, self.method in AUTOREGRESSIVE
        return (
            (method in TRAINED, f"method must be one of {', '.join(TRAINED)}, got {method!r}"),
            (
                method not in BLOCK or self.mask_token_id is not None,
                f"the configuration of a {method} drafter lacks the key 'mask_token_id'",
            ),
            (
                method == "dspark" or not self.markov_rank,
                f"{method} drafters have no sequential head: markov_rank must be 0",
            ),
            (
                method != "dspark" or self.markov_rank > 0,
                "a dspark drafter needs a sequential head: markov_rank above 0",
            ),
            (
                not chained or self.num_layers == 1,
                f"{method} drafters are one decoder layer: num_layers must be 1, got {self.num_layers}",
            ),
            (
                method != "mtp" or len(self.taps) == 1,
                f"an mtp drafter reads the target's last layer: taps must name one layer, got {self.taps}",
            ),
        )

    @property
    def output_vocab_size(self) -> int:
        return self.draft_vocab_size or self.vocab_size

    @property
    def layer_config(self) -> DecoderConfig:
        """The draft layers as decoder layers."""
        return DecoderConfig(
            model_type="drafter",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            max_context=self.max_context,
            tie_embeddings=True,
            qk_norm=self.qk_norm,
            attention_bias=self.attention_bias,
        )
