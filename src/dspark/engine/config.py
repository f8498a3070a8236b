"""Sizes of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.acceptance import ACCEPTANCE_RULES, AcceptanceRule
from dspark.core import DSparkError
from dspark.typed import check_fields

__all__ = ["EngineConfig"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of one engine; names are vLLM's where it has them.

    `max_num_seqs`: requests in one step. `max_num_batched_tokens`: target rows in one step before drafts (longer
    prompts are prefilled in chunks). `kv_cache_tokens`: positions in the KV pool, by default room for
    `max_num_seqs` requests of 1,024 tokens and at least one of `max_model_len`. `max_model_len`: context edge,
    by default the model's. `acceptance`: "ratio" (rejection sampling), or "shared_noise": output at a seed is then
    the same for every drafter, policy and batch, plain decoding included; fewer drafts are accepted above T = 0.
    """

    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_tokens: int | None = None
    max_model_len: int | None = None
    acceptance: str = "ratio"

    def __post_init__(self) -> None:
        check_fields(self, "the engine's")
        if self.acceptance not in ACCEPTANCE_RULES:
            raise DSparkError(
                f"acceptance must be one of {', '.join(ACCEPTANCE_RULES)}, got {self.acceptance!r}"
            )
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "kv_cache_tokens",
            "max_model_len",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DSparkError(f"{name} must be at least 1, got {value}")

    @property
    def rule(self) -> AcceptanceRule:
        return "shared_noise" if self.acceptance == "shared_noise" else "ratio"

    def model_len(self, max_context: int) -> int:
        if self.max_model_len is not None and self.max_model_len > max_context:
            raise DSparkError(
                f"max_model_len {self.max_model_len} exceeds the model's context of {max_context}"
            )
        return self.max_model_len or max_context

    def kv_tokens(self, max_context: int) -> int:
        length = self.model_len(max_context)
        return self.kv_cache_tokens or max(length, self.max_num_seqs * min(1024, length))
