"""Sampling parameters of a request: names and meanings are vLLM's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

from dspark.errors import DSparkError
from dspark.typed import keywords_checked

__all__ = ["SamplingParams"]

_MOST_BIAS = 1e5
_REALS = {  # name -> lowest, highest, and what the range is called
    "temperature": (0, math.inf, "0 (greedy) or more"),
    "top_p": (0, 1, "in (0, 1]"),
    "min_p": (0, 1, "in [0, 1]"),
    "repetition_penalty": (1e-3, 1e3, "in [0.001, 1000]"),
    "presence_penalty": (-2, 2, "in [-2, 2]"),
    "frequency_penalty": (-2, 2, "in [-2, 2]"),
}
_ABOVE_LOWEST = {"top_p", "repetition_penalty"}  # whose lowest value itself is excluded
_WHOLES = {
    "n": (1, math.inf, "1 or more"),
    "top_k": (-1, math.inf, "0 or more, -1 or 0 for off"),
    "min_tokens": (0, math.inf, "0 or more"),
    "max_tokens": (0, math.inf, "0 or more"),
    "seed": (0, 2**63 - 1, "in [0, 2^63)"),
    "logprobs": (0, 20, "in [0, 20]"),
}
_OPTIONAL = {"max_tokens", "seed", "logprobs"}
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "raw_logprobs", "speculative")
_CALLED = {  # what transformers and OpenAI call a parameter -> its name here
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "eos_token_id": "stop_token_ids",
    "stop_strings": "stop",
    "top_logprobs": "logprobs",
    "num_return_sequences": "n",
    "do_sample": "temperature (0 is greedy)",
}
_ELSEWHERE = {  # what vLLM, OpenAI and transformers have besides
    *("best_of", "use_beam_search", "num_beams", "length_penalty", "typical_p", "bad_words"),
    *("allowed_token_ids", "prompt_logprobs", "flat_logprobs", "detokenize", "skip_special_tokens"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens", "logits_processors", "output_kind"),
    *("structured_outputs", "guided_decoding", "response_format", "extra_args"),
}


def _no_such_parameter(name: str, known: list[str]) -> str:
    if name in _CALLED:
        return f"SamplingParams: {name} is called {_CALLED[name]} here"
    problem = f"{name} is not supported" if name in _ELSEWHERE else f"there is no parameter {name}"
    return f"SamplingParams: {problem}, leave it out; parameters are {', '.join(known)}"


@keywords_checked(_no_such_parameter)
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Everything that shapes the distribution (temperature, filters, penalties, bias, `min_tokens`) acts on
    the target's and on the drafter's logits, once per committed position. `top_k` 0 (or -1) is off.
    `seed` None draws a fresh one, which the output records; a seed repeats a run of the same requests in the same
    order with the same drafter and draft lengths. Where a seed is to give the same text again and again, within one
    run too, set the acceptance rule `shared_noise`: under `ratio` a request's own number counts as well. `max_tokens`
    None runs to the context edge. `logprobs` n returns the chosen token's log-probability and the n most likely
    tokens' ones, after temperature and filters; with `raw_logprobs` before them. `speculative` False decodes this
    request plainly. `n` answers are sampled to each prompt of `LLM.generate`: see `of_answer`.

    Raises:
        DSparkError: a parameter is not known, or a value out of range, not finite or of the wrong type.
    """

    n: int = 1
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
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    raw_logprobs: bool = False
    speculative: bool = True

    def __post_init__(self) -> None:
        for name, (low, high, words) in _REALS.items():
            value = getattr(self, name)
            if not _is_real(value):
                raise DSparkError(f"{name} must be a finite number, got {value!r}")
            if not low <= value <= high or (name in _ABOVE_LOWEST and value == low):
                raise DSparkError(f"{name} must be {words}, got {value}")
        for name, (low, high, words) in _WHOLES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not _is_whole(value) or not low <= value <= high:
                raise DSparkError(f"{name} must be a whole number, {words}, got {value!r}")
        if self.n > 1 and self.greedy:
            raise DSparkError(f"n must be 1 at temperature 0, where all answers are the same, got {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise DSparkError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise DSparkError(f"{name} must be True or False, got {getattr(self, name)!r}")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    def of_answer(self, number: int) -> SamplingParams:
        """The parameters of one of `n` answers, from 0: each is a request, with a seed that follows from `seed`.

        The first one has `seed` itself, and is the answer that there would be without the others.
        """
        if self.n == 1:
            return self
        seed = self.seed
        if seed is not None and number > 0:
            digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
            seed = int.from_bytes(digest[:8], "big") >> 1  # below 2^63
        return replace(self, n=1, seed=seed)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise DSparkError(f"stop must be one or several non-empty strings, got {stop!r}")
    return tuple(strings)


def _stop_ids(ids: Any) -> tuple[int, ...]:
    values = () if ids is None else ids
    if not isinstance(values, Sequence) or not all(_is_whole(i) and i >= 0 for i in values):
        raise DSparkError(f"stop_token_ids must be token ids (whole numbers, 0 or more), got {ids!r}")
    return tuple(int(i) for i in values)


def _bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    good = isinstance(bias, Mapping) and all(_is_whole(t) and t >= 0 and _is_real(b) for t, b in bias.items())
    if not good:
        raise DSparkError(f"logit_bias must map token ids to finite numbers, got {bias!r}")
    if beyond := [
        b for b in bias.values() if abs(b) > _MOST_BIAS
    ]:  # sums that float32 cannot hold are no logits
        raise DSparkError(f"logit_bias must lie between -{_MOST_BIAS:g} and {_MOST_BIAS:g}, got {beyond[0]}")
    return {int(t): float(b) for t, b in bias.items()}
