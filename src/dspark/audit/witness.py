"""Why a pair is biased: the smallest world that shows it, and two branches that differ where they must not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np

from dspark.audit.exact import TOLERANCE, Branch, Exploration
from dspark.audit.noise import address
from dspark.audit.world import World
from dspark.schedule.policies import Policy

__all__ = ["Deviation", "Fork", "Witness", "find_witness"]

Cause = Literal["schedule", "reused noise", "acceptance", "joint"]


@dataclass(frozen=True, eq=False)
class Deviation:
    """Law of the next token behind `prefix` (output tokens of `request`), and what the target says.

    `request` None: the requests' laws are right one by one, and these are the laws of all their tokens together.
    """

    request: int | None
    prefix: tuple[int, ...]
    got: np.ndarray
    expected: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        return {
            "request": self.request,
            "prefix": list(self.prefix),
            "got": self.got.tolist(),
            "expected": self.expected.tolist(),
        }


@dataclass(frozen=True, eq=False)
class Fork:
    """Two branches alike up to slot `slot` - 1 of `request`: one verifies x_slot, the other does not."""

    request: int
    slot: int  # from 1
    verified: Branch
    dropped: Branch

    def as_dict(self) -> dict[str, Any]:
        return {
            "request": self.request,
            "slot": self.slot,
            "round": self.verified.round + 1,
            "verified": _branch(self.verified),
            "dropped": _branch(self.dropped),
        }


@dataclass(frozen=True, eq=False)
class Witness:
    """`cause` "schedule": whether x_k is verified depends on x_k or what follows; "reused noise": the schedule
    learned of x_k from a draw made elsewhere; "acceptance": the rule divides by what was not sampled from;
    "joint": requests depend on each other's drafts in a circle."""

    cause: Cause
    requests: tuple[int, ...]  # of the audited world
    rounds: int
    gamma: int
    deviation: Deviation
    fork: Fork | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "requests": list(self.requests),
            "rounds": self.rounds,
            "gamma": self.gamma,
            **self.deviation.as_dict(),
            "fork": None if self.fork is None else self.fork.as_dict(),
        }


def find_witness(world: World, policy: Policy, rounds: int) -> Witness | None:
    """The first biased world by number of requests, rounds, slots; None where nothing is biased."""
    for requests, few_rounds, gamma in _sizes(world, rounds):
        small = world.restrict(requests, gamma)
        exploration = Exploration(small, policy, few_rounds)
        found = deviation(small, exploration.run())
        if found is None:
            continue
        fork = _fork(small, exploration.branches)
        cause: Cause = "acceptance" if small.p_ratio is not None else "joint"
        if fork is not None:
            alike = fork.verified.view == fork.dropped.view and small.noise == "fresh"
            cause = "schedule" if alike else "reused noise"
        return Witness(cause, requests, few_rounds, gamma, found, fork)
    return None


def _sizes(world: World, rounds: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    for count in range(1, world.num_requests + 1):
        for few in range(1, rounds + 1):
            for gamma in range(1, world.gamma + 1):
                for requests in combinations(range(world.num_requests), count):
                    yield requests, few, gamma


def deviation(world: World, joint: np.ndarray) -> Deviation | None:
    """The first token whose law is not the target's, by position, then request, then prefix."""
    R = world.num_requests
    n = joint.ndim // R
    for position in range(n):
        for r, anchor in enumerate(world.anchors):
            kept = range(n * r, n * r + position + 1)
            law = joint.sum(axis=tuple(i for i in range(n * R) if i not in kept))
            wrong = abs(law - world.target_law(anchor, position + 1)).sum(-1) > TOLERANCE
            if wrong.any():
                prefix = tuple(int(i) for i in np.argwhere(wrong)[0])
                row = law[prefix]
                return Deviation(r, prefix, row / row.sum(), world.p_target[(anchor, *prefix)[-1]])
    return _joint_deviation(world, joint, n) if world.rule == "ratio" else None


def _joint_deviation(world: World, joint: np.ndarray, n: int) -> Deviation | None:
    independent = world.target_law(world.anchors[0], n)
    for anchor in world.anchors[1:]:
        independent = np.multiply.outer(independent, world.target_law(anchor, n))
    if abs(joint - independent).sum() / 2 <= TOLERANCE:
        return None
    return Deviation(None, (), joint.ravel(), independent.ravel())


def _fork(world: World, branches: list[Branch]) -> Fork | None:
    """Two branches that know the same of x_k and treat it differently, or that know x_k from elsewhere."""
    groups: dict[tuple[int, int, Hashable], list[Branch]] = defaultdict(list)
    for b in branches:
        for r, drafts in enumerate(b.block):
            for k in range(1, len(drafts) + 1):
                key = _legitimate(world, b, r, k)
                if key is not None:
                    groups[k, r, (b.round, key)].append(b)
    for (k, r, _), group in groups.items():
        verified = [b for b in group if b.lengths[r] >= k]
        dropped = [b for b in group if b.lengths[r] < k]
        pairs = [(v, d) for v in verified for d in dropped if v.block[r][k - 1 :] != d.block[r][k - 1 :]]
        if pairs:
            v, d = next((p for p in pairs if p[0].block[r][k - 1] != p[1].block[r][k - 1]), pairs[0])
            return Fork(r, k, v, d)
    return None


def _legitimate(world: World, b: Branch, r: int, k: int) -> Hashable | None:
    """What the decision on x_k of request r may depend on, as far as a fork must keep it equal.

    With reused noise other things carry x_k: the other requests' drafts of this round, or the history.
    """
    before = b.block[r][: k - 1]
    others = (*b.block[:r], *b.block[r + 1 :])
    if world.noise == "fresh" or world.rule == "shared-noise":
        return (b.view, before, others)
    if world.noise == "seed":
        return (b.view, before)
    where = address(world, r, b.view.committed[r], k - 1)
    revealed = where in dict(b.view.noise)
    return (b.view.anchors[r], before) if revealed else None


def _branch(b: Branch) -> dict[str, Any]:
    return {
        "drafts": [list(x) for x in b.block],
        "survival": b.survival.tolist(),
        "lengths": list(b.lengths),
    }
