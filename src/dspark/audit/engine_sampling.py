"""Statistical part of the engine audit: above temperature 0 the ratio rule keeps the target's distribution.

Many answers to the same prompts, drawn by plain and by speculative decoding with different seeds, are compared:
the law of each position, of neighbouring positions together, and of two requests side by side in a batch (equal
seeds must not tie them together). The first token comes from the prefill, so drafts decide from the second on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from dspark.audit.engine_statistics import ChiSquare, detectable_tv, two_sample
from dspark.audit.engine_subjects import PolicyFactory, Subject, make_engine, play
from dspark.core import SamplingParams
from dspark.drafters.base import Drafter
from dspark.engine.intake import check_sound
from dspark.errors import DSparkError
from dspark.target.base import Target

__all__ = ["TEST_KINDS", "Arm", "DistributionTest", "Sample", "TestKind", "compare", "draw", "sampling_arms"]

TestKind = Literal["position", "pair", "neighbours"]
TEST_KINDS: tuple[TestKind, ...] = get_args(TestKind)
Prompts = Sequence[Sequence[int]]
MISSING = -1  # in the place of a token that an answer lacks


@dataclass(frozen=True)
class Arm:
    """A drafter, policy and draft length whose answers are drawn. Plain decoding's has no drafter."""

    drafter_name: str
    policy_name: str
    gamma: int
    drafter: Drafter | None = None
    make_policy: PolicyFactory | None = None


@dataclass(frozen=True, eq=False)
class Sample:
    """Answers of an arm. `failure`: the run broke off; `refused`: the engine declined to run it, saying why."""

    tokens: np.ndarray  # [prompts, samples, n]
    drafted: int = 0
    scheduled: int = 0
    accepted: int = 0
    failure: str | None = None
    refused: str | None = None

    def as_dict(self) -> dict[str, Any]:
        names = ("drafted", "scheduled", "accepted", "failure", "refused")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class DistributionTest:
    """One two-sample test; `token` is the first position (from 1) it looks at.

    `adjusted`: Holm's p-value over the audit. `detectable_tv`: see `engine_statistics`.
    """

    drafter: str
    policy: str
    gamma: int
    kind: TestKind
    token: int
    chi_square: ChiSquare
    adjusted: float = 1.0
    detectable_tv: float = 1.0

    def judged(self, adjusted: float, level: float) -> DistributionTest:
        """With its verdict; `level` is a single test's."""
        found = detectable_tv(self.chi_square.freedom, self.chi_square.samples, level)
        return replace(self, adjusted=adjusted, detectable_tv=found)

    def as_dict(self) -> dict[str, Any]:
        own = {k: v for k, v in asdict(self).items() if k != "chi_square"}
        return {**own, **asdict(self.chi_square), "p_value": self.chi_square.p_value}


def sampling_arms(subjects: Sequence[Subject]) -> Iterator[Arm]:
    """Every policy and draft length of every subject."""
    for s in subjects:
        for name, make in s.policies.items():
            yield from (Arm(s.name, name, gamma, s.drafter, make) for gamma in s.gammas)


def draw(
    target: Target,
    arm: Arm,
    prompts: Prompts,
    samples: int,
    params: SamplingParams,
    concurrency: int,
) -> Sample:
    """`samples` answers (an even number) to each prompt under the ratio rule; all requests carry `params.seed`.

    Prompts take turns in pairs of requests, so that every batch mixes them and holds neighbours with one prompt.
    """
    policy = arm.make_policy(arm.gamma) if arm.make_policy is not None else None
    n = params.max_tokens or 0
    tokens = np.full((len(prompts), samples // 2, 2, n), MISSING)
    try:
        if policy is not None:
            check_sound(policy, arm.drafter, params)
    except DSparkError as error:
        return Sample(tokens, refused=str(error))
    longest = max(len(p) for p in prompts) + n
    work = [(prompt, params) for _ in range(samples // 2) for prompt in prompts for _ in range(2)]
    try:
        engine = make_engine(target, arm.drafter, policy, "ratio", arm.gamma, concurrency, longest)
        outputs = play(engine, work)
    except Exception as error:
        # A policy or drafter under audit may fail in any way: that is a finding, not the audit's end.
        return Sample(tokens, failure=f"{type(error).__name__}: {error}")
    flat = tokens.transpose(1, 0, 2, 3)  # a view, in the order of the work
    for index, output in zip(np.ndindex(flat.shape[:3]), outputs, strict=True):
        flat[index][: len(output.token_ids)] = output.token_ids
    metrics = [o.metrics for o in outputs]
    return Sample(
        tokens.reshape(len(prompts), -1, n),
        sum(m.drafted for m in metrics),
        sum(m.scheduled for m in metrics),
        sum(m.accepted for m in metrics),
    )


def compare(arm: Arm, plain: np.ndarray, drawn: np.ndarray, vocab_size: int) -> list[DistributionTest]:
    """Tests of drawn answers against plain decoding's, both [prompts, samples, n]; prompts are the strata."""
    views: list[tuple[TestKind, int, tuple[np.ndarray, np.ndarray]]] = []
    for k in range(1, plain.shape[2]):
        views.append(("position", k + 1, (plain[:, :, k], drawn[:, :, k])))
        if k + 1 < plain.shape[2]:
            a, b = (_pair(x[:, :, k], x[:, :, k + 1], vocab_size) for x in (plain, drawn))
            views.append(("pair", k + 1, (a, b)))
    a, b = (_pair(x[:, ::2, 1], x[:, 1::2, 1], vocab_size) for x in (plain, drawn))
    views.append(("neighbours", 2, (a, b)))
    names = (arm.drafter_name, arm.policy_name, arm.gamma)
    return [
        DistributionTest(*names, kind, token, two_sample(zip(*both, strict=True)))
        for kind, token, both in views
    ]


def _pair(first: np.ndarray, second: np.ndarray, vocab_size: int) -> np.ndarray:
    """One number a pair of tokens."""
    return (first + 1) * (vocab_size + 1) + second + 1
