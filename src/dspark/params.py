"""Sampling parameters of a request: names and meanings are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dspark.errors import DSparkError

__all__ = ["SamplingParams"]


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise DSparkError(message)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names and meanings are vLLM's.

    Everything that shapes the distribution (temperature, filters, penalties, bias, `min_tokens`) acts on
    the target's and on the drafter's logits, once per committed position. `top_k` 0 (or -1) is off.
    `seed` None draws a fresh one, which the output records. `max_tokens` None runs to the context edge.
    `logprobs` n returns the chosen token's log-probability and the n most likely tokens' ones, after
    temperature and filters; with `raw_logprobs` before them. `speculative` False decodes this request plainly.

    Raises:
        DSparkError: a value is out of range, not finite or of the wrong type.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    raw_logprobs: bool = False
    speculative: bool = True

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
            _check(
                _is_real(getattr(self, name)), f"{name} must be a finite number, got {getattr(self, name)!r}"
            )
        _check(
            _is_real(self.frequency_penalty),
            f"frequency_penalty must be a finite number, got {self.frequency_penalty!r}",
        )
        _check(self.temperature >= 0, f"temperature must be 0 (greedy) or more, got {self.temperature}")
        _check(
            _is_int(self.top_k) and self.top_k >= -1,
            f"top_k must be a whole number, 0 or -1 for off, got {self.top_k!r}",
        )
        _check(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        _check(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}")
        _check(
            self.repetition_penalty > 0, f"repetition_penalty must be above 0, got {self.repetition_penalty}"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, name) <= 2, f"{name} must be in [-2, 2], got {getattr(self, name)}")
        _check(
            _is_int(self.min_tokens) and self.min_tokens >= 0,
            f"min_tokens must be 0 or more, got {self.min_tokens!r}",
        )
        if self.max_tokens is not None:
            _check(
                _is_int(self.max_tokens) and self.max_tokens >= 0,
                f"max_tokens must be 0 or more, got {self.max_tokens!r}",
            )
            _check(
                self.min_tokens <= self.max_tokens,
                f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}",
            )
        if self.seed is not None:
            _check(
                _is_int(self.seed) and 0 <= self.seed < 2**63,
                f"seed must be a whole number in [0, 2^63), got {self.seed!r}",
            )
        if self.logprobs is not None:
            _check(
                _is_int(self.logprobs) and 0 <= self.logprobs <= 20,
                f"logprobs must be in [0, 20], got {self.logprobs!r}",
            )
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        _check(all(isinstance(s, str) and s for s in stop), "stop must be one or several non-empty strings")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids)
        _check(
            all(_is_int(i) and i >= 0 for i in ids),
            "stop_token_ids must be token ids (whole numbers, 0 or more)",
        )
        object.__setattr__(self, "stop_token_ids", ids)
        if self.logit_bias is not None:
            bias = dict(self.logit_bias)
            good = all(_is_int(t) and t >= 0 and _is_real(b) for t, b in bias.items())
            _check(good, "logit_bias must map token ids to finite numbers")
            object.__setattr__(self, "logit_bias", bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
