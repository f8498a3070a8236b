"""What a round costs: seconds of a target pass by its rows, and of the draft before it.

A table prices what is *executed*: where passes are padded to captured sizes, a batch of B tokens costs what the
next size costs. Behind the last probe the last slope goes on; nothing is ever clamped there, or a table that ends
early would make every larger batch look free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from dspark.errors import DSparkError

__all__ = ["AdditiveCost", "ContextCost", "CostModel", "DraftCost", "TableCost", "monotone_medians"]

FLAT = 1.02  # a curve that rises less than this from its first probe to its last tells sizes apart by noise alone


class CostModel(Protocol):
    """Prices of one machine, model and drafter. Seconds; arguments broadcast against each other."""

    @property
    def warning(self) -> str | None:
        """What is suspicious about these prices, to be shown to whoever runs with them."""
        ...

    def step_seconds(
        self, num_requests: np.ndarray | int, query_tokens: np.ndarray | int, context: np.ndarray | int
    ) -> np.ndarray:
        """One target pass: `query_tokens` rows of `num_requests` requests with `context` cached positions in all."""
        ...

    def draft_seconds(self, num_requests: np.ndarray | int, drafts: np.ndarray | int) -> np.ndarray:
        """Proposing `drafts` tokens in all for `num_requests` requests; 0 where there are no drafts."""
        ...


@dataclass(frozen=True)
class DraftCost:
    """Seconds of a draft: base + per_request * requests drafted for + per_draft * drafts."""

    base: float = 0.0
    per_request: float = 0.0
    per_draft: float = 0.0

    def __post_init__(self) -> None:
        _refuse_negative("draft cost", (self.base, self.per_request, self.per_draft))

    def seconds(self, num_requests: np.ndarray | int, drafts: np.ndarray | int) -> np.ndarray:
        drafts = np.asarray(drafts)
        full = self.base + self.per_request * np.asarray(num_requests) + self.per_draft * drafts
        return np.where(drafts > 0, full, 0.0)


@dataclass(frozen=True)
class ContextCost:
    """Seconds that attention adds, beyond what the table's own probes held.

    per_position * cached positions (the KV is read once) + per_pair * (row, position) pairs (each row attends to
    its request's positions; pairs are taken as rows * mean context). `profiled_at`: positions a request had when
    the table was measured.
    """

    per_position: float = 0.0
    per_pair: float = 0.0
    profiled_at: float = 0.0

    def __post_init__(self) -> None:
        _refuse_negative("context cost", (self.per_position, self.per_pair, self.profiled_at))

    def add(
        self,
        seconds: np.ndarray,
        num_requests: np.ndarray | int,
        query_tokens: np.ndarray | int,
        context: np.ndarray | int,
    ) -> np.ndarray:
        """`seconds` of the table with attention's added. A context shorter than the profile's can save a table's
        seconds, but never make a pass free or a larger one cheaper: pairs below the profile's are not credited."""
        if self.per_position == 0 and self.per_pair == 0:
            return seconds
        requests = np.maximum(num_requests, 1)
        beyond = np.asarray(context) - self.profiled_at * requests
        pairs = query_tokens * np.maximum(beyond, 0) / requests
        return np.maximum(seconds + self.per_position * beyond, 0.01 * seconds) + self.per_pair * pairs


@dataclass(frozen=True)
class TableCost:
    """Seconds by query tokens (the paper's 1 / SPS(B)).

    `tokens` increase, `seconds` are positive and never fall. Between probes: linear, or with `executed` the next
    probe's price (the probes are the captured sizes). Below the first probe its price holds. `num_requests` has
    no price of its own here.

    Raises:
        DSparkError: fewer than two probes, not finite, not increasing, or falling.
    """

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    executed: bool = False
    draft: DraftCost = field(default_factory=DraftCost)
    context: ContextCost = field(default_factory=ContextCost)

    def __post_init__(self) -> None:
        _check_probes("cost table", self.tokens, self.seconds)
        if self.seconds[0] <= 0:
            raise DSparkError("cost table: seconds must be above 0; profile the machine again")

    @cached_property
    def _curve(self) -> _Line:
        return (_Staircase if self.executed else _Line)(self.tokens, self.seconds)

    @property
    def warning(self) -> str | None:
        return _flatness("cost table", self.tokens, self.seconds)

    def step_seconds(
        self, num_requests: np.ndarray | int, query_tokens: np.ndarray | int, context: np.ndarray | int
    ) -> np.ndarray:
        return self.context.add(self._curve(query_tokens), num_requests, query_tokens, context)

    def draft_seconds(self, num_requests: np.ndarray | int, drafts: np.ndarray | int) -> np.ndarray:
        return self.draft.seconds(num_requests, drafts)


@dataclass(frozen=True)
class AdditiveCost:
    """bias + alpha(requests) + theta(query tokens), each linear between probes (SGLang's and TensorRT-LLM's form).

    Raises:
        DSparkError: as `TableCost`, for either table; a negative price, or nothing that costs anything.
    """

    bias: float
    requests: tuple[int, ...]
    alpha: tuple[float, ...]
    tokens: tuple[int, ...]
    theta: tuple[float, ...]
    draft: DraftCost = field(default_factory=DraftCost)
    context: ContextCost = field(default_factory=ContextCost)

    def __post_init__(self) -> None:
        _check_probes("alpha table", self.requests, self.alpha)
        _check_probes("theta table", self.tokens, self.theta)
        _refuse_negative("bias", (self.bias,))
        _refuse_negative("additive cost", (self.alpha[0], self.theta[0]))
        if self.bias + self.alpha[0] + self.theta[0] <= 0:
            raise DSparkError("additive cost: the smallest pass costs nothing; profile the machine again")

    @cached_property
    def _alpha(self) -> _Line:
        return _Line(self.requests, self.alpha)

    @cached_property
    def _theta(self) -> _Line:
        return _Line(self.tokens, self.theta)

    @property
    def warning(self) -> str | None:
        lowest = self.bias + self.alpha[0]
        return _flatness("theta table", self.tokens, tuple(lowest + t for t in self.theta))

    def step_seconds(
        self, num_requests: np.ndarray | int, query_tokens: np.ndarray | int, context: np.ndarray | int
    ) -> np.ndarray:
        seconds = self.bias + self._alpha(num_requests) + self._theta(query_tokens)
        return self.context.add(seconds, num_requests, query_tokens, context)

    def draft_seconds(self, num_requests: np.ndarray | int, drafts: np.ndarray | int) -> np.ndarray:
        return self.draft.seconds(num_requests, drafts)


def monotone_medians(
    tokens: Sequence[int] | np.ndarray, seconds: Sequence[float] | np.ndarray
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A table from raw samples: the median at each size, raised to the largest one before it."""
    sizes, samples = np.asarray(tokens), np.asarray(seconds, dtype=np.float64)
    if len(sizes) != len(samples) or not len(sizes):
        raise DSparkError(f"{len(sizes)} sizes and {len(samples)} times: give one time a size, at least one")
    probes = np.unique(sizes)
    medians = np.maximum.accumulate([np.median(samples[sizes == p]) for p in probes])
    return tuple(int(p) for p in probes), tuple(float(m) for m in medians)


class _Line:
    """Linear between probes, the first value below them, the last slope beyond them."""

    def __init__(self, probes: tuple[int, ...], values: tuple[float, ...]) -> None:
        self.probes, self.values = np.array(probes), np.array(values)
        self.last = probes[-1]
        self.slope = (values[-1] - values[-2]) / (probes[-1] - probes[-2])

    def __call__(self, x: np.ndarray | int) -> np.ndarray:
        return self._beyond(np.interp(x, self.probes, self.values), x)

    def _beyond(self, inside: np.ndarray, x: np.ndarray | int) -> np.ndarray:
        return inside + self.slope * np.maximum(np.asarray(x) - self.last, 0)


class _Staircase(_Line):
    """The value at the next probe; beyond the last one nothing is padded and the last slope goes on."""

    def __call__(self, x: np.ndarray | int) -> np.ndarray:
        index = np.searchsorted(self.probes, x)
        return self._beyond(self.values.take(index, mode="clip"), x)


def _check_probes(name: str, probes: Sequence[int], values: Sequence[float]) -> None:
    if len(probes) != len(values):
        raise DSparkError(f"{name}: {len(probes)} probes but {len(values)} values; give one value a probe")
    if len(probes) < 2:
        raise DSparkError(f"{name}: {len(probes)} probes give no slope; profile at least two sizes")
    if not (np.isfinite(probes).all() and np.isfinite(values).all()):
        raise DSparkError(f"{name}: holds a value that is not finite; profile the machine again")
    if probes[0] < 0 or (np.diff(probes) <= 0).any():
        raise DSparkError(f"{name}: probes must be 0 or more and increase, got {list(probes)}")
    falls = np.flatnonzero(np.diff(values) < 0)
    if len(falls):
        at = int(falls[0])
        raise DSparkError(
            f"{name}: {probes[at + 1]} costs less than {probes[at]}; repeat the profile, "
            "or clean its samples with monotone_medians"
        )


def _flatness(name: str, probes: Sequence[int], values: Sequence[float]) -> str | None:
    if values[-1] <= FLAT * values[0]:
        return (
            f"{name} is flat: {probes[-1]} tokens cost as much as {probes[0]}, so every draft will be verified; "
            "profile larger sizes"
        )
    if values[-1] == values[-2]:
        return (
            f"{name} ends flat: beyond {probes[-1]} tokens it prices every size alike; profile larger sizes"
        )
    return None


def _refuse_negative(name: str, values: Sequence[float]) -> None:
    if not all(np.isfinite(v) and v >= 0 for v in values):
        raise DSparkError(f"{name}: must be finite and 0 or more, got {list(values)}")
