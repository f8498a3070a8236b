"""Admission: which requests take part in a step, with how many rows, and who gives way when memory is short."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dspark.core import Request
from dspark.engine.termination import OutputStream
from dspark.kv import BlockTable, KVPool
from dspark.schedule.policies import ScheduleState
from dspark.shaping import LogitsShaper

__all__ = ["Batch", "Running", "Scheduler"]


@dataclass(eq=False)
class Running:
    """A request with what the engine keeps beside it."""

    request: Request
    stream: OutputStream
    shaper: LogitsShaper | None
    table: BlockTable = field(default_factory=BlockTable)
    prefilling: bool = True  # until its first token since (re)start
    followed: bool = True  # the drafter was told of every row in the cache


@dataclass(frozen=True)
class Batch:
    """The requests of one step, in order of arrival.

    `rows[r]` pending tokens of request r are processed; where they are all it has (`samples[r]`), the target's
    last row decides a token. `room[r]` is how many drafts it could take.
    """

    running: list[Running]
    rows: np.ndarray  # [R] int64
    samples: np.ndarray  # [R] bool
    room: np.ndarray  # [R] int64

    @cached_property
    def requests(self) -> list[Request]:
        return [r.request for r in self.running]

    def state(
        self, tolerates_live: np.ndarray | None = None, free: np.ndarray | None = None
    ) -> ScheduleState:
        """What a policy may know of the step. Where a drafter has not followed, there is room for copies alone."""
        room = self.room
        if not all(r.followed for r in self.running):
            followed = np.array([r.followed for r in self.running])
            room = np.where(followed if free is None else followed | (free > 0), room, 0)
        uids = np.array([r.uid for r in self.requests], dtype=np.int64)
        cached = np.array([r.cached for r in self.requests], dtype=np.int64)
        return ScheduleState(uids, room, cached, self.rows, self.samples, tolerates_live, free)

    def outlasts(self, rounds: float) -> bool:
        """Whether a request that the drafter has followed may go on for more than so many rounds."""
        return any(r.followed and r.request.remaining > rounds for r in self.running)

    @cached_property
    def block_tables(self) -> np.ndarray:
        """[R, max_blocks] int64, padded with 0."""
        width = max((len(r.table.blocks) for r in self.running), default=0)
        tables = np.zeros((len(self.running), max(1, width)), dtype=np.int64)
        for i, r in enumerate(self.running):
            tables[i, : len(r.table.blocks)] = r.table.blocks
        return tables


class _Entry(NamedTuple):
    running: Running
    rows: int


class Scheduler:
    """First come, first served, with continuous batching and chunked prefill.

    A request that does not fit waits. When running requests outgrow the pool, the youngest is preempted: its
    blocks return, and it prefills its committed tokens again later. The oldest always fits (`Engine.add`
    refuses requests larger than the pool), so there is always progress.
    """

    def __init__(self, pool: KVPool, max_num_seqs: int, max_rows: int, max_draft: int) -> None:
        self.pool, self.max_num_seqs, self.max_rows, self.max_draft = pool, max_num_seqs, max_rows, max_draft
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.preempted: list[Request] = []  # since the last step; drafters must forget them

    def admit(self) -> Batch:
        """Choose this step's requests and reserve the blocks of all rows they may write.

        What every request must have comes first; drafts get what is left, so speculation never takes another
        request's place.
        """
        entries = self._continue_running()
        entries += self._admit_waiting(self.max_rows - sum(e.rows for e in entries))
        assert all(e.rows >= 1 for e in entries), "a request without a token to process"
        rows = np.array([e.rows for e in entries], dtype=np.int64)
        samples = np.array([e.rows == e.running.request.pending for e in entries], dtype=bool)
        room = np.array([self._room(e) for e in entries], dtype=np.int64)
        return Batch([e.running for e in entries], rows, samples, room)

    def finish(self, r: Running) -> None:
        self.pool.release(r.table)
        if r in self.running:
            self.running.remove(r)
        elif r in self.waiting:
            self.waiting.remove(r)

    def _continue_running(self) -> list[_Entry]:
        """Rows for running requests, oldest first; the youngest give way when blocks run out."""
        entries: list[_Entry] = []
        left = self.max_rows
        for r in list(self.running):
            rows = min(r.request.pending, left)
            if r in self.running and rows > 0 and self._reserve(r, rows):
                entries.append(_Entry(r, rows))
                left -= rows
        return entries

    def _admit_waiting(self, left: int) -> list[_Entry]:
        entries: list[_Entry] = []
        while self.waiting and left > 0 and len(self.running) < self.max_num_seqs:
            r = self.waiting[0]
            if not self.pool.reserve(r.table, r.request.committed + 1):
                break
            self.running.append(self.waiting.popleft())
            entries.append(_Entry(r, min(r.request.pending, left)))
            left -= entries[-1].rows
        return entries

    def _reserve(self, r: Running, rows: int) -> bool:
        """Blocks for `rows` rows, preempting younger requests; False if `r` had to give way itself."""
        while not self.pool.reserve(r.table, r.request.cached + rows):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is r:
                return False
        return True

    def _room(self, entry: _Entry) -> int:
        """Drafts a request could take, with blocks reserved for them."""
        r, request = entry.running, entry.running.request
        if r.prefilling or not request.params.speculative:
            return 0
        start, size = request.cached + entry.rows, self.pool.block_size
        fits = r.table.capacity(size) + self.pool.num_free * size - start
        room = max(0, min(self.max_draft, request.remaining - 1, fits))
        reserved = self.pool.reserve(r.table, start + room)
        assert reserved
        return room

    def _preempt(self, r: Running) -> None:
        self.pool.release(r.table)
        r.request.cached, r.prefilling, r.followed = 0, True, True
        self.running.remove(r)
        self.waiting.appendleft(r)
        self.preempted.append(r.request)
