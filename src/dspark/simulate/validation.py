"""Does the simulator predict the real engine? Two questions, asked apart and then together.

- *Prices*: given what each recorded step held, how well does a cost model fitted to one half of the run predict the
  time of the other half?
- *Run*: given prices, traffic and acceptance, does the simulation deliver as many tokens per second as was measured?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.base import Policy
from dspark.schedule.cost import AdditiveCost, ContextCost, CostModel, DraftCost
from dspark.simulate.intervals import Interval, interval
from dspark.simulate.policies import PolicyFactory
from dspark.simulate.recording import StepRecords
from dspark.simulate.simulation import Scenario, run

__all__ = [
    "Prediction",
    "RunValidation",
    "Scatter",
    "cross_validate",
    "fit_cost",
    "predict",
    "scatter",
    "validate_run",
]

KNOTS = 6  # of the price of rows
REWEIGHTED = 10  # times
LONGEST = 2.0  # times the recorded seconds: what takes longer is further off than anyone asks
ALIKE = 8  # steps of a shape, at least, that have a median worth the name


@dataclass(frozen=True)
class Prediction:
    """Times predicted for recorded steps, over those measured."""

    measured_tokens_per_s: float
    predicted_tokens_per_s: float
    error: float  # relative, of tokens per second
    step_error_median: float  # relative and absolute, of single steps
    step_error_p90: float
    steps: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class RunValidation:
    """A simulated run against a measured one."""

    measured_tokens_per_s: float
    simulated_tokens_per_s: Interval
    slowest: float  # of the simulated runs, tokens/s: a measured one is one draw of these, too
    fastest: float
    error: float  # relative, of the mean over seeds
    tolerance: float

    @property
    def within(self) -> bool:
        return abs(self.error) <= self.tolerance

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "within": self.within}


@dataclass(frozen=True)
class Scatter:
    """How much longer steps take on average than in the median, among steps that hold the same.

    Tokens per second follow the mean: prices that are medians promise `mean_over_median` times as many.
    """

    mean_over_median: float  # of every shape's steps, weighted by time
    share: float  # of the recorded time, in shapes with `ALIKE` steps or more

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def scatter(records: StepRecords) -> Scatter | None:
    """Of steps with the same rows, requests and drafts, all shapes pooled; None where no shape has enough steps."""
    rows = records.query_tokens + records.scheduled
    held = np.column_stack((rows, records.requests, records.drafted))
    _, shape, count = np.unique(held, axis=0, return_inverse=True, return_counts=True)
    alike = [records.seconds[shape.ravel() == k] for k in np.flatnonzero(count >= ALIKE)]
    if not alike:
        return None
    took = sum(float(seconds.sum()) for seconds in alike)
    at_medians = sum(len(seconds) * float(np.median(seconds)) for seconds in alike)
    return Scatter(took / at_medians, took / float(records.seconds.sum()))


def predict(records: StepRecords, cost: CostModel) -> Prediction:
    """Replay the steps at the prices of `cost`: their counts are given, only time is predicted."""
    return _compare(records, _prices(records, cost))


def cross_validate(records: StepRecords) -> Prediction:
    """Fit prices to each half of the run, predict the other half.

    Raises:
        DSparkError: too few steps.
    """
    half = len(records) // 2
    if half < 8:
        raise DSparkError(f"{len(records)} steps are too few to fit prices and test them; record 16 or more")
    first, second = records[:half], records[half:]
    predicted = (_prices(first, fit_cost(second)), _prices(second, fit_cost(first)))
    return _compare(records, np.concatenate(predicted))


def validate_run(
    records: StepRecords,
    scenario: Scenario,
    make: PolicyFactory,
    seeds: Sequence[int],
    tolerance: float = 0.1,
    confidence: float = 0.95,
) -> RunValidation:
    """Simulate the scenario that was recorded; within `tolerance` of the measured tokens/s or not.

    Both are held to the same phase: behind the scenario's warm-up (0 where the records begin with the traffic) the
    simulation goes on until it has delivered as many tokens as were recorded.
    """
    runs = [_same_tokens(records, scenario, make(), seed) for seed in seeds]
    simulated = interval(runs, confidence)
    measured = records.tokens_per_s
    error = simulated.mean / measured - 1
    return RunValidation(measured, simulated, min(runs), max(runs), error, tolerance)


def fit_cost(records: StepRecords) -> AdditiveCost:
    """Prices from recorded steps: non-negative least squares, so weighted that the totals of seconds agree.

    A step is a constant, so much a request, a convex curve of its rows (knots at quantiles), so much a cached
    position, and for drafts a constant, so much a request drafted for and so much a draft. What the run never
    varied cannot be told apart and lands on one of them.
    """
    rows = (records.query_tokens + records.scheduled).astype(np.float64)
    knots = np.unique(np.quantile(rows, np.linspace(0, 1, KNOTS + 1)[:-1]).astype(np.int64))
    hinges = np.maximum(rows[:, None] - knots, 0)
    columns = np.column_stack(
        (
            np.ones(len(records)),
            records.requests,
            records.context,
            records.drafted > 0,
            np.where(records.drafted > 0, records.drafted_requests, 0),
            records.drafted,
            hinges,
        )
    ).astype(np.float64)
    prices = _expected(columns, records.seconds)
    bias, request, position, draft, drafted_for, each = prices[:6].tolist()
    most = int(records.requests.max())
    probes = np.unique(np.concatenate(([0], knots, [int(rows.max()) + 1])))
    theta = np.maximum(probes[:, None] - knots, 0) @ prices[6:]
    return AdditiveCost(
        max(bias, 1e-3 * float(records.seconds.min())),  # a pass of nothing must cost something
        (0, most),
        (0.0, request * most),
        tuple(int(p) for p in probes),
        tuple(float(t) for t in theta),
        DraftCost(draft, drafted_for, each),
        ContextCost(per_position=position),
    )


def _same_tokens(records: StepRecords, scenario: Scenario, policy: Policy, seed: int) -> float:
    """Simulated tokens/s until as many were delivered as recorded, for `LONGEST` times the recorded seconds at most."""
    longest = LONGEST * float(records.seconds.sum())
    log = run(replace(scenario, duration_s=longest, drain_s=0.0), policy, seed)
    counted = log.step("start") >= scenario.warmup_s
    tokens, seconds = log.step("tokens")[counted].cumsum(), log.step("seconds")[counted].cumsum()
    if not len(tokens):
        raise DSparkError(
            f"nothing was simulated behind a warm-up of {scenario.warmup_s:g} s: shorten it, or raise the load"
        )
    last = min(int(np.searchsorted(tokens, records.tokens.sum())), len(tokens) - 1)
    return float(tokens[last] / seconds[last])


def _prices(records: StepRecords, cost: CostModel) -> np.ndarray:
    rows = records.query_tokens + records.scheduled
    # One call a step: context models may take the step's numbers as scalars.
    passes = [
        float(cost.step_seconds(int(n), int(b), int(c)))
        for n, b, c in zip(records.requests, rows, records.context, strict=True)
    ]
    return np.array(passes) + cost.draft_seconds(records.drafted_requests, records.drafted)


def _compare(records: StepRecords, predicted: np.ndarray) -> Prediction:
    errors = np.abs(predicted / records.seconds - 1)
    rate = float(records.tokens.sum() / predicted.sum())
    return Prediction(
        records.tokens_per_s,
        rate,
        rate / records.tokens_per_s - 1,
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        len(records),
    )


def _expected(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Prices x >= 0 for which `columns` x are the mean of `seconds` [S], however these scatter.

    NOTE: squared errors are divided by the predicted seconds. The totals then agree, since x times the gradient, which
    is sum(predicted - measured), is 0 at the optimum. Divided by measured seconds, steps that happened to be fast
    would count for more, and the prices of a noisy machine would be too low.
    """
    predicted, least = np.full(len(seconds), seconds.mean()), 0.01 * seconds.mean()
    for _ in range(REWEIGHTED):
        weight = np.maximum(predicted, least) ** -0.5
        prices = _non_negative(columns * weight[:, None], seconds * weight)
        predicted = columns @ prices
    return prices


def _non_negative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |a x - b| (Lawson and Hanson's active sets, columns scaled to length 1)."""
    scale = np.linalg.norm(a, axis=0)
    a = a / np.where(scale > 0, scale, 1)
    n = a.shape[1]
    x, free = np.zeros(n), np.zeros(n, dtype=bool)
    for _ in range(10 * n):
        gradient = a.T @ (b - a @ x)
        gradient[free | (scale == 0)] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-9:
            break
        free[best] = True
        while True:
            trial = np.zeros(n)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            bad = free & (trial <= 0)
            if not bad.any():
                break
            step = np.min(x[bad] / np.maximum(x[bad] - trial[bad], 1e-300))
            x = x + step * (trial - x)
            free &= x > 1e-12
            x[~free] = 0
        x = trial
    return x / np.where(scale > 0, scale, 1)
