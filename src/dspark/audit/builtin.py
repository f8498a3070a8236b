"""What `dspark audit` runs: small worlds with prices, the policies that ship, and a user's own by import path."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from dspark.audit.world import World, appendix_a, random_world
from dspark.schedule.auto import AutoScheduler
from dspark.schedule.cost import CostModel, TableCost
from dspark.schedule.policies import (
    Dependence,
    FixedLength,
    GlobalScheduler,
    LaggedScheduler,
    Policy,
    PrefixScheduler,
    Threshold,
)

__all__ = [
    "APPENDIX_A_COST",
    "Case",
    "Setting",
    "built_in_policies",
    "cases",
    "claims_exact",
    "settings",
]

APPENDIX_A_COST = TableCost(
    tuple(range(1, 8)), tuple(1 / sps for sps in (1.0, 0.5, 0.45, 0.30, 0.28, 0.27, 0.26))
)  # the paper gives the first three steps per second; a third request's worth of tokens costs a step again


@dataclass(frozen=True, eq=False)
class Case:
    """A world and the prices that make its schedules interesting."""

    name: str
    world: World
    cost: CostModel


@dataclass(frozen=True)
class Setting:
    """How drafts are judged: which LIVE policies bias, and which they do not."""

    name: str
    exact_for_live: bool
    always: bool  # worth a row for policies that are not LIVE, too
    apply: Callable[[World], World]


def cases(requests: int, gamma: int) -> list[Case]:
    """Appendix A; random tables with smoothly rising prices; tied confidences with prices in steps of two."""
    sizes = np.arange(requests, max(requests * (gamma + 1), requests + 2) + 1)
    extra = sizes - requests
    rising = 1 + 0.2 * extra + 0.025 * extra**2
    stairs = rising[::2] if len(rising) % 2 else [*rising[::2], 2 * rising[-1]]
    steps = sizes[::2] if len(sizes) % 2 else [*sizes[::2], sizes[-1] + 1]
    return [
        Case("appendix-a", appendix_a(requests, gamma), APPENDIX_A_COST),
        Case("random", random_world(0, 2, gamma, requests), _table(sizes, rising)),
        Case("ties", random_world(9, 2, gamma, requests, ties=True), _table(steps, stairs, executed=True)),
    ]


def _table(tokens: Iterable[int], seconds: Iterable[float], executed: bool = False) -> TableCost:
    return TableCost(tuple(int(t) for t in tokens), tuple(float(s) for s in seconds), executed)


def settings() -> list[Setting]:
    """Sampling under the ratio rule first, then the three ways in which looking at the block is harmless."""
    return [
        Setting("ratio, T > 0", False, True, lambda world: world),
        Setting("shared noise", True, False, lambda world: replace(world, rule="shared-noise")),
        Setting("greedy", True, False, lambda world: replace(world, p_target=_one_hot(world.p_target))),
        Setting("one-hot drafts", True, False, lambda world: replace(world, p_draft=_one_hot(world.p_draft))),
    ]


def claims_exact(policy: Policy, setting: Setting) -> bool:
    """Whether the pair is declared to be lossless."""
    return policy.dependence is not Dependence.LIVE or setting.exact_for_live


def built_in_policies(gamma: int, cost: CostModel) -> dict[str, Policy]:
    """A fresh policy of each kind that ships."""
    return {
        "fixed": FixedLength(gamma),
        "threshold": Threshold(gamma, 0.5),
        "prefix": PrefixScheduler(gamma, cost),
        "lagged": LaggedScheduler(gamma, cost),
        "lagged-previous": LaggedScheduler(gamma, cost, ranks="previous"),
        "global": GlobalScheduler(gamma, cost),
        "auto": AutoScheduler(gamma, cost),
    }


def _one_hot(table: np.ndarray) -> np.ndarray:
    return np.eye(table.shape[-1])[table.argmax(-1)]
