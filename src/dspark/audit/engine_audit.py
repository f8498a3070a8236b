"""Statistical audit of losslessness on real engines: drafters, policies, draft lengths, batch mixes.

report = audit_engine(target, [subject("mine", drafter, target, policy_factories(["auto"], 16))], prompts)
report.sound, report.differences, report.biased

The exact audit (`dspark.audit.audit`) proves a policy on tiny models; this one looks for faults where they live:
in kernels, caches, batching, a drafter's probabilities, the acceptance as it really runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dspark.audit.engine_exact import ExactCell, ExactKind, exact_cells, exact_kinds, run_cell
from dspark.audit.engine_sampling import (
    TEST_KINDS,
    Arm,
    DistributionTest,
    Sample,
    TestKind,
    compare,
    draw,
    sampling_arms,
)
from dspark.audit.engine_statistics import holm
from dspark.audit.engine_subjects import Subject, make_engine, play
from dspark.core import DSparkError, SamplingParams
from dspark.target.base import Target

__all__ = ["ArmResult", "EngineAudit", "EngineAuditSettings", "audit_engine"]

Prompts = Sequence[Sequence[int]]
Progress = Callable[[int, int, str], None]  # done, of how many, what was done


@dataclass(frozen=True, kw_only=True)
class EngineAuditSettings:
    """Sizes of an audit.

    `tokens`: of each answer where it must equal plain decoding's. `samples`: answers to each prompt where
    distributions are compared, of `sampled_tokens` tokens, to the last `sampled_prompt` tokens of each prompt (the
    prefill is most of the work). `false_alarm`: chance of any false alarm over all of the audit's tests.
    """

    tokens: int = 32
    samples: int = 500
    sampled_tokens: int = 5
    sampled_prompt: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    concurrency: int = 16
    seed: int = 0
    false_alarm: float = 1e-3

    def __post_init__(self) -> None:
        for name, least in (("tokens", 2), ("sampled_tokens", 2), ("sampled_prompt", 1), ("concurrency", 1)):
            if getattr(self, name) < least:
                raise DSparkError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if self.samples < 0 or self.samples % 2:
            raise DSparkError(f"samples must be an even number, 0 for no sampling, got {self.samples}")
        if not self.temperature > 0:
            raise DSparkError(f"the temperature to sample at must be above 0, got {self.temperature}")
        if not 0 < self.false_alarm < 1:
            raise DSparkError(f"false_alarm must lie between 0 and 1, got {self.false_alarm}")


@dataclass(frozen=True, eq=False)
class ArmResult:
    """An arm's counts and tests."""

    arm: Arm
    sample: Sample
    tests: list[DistributionTest]

    @property
    def p_value(self) -> float:
        """The smallest adjusted one."""
        return min((t.adjusted for t in self.tests), default=1.0)

    def as_dict(self) -> dict[str, Any]:
        names = {"drafter": self.arm.drafter_name, "policy": self.arm.policy_name, "gamma": self.arm.gamma}
        return {**names, **self.sample.as_dict(), "p_value": self.p_value}


@dataclass(frozen=True, eq=False)
class EngineAudit:
    """What an audit found."""

    settings: EngineAuditSettings
    cells: list[ExactCell]
    arms: list[ArmResult]

    @property
    def tests(self) -> list[DistributionTest]:
        return [t for arm in self.arms for t in arm.tests]

    @property
    def differences(self) -> list[ExactCell]:
        """Cells whose text is not plain decoding's, or that broke off."""
        return [c for c in self.cells if c.failed]

    @property
    def biased(self) -> list[DistributionTest]:
        return [t for t in self.tests if t.adjusted <= self.settings.false_alarm]

    @property
    def failures(self) -> list[ArmResult]:
        return [a for a in self.arms if a.sample.failure is not None]

    @property
    def sound(self) -> bool:
        return not (self.differences or self.biased or self.failures)

    def detectable_tv(self, kind: TestKind) -> float | None:
        """Largest over the tests of a kind: what is found with 99% in any of them. None without such tests."""
        return max((t.detectable_tv for t in self.tests if t.kind == kind), default=None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "sound": self.sound,
            "settings": asdict(self.settings),
            "detectable_tv": {kind: self.detectable_tv(kind) for kind in TEST_KINDS},
            "exact": [c.as_dict() for c in self.cells],
            "sampled": [a.as_dict() for a in self.arms],
            "tests": [t.as_dict() for t in self.tests],
        }


