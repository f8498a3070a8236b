"""Exact part of the engine audit: where output must equal plain decoding's, token for token.

That is at temperature 0, and under the shared-noise rule at any temperature with equal seeds: whatever drafts,
whatever schedules, whoever else is in the batch, whenever requests arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dspark.acceptance import AcceptanceRule, token_noise
from dspark.audit.engine_subjects import PolicyFactory, Subject, make_engine, play
from dspark.core import DSparkError, Request, RequestOutput, SamplingParams
from dspark.drafters.base import Drafter
from dspark.engine.intake import check_sound
from dspark.sampling import SamplingRows, log_probabilities
from dspark.schedule.policies import Policy
from dspark.target.base import Target
from dspark.testing import fresh_pass

__all__ = ["MIXES", "Difference", "ExactCell", "ExactKind", "exact_cells", "exact_kinds", "run_cell"]

MIXES = {
    "alone": "one request at a time",
    "batched": "all requests together",
    "mixed": "every second request is judged in the other way (sampled beside greedy), not compared",
    "staggered": "a request arrives every second step",
}
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ExactKind:
    """A way of judging under which output is a function of prompt and seed. `params` without a seed."""

    name: str
    rule: AcceptanceRule
    params: SamplingParams

    def work(self, prompts: Prompts, seed: int) -> list[tuple[Sequence[int], SamplingParams]]:
        """Every prompt with a seed of its own."""
        return [(p, replace(self.params, seed=seed + i)) for i, p in enumerate(prompts)]


@dataclass(frozen=True)
class Difference:
    """First token at which a request leaves plain decoding's text.

    `gap`: how far the target prefers plain decoding's token, in nats (logits at temperature 0, noisy
    log-probabilities under shared noise), from a pass of its own over the text before; None where a text is
    shorter or a score is not finite. `tie`: so small that a batch's rounding may turn it.
    """

    prompt: int
    position: int  # in the output, from 0
    expected: int | None
    got: int | None
    gap: float | None
    tie: bool


@dataclass(frozen=True)
class ExactCell:
    """One drafter, policy, draft length and batch mix against plain decoding. `error`: the run broke off."""

    kind: str
    drafter: str
    policy: str
    gamma: int
    mix: str
    requests: int
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    differences: tuple[Difference, ...] = ()
    error: str | None = None

    @property
    def failed(self) -> bool:
        return bool(self.differences) or self.error is not None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "failed": self.failed}


def exact_kinds(tokens: int, temperature: float) -> list[ExactKind]:
    """Greedy, and sampled under the shared-noise rule."""
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    noisy = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    return [ExactKind("greedy", "ratio", greedy), ExactKind("shared noise", "shared_noise", noisy)]


Cell = tuple[str, Drafter | None, str, PolicyFactory | None, int, str]  # names, parts, gamma, mix


def exact_cells(subjects: Sequence[Subject]) -> Iterator[Cell]:
    """Plain decoding in every mix (alone is the reference itself), then each subject's grid."""
    yield from (("none", None, "plain", None, 0, mix) for mix in MIXES if mix != "alone")
    for s in subjects:
        for name, make in s.policies.items():
            for gamma in s.gammas:
                yield from ((s.name, s.drafter, name, make, gamma, mix) for mix in MIXES)


def run_cell(
    target: Target, cell: Cell, kind: ExactKind, prompts: Prompts, seed: int, concurrency: int, plain: Prompts
) -> ExactCell:
    """Run one cell and compare; `plain` holds plain decoding's tokens, prompt by prompt."""
    name, drafter, policy_name, make, gamma, mix = cell
    result = ExactCell(kind.name, name, policy_name, gamma, mix, len(prompts))
    policy = make(gamma) if make is not None else None
    work = kind.work(prompts, seed)
    if mix == "mixed":
        other = replace(_companion(kind, policy, drafter), seed=seed)
        work = [item for own in work for item in (own, (own[0], other))]
    longest = max(len(p) for p in prompts) + (kind.params.max_tokens or 0)
    try:
        engine = make_engine(
            target, drafter, policy, kind.rule, gamma, 1 if mix == "alone" else concurrency, longest
        )
        outputs = play(engine, work, every=2 if mix == "staggered" else 0)
    except Exception as error:
        # A policy or drafter under audit may fail in any way: that is a finding, not the audit's end.
        return replace(result, error=f"{type(error).__name__}: {error}")
    outputs = outputs[::2] if mix == "mixed" else outputs
    differences = _differences(target, kind, work[:: 2 if mix == "mixed" else 1], outputs, plain)
    return replace(
        result,
        drafted=sum(o.metrics.drafted for o in outputs),
        scheduled=sum(o.metrics.scheduled for o in outputs),
        accepted=sum(o.metrics.accepted for o in outputs),
        differences=differences,
    )


def _differences(
    target: Target,
    kind: ExactKind,
    work: Sequence[tuple[Sequence[int], SamplingParams]],
    outputs: Sequence[RequestOutput],
    plain: Prompts,
) -> tuple[Difference, ...]:
    pairs = enumerate(zip(work, outputs, plain, strict=True))
    return tuple(
        _difference(target, kind, i, prompt, params, list(expected), output.token_ids)
        for i, ((prompt, params), output, expected) in pairs
        if output.token_ids != list(expected)
    )


def _difference(
    target: Target,
    kind: ExactKind,
    number: int,
    prompt: Sequence[int],
    params: SamplingParams,
    expected: list[int],
    got: list[int],
) -> Difference:
    both = min(len(expected), len(got))
    k = next((i for i in range(both) if expected[i] != got[i]), both)
    if k == both:
        ends = [tokens[k] if k < len(tokens) else None for tokens in (expected, got)]
        return Difference(number, k, ends[0], ends[1], None, False)
    scores, tolerance = _scores(target, kind, [*prompt, *expected[:k]], params)
    gap = float(scores[expected[k]] - scores[got[k]])
    finite = math.isfinite(gap)
    return Difference(
        number, k, expected[k], got[k], gap if finite else None, finite and abs(gap) <= tolerance
    )


@torch.inference_mode()
def _scores(
    target: Target, kind: ExactKind, tokens: list[int], params: SamplingParams
) -> tuple[torch.Tensor, float]:
    """What the target takes the argmax of behind `tokens`, [V], and how near two scores are a tie.

    Half of the digits of the logits' type: rounding errors of a deep model are well below it.
    """
    logits = fresh_pass(target, [tokens]).last_logits
    tolerance = torch.finfo(logits.dtype).eps ** 0.5 * max(1.0, float(logits.abs().nan_to_num(0, 0, 0).max()))
    if kind.rule == "ratio":
        return logits[0].double(), tolerance
    rows = SamplingRows.of([Request(0, "", tokens, params, params.seed or 0, len(tokens))], logits.device)
    ids = torch.arange(logits.shape[1], device=logits.device)
    position = torch.tensor([len(tokens)], device=logits.device)
    noise = token_noise(rows.seed, position, ids)[0].log()
    return log_probabilities(logits, rows)[0].double() - noise, tolerance


def _companion(kind: ExactKind, policy: Policy | None, drafter: Drafter | None) -> SamplingParams:
    """Sampled beside greedy, greedy beside sampled; decoded plainly where the policy would bias it."""
    params = SamplingParams(
        temperature=0 if kind.params.temperature else 1,
        max_tokens=kind.params.max_tokens,
        ignore_eos=True,
    )
    try:
        if policy is not None:
            check_sound(policy, drafter, params, kind.rule)
    except DSparkError:
        return replace(params, speculative=False)
    return params
