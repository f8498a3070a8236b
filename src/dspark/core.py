"""The nouns of the system: what a request asks for, what a round drafts, plans and decides.

Shapes use the letters of the paper: R requests in a round, gamma draft slots, V vocabulary, Vd draft
vocabulary. Every class here is a value; the engine alone changes a `Request`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

__all__ = [
    "DSparkError",
    "Draft",
    "FinishReason",
    "Plan",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StepEvent",
    "TokenLogprobs",
    "TokenOrigin",
    "Verdict",
]

FinishReason = Literal["stop", "length", "abort"]
TokenOrigin = Literal["accepted", "corrected", "bonus", "plain"]  # plain: no draft was verified


class DSparkError(ValueError):
    """Bad input or an unusable file. The message is one line and says what to do."""


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


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (nats, of the target) at one output position."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)  # most likely first


@dataclass
class RequestMetrics:
    """Counts of one request's decoding rounds (prefill chunks are not rounds).

    `drafted_per_position[k]` counts drafts proposed at slot k, `scheduled_...` those verified,
    `accepted_...` those accepted; slot 0 is the first draft after the anchor.
    """

    rounds: int = 0
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    scheduled_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    def count(self, drafted: int, scheduled: int, accepted: int) -> None:
        self.rounds += 1
        for name, n in (("drafted", drafted), ("scheduled", scheduled), ("accepted", accepted)):
            setattr(self, name, getattr(self, name) + n)
            per_position: list[int] = getattr(self, f"{name}_per_position")
            per_position.extend([0] * (n - len(per_position)))
            for k in range(n):
                per_position[k] += 1

    @property
    def accepted_length(self) -> float:
        """Mean tokens a round decides, bonus included (tau)."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "accepted_length": self.accepted_length}


@dataclass(eq=False)
class Request:
    """One sequence in the engine, and the length algebra of its caches.

    `token_ids` are the committed tokens (prompt and output). `cached` of them have KV entries. In steady
    decoding exactly one has none, the anchor: `pending == 1`. `uid` numbers requests in order of arrival
    and addresses the request's randomness; `round` counts its decoding rounds and never repeats.
    """

    uid: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total: int  # tokens the sequence may reach: prompt + max_tokens, or the context edge
    token_ids: list[int] = field(default_factory=list)
    cached: int = 0
    round: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)
        if self.params.logprobs is not None and self.logprobs is None:
            self.logprobs = []

    @property
    def committed(self) -> int:
        return len(self.token_ids)

    @property
    def pending(self) -> int:
        return self.committed - self.cached

    @property
    def num_output(self) -> int:
        return self.committed - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.max_total - self.committed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for R requests. Slots at and past a row's length hold no meaning.

    `probs` is the very array the tokens were sampled from (p_d); None means one-hot, a deterministic
    proposal. `vocab` maps draft ids to target ids where the draft vocabulary is pruned; tokens are
    always target ids.
    """

    tokens: torch.Tensor  # [R, gamma] int64
    lengths: np.ndarray  # [R] int64, 0..gamma
    probs: torch.Tensor | None = None  # [R, gamma, Vd] float
    vocab: torch.Tensor | None = None  # [Vd] int64
    confidence: torch.Tensor | None = None  # [R, gamma] logits of conditional acceptance, eq. (7)

    @property
    def gamma(self) -> int:
        return self.tokens.shape[1]

    @staticmethod
    def empty(num_requests: int, device: torch.device | str = "cpu") -> Draft:
        tokens = torch.zeros(num_requests, 0, dtype=torch.int64, device=device)
        return Draft(tokens=tokens, lengths=np.zeros(num_requests, dtype=np.int64))


@dataclass(frozen=True)
class Plan:
    """How many drafts of each request this round verifies (scheduled lengths, drafts only)."""

    lengths: np.ndarray  # [R] int64, 0..drafted

    @property
    def budget(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True)
class Verdict:
    """What verification decided: `num_accepted` excludes the bonus; `next_token` is the correction or bonus."""

    num_accepted: torch.Tensor  # [R] int64
    next_token: torch.Tensor  # [R] int64


@dataclass(frozen=True)
class RequestOutput:
    """A finished request (or, from `Engine.step`, its state after a round)."""

    request_id: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None
    seed: int
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class StepEvent:
    """What one step added to a request. `text` is safe to show: it can no longer change.

    `origins[i]` says how `token_ids[i]` came about: a draft the target accepted, its correction of a rejected
    draft, the bonus behind a fully accepted block, or plain decoding. `output` is set when the request ended.
    """

    request_id: str
    token_ids: list[int]
    origins: list[TokenOrigin]
    text: str
    output: RequestOutput | None = None
