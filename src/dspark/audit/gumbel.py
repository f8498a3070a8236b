"""Shared (Gumbel) noise over three tokens, exactly: which noise lets which distributions draw which tokens.

Noise of one position is three independent exponentials E; distribution p draws argmin_v E(v) / p(v). Only the
direction E / sum E matters, and it is uniform on the triangle of all directions. "p draws w" cuts a convex
polygon out of the triangle, so several draws from the same noise have the area of an intersection as probability.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

__all__ = ["Win", "after_draw"]

Win = tuple[tuple[float, ...], int]  # (p, token that it draws)
Wins = tuple[Win, ...]  # sorted, each once: what is known of one position's noise
Point = tuple[float, float, float]

_TRIANGLE: tuple[Point, ...] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
_NOTHING = 1e-15  # smaller areas are rounding


def after_draw(row: np.ndarray, known: Wins) -> list[tuple[int, Wins, float]]:
    """Tokens that `row` [3] may draw where `known` is known: with what is known then, and probabilities."""
    before = _area(known)
    p = tuple(float(x) for x in row)
    results = []
    for token in range(len(p)):
        if p[token] > 0:
            wins = tuple(sorted({*known, (p, token)}))
            share = _area(wins) / before
            if share > _NOTHING:
                results.append((token, wins, share))
    return results


@lru_cache(maxsize=100_000)
def _area(wins: Wins) -> float:
    """Twice the area of the directions (in two of their coordinates) under which all of `wins` happen."""
    polygon = list(_TRIANGLE)
    for p, w in wins:
        for v in range(3):
            if v != w:
                polygon = _clip(polygon, p, w, v)
    x, y = np.array([(a, b) for a, b, _ in polygon] or [(0.0, 0.0)]).T
    return abs(float(x @ np.roll(y, -1) - y @ np.roll(x, -1)))


def _clip(polygon: list[Point], p: tuple[float, ...], w: int, v: int) -> list[Point]:
    """The part of a convex polygon in which w beats v: E(v) p(w) >= E(w) p(v)."""
    kept: list[Point] = []
    lead = [e[v] * p[w] - e[w] * p[v] for e in polygon]
    for i, here in enumerate(polygon):
        there, a, b = polygon[i - 1], lead[i], lead[i - 1]
        if (a < 0 < b) or (b < 0 < a):
            t = b / (b - a)
            kept.append(tuple(y + t * (x - y) for x, y in zip(here, there, strict=True)))  # type: ignore[arg-type]
        if a >= 0:
            kept.append(here)
    return kept