def audit_engine(
    target: Target,
    subjects: Sequence[Subject],
    prompts: Prompts,
    settings: EngineAuditSettings | None = None,
    progress: Progress = lambda done, total, what: None,
) -> EngineAudit:
    """Run every cell and arm. A drafter or policy that raises is a finding; the audit goes on.

    Raises:
        DSparkError: no prompts, or prompts the target refuses.
    """
    settings = settings or EngineAuditSettings()
    if not prompts:
        raise DSparkError("an audit needs at least one prompt")
    kinds, cells, arms = _plan(settings, subjects)
    total, done = len(kinds) * (len(cells) + 1) + len(arms) + 1, 0

    def tick(what: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, what)

    exact = []
    for kind in kinds:
        plain = _plain(target, kind, prompts, settings.seed)
        tick(f"{kind.name}: plain decoding")
        for cell in cells:
            exact.append(run_cell(target, cell, kind, prompts, settings.seed, settings.concurrency, plain))
            tick(f"{kind.name}: {cell[0]}, {cell[2]}, {cell[5]}")
    return EngineAudit(settings, exact, _sampled(target, arms, prompts, settings, tick))


def _plan(
    settings: EngineAuditSettings, subjects: Sequence[Subject]
) -> tuple[list[ExactKind], list[Any], list[Arm]]:
    kinds = exact_kinds(settings.tokens, settings.temperature)
    return kinds, list(exact_cells(subjects)), list(sampling_arms(subjects)) if settings.samples else []


def _plain(target: Target, kind: ExactKind, prompts: Prompts, seed: int) -> list[list[int]]:
    """Plain decoding's tokens, each prompt alone: the reference."""
    longest = max(len(p) for p in prompts) + (kind.params.max_tokens or 0)
    engine = make_engine(target, None, None, kind.rule, 0, 1, longest)
    return [output.token_ids for output in play(engine, kind.work(prompts, seed))]


def _sampled(
    target: Target,
    arms: Sequence[Arm],
    prompts: Prompts,
    settings: EngineAuditSettings,
    tick: Callable[[str], None],
) -> list[ArmResult]:
    """Draw each arm, test it against plain decoding, and correct over all tests."""
    if not arms:
        return []
    short = [list(p[-settings.sampled_prompt :]) for p in prompts]
    params = SamplingParams(
        temperature=settings.temperature, top_p=settings.top_p, max_tokens=settings.sampled_tokens,
        ignore_eos=True, seed=settings.seed,
    )  # fmt: skip

    def sample(arm: Arm, number: int) -> Sample:
        # An own seed each: with plain decoding's, an arm would repeat some of its draws.
        own = replace(params, seed=settings.seed + number)
        drawn = draw(target, arm, short, settings.samples, own, settings.concurrency)
        tick(f"sampling: {arm.drafter_name}, {arm.policy_name}")
        return drawn

    plain = sample(Arm("none", "plain", 0), 0)
    if plain.failure is not None:
        raise DSparkError(f"plain decoding failed: {plain.failure}")
    results = []
    for number, arm in enumerate(arms, start=1):
        drawn = sample(arm, number)
        ran = drawn.failure is None and drawn.refused is None
        tests = compare(arm, plain.tokens, drawn.tokens, target.vocab_size) if ran else []
        results.append(ArmResult(arm, drawn, tests))
    return _corrected(results, settings.false_alarm)


def _corrected(results: list[ArmResult], level: float) -> list[ArmResult]:
    """Holm's correction over all tests; power at the level that the first of them must pass."""
    p_values = [t.chi_square.p_value for r in results for t in r.tests]
    adjusted = iter(holm(p_values))
    single = level / max(1, len(p_values))
    return [replace(r, tests=[t.judged(next(adjusted), single) for t in r.tests]) for r in results]
