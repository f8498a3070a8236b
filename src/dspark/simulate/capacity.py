"""How much load one engine bears: "how many users at 30 tokens/s each?", by bisection, with confidence over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dspark.errors import DSparkError
from dspark.simulate.intervals import interval, lower_bound, upper_bound
from dspark.simulate.log import RunLog
from dspark.simulate.metrics import decode_speeds
from dspark.simulate.policies import PolicyFactory
from dspark.simulate.simulation import Scenario, run
from dspark.simulate.sweep import ScenarioAt

__all__ = ["Capacity", "Probe", "ServiceTarget", "find_capacity"]

Answer = Literal["yes", "no", "undecided"]


@dataclass(frozen=True)
class ServiceTarget:
    """A `share` of all requests gets at least `tokens_per_s` past its first token, which comes within `ttft_s` (if
    given). "yes" needs one-sided confidence `confidence` over seeds, and so does "no".

    Raises:
        DSparkError: a number out of range.
    """

    tokens_per_s: float
    ttft_s: float | None = None
    share: float = 0.9
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not self.tokens_per_s > 0 or (self.ttft_s is not None and not self.ttft_s > 0):
            raise DSparkError("a service target needs a speed (and a time to first token, if any) above 0")
        if not 0 < self.share < 1:
            raise DSparkError(f"the share of requests served so must lie between 0 and 1, got {self.share}")
        if not 0.5 <= self.confidence < 1:
            raise DSparkError(f"confidence must be at least 0.5 and below 1, got {self.confidence}")


@dataclass(frozen=True)
class Probe:
    """One load: what the `share` quantile of requests got, a value a seed."""

    load: float
    speeds: tuple[float, ...]  # tokens/s that a share of the requests reaches
    ttft_s: tuple[float, ...]  # seconds that a share of the requests stays within
    answer: Answer

    def as_dict(self) -> dict[str, object]:
        speed, ttft = interval(self.speeds), interval(self.ttft_s)
        return {"load": self.load, "answer": self.answer, "speed": speed.as_dict(), "ttft_s": ttft.as_dict()}


@dataclass(frozen=True)
class Capacity:
    """`load`: the largest probed load that meets the target with confidence, 0 if none did.

    `fails_at`: the smallest probed load above it that does not; None where the search ended at its limit. Between
    them nothing was probed. It is assumed that a load above a failing one fails.
    """

    policy: str
    load: float
    fails_at: float | None
    probes: tuple[Probe, ...]  # in order of load

    @property
    def undecided(self) -> bool:
        """Whether what ended the search is open: the capacity may be larger than `load`."""
        return any(probe.load == self.fails_at and probe.answer == "undecided" for probe in self.probes)

    def as_dict(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "load": self.load,
            "fails_at": self.fails_at,
            "undecided": self.undecided,
            "probes": [probe.as_dict() for probe in self.probes],
        }


def find_capacity(
    scenario_at: ScenarioAt,
    policy: str,
    make: PolicyFactory,
    target: ServiceTarget,
    seeds: Sequence[int],
    *,
    start: float = 1,
    most: float = 4096,
    whole: bool = True,
    tolerance: float = 0.02,
    progress: Callable[[], object] = lambda: None,
) -> Capacity:
    """Double the load until the target is missed, then bisect.

    `whole`: loads are users, so down to neighbouring numbers or `tolerance`; otherwise rates, to `tolerance`.

    Raises:
        DSparkError: fewer than two seeds: one run gives no confidence.
    """
    if len(seeds) < 2:
        raise DSparkError(f"a capacity with confidence needs 2 seeds or more, got {len(seeds)}")
    probes: dict[float, Probe] = {}

    def meets(load: float) -> bool:
        if load not in probes:
            probes[load] = _probe(scenario_at(load), load, make, target, seeds, progress)
        return probes[load].answer == "yes"

    low, high = 0.0, start
    while meets(high):
        if high >= most:
            return _capacity(policy, high, None, probes)
        low, high = high, min(2 * high, most)
    if not whole and low == 0.0:
        while not meets(high / 2) and high > start / 1024:
            high /= 2
        low = high / 2 if meets(high / 2) else 0.0
    while low and high - low > (max(1.0, tolerance * low) if whole else tolerance * low):
        middle = float(round((low + high) / 2)) if whole else (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return _capacity(policy, low, high, probes)


def _capacity(policy: str, load: float, fails_at: float | None, probes: dict[float, Probe]) -> Capacity:
    return Capacity(policy, load, fails_at, tuple(probes[at] for at in sorted(probes)))


def _probe(
    scenario: Scenario,
    load: float,
    make: PolicyFactory,
    target: ServiceTarget,
    seeds: Sequence[int],
    progress: Callable[[], object],
) -> Probe:
    speeds, waits = [], []
    for seed in seeds:
        log = run(scenario, make(), seed)
        got = decode_speeds(log, scenario)
        wait = _waits(log, scenario)
        if not len(got) or not len(wait):
            raise DSparkError(
                "too few requests were measured: simulate longer, or raise the load to start from"
            )
        speeds.append(float(np.quantile(got, 1 - target.share)))
        waits.append(float(np.quantile(wait, target.share)))
        progress()
    return Probe(load, tuple(speeds), tuple(waits), _judge(speeds, waits, target))


def _waits(log: RunLog, scenario: Scenario) -> np.ndarray:
    arrival, first = log.request("arrival"), log.request("first_token")
    measured = (arrival >= scenario.warmup_s) & (arrival < scenario.measured_until)
    return np.where(np.isnan(first), log.end, first)[measured] - arrival[measured]


def _judge(speeds: Sequence[float], waits: Sequence[float], target: ServiceTarget) -> Answer:
    confidence = target.confidence
    fast = lower_bound(speeds, confidence) >= target.tokens_per_s
    slow = upper_bound(speeds, confidence) < target.tokens_per_s
    if target.ttft_s is not None:
        fast = fast and upper_bound(waits, confidence) <= target.ttft_s
        slow = slow or lower_bound(waits, confidence) > target.ttft_s
    return "yes" if fast else "no" if slow else "undecided"
