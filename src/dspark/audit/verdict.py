"""The audit itself: exact output laws, their distance to the target's, and a witness where they differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dspark.audit.exact import TOLERANCE, Exploration
from dspark.audit.witness import Witness, find_witness
from dspark.audit.world import World
from dspark.schedule.policies import Dependence, Policy

__all__ = ["AuditResult", "audit"]


@dataclass(frozen=True, eq=False)
class AuditResult:
    """What an audit found. `joint_tv` is the distance of all requests' tokens together to independent ones;
    None under the shared-noise rule, where requests with equal seeds are meant to depend on each other.
    """

    policy: str
    dependence: Dependence
    world: World
    rounds: int
    laws: list[np.ndarray]  # one a request: [V] * n
    expected: list[np.ndarray]  # the target's
    joint_tv: float | None
    schedules: int  # different schedules that came up: with one only, the policy was not put to the test
    witness: Witness | None = None

    @property
    def tv(self) -> list[float]:
        """Total variation distance of each request's law to the target's."""
        return [total_variation(a, b) for a, b in zip(self.laws, self.expected, strict=True)]

    @property
    def max_tv(self) -> float:
        """The largest distance, the joint one included."""
        return max([*self.tv, self.joint_tv or 0.0])

    @property
    def biased(self) -> bool:
        return self.max_tv > TOLERANCE

    @property
    def first_token(self) -> np.ndarray:
        """[V] law of request 0's first output token."""
        law = self.laws[0]
        first: np.ndarray = law.sum(axis=tuple(range(1, law.ndim)))
        return first

    def as_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "dependence": self.dependence.name,
            "rounds": self.rounds,
            "requests": self.world.num_requests,
            "tv": self.tv,
            "joint_tv": self.joint_tv,
            "biased": self.biased,
            "schedules": self.schedules,
            "first_token": self.first_token.tolist(),
            "witness": None if self.witness is None else self.witness.as_dict(),
        }


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return float(abs(a - b).sum()) / 2


def audit(
    world: World, policy: Policy, rounds: int = 3, tokens: int | None = None, with_witness: bool = True
) -> AuditResult:
    """Exact law of each request's first `tokens` output tokens (default: as many as rounds) under `policy`.

    `policy` is copied, never changed. Time grows with V^(gamma R rounds): keep the world tiny.

    Raises:
        DSparkError: rounds or tokens out of range, or the policy failed or returned impossible lengths.
    """
    exploration = Exploration(world, policy, rounds, tokens)
    joint = exploration.run()
    R = world.num_requests
    n = joint.ndim // R
    laws = [joint.sum(axis=tuple(i for i in range(n * R) if i // n != r)) for r in range(R)]
    expected = [world.target_law(a, n) for a in world.anchors]
    joint_tv = None
    if world.rule == "ratio":
        independent = expected[0]
        for law in expected[1:]:
            independent = np.multiply.outer(independent, law)
        joint_tv = total_variation(joint, independent)
    schedules = len({b.lengths for b in exploration.branches})
    result = AuditResult(
        type(policy).__name__, policy.dependence, world, rounds, laws, expected, joint_tv, schedules
    )
    if not (result.biased and with_witness):
        return result
    return replace(result, witness=find_witness(world, policy, rounds))
