"""How drafts fare, without a model: domains with a conditional acceptance a slot, and what confidences tell of it.

The chance that slot k of a block survives, given that the slots before it did, is

    p = sigmoid(mu_k + request_spread * z + passage_spread * y + slot_spread * u)

with standard normal z of the request, u of the slot, and y of the passage, which fades from round to round
(`persistence` is its correlation between two rounds). `mu_k` is solved for, so that the mean of p over all
requests is the stated conditional acceptance. A perfect confidence head reports p itself: it is calibrated, and the
spreads say how much it can tell apart. `Confidence` makes it worse. Outcomes are Bernoulli(p), slot by slot.

NOTE: the population's conditional acceptance at later slots lies above the stated mean wherever there is a spread
over requests or passages: easy ones survive longer. `Domain.accepted_length` accounts for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from dspark.errors import DSparkError

__all__ = ["Acceptance", "AcceptanceState", "Block", "Confidence", "Domain", "SyntheticAcceptance"]

_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(40)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()  # of a standard normal
_LIMIT = 30.0  # logits beyond are certain


@dataclass(frozen=True)
class Block:
    """One round's drafts of R requests. `run`: how many leading drafts verification would accept, 0..gamma."""

    survival: np.ndarray | None  # [R, gamma] a_{r,j} as the policy sees it; None without confidences
    run: np.ndarray  # [R] int64


class AcceptanceState(Protocol):
    """The drafts of one run."""

    def block(self, requests: np.ndarray, with_survival: bool) -> Block:
        """Draft for `requests` [R] (rows of the pool)."""
        ...


class Acceptance(Protocol):
    """`gamma`: draft slots of a block."""

    @property
    def gamma(self) -> int: ...

    @property
    def domain_names(self) -> tuple[str, ...]: ...

    def start(
        self, domains: tuple[str, ...], domain: np.ndarray, seeds: np.random.SeedSequence
    ) -> AcceptanceState:
        """For requests of `domain` [N], an index into `domains`. Difficulty is drawn from `seeds` first, so that it
        is the same for every policy."""
        ...


@dataclass(frozen=True)
class Domain:
    """Mean conditional acceptance by slot, and how much it varies (standard deviations of logits).

    Raises:
        DSparkError: no slots, a probability outside 0..1, a negative spread, persistence outside 0..1.
    """

    conditional: tuple[float, ...]  # [gamma]
    slot_spread: float = 0.0
    request_spread: float = 0.0
    passage_spread: float = 0.0
    persistence: float = 0.8

    def __post_init__(self) -> None:
        if not self.conditional or not all(0 <= c <= 1 for c in self.conditional):
            raise DSparkError(
                f"conditional acceptance must be probabilities, one a slot, got {self.conditional}"
            )
        spreads = (self.slot_spread, self.request_spread, self.passage_spread)
        if not all(np.isfinite(s) and s >= 0 for s in spreads):
            raise DSparkError(f"spreads must be 0 or more, got {spreads}")
        if not 0 <= self.persistence < 1:
            raise DSparkError(f"persistence must be at least 0 and below 1, got {self.persistence}")

    @staticmethod
    def of_accepted_length(length: float, gamma: int, **spreads: float) -> Domain:
        """The same conditional acceptance at every slot, chosen so that full verification commits `length` tokens a
        round on average over requests, bonus included.

        Raises:
            DSparkError: a length outside 1..gamma + 1.
        """
        if not 1 < length < gamma + 1:
            raise DSparkError(
                f"an accepted length with {gamma} drafts lies between 1 and {gamma + 1}, got {length}"
            )
        low, high = 0.0, 1.0
        shape = Domain((0.5,) * gamma, **spreads)
        for _ in range(40):
            middle = (low + high) / 2
            below = replace(shape, conditional=(middle,) * gamma).accepted_length() < length
            low, high = (middle, high) if below else (low, middle)
        return replace(shape, conditional=((low + high) / 2,) * gamma)

    @property
    def gamma(self) -> int:
        return len(self.conditional)

    def logits(self) -> np.ndarray:
        """[gamma] mu_k."""
        total = np.sqrt(self.slot_spread**2 + self.request_spread**2 + self.passage_spread**2)
        means = np.array(self.conditional)
        if total == 0:
            with np.errstate(divide="ignore"):
                return np.clip(np.log(means) - np.log1p(-means), -_LIMIT, _LIMIT)
        low, high = np.full(len(means), -2 * _LIMIT), np.full(len(means), 2 * _LIMIT)
        for _ in range(50):
            middle = (low + high) / 2
            below = _sigmoid(middle[:, None] + total * _NODES) @ _WEIGHTS < means
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return (low + high) / 2

    def accepted_length(self) -> float:
        """tau of full verification, averaged over requests and passages: 1 + sum_k E[prod_{i<=k} p_i]."""
        level = np.hypot(self.request_spread, self.passage_spread) * _NODES  # shared by the slots of a block
        inner = self.logits()[:, None, None] + level[:, None] + self.slot_spread * _NODES
        conditional = _sigmoid(inner) @ _WEIGHTS  # [gamma, levels]
        return float(1 + (conditional.cumprod(axis=0) @ _WEIGHTS).sum())


