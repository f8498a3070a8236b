"""The drafter protocol: propose tokens for a batch, follow what was committed.

A drafter is told what was committed (`observe`) and asked for a block (`propose`). Its KV layers, if any,
live in the engine's pool behind the target's (`first_layer`), so one block table rolls back both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from dspark.core import Draft, Request
from dspark.kv import KVPool, LayerKV
from dspark.sampling import SamplingRows
from dspark.shaping import LogitsShaper

__all__ = ["Copier", "Deferring", "Drafter", "ObserveBatch", "ProposeBatch"]


@dataclass(frozen=True)
class ProposeBatch:
    """The R requests of a step. One with a length above 0 has `pending == 1`: its anchor is the last committed
    token, at position `cached`, and the pool holds room for positions cached .. cached + length. The others
    (prefilling, or not to be drafted for) are there so that rows line up with the step's."""

    requests: Sequence[Request]
    lengths: np.ndarray  # [R] drafts wanted, from Policy.draft_lengths
    rows: SamplingRows  # [R] sampling parameters and random addresses
    block_tables: np.ndarray  # [R, max_blocks] int64
    shapers: Sequence[LogitsShaper | None]  # [R] penalties, bias and masks, for drafters that sample


@dataclass(frozen=True)
class ObserveBatch:
    """Rows whose tokens are now committed *and* in the target's KV, with the target's taps of those rows.

    Request r owns rows row_start[r] .. row_start[r + 1], at consecutive positions.
    """

    requests: Sequence[Request]
    row_start: np.ndarray  # [R + 1]
    positions: torch.Tensor  # [N] int64
    slots: torch.Tensor  # [N] int64
    taps: torch.Tensor | None  # [N, m * hidden]

    def without(self, request: Request) -> ObserveBatch | None:
        """The rows of the others; None if there are none."""
        r = next((r for r, other in enumerate(self.requests) if other.uid == request.uid), None)
        if r is None:
            return self
        start, stop, total = int(self.row_start[r]), int(self.row_start[r + 1]), len(self.slots)
        if stop - start == total:
            return None
        kept = torch.tensor([*range(start), *range(stop, total)], device=self.slots.device)
        counts = np.delete(np.diff(self.row_start), r)
        return ObserveBatch(
            requests=[other for other in self.requests if other.uid != request.uid],
            row_start=np.concatenate(([0], np.cumsum(counts))),
            positions=self.positions[kept],
            slots=self.slots[kept],
            taps=None if self.taps is None else self.taps[kept],
        )


class Drafter(Protocol):
    """Proposes blocks of draft tokens.

    `max_draft` is the longest block it was built for, `taps` the target layers it reads, `kv_specs` the layers
    it adds to the pool. Randomness comes from `batch.rows` alone. `deterministic`: proposals are one-hot at any
    temperature, so that looking at them reveals nothing random.
    """

    name: str
    deterministic: bool
    max_draft: int
    taps: tuple[int, ...]
    kv_specs: tuple[LayerKV, ...]

    def attach(self, pool: KVPool, first_layer: int) -> None:
        """Tell the drafter where its KV layers begin in the pool."""

    def observe(self, batch: ObserveBatch) -> None:
        """Follow the commits of a step (prefill chunks included)."""

    def propose(self, batch: ProposeBatch) -> Draft:
        """Draft `batch.lengths[r]` tokens for each request."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that ended or was preempted."""


@runtime_checkable
class Deferring(Protocol):
    """A drafter whose `observe` puts off work until a draft needs it."""

    def catch_up(self) -> None:
        """Do it now: the KV of all observed rows is in the pool afterwards."""


@runtime_checkable
class Copier(Protocol):
    """A drafter that has drafts for nothing: functions of the committed tokens, one-hot, made without its model."""

    def free(self, requests: Sequence[Request], room: np.ndarray) -> np.ndarray:
        """[R] int64 in 0..room: drafts that the round's `propose` will hold for each request, whatever it is asked
        for. Rows of 0 are for the model. Called once a round, before the policy decides what to pay for."""
        ...
