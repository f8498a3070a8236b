"""Shape and conventions of a trained block drafter (DSpark, DFlash): what its checkpoint must state."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.core import DSparkError
from dspark.target.config import DecoderConfig
from dspark.typed import check_fields

__all__ = ["HEAD_TYPES", "DrafterConfig"]

HEAD_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A block drafter over a target with `hidden_size` and `vocab_size`.

    Slot convention: anchor-first, `block_size` inputs (anchor and block_size - 1 masks) give `block_size`
    predictions. `taps`: target layer ids, L is the hidden state after layer L, -1 the embedding output.
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
    mask_token_id: int
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
        checks = (
            (self.method in ("dspark", "dflash"), f"method must be dspark or dflash, got {self.method!r}"),
            (self.rope_theta > 0, f"rope_theta must be above 0, got {self.rope_theta}"),
            (self.head_dim % 2 == 0, f"head_dim must be even, got {self.head_dim}"),
            (self.num_heads % self.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads"),
            (
                self.draft_vocab_size is None or 1 <= self.draft_vocab_size <= self.vocab_size,
                f"draft_vocab_size must lie in 1..{self.vocab_size}, got {self.draft_vocab_size}",
            ),
            (
                self.num_speculative_tokens is None or 1 <= self.num_speculative_tokens <= self.block_size,
                f"num_speculative_tokens must lie in 1..{self.block_size}, got {self.num_speculative_tokens}",
            ),
            (bool(self.taps), "taps must name at least one target layer"),
            (
                0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id {self.mask_token_id} is outside the vocabulary",
            ),
            (self.markov_rank >= 0, f"markov_rank must be 0 or more, got {self.markov_rank}"),
            (
                self.markov_head_type in HEAD_TYPES,
                f"markov_head_type must be one of {HEAD_TYPES}, got {self.markov_head_type!r}",
            ),
            (
                self.method != "dflash" or not self.markov_rank,
                "a dflash drafter has no sequential head: markov_rank must be 0",
            ),
            (
                self.method != "dspark" or self.markov_rank > 0,
                "a dspark drafter needs a sequential head: markov_rank above 0",
            ),
        )
        for ok, message in checks:
            if not ok:
                raise DSparkError(message)

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
        )
