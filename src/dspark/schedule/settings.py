"""What a speculative configuration says about scheduling and acceptance, and the policy that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dspark.acceptance import tolerates_live
from dspark.compilation import told_once
from dspark.errors import DSparkError
from dspark.schedule.aim import AimConfig
from dspark.schedule.auto import AutoScheduler
from dspark.schedule.base import Dependence, ScheduleState
from dspark.schedule.cost import CostModel, TableCost
from dspark.schedule.custom import check_policy, load_policy
from dspark.schedule.feedback import LiveCost
from dspark.schedule.loops import tally
from dspark.schedule.names import ACCEPTANCE_RULES, POLICIES, PRICED, AcceptanceRule
from dspark.schedule.policies import (
    FixedLength,
    GlobalScheduler,
    LaggedScheduler,
    Policy,
    PrefixScheduler,
    Threshold,
)
from dspark.schedule.survival import Calibrate, along

__all__ = [
    "ScheduleSettings",
    "build_policy",
    "check_sound_settings",
    "compile_schedulers",
    "refuse_biased",
    "split_config",
]

_SCHEDULERS: dict[str, type[PrefixScheduler | GlobalScheduler | LaggedScheduler]] = {
    "prefix": PrefixScheduler,
    "global": GlobalScheduler,
    "lagged": LaggedScheduler,
    "auto": AutoScheduler,
}


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Keys of speculative_config that are not about the drafter.

    `policy`: one of `POLICIES`; or one of your own, a `Policy` or the import path of what makes one (`module:factory`):
    `dspark audit --policy` tells whether that is lossless. "fixed" drafts as much as it may, also where that is slower
    than plain decoding; "auto" does not. `threshold`: survival below which the policy "threshold" verifies no more.
    `acceptance`: see `EngineConfig`. `cost_table`: file with prices, instead of the profile made here.
    `calibration`: file (or function) that turns confidence logits into probabilities; None: the one beside the
    drafter's weights, if there is one; "off": none at all.
    """

    policy: str | Policy = "fixed"
    threshold: float | None = None
    acceptance: str = "ratio"
    cost_table: str | Path | None = None
    calibration: str | Path | Calibrate | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str):
            check_policy(self.policy, "policy")
        elif self.policy not in POLICIES and ":" not in self.policy:
            raise DSparkError(
                f"policy {self.policy!r} is not known; choose from {', '.join(POLICIES)}, or name one of your own as "
                "module:factory"
            )
        if self.acceptance not in ACCEPTANCE_RULES:
            raise DSparkError(
                f"acceptance {self.acceptance!r} is not known; choose from {', '.join(ACCEPTANCE_RULES)}"
            )
        if (self.threshold is not None) != (self.policy == "threshold"):
            raise DSparkError("the policy threshold needs a threshold, and no other policy has one")
        if self.threshold is not None and (
            isinstance(self.threshold, bool) or not isinstance(self.threshold, int | float)
        ):
            raise DSparkError(f"threshold must be a number between 0 and 1, got {self.threshold!r}")
        if self.cost_table is not None and not self.priced:
            raise DSparkError(f"the policy {self.policy} has no use for a cost_table: leave it out")
        if self.calibration not in (None, "off") and self.policy == "fixed":
            raise DSparkError("the policy fixed reads no confidences: choose another one, or no calibration")
        for name in ("cost_table", "calibration"):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, str | Path) or (name == "calibration" and callable(value))
            ):
                raise DSparkError(f"{name} must be a path, got {value!r}")

    @property
    def priced(self) -> bool:
        """The policy decides by what things cost."""
        return self.policy in PRICED

    @property
    def rule(self) -> AcceptanceRule:
        return "shared_noise" if self.acceptance == "shared_noise" else "ratio"


