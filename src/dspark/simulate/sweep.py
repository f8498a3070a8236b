"""Policies against loads: the frontier of throughput and speed per user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dspark.errors import DSparkError
from dspark.simulate.intervals import Interval, interval
from dspark.simulate.metrics import METRICS, Summary, summarise
from dspark.simulate.policies import PolicyFactory
from dspark.simulate.simulation import Scenario, run

__all__ = ["Cell", "paired_ratio", "speed_at_throughput", "sweep", "throughput_at_speed"]

ScenarioAt = Callable[[float], Scenario]  # by load: users of a closed loop, or requests per second


@dataclass(frozen=True, eq=False)
class Cell:
    """One policy at one load, one summary a seed."""

    policy: str
    load: float
    runs: tuple[Summary, ...]

    def interval(self, metric: str, confidence: float = 0.95) -> Interval:
        return interval([getattr(summary, metric) for summary in self.runs], confidence)

    def mean(self, metric: str) -> float:
        return self.interval(metric).mean

    def as_dict(self, confidence: float = 0.95) -> dict[str, object]:
        metrics = {name: self.interval(name, confidence).as_dict() for name in METRICS}
        return {"policy": self.policy, "load": self.load, "seeds": len(self.runs), "metrics": metrics}


def sweep(
    scenario_at: ScenarioAt,
    loads: Sequence[float],
    policies: Mapping[str, PolicyFactory],
    seeds: Iterable[int],
    progress: Callable[[], object] = lambda: None,
) -> list[Cell]:
    """Simulate every policy at every load with every seed. A seed means the same requests for all policies."""
    chosen = list(seeds)
    if not chosen or not loads or not policies:
        raise DSparkError("a sweep needs at least one load, one policy and one seed")
    cells = []
    for load in loads:
        scenario = scenario_at(load)
        for name, make in policies.items():
            runs = []
            for seed in chosen:
                runs.append(summarise(run(scenario, make(), seed), scenario))
                progress()
            cells.append(Cell(name, load, tuple(runs)))
    return cells


def paired_ratio(cell: Cell, base: Cell, metric: str, confidence: float = 0.95) -> Interval:
    """`cell` over `base`, seed by seed: what the seeds have in common falls out."""
    pairs = zip(cell.runs, base.runs, strict=True)
    ratios = [getattr(a, metric) / getattr(b, metric) if getattr(b, metric) else np.nan for a, b in pairs]
    return interval(ratios, confidence)


def throughput_at_speed(cells: Sequence[Cell], policy: str, speed: float) -> float | None:
    """Most tokens/s of `policy` where readers get `speed` tokens/s each, linear between loads.

    None outside the simulated loads: a frontier is never extended.
    """
    return _along(cells, policy, "user_tokens_per_s", "tokens_per_s", speed)


def speed_at_throughput(cells: Sequence[Cell], policy: str, tokens_per_s: float) -> float | None:
    """Highest tokens/s per user of `policy` where it delivers `tokens_per_s` in all; see `throughput_at_speed`."""
    return _along(cells, policy, "tokens_per_s", "user_tokens_per_s", tokens_per_s)


def _along(cells: Sequence[Cell], policy: str, given: str, wanted: str, value: float) -> float | None:
    mine = sorted((cell for cell in cells if cell.policy == policy), key=lambda cell: cell.load)
    points = [(cell.mean(given), cell.mean(wanted)) for cell in mine]
    found = [y for x, y in points if x == value]
    for (x0, y0), (x1, y1) in pairwise(points):
        if min(x0, x1) < value < max(x0, x1):
            found.append(y0 + (y1 - y0) * (value - x0) / (x1 - x0))
    return max(found, default=None)