@dataclass(frozen=True)
class Confidence:
    """What is wrong with the confidences: reported logit = scale * (logit + noise * normal) + bias.

    `scale` above 1 is overconfidence (what STS takes back); `noise` blurs ranks, too. `available` False: a drafter
    without a confidence head.
    """

    noise: float = 0.0
    scale: float = 1.0
    bias: float = 0.0
    available: bool = True

    def __post_init__(self) -> None:
        if not all(np.isfinite(v) for v in (self.noise, self.scale, self.bias)):
            raise DSparkError("noise, scale and bias of a confidence must be finite")
        if self.noise < 0 or self.scale <= 0:
            raise DSparkError("a confidence needs noise of 0 or more and a scale above 0")

    @property
    def perfect(self) -> bool:
        return (self.noise, self.scale, self.bias) == (0.0, 1.0, 0.0)


@dataclass(frozen=True)
class SyntheticAcceptance:
    """Domains by name, and the quality of the confidences.

    Raises:
        DSparkError: no domain, or blocks of different widths.
    """

    domains: Mapping[str, Domain]
    confidence: Confidence = field(default_factory=Confidence)

    def __post_init__(self) -> None:
        if not self.domains:
            raise DSparkError("acceptance needs at least one domain")
        widths = {domain.gamma for domain in self.domains.values()}
        if len(widths) > 1:
            raise DSparkError(f"domains have blocks of different widths: {sorted(widths)}")

    @property
    def gamma(self) -> int:
        return next(iter(self.domains.values())).gamma

    @property
    def domain_names(self) -> tuple[str, ...]:
        return tuple(self.domains)

    def start(
        self, domains: tuple[str, ...], domain: np.ndarray, seeds: np.random.SeedSequence
    ) -> AcceptanceState:
        unknown = [name for name in domains if name not in self.domains]
        if unknown:
            raise DSparkError(f"no acceptance for domain {unknown[0]!r}: there are {', '.join(self.domains)}")
        return _Synthetic(self, [self.domains[name] for name in domains], domain, seeds)


class _Synthetic:
    def __init__(
        self,
        model: SyntheticAcceptance,
        kinds: list[Domain],
        domain: np.ndarray,
        seeds: np.random.SeedSequence,
    ) -> None:
        of_requests, of_rounds = (np.random.default_rng(s) for s in seeds.spawn(2))
        spread = np.array([kind.request_spread for kind in kinds])[domain]
        level = spread * of_requests.standard_normal(len(domain))
        self._base = np.stack([kind.logits() for kind in kinds])[domain] + level[:, None]  # [N, gamma]
        self._slot_spread = np.array([kind.slot_spread for kind in kinds])[domain]
        self._passage_spread = np.array([kind.passage_spread for kind in kinds])[domain]
        self._keep = np.array([kind.persistence for kind in kinds])[domain]
        self._passage = of_requests.standard_normal(len(domain))
        self._moving = bool((self._passage_spread > 0).any())
        self._uneven = bool((self._slot_spread > 0).any())
        self._quality, self._rng = model.confidence, of_rounds

    def block(self, requests: np.ndarray, with_survival: bool) -> Block:
        logits = self._base[requests]
        if self._moving:
            keep = self._keep[requests]
            fresh = self._rng.standard_normal(len(requests))
            passage = keep * self._passage[requests] + np.sqrt(1 - keep**2) * fresh
            self._passage[requests] = passage
            logits += (self._passage_spread[requests] * passage)[:, None]
        if self._uneven:
            logits += self._slot_spread[requests][:, None] * self._rng.standard_normal(logits.shape)
        p = _sigmoid(logits)
        run = leading(self._rng.random(p.shape) < p)
        if not (with_survival and self._quality.available):
            return Block(None, run)
        return Block(self._reported(logits, p).cumprod(axis=1), run)

    def _reported(self, logits: np.ndarray, p: np.ndarray) -> np.ndarray:
        quality = self._quality
        if quality.perfect:
            return p
        noise = quality.noise * self._rng.standard_normal(p.shape) if quality.noise else 0.0
        return _sigmoid(quality.scale * (logits + noise) + quality.bias)


def leading(hits: np.ndarray) -> np.ndarray:
    """[R] int64: how many leading entries of each row of `hits` [R, gamma] are true."""
    stopped = np.ones((len(hits), hits.shape[1] + 1), dtype=bool)
    np.logical_not(hits, out=stopped[:, :-1])
    return stopped.argmax(axis=1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
