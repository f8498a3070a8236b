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
from dspark.schedule import loops
from dspark.schedule.lines import Line, Staircase, check_probes, flatness, refuse_negative

__all__ = ["AdditiveCost", "ContextCost", "CostModel", "DraftCost", "TableCost", "monotone_medians"]


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

    def step_price(self, num_requests: int, query_tokens: int, context: int) -> float:
        """`step_seconds` of one pass: decisions ask for single prices often, and arrays of one are slow."""
        ...

    def step_curve(self, num_requests: int, first: int, count: int, context: int) -> np.ndarray:
        """[count] `step_seconds` of first, first + 1, ... query tokens."""
        ...

    def draft_price(self, num_requests: int, drafts: int) -> float:
        """`draft_seconds` of one draft."""
        ...

    @property
    def draft_terms(self) -> tuple[float, float, float]:
        """Seconds of a draft, of each request in it, and of each of its tokens."""
        ...

    @property
    def displacement(self) -> float:
        """Seconds of a draft, part of its price, that pass in the rest of the round behind it."""
        ...


@dataclass(frozen=True)
class DraftCost:
    """Seconds that a draft adds to a round: base + per_request * requests drafted for + per_draft * drafts, and
    `displacement`, by which the rest of the round takes longer behind it: the drafter's weights and activations have
    displaced the target's in the caches, and the pass keeps hidden states for the drafter."""

    base: float = 0.0
    per_request: float = 0.0
    per_draft: float = 0.0
    displacement: float = 0.0

    def __post_init__(self) -> None:
        terms = self.base, self.per_request, self.per_draft, self.displacement
        refuse_negative("draft cost", terms)

    @property
    def fixed(self) -> float:
        """Seconds whatever is drafted."""
        return self.base + self.displacement

    def seconds(self, num_requests: np.ndarray | int, drafts: np.ndarray | int) -> np.ndarray:
        drafts = np.asarray(drafts)
        full = self.fixed + self.per_request * np.asarray(num_requests) + self.per_draft * drafts
        return full * (drafts > 0)

    def price(self, num_requests: int, drafts: int) -> float:
        return self.fixed + self.per_request * num_requests + self.per_draft * drafts if drafts > 0 else 0.0


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
        refuse_negative("context cost", (self.per_position, self.per_pair, self.profiled_at))

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

    def price(self, seconds: float, num_requests: int, query_tokens: int, context: int) -> float:
        """`add` for one pass."""
        fixed, each = self.terms(num_requests, context)
        return max(seconds + fixed, 0.01 * seconds) + each * query_tokens

    def terms(self, num_requests: int, context: int) -> tuple[float, float]:
        """Seconds of a pass, and of each of its rows."""
        requests = max(num_requests, 1)
        beyond = context - self.profiled_at * requests
        return self.per_position * beyond, self.per_pair * max(beyond, 0.0) / requests


class _DraftPrices:
    """The draft's part of `CostModel`, for tables with a `DraftCost`."""

    draft: DraftCost

    def draft_seconds(self, num_requests: np.ndarray | int, drafts: np.ndarray | int) -> np.ndarray:
        return self.draft.seconds(num_requests, drafts)

    def draft_price(self, num_requests: int, drafts: int) -> float:
        return self.draft.price(num_requests, drafts)

    @property
    def draft_terms(self) -> tuple[float, float, float]:
        return self.draft.fixed, self.draft.per_request, self.draft.per_draft

    @property
    def displacement(self) -> float:
        return self.draft.displacement


@dataclass(frozen=True)
class TableCost(_DraftPrices):
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
        check_probes("cost table", self.tokens, self.seconds)
        if self.seconds[0] <= 0:
            raise DSparkError("cost table: seconds must be above 0; profile the machine again")

    @cached_property
    def _curve(self) -> Line:
        return (Staircase if self.executed else Line)(self.tokens, self.seconds)

    @property
    def warning(self) -> str | None:
        return flatness("cost table", self.tokens, self.seconds)

    def step_seconds(
        self, num_requests: np.ndarray | int, query_tokens: np.ndarray | int, context: np.ndarray | int
    ) -> np.ndarray:
        return self.context.add(self._curve(query_tokens), num_requests, query_tokens, context)

    def step_price(self, num_requests: int, query_tokens: int, context: int) -> float:
        return self.context.price(self._curve.at(query_tokens), num_requests, query_tokens, context)

    def step_curve(self, num_requests: int, first: int, count: int, context: int) -> np.ndarray:
        seconds, table = np.empty(count), self._curve.whole(first + count)
        loops.priced(table, first, 0.0, *self.context.terms(num_requests, context), seconds)
        return seconds


@dataclass(frozen=True)
class AdditiveCost(_DraftPrices):
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
        check_probes("alpha table", self.requests, self.alpha)
        check_probes("theta table", self.tokens, self.theta)
        refuse_negative("bias", (self.bias,))
        refuse_negative("additive cost", (self.alpha[0], self.theta[0]))
        if self.bias + self.alpha[0] + self.theta[0] <= 0:
            raise DSparkError("additive cost: the smallest pass costs nothing; profile the machine again")

    @cached_property
    def _alpha(self) -> Line:
        return Line(self.requests, self.alpha)

    @cached_property
    def _theta(self) -> Line:
        return Line(self.tokens, self.theta)

    @property
    def warning(self) -> str | None:
        lowest = self.bias + self.alpha[0]
        return flatness("theta table", self.tokens, tuple(lowest + t for t in self.theta))

    def step_seconds(
        self, num_requests: np.ndarray | int, query_tokens: np.ndarray | int, context: np.ndarray | int
    ) -> np.ndarray:
        seconds = self.bias + self._alpha(num_requests) + self._theta(query_tokens)
        return self.context.add(seconds, num_requests, query_tokens, context)

    def step_price(self, num_requests: int, query_tokens: int, context: int) -> float:
        seconds = self.bias + self._alpha.at(num_requests) + self._theta.at(query_tokens)
        return self.context.price(seconds, num_requests, query_tokens, context)

    def step_curve(self, num_requests: int, first: int, count: int, context: int) -> np.ndarray:
        seconds, table = np.empty(count), self._theta.whole(first + count)
        constant = self.bias + self._alpha.at(num_requests)
        loops.priced(table, first, constant, *self.context.terms(num_requests, context), seconds)
        return seconds


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
