"""From raw times to prices: medians, made monotone, with draft, context and request terms beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.cost import AdditiveCost, ContextCost, DraftCost, TableCost

__all__ = ["Probe", "Sample", "fit_cost", "flat", "isotonic", "pooled_noise"]

Kind = Literal["step", "draft", "behind", "upkeep"]
REQUESTS_MATTER = 0.02  # of the price of a pass: a smaller effect of the number of requests is left out
SIGMA_OF_MAD = 1.4826


class Sample(NamedTuple):
    """One timed call.

    `rows`: query tokens of a "step" (a whole round, but for drafting; among others without, which no drafter follows),
    or of one "behind" a draft of all its rows, which the drafter follows; drafts of a "draft" (`Drafter.propose` and
    what the engine does around it); committed rows of an "upkeep" (`Drafter.observe`). `context`: cached positions of
    *each* request.
    """

    kind: Kind
    requests: int
    rows: int
    context: int
    seconds: float


Probe = tuple[Kind, int, int, int]  # a sample's first four fields


def medians(samples: Iterable[Sample]) -> dict[Probe, float]:
    """Median seconds of each probe (kind, requests, rows, context)."""
    return {probe: float(np.median(times)) for probe, times in _by_probe(samples).items()}


def pooled_noise(samples: Iterable[Sample]) -> float:
    """Relative scatter of one sample, pooled over all probes (a single one has too few to tell its own)."""
    residuals: list[float] = []
    for times in _by_probe(samples).values():
        middle = np.median(times)
        if len(times) > 1 and middle > 0:
            # Residuals from a group's own median are too small by about sqrt((n - 1) / n).
            residuals += list((np.array(times) / middle - 1) * (len(times) / (len(times) - 1)) ** 0.5)
    return float(SIGMA_OF_MAD * np.median(np.abs(residuals))) if residuals else 0.0


def isotonic(values: Sequence[float], weights: Sequence[float] | None = None) -> np.ndarray:
    """The non-decreasing sequence nearest to `values` in (weighted) squares: pooled adjacent violators."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        blocks.append((float(value), float(weight), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return np.concatenate([np.full(n, mean) for mean, _, n in blocks]) if blocks else np.zeros(0)


def fit_cost(samples: Sequence[Sample]) -> TableCost | AdditiveCost:
    """Prices from the samples of one profile.

    Seconds by rows come from the shortest context, as isotonic medians; beyond the last probe the last slope goes
    on. Attention's price comes from the longer contexts. Upkeep of the drafter's own context is part of a draft's
    price: for the anchor by what a round behind a draft takes longer than one that no drafter follows, for further
    rows by those that a draft wins. Drafters that put it off until they draft (`Deferring`) have no samples of it: it
    is in those of drafts.

    Raises:
        DSparkError: fewer than two sizes of pass were measured.
    """
    table = medians(samples)
    steps = {probe[1:]: t for probe, t in table.items() if probe[0] == "step"}
    if len({rows for _, rows, _ in steps}) < 2:
        raise DSparkError("a cost profile needs passes of two sizes at least: measure again")
    shortest = min(context for _, _, context in steps)
    base = {(r, n): t for (r, n, context), t in steps.items() if context == shortest}
    per_request = _per_request(base)
    sizes = sorted({n for _, n in base})
    at_one = [np.median([t - per_request * (r - 1) for (r, m), t in base.items() if m == n]) for n in sizes]
    seconds = tuple(isotonic(at_one).tolist())
    draft, context = _draft(table, _upkeep(table), _displacement(table)), _context(steps, shortest)
    if per_request * max(r for r, _ in base) <= REQUESTS_MATTER * seconds[0]:
        return TableCost(tuple(sizes), seconds, draft=draft, context=context)
    requests = tuple(sorted({1, *(r for r, _ in base)}))
    alpha = tuple(per_request * (r - 1) for r in requests)
    return AdditiveCost(0.0, requests, alpha, tuple(sizes), seconds, draft=draft, context=context)


def flat(samples: Sequence[Sample]) -> str | None:
    """Says so where the largest pass costs no more than the smallest beyond the noise of one sample, else None."""
    cost = fit_cost(samples)
    seconds = cost.theta if isinstance(cost, AdditiveCost) else cost.seconds
    if seconds[-1] > seconds[0] * (1 + pooled_noise(samples)):
        return None
    return f"the profile is flat: {cost.tokens[-1]} rows cost no more than {cost.tokens[0]} beyond noise"


def _by_probe(samples: Iterable[Sample]) -> dict[Probe, list[float]]:
    groups: dict[Probe, list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample[:4]].append(sample.seconds)
    return groups


def _per_request(base: dict[tuple[int, int], float]) -> float:
    """Seconds that one more request adds to a pass of the same rows, from sizes measured with several numbers."""
    slopes = [
        (base[r2, n] - base[r1, n]) / (r2 - r1) for r1, n in base for r2, m in base if m == n and r2 > r1
    ]
    return max(0.0, float(np.median(slopes))) if slopes else 0.0


def _upkeep(table: dict[Probe, float]) -> float:
    """Seconds of observing a further row."""
    rows = [(n, t) for (kind, _, n, _), t in table.items() if kind == "upkeep"]
    return _nonnegative([[1.0, n] for n, _ in rows], [t for _, t in rows])[1] if rows else 0.0


def _displacement(table: dict[Probe, float]) -> float:
    """Seconds that a round takes longer behind a draft than without: a constant, fitted with the weights of relative
    noise."""
    pairs = [
        (t - table["step", r, n, c], t)
        for (kind, r, n, c), t in table.items()
        if kind == "behind" and ("step", r, n, c) in table
    ]
    weights = [t**-2 for _, t in pairs]
    return max(0.0, float(np.average([d for d, _ in pairs], weights=weights))) if pairs else 0.0


def _draft(table: dict[Probe, float], upkeep: float, displacement: float) -> DraftCost:
    rows = [(r, n, t) for (kind, r, n, _), t in table.items() if kind == "draft"]
    if not rows:
        return DraftCost(per_draft=upkeep)
    base, request, draft = _nonnegative([[1.0, r, n] for r, n, _ in rows], [t for _, _, t in rows])
    return DraftCost(base, request, draft + upkeep, displacement)


def _context(steps: dict[tuple[int, int, int], float], shortest: int) -> ContextCost:
    """Attention's price, from passes that differ in the context alone."""
    beyond = [
        (requests * (context - shortest), rows * (context - shortest), t - steps[requests, rows, shortest])
        for (requests, rows, context), t in steps.items()
        if context > shortest and (requests, rows, shortest) in steps
    ]
    if not beyond:
        return ContextCost(profiled_at=shortest)
    position, pair = _nonnegative([[p, q] for p, q, _ in beyond], [t for *_, t in beyond])
    return ContextCost(position, pair, shortest)


def _nonnegative(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares with coefficients of 0 or more, by trying every set of them (there are two or three)."""
    x, y = np.array(features, dtype=np.float64), np.array(seconds)
    k = x.shape[1]
    best, error = np.zeros(k), float((y**2).sum())
    for size in range(1, k + 1):
        for kept in combinations(range(k), size):
            part = np.linalg.lstsq(x[:, kept], y, rcond=None)[0]
            misfit = float(((x[:, kept] @ part - y) ** 2).sum())
            if (part >= 0).all() and misfit < error * (1 - 1e-9):
                best, error = np.zeros(k), misfit
                best[list(kept)] = part
    return [float(b) for b in best]
