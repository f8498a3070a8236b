"""A world small enough to enumerate: order-1 target and drafter tables, confidences, requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from dspark.errors import DSparkError

__all__ = ["Confidence", "Noise", "Rule", "World", "appendix_a", "overlap", "random_world"]

Confidence = Callable[[tuple[int, ...], int], float]
Rule = Literal["ratio", "shared-noise"]
Noise = Literal["fresh", "position", "seed"]

_UNIT_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class World:
    """What is audited, apart from the policy.

    Each request starts behind a prompt of one token, its anchor. p(next | last) = p_target[last]; slot k
    (from 1) is drafted from p_draft[k - 1, previous token].

    `confidence(tokens, k)` is c_k of a block; tokens = (x_0, ..., x_L), anchor first. A legal one reads
    tokens[:k] alone: a policy that sees a confidence reading x_k looks at what it decides about.

    `noise` says what a draft draw of the ratio rule is addressed by, besides its slot: "fresh" (seed, request,
    round) as it must be, "position" (request, position: used again next round), or "seed" (seed, round: the same
    for requests with equal seeds). The shared-noise rule draws target *and* draft by (seed, position), and
    is enumerated for two tokens (argmax(log p + Gumbel noise) is the inverse CDF of one uniform) and for
    three (`gumbel`).

    `p_ratio`: what acceptance divides by, where that is not what the drafts were sampled from.
    """

    p_target: np.ndarray  # [V, V]
    p_draft: np.ndarray  # [gamma, V, V]
    confidence: Confidence
    anchors: tuple[int, ...] = (0,)  # one a request
    seeds: tuple[int, ...] | None = None  # one a request; None: all equal
    p_ratio: np.ndarray | None = None  # [gamma, V, V]
    rule: Rule = "ratio"
    noise: Noise = "fresh"

    def __post_init__(self) -> None:
        V = len(self.p_target)
        _check_rows("p_target", self.p_target, (V, V))
        _check_rows("p_draft", self.p_draft, (self.gamma, V, V))
        if self.p_ratio is not None:
            _check_rows("p_ratio", self.p_ratio, (self.gamma, V, V))
        if not self.anchors or not all(0 <= a < V for a in self.anchors):
            raise DSparkError(f"anchors must be tokens 0..{V - 1}, one a request, got {self.anchors}")
        if self.seeds is not None and len(self.seeds) != len(self.anchors):
            raise DSparkError(f"{len(self.anchors)} requests need as many seeds, got {len(self.seeds)}")
        if self.rule == "shared-noise" and V > 3:
            raise DSparkError(f"the shared-noise rule is enumerated for 2 or 3 tokens only, got {V}")

    @property
    def vocab_size(self) -> int:
        return len(self.p_target)

    @property
    def gamma(self) -> int:
        return len(self.p_draft)

    @property
    def num_requests(self) -> int:
        return len(self.anchors)

    @property
    def divisor(self) -> np.ndarray:
        """[gamma, V, V] the p_d that acceptance divides by."""
        return self.p_draft if self.p_ratio is None else self.p_ratio

    @property
    def tolerates_live(self) -> bool:
        """Output stays exact whatever the schedule looks at: `dspark.acceptance.tolerates_live`."""
        deterministic = self.p_ratio is None and _one_hot(self.p_draft)
        return self.rule == "shared-noise" or _one_hot(self.p_target) or deterministic

    def seed(self, r: int) -> int:
        return 0 if self.seeds is None else self.seeds[r]

    def restrict(self, requests: Sequence[int], gamma: int) -> World:
        """The same world with some of its requests and shorter blocks."""
        return replace(
            self,
            anchors=tuple(self.anchors[r] for r in requests),
            seeds=None if self.seeds is None else tuple(self.seeds[r] for r in requests),
            p_draft=self.p_draft[:gamma],
            p_ratio=None if self.p_ratio is None else self.p_ratio[:gamma],
        )

    def target_law(self, anchor: int, n: int) -> np.ndarray:
        """The target's own distribution of the next n tokens, [V] * n."""
        joint: np.ndarray = np.ones(())
        for i in range(n):
            joint = self.p_target[anchor] if i == 0 else joint[..., None] * self.p_target
        return joint


def overlap(p_target: np.ndarray, p_draft: np.ndarray) -> Confidence:
    """The perfect confidence head, eq. (8): sum_v min(p_d(v), p_t(v)) behind x_{k-1}."""

    def confidence(tokens: tuple[int, ...], k: int) -> float:
        previous = tokens[k - 1]
        return float(np.minimum(p_target[previous], p_draft[k - 1, previous]).sum())

    return confidence


def appendix_a(num_requests: int = 1, gamma: int = 2) -> World:
    """The paper's counterexample: p_t = (.7, .3), p_d = (.5, .5), c_1 = .8, c_2 = .9 behind A and 0 behind B.

    Slots past the second are as certain as the second's prefix (1 behind A, 0 behind B).
    """

    def confidence(tokens: tuple[int, ...], k: int) -> float:
        if k == 1:
            return 0.8
        return 0.0 if tokens[k - 1] == 1 else (0.9 if k == 2 else 1.0)

    return World(
        p_target=np.array([[0.7, 0.3], [0.7, 0.3]]),
        p_draft=np.full((gamma, 2, 2), 0.5),
        confidence=confidence,
        anchors=(0,) * num_requests,
    )


def random_world(
    seed: int, vocab_size: int = 2, gamma: int = 2, num_requests: int = 2, ties: bool = False
) -> World:
    """Random tables. Confidences are a random legal table; with `ties` few values, 1 among them."""
    rng = np.random.default_rng(seed)
    V = vocab_size
    p_target = rng.dirichlet(np.ones(V), size=V)
    p_draft = rng.dirichlet(np.ones(V), size=(gamma, V))
    table = rng.choice([0.4, 0.8, 1.0], size=(gamma, V)) if ties else rng.uniform(0.05, 1, size=(gamma, V))

    def confidence(tokens: tuple[int, ...], k: int) -> float:
        return float(table[k - 1, tokens[k - 1]])

    return World(p_target, p_draft, confidence, tuple(int(a) for a in rng.integers(V, size=num_requests)))


def _one_hot(table: np.ndarray) -> bool:
    return bool((table.max(-1) == 1).all())


def _check_rows(name: str, table: np.ndarray, shape: tuple[int, ...]) -> None:
    if table.shape != shape:
        raise DSparkError(f"{name} must have the shape {list(shape)}, got {list(table.shape)}")
    if not ((table >= 0).all() and (abs(table.sum(-1) - 1) < _UNIT_TOLERANCE).all()):
        raise DSparkError(f"every row of {name} must be a distribution: non-negative, with the sum 1")
