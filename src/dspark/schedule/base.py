"""What every scheduling policy shares: what it may know, what it answers, what its answer depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol, runtime_checkable

import numpy as np

from dspark.schedule import loops

__all__ = ["Dependence", "Observer", "Policy", "Resting", "ScheduleState", "Timed"]


class Dependence(IntEnum):
    """What a verify decision depends on, weakest first; for rows that do not tolerate LIVE (`ScheduleState`).

    CAUSAL, precisely: with lengths l decided, changing any confidence at a slot behind l_r + 1 of its row leaves
    every length as it is. Slot l_r + 1's own confidence is pre-token: it knows the admitted tokens alone. So no
    decision has seen a token that it did not admit, of any request, and the outputs stay jointly exact.
    """

    STATIC = 0  # nothing drawn this round
    CAUSAL = 1  # early stop: verifying x_k depends on nothing at or after x_k
    LAGGED = 2  # budget from old rounds, ranks from the current one
    LIVE = 3  # anything in the current block


class _Fact:
    """A number of the batch as a whole, an attribute of `ScheduleState`.

    All are counted when the first one is asked for, and plain attributes from then on. A round asks for them a dozen
    times: a property is called each time, and `cached_property` takes a lock up to Python 3.11.
    """

    NAMES = ("query_tokens", "outputs", "context", "decoding_context", "open_to_model", "may_look")

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, state: ScheduleState, owner: type) -> int:
        s, known = state, state.__dict__
        counts = loops.count_batch(s.room, s.context_lens, s.pending, s.samples, s.tolerates_live, s.free)
        known.update(zip(self.NAMES, counts, strict=True))
        return known[self._name]


@dataclass(frozen=True)
class ScheduleState:
    """What a policy may know before drafting: R requests of this round.

    A request decodes with one row and one token: neither a prompt nor a part of one. A prompt's first token comes
    whatever is drafted, and is none of the `outputs`.
    """

    uids: np.ndarray  # [R] int64
    room: np.ndarray  # [R] int64: most drafts each may have (0 while prefilling, or where speculation is off)
    context_lens: np.ndarray  # [R] int64 cached positions
    pending: np.ndarray | None = None  # [R] int64 rows each needs besides drafts; None: one each, the anchor
    samples: np.ndarray | None = None  # [R] bool: decides a token this round; None: all do
    tolerates_live: np.ndarray | None = (
        None  # [R] bool: exact whatever the schedule looks at; None: no row is
    )
    free: np.ndarray | None = None  # [R] int64 drafts that were copied from committed tokens; None: none were

    query_tokens = _Fact()  # rows of the pass without any draft
    outputs = _Fact()  # tokens that decoding requests (a row and a token each) get without any draft
    context = _Fact()  # cached positions of all requests together
    decoding_context = _Fact()  # and of those that decode
    open_to_model = _Fact()  # requests that a model may draft for
    may_look = _Fact()  # whether every row with room stays exact even if the schedule looks at its own block

    def modelled(self, lengths: np.ndarray) -> np.ndarray:
        """[R] `lengths` where they are a model's to draft, 0 where a copy stands in for them, which costs nothing."""
        return lengths if self.free is None else np.where(self.free > 0, 0, lengths)

    def behind_prompts(self, most: int) -> ScheduleState:
        """The same requests once their prompts are processed: a row each, and room for `most` drafts where there was a
        prompt."""
        if self.pending is None:
            return self
        prompt = self.pending > 1 if self.samples is None else (self.pending > 1) | ~self.samples
        return replace(self, room=np.where(prompt, most, self.room), pending=None, samples=None)

    @property
    def num_requests(self) -> int:
        return len(self.uids)


class Policy(Protocol):
    """`uses_survival`: whether `verify_lengths` reads confidences (they cost a device synchronisation).

    Both methods may be asked again for the same round and then answer the same: what a policy learns, it learns
    through `Observer.observe`. `verify_lengths` is not asked in a round without drafts.
    """

    @property
    def dependence(self) -> Dependence: ...

    @property
    def uses_survival(self) -> bool: ...

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        """Drafts to propose, [R] int64 in 0..room; all 0 means that no model drafts.

        A row with free drafts gets those, whatever is asked for.
        """
        ...

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        """Scheduled lengths [R] int64 in 0..drafted. `survival` [R, gamma]: a_{r,j}, where confidences exist."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A policy that learns from rounds. Called once a round, after acceptance, also when nothing was drafted."""

    def observe(
        self,
        state: ScheduleState,
        survival: np.ndarray | None,
        drafted: np.ndarray,
        scheduled: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """`drafted`, `scheduled`, `accepted` [R] int64; `survival` as `verify_lengths` saw it."""
        ...


@runtime_checkable
class Timed(Protocol):
    """A policy that follows what rounds really take. Called once a round, behind `Observer.observe`.

    The caller has the clock; a policy has none.
    """

    def timed(
        self, state: ScheduleState, drafted: np.ndarray, scheduled: np.ndarray, draft_s: float, step_s: float
    ) -> None:
        """`draft_s`: seconds of drafting, the plan included; `step_s`: the rest of the round, the target's pass above
        all."""
        ...


@runtime_checkable
class Resting(Protocol):
    """A policy that knows when drafting has no prospects for a while."""

    def rests(self, num_requests: int) -> float:
        """In how many rounds of so many requests, this one included, no model will be asked for drafts; 0 if in this.

        A drafter need not follow requests that end before that. It cannot draft for them any more: their `room`
        is 0 from then on. Called at most once a round, behind `draft_lengths`.
        """
        ...
