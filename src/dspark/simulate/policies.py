"""Policies by name, priced for one machine. They are the engine's own objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dspark.errors import DSparkError
from dspark.schedule.aim import AimConfig
from dspark.schedule.auto import AutoScheduler
from dspark.schedule.cost import CostModel, TableCost
from dspark.schedule.policies import (
    FixedLength,
    GlobalScheduler,
    LaggedScheduler,
    Policy,
    PrefixScheduler,
    Threshold,
)

__all__ = ["POLICY_NAMES", "PolicyFactory", "policy_factory"]

PolicyFactory = Callable[[], Policy]
POLICY_NAMES = (
    "plain",
    "fixed",
    "threshold",
    "prefix",
    "prefix-raw",
    "lagged",
    "lagged-previous",
    "global",
    "auto",
)


def policy_factory(
    name: str, gamma: int, cost: CostModel, acceptance: tuple[float, ...] = ()
) -> PolicyFactory:
    """What makes a fresh policy (they learn, so every run needs its own); `acceptance`: see `AimConfig`.

    | name | policy |
    |---|---|
    | plain | nothing is drafted |
    | fixed, fixed:3 | all gamma drafts, or 3 |
    | threshold, threshold:0.3 | verify while survival is at least 0.5, or 0.3 |
    | prefix | Algorithm 1; on captured sizes priced by the line between them and filled upwards to the next |
    | prefix-raw | Algorithm 1 on the prices as they are: it stops at the first step of a staircase |
    | lagged, lagged-previous | budget from survivals two rounds old, ranks from this round's or the last one's |
    | global | the best budget for the block at hand: lossless for greedy requests only |
    | auto | the strongest of these that is sound for the batch |

    Raises:
        DSparkError: no such name, or a number that does not fit it.
    """
    kind, colon, argument = name.partition(":")
    if kind not in POLICY_NAMES:
        raise DSparkError(f"no policy {name!r}: choose from {', '.join(POLICY_NAMES)}")
    if colon and kind not in ("fixed", "threshold"):
        raise DSparkError(f"the policy {kind} takes no number, got {name!r}")
    if kind == "fixed":
        length = _number(argument, name, int) if colon else gamma
        if length > gamma:
            raise DSparkError(f"{name}: a block has {gamma} drafts; ask for fewer, or raise gamma")
        return _made(FixedLength, length)
    if kind == "threshold":
        return _made(Threshold, gamma, _number(argument, name, float) if colon else 0.5)
    aim = AimConfig(acceptance=acceptance)
    if kind == "prefix" and isinstance(cost, TableCost) and cost.executed:
        return _made(PrefixScheduler, gamma, replace(cost, executed=False), sizes=cost.tokens, aim=aim)
    return {
        "plain": _made(FixedLength, 0),
        "prefix": _made(PrefixScheduler, gamma, cost, aim=aim),
        "prefix-raw": _made(PrefixScheduler, gamma, cost, aim=aim),
        "lagged": _made(LaggedScheduler, gamma, cost, aim=aim),
        "lagged-previous": _made(LaggedScheduler, gamma, cost, ranks="previous", aim=aim),
        "global": _made(GlobalScheduler, gamma, cost, aim=aim),
        "auto": _made(AutoScheduler, gamma, cost, aim=aim),
    }[kind]


def _made(kind: Callable[..., Policy], *args: Any, **options: Any) -> PolicyFactory:
    def make() -> Policy:
        return kind(*args, **options)

    make()  # refuses bad numbers now rather than behind a long simulation
    return make


def _number(text: str, name: str, kind: type[Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise DSparkError(f"{name}: {text!r} is not a number") from None