def split_config(config: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, ScheduleSettings]:
    """The drafter's part of a speculative_config, and the rest.

    Raises:
        DSparkError: a value that is not possible, or scheduling without anything to schedule.
    """
    if not isinstance(config, Mapping):
        return config, ScheduleSettings()  # the registry refuses what is no mapping
    names = {field.name for field in fields(ScheduleSettings)}
    settings = ScheduleSettings(**{k: v for k, v in config.items() if k in names and v is not None})
    rest = {k: v for k, v in config.items() if k not in names}
    if rest.get("method") == "none" and settings.policy != "fixed":
        raise DSparkError(
            f"the method none drafts nothing, so the policy {settings.policy} has nothing to do"
        )
    return rest, settings


def refuse_biased(
    dependence: Dependence, greedy: bool, one_hot_proposals: bool, rule: AcceptanceRule = "ratio"
) -> None:
    """Refuse a policy that would bias a request's output (losslessness is typed); see `tolerates_live`.

    Raises:
        DSparkError: says what would be sound.
    """
    if dependence is not Dependence.LIVE or tolerates_live(np.array([greedy]), one_hot_proposals, rule)[0]:
        return
    raise DSparkError(
        "this policy looks at the block whose verification it decides (LIVE): under the ratio rule, with sampled "
        "drafts at a temperature above 0, that biases the output. Use the policy auto, prefix or lagged, the "
        "acceptance shared_noise, temperature 0, a deterministic drafter, or speculative=False"
    )


def check_sound_settings(settings: ScheduleSettings, greedy: bool, one_hot_proposals: bool) -> None:
    """`refuse_biased` for a policy that is not built yet: its prices may take seconds to measure."""
    policy = _SCHEDULERS.get(settings.policy) if isinstance(settings.policy, str) else settings.policy
    if policy is not None:
        refuse_biased(policy.dependence, greedy, one_hot_proposals, settings.rule)


def build_policy(
    settings: ScheduleSettings,
    gamma: int,
    cost: Callable[[], CostModel],
    report: Callable[[str], None],
    acceptance: tuple[float, ...] = (),
) -> Policy:
    """The policy for blocks of `gamma` drafts; `cost` is asked for prices only where they are needed.

    `acceptance`: see `AimConfig`. Its loops are compiled here rather than under the first request.
    """
    if not isinstance(settings.policy, str):
        return settings.policy
    if gamma == 0 or settings.policy == "fixed":
        return FixedLength(gamma)
    if ":" in settings.policy:
        return load_policy(settings.policy)
    if settings.policy == "threshold":
        assert settings.threshold is not None
        compile_schedulers(report)
        return Threshold(gamma, settings.threshold)
    prices = cost()
    if prices.warning is not None:
        report(prices.warning)
    compile_schedulers(report)
    return _SCHEDULERS[settings.policy](gamma, LiveCost(prices), aim=AimConfig(acceptance=acceptance))


def compile_schedulers(report: Callable[[str], None] = lambda message: None) -> None:
    """Take every policy through made-up rounds: compiles its loops, or loads them from Numba's cache.

    `report` gets a line before the one compilation that a new version or processor needs.
    """
    cost, gamma, one = TableCost((1, 8), (1.0, 2.0)), 2, np.ones(1, dtype=np.int64)
    with told_once("schedule", "compiling the scheduler, once (a few seconds) ...", report):
        along(np.zeros((1, gamma)))
        threshold = Threshold(gamma, 0.5)
        policies = [kind(gamma, LiveCost(cost)) for kind in _SCHEDULERS.values()]
        for looks, survival, free in product(
            (True, False), (np.full((1, gamma), 0.9), None), (None, one - one)
        ):
            state = ScheduleState(one, one, one, one, one > 0, np.full(1, looks), free)
            tally(one, one)
            policies[0].draft_lengths(state.behind_prompts(gamma))
            threshold.verify_lengths(state, survival, one if survival is not None else one - one)
            for policy in policies:
                policy.draft_lengths(state)
                policy.observe(state, survival, one, policy.verify_lengths(state, survival, one), one)
                policy.timed(state, one, one, 1e-3, 1e-3)
