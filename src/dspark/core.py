"""The nouns of the system: what a request asks for, what a round drafts, plans and decides.

Shapes use the letters of the paper: R requests in a round, gamma draft slots, V vocabulary, Vd draft
vocabulary. Every class here is a value; the engine alone changes a `Request`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
import torch

from dspark.errors import DSparkError
from dspark.params import SamplingParams

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
    committed: int = 0  # tokens the rounds added to the output
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    scheduled_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    def count(self, drafted: int, scheduled: int, accepted: int, committed: int) -> None:
        """Count a round. Drafts accepted behind the request's end are none of its tokens: leave them out."""
        self.rounds += 1
        self.committed += committed
        if not drafted:
            return
        self.drafted += drafted
        self.scheduled += scheduled
        self.accepted += accepted
        for n, per_position in (
            (drafted, self.drafted_per_position),
            (scheduled, self.scheduled_per_position),
            (accepted, self.accepted_per_position),
        ):
            per_position.extend([0] * (n - len(per_position)))
            for k in range(n):
                per_position[k] += 1

    @property
    def accepted_length(self) -> float:
        """Mean tokens a round commits, bonus included (tau)."""
        return self.committed / self.rounds if self.rounds else float("nan")

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
    proposal, and rows of `one_hot` are such whatever `probs` holds. `vocab` maps draft ids to target ids where
    the draft vocabulary is pruned; tokens are always target ids.
    """

    tokens: torch.Tensor  # [R, gamma] int64
    lengths: np.ndarray  # [R] int64, 0..gamma
    probs: torch.Tensor | None = None  # [R, gamma, Vd] float
    vocab: torch.Tensor | None = None  # [Vd] int64
    confidence: torch.Tensor | None = None  # [R, gamma] logits of conditional acceptance, eq. (7)
    one_hot: torch.Tensor | None = None  # [R] bool; None: no row, or all where there are no `probs`

    @property
    def gamma(self) -> int:
        return self.tokens.shape[1]

    @staticmethod
    def empty(num_requests: int, device: torch.device | str = "cpu") -> Draft:
        """No drafts."""
        return Draft(_no_tokens(num_requests, device), np.zeros(num_requests, dtype=np.int64))


@cache  # rounds without drafts are to cost nothing, and PyTorch takes 0.1 ms for this, cold
def _no_tokens(num_requests: int, device: torch.device | str) -> torch.Tensor:
    return torch.empty(num_requests, 0, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Plan:
    """How many drafts of each request this round verifies (scheduled lengths, drafts only)."""

    lengths: np.ndarray  # [R] int64, 0..drafted

    @cached_property
    def budget(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True)
class Verdict:
    """What verification decided: `num_accepted` excludes the bonus; `next_token` is the correction or bonus."""

    num_accepted: torch.Tensor  # [R] int64
    next_token: torch.Tensor  # [R] int64


@dataclass(frozen=True)
class RequestOutput:
    """A finished request (or, from `Engine.step`, its state after a round).

    Of a prompt with several answers (`SamplingParams.n`) this is the first one, and `outputs` has all.
    """

    request_id: str
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    logprobs: list[TokenLogprobs] | None
    seed: int
    metrics: RequestMetrics
    others: tuple[RequestOutput, ...] = ()  # further answers to the same prompt

    @property
    def outputs(self) -> list[RequestOutput]:
        """All answers to the prompt: vLLM's `outputs[i].text`, `.token_ids`, `.finish_reason` and so on."""
        return [self, *self.others]

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
