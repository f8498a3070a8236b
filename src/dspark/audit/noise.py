"""Draws that are used more than once: which addresses share a uniform, and what is known about it.

A shared uniform matters through the tokens it picks. Each use narrows it down to the piece of the inverse CDF
that the token stands for, so that is all that is kept of it. Shared noise over three tokens is kept as the draws made
from it (`gumbel`); over two tokens it is one uniform.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark.audit.gumbel import after_draw
from dspark.audit.world import Rule, World

__all__ = ["Address", "Known", "address", "draw", "still_needed"]

Address = tuple[int, int]
Piece = tuple[Any, ...]  # [low, high) of a uniform, or the draws known of noise over three tokens
Known = tuple[tuple[Address, Piece], ...]  # address -> piece, sorted


def address(world: World, r: int, committed: int, slot: int) -> Address | None:
    """What the draw of request r's slot (from 0) is shared by; None for a draw that nothing else uses."""
    if world.rule == "shared-noise":
        return world.seed(r), committed + 1 + slot
    if world.noise == "position":
        return r, committed + 1 + slot
    if world.noise == "seed":
        return world.seed(r), slot
    return None


def draw(
    where: Address | None, row: np.ndarray, known: Known, rule: Rule = "ratio"
) -> list[tuple[int, Known, float]]:
    """Tokens that the draw at `where` may give from `row` [V], with what is known then and probabilities."""
    if where is None:
        return [(v, known, float(p)) for v, p in enumerate(row) if p > 0]
    pieces = dict(known)
    if rule == "shared-noise" and len(row) == 3:
        drawn = after_draw(row, pieces.get(where, ()))
        return [(v, tuple(sorted({**pieces, where: wins}.items())), p) for v, wins, p in drawn]
    low, high = pieces.get(where, (0.0, 1.0))
    results = []
    ends = np.minimum(row.cumsum(), 1.0)
    ends[np.flatnonzero(row)[-1] :] = 1.0
    for token, (start, end) in enumerate(zip((0.0, *ends[:-1].tolist()), ends.tolist(), strict=True)):
        piece = (max(low, start), min(high, end))
        if piece[0] < piece[1]:
            after = tuple(sorted({**pieces, where: piece}.items()))
            results.append((token, after, (piece[1] - piece[0]) / (high - low)))
    return results


def still_needed(world: World, known: Known, committed: tuple[int, ...]) -> Known:
    """What is of use behind a round: draws of positions that some request has yet to decide."""
    if not known or (world.rule == "ratio" and world.noise == "seed"):
        return ()  # the next round's draws are others

    def decided(owner: int) -> int:
        if world.rule == "ratio":
            return committed[owner]
        return min(c for r, c in enumerate(committed) if world.seed(r) == owner)

    return tuple((where, piece) for where, piece in known if where[1] > decided(where[0]))
