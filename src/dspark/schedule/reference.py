"""The searches of `search.py` as plain loops: slow, short, and what the fast ones are tested against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["admission_order", "reference_early_stop", "reference_global"]

Price = Callable[[int], float]  # seconds of a round with a budget of K drafts


def admission_order(survival: np.ndarray, drafted: Sequence[int]) -> list[tuple[int, int]]:
    """(request, slot), best first: by survival, then earlier slot, then earlier request."""
    candidates = [(r, j) for r, length in enumerate(drafted) for j in range(int(length))]
    return sorted(candidates, key=lambda c: (-survival[c], c[1], c[0]))


def reference_early_stop(
    survival: np.ndarray, drafted: Sequence[int], outputs: int, price: Price, min_gain: float = 0.0
) -> list[int]:
    """Algorithm 1 as the paper writes it: lengths [R]. `outputs`: tokens decided without any draft."""
    lengths = [0] * len(drafted)
    tau = float(outputs)
    for budget, (r, j) in enumerate(admission_order(survival, drafted)):
        gain = float(survival[r, j])
        worth = tau + gain if min_gain == 0 else tau + (tau + gain - tau) / (1 + min_gain)
        if worth / price(budget + 1) <= tau / price(budget):
            break
        assert lengths[r] == j, "a prefix of the row is admitted"
        lengths[r] += 1
        tau += gain
    return lengths


def reference_global(
    survival: np.ndarray, drafted: Sequence[int], outputs: int, price: Price
) -> tuple[int, list[int]]:
    """Every budget is tried: (budget, lengths [R]) of the largest rate, the smaller budget where two are equal."""
    order = admission_order(survival, drafted)
    best, best_rate, tau = 0, outputs / price(0), float(outputs)
    for budget, candidate in enumerate(order, start=1):
        tau += float(survival[candidate])
        if tau / price(budget) > best_rate:
            best, best_rate = budget, tau / price(budget)
    lengths = [0] * len(drafted)
    for r, _ in order[:best]:
        lengths[r] += 1
    return best, lengths
