"""Timed decoding of one prompt, and the comparison of plain with speculative decoding."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark.core import DSparkError, RequestOutput, SamplingParams, StepEvent

if TYPE_CHECKING:
    from dspark.llm import LLM

__all__ = ["Comparison", "Decoded", "Prompt", "decode", "first_divergence"]

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True)
class Decoded:
    """A finished request. From its start, `seconds` run to the last token, `prefill_seconds` to the first."""

    output: RequestOutput
    events: list[StepEvent]
    seconds: float
    prefill_seconds: float

    @property
    def tokens(self) -> int:
        return len(self.output.token_ids)

    @property
    def tokens_per_s(self) -> float:
        """Prompt processing included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens behind the first event, over the time since it."""
        first = next((len(event.token_ids) for event in self.events if event.token_ids), 0)
        seconds = self.seconds - self.prefill_seconds
        return (self.tokens - first) / seconds if seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.output.text,
            "token_ids": self.output.token_ids,
            "origins": [origin for event in self.events for origin in event.origins],
            "finish_reason": self.output.finish_reason,
            "seed": self.output.seed,
            "metrics": self.output.metrics.as_dict(),
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
        }

    def rate(self) -> str:
        return f"{self.tokens} tokens, {self.tokens_per_s:.1f} tokens/s"

    def summary(self) -> str:
        return f"{self.rate()}, accepted length {_length(self.output)}"


def _length(output: RequestOutput) -> str:
    """The accepted length for people, "-" where there was no round."""
    length = output.metrics.accepted_length
    return f"{length:.2f}" if math.isfinite(length) else "-"


def decode(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    on_event: Callable[[StepEvent], None] = lambda event: None,
) -> Decoded:
    """Decode one prompt and take the time; `on_event` sees every step as it happens."""
    events: list[StepEvent] = []
    first = None
    begin = time.perf_counter()
    for event in llm.stream(prompt, params):
        if first is None and event.token_ids:
            first = time.perf_counter()
        events.append(event)
        on_event(event)
    end = time.perf_counter()
    output = events[-1].output if events else None
    if output is None:
        raise DSparkError("the engine ended the stream without an output")
    return Decoded(output, events, end - begin, (end if first is None else first) - begin)


def first_divergence(a: list[int], b: list[int]) -> int | None:
    """First position at which the ids differ (one may just be longer), None where they are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class Comparison:
    """Pairs (plain, speculative) of the same prompt, decoded in turn."""

    pairs: list[tuple[Decoded, Decoded]]
    greedy: bool

    @property
    def speedup(self) -> float:
        """Median over the pairs of the ratio of tokens/s."""
        return statistics.median(
            speculative.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else float("nan")
            for plain, speculative in self.pairs
        )

    @property
    def divergence(self) -> int | None:
        """First position at which any pair differs."""
        found = [first_divergence(a.output.token_ids, b.output.token_ids) for a, b in self.pairs]
        return min((position for position in found if position is not None), default=None)

    @property
    def identical(self) -> bool | None:
        """Whether all pairs have the same ids; None above T = 0, where samples may differ."""
        return self.divergence is None if self.greedy else None

    def as_dict(self) -> dict[str, Any]:
        plain, speculative = self.pairs[0]
        return {
            "plain": plain.as_dict(),
            "speculative": speculative.as_dict(),
            "repeats": [
                {"plain_tokens_per_s": a.tokens_per_s, "speculative_tokens_per_s": b.tokens_per_s}
                for a, b in self.pairs
            ],
            "speedup": self.speedup,
            "accepted_length": speculative.output.metrics.accepted_length,
            "identical": self.identical,
            "first_divergence": self.divergence if self.greedy else None,
        }

    def summary(self) -> str:
        rates = [
            statistics.median(side.tokens_per_s for side in pair) for pair in zip(*self.pairs, strict=True)
        ]
        length = _length(self.pairs[0][1].output)
        line = f"{rates[0]:.1f} -> {rates[1]:.1f} tokens/s, speed-up {self.speedup:.2f}x"
        line = f"{line}, accepted length {length}"
        if self.identical is None:
            return f"{line}; samples, so the texts may differ"
        if self.identical:
            return f"{line}; identical token ids"
        return f"{line}; NOT identical: token ids first differ at position {self.divergence}"
