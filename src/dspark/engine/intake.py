"""What the engine refuses before a request is queued."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from dspark.acceptance import AcceptanceRule
from dspark.compilation import compiled
from dspark.core import DSparkError, SamplingParams
from dspark.drafters.base import Drafter
from dspark.schedule.policies import Dependence, Policy
from dspark.schedule.settings import refuse_biased

__all__ = ["check_lengths", "check_policy", "check_prompt", "check_sound", "longest_total", "unused_id"]


def unused_id(wanted: str | None, number: int, in_use: Container[str]) -> str:
    """The id that is `wanted`, or one made of the first number from `number` on that gives a new one.

    Raises:
        DSparkError: it is in use.
    """
    if wanted is not None:
        if wanted in in_use:
            raise DSparkError(f"request id {wanted!r} is in use; choose another")
        return wanted
    while f"request-{number}" in in_use:
        number += 1
    return f"request-{number}"


def check_prompt(prompt: list[int], params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    """Refuse an empty prompt, ids outside the vocabulary, a prompt at or past the context edge, several answers."""
    if params.n > 1:
        raise DSparkError(
            f"a request has one answer, n = {params.n} are for LLM.generate: ask {params.n} times"
        )
    if not prompt:
        raise DSparkError("the prompt has no tokens; give it some text")
    outside = next((t for t in (*prompt, *params.stop_ids) if not 0 <= t < vocab_size), None)
    if outside is not None:
        raise DSparkError(f"token id {outside} is outside the model's vocabulary of {vocab_size}")
    if len(prompt) >= max_model_len:
        raise DSparkError(
            f"the prompt has {len(prompt)} tokens, the context holds {max_model_len}: shorten the prompt"
        )


def longest_total(prompt_len: int, max_tokens: int | None, max_model_len: int, capacity: int) -> int:
    """Tokens the sequence may reach. Without `max_tokens` it runs to the context edge or fills the pool.

    Raises:
        DSparkError: the KV pool could never hold what is asked for, so the request would wait for ever.
    """
    asked = prompt_len + 1 if max_tokens is None else prompt_len + max_tokens
    needed = min(asked, max_model_len)
    if needed > capacity:
        raise DSparkError(
            f"the request needs {needed} KV positions, the pool has {capacity}: "
            "lower max_tokens or raise kv_cache_tokens"
        )
    return min(max_model_len, capacity) if max_tokens is None else needed


def check_policy(policy: Policy) -> None:
    """Refuse a policy that contradicts itself."""
    if policy.dependence is Dependence.STATIC and policy.uses_survival:
        raise DSparkError("a STATIC policy must not read survival: declare CAUSAL, LAGGED or LIVE")


def check_sound(
    policy: Policy, drafter: Drafter | None, params: SamplingParams, rule: AcceptanceRule = "ratio"
) -> None:
    """Refuse a policy that would bias this request's output (losslessness is typed)."""
    if drafter is not None and params.speculative:
        refuse_biased(policy.dependence, params.greedy, drafter.deterministic, rule)


def check_lengths(what: str, lengths: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Lengths [R] int64, or an error: longer ones would write over other requests' KV."""
    if lengths.dtype.kind not in "iu":
        raise DSparkError(f"{what} gave lengths of dtype {lengths.dtype}; give integers")
    if lengths.dtype != np.int64 or not (lengths.flags.c_contiguous and lengths.flags.writeable):
        lengths = np.require(lengths, np.int64, ("C", "W"))
    if lengths.shape != limit.shape or not _within(lengths, limit):
        raise DSparkError(f"{what} gave lengths {lengths.tolist()}, allowed are 0 to {limit.tolist()}")
    return lengths


@compiled
def _within(lengths: np.ndarray, limit: np.ndarray) -> bool:
    for r in range(len(limit)):  # noqa: SIM110 - a loop compiles to one
        if not 0 <= lengths[r] <= limit[r]:
            return False
    return True
