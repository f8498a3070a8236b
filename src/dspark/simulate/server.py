"""One engine as counts: admission, chunked prefill, KV blocks, rounds. The rules are `dspark.engine`'s, step for step.

Requests of a step are columns of one array in the order of admission, so that a round is a few array operations
whatever the number of users. `tests/simulate/test_against_the_engine.py` holds this to the engine's own steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.base import ScheduleState

__all__ = ["Limits", "Server", "StepBatch"]

UID, CACHED, COMMITTED, END, HELD, PREFILLING, FOLLOWED = range(7)  # rows of the slots; HELD counts KV blocks


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes of the engine, as in `EngineConfig`. `kv_cache_tokens` None: memory never runs out.

    `known_end`: answers end by max_tokens, so a round never drafts past it; otherwise they end by themselves, and
    accepted drafts behind the end are lost.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    kv_cache_tokens: int | None = None
    max_model_len: int = 32768
    known_end: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DSparkError(f"{name} must be at least 1, got {value}")
        if self.max_model_len < 2:
            raise DSparkError(f"max_model_len must be at least 2, got {self.max_model_len}")

    @property
    def blocks(self) -> int | None:
        return None if self.kv_cache_tokens is None else -(-self.kv_cache_tokens // self.block_size)


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The requests of one step. `at`: their slots."""

    at: np.ndarray | slice
    state: ScheduleState
    samples: np.ndarray  # [R] bool
    decoding: np.ndarray  # [R] bool: past their first token


class Server:
    """Slots, waiting line and KV blocks of one engine.

    `prompt`, `output` [N] are the pool's; uid u is row u % N.
    """

    def __init__(self, limits: Limits, gamma: int, prompt: np.ndarray, output: np.ndarray) -> None:
        self.limits, self.gamma, self._prompt, self._output = limits, gamma, prompt, output
        self._slots = np.zeros((7, limits.max_num_seqs), dtype=np.int64)
        self._n = 0
        self._blocks = limits.blocks
        self.waiting: deque[int] = deque()
        self._progress: dict[int, int] = {}  # uid -> committed tokens of preempted requests
        self.preemptions = 0
        self._edge = limits.max_model_len
        if self._blocks is not None:
            self._edge = min(self._edge, self._blocks * limits.block_size)
        longest = int((prompt + output).max())
        if self._blocks is not None and longest > self._blocks * limits.block_size:
            raise DSparkError(
                f"the longest request needs {longest} KV positions, the pool has "
                f"{self._blocks * limits.block_size}: raise kv_cache_tokens or lower max_model_len"
            )

    @property
    def busy(self) -> bool:
        return bool(self._n or self.waiting)

    def admit(self) -> StepBatch:
        """This step's requests and the blocks of all rows they may write."""
        rows = self._continue_running()
        rows = self._admit_waiting(rows)
        at: np.ndarray | slice = slice(0, self._n) if rows.all() else np.flatnonzero(rows)
        slots = self._slots[:, at] if isinstance(at, np.ndarray) else self._slots[:, : self._n]
        rows = rows[at]
        samples = rows == slots[COMMITTED] - slots[CACHED]
        decoding = slots[PREFILLING] == 0
        room = self._room(at, slots, rows, decoding)
        uids, cached = (
            slots[UID].copy(),
            slots[CACHED].copy(),
        )  # views of the slots would change behind the policy
        room = np.where(slots[FOLLOWED], room, 0)
        return StepBatch(at, ScheduleState(uids, room, cached, rows, samples), samples, decoding)

    def rest(self, batch: StepBatch, rounds: float) -> None:
        """No draft for so many rounds: a drafter does not follow this one, unless a request it has followed may go on
        for longer. See `dspark.schedule.base.Resting`."""
        slots, at = self._slots, batch.at
        outlasts = (slots[FOLLOWED, at] > 0) & (self._ends(slots[:, at]) - slots[COMMITTED, at] > rounds)
        if not outlasts.any():
            slots[FOLLOWED, at] = 0

    def commit(self, batch: StepBatch, accepted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append accepted drafts and the target's token. Returns delivered tokens [R] and who ended [R] bool."""
        slots, at = self._slots, batch.at
        pending, samples = batch.state.pending, batch.samples
        assert pending is not None
        slots[CACHED, at] += pending + accepted
        before, end = slots[COMMITTED, at], slots[END, at]
        after = np.minimum(before + np.where(samples, accepted + 1, 0), end)
        tokens = after - before
        slots[COMMITTED, at] = after
        ended: np.ndarray = (after == end) & samples
        slots[PREFILLING, at] = np.where(samples, 0, slots[PREFILLING, at])
        if self._blocks is not None:
            held, cached = slots[HELD, at], slots[CACHED, at]
            slots[HELD, at] = np.where(samples, self._for(cached), held)
        if ended.any():
            self._release(np.arange(self._n)[at][ended])
        return tokens, ended

    def _release(self, gone: np.ndarray) -> None:
        keep = np.ones(self._n, dtype=bool)
        keep[gone] = False
        left = int(keep.sum())
        self._slots[:, :left] = self._slots[:, : self._n][:, keep]
        self._n = left

    def _for(self, tokens: np.ndarray) -> np.ndarray:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.limits.block_size)

    @property
    def _free(self) -> int:
        assert self._blocks is not None
        return self._blocks - int(self._slots[HELD, : self._n].sum())

    def _continue_running(self) -> np.ndarray:
        """[n] rows of running requests, oldest first; the youngest give way when blocks run out."""
        slots = self._slots[:, : self._n]
        pending = slots[COMMITTED] - slots[CACHED]
        before = np.cumsum(pending) - pending
        rows = np.clip(self.limits.max_num_batched_tokens - before, 0, pending)
        if self._blocks is None:
            return rows
        need = np.maximum(slots[HELD], np.where(rows > 0, self._for(slots[CACHED] + rows), 0))
        if int((need - slots[HELD]).sum()) <= self._free:
            slots[HELD] = need
            return rows
        return self._continue_one_by_one(pending)

    def _continue_one_by_one(self, pending: np.ndarray) -> np.ndarray:
        rows, left, i = np.zeros(len(pending), dtype=np.int64), self.limits.max_num_batched_tokens, 0
        while i < self._n:
            wanted = min(int(pending[i]), left)
            if wanted > 0 and self._reserve(i, int(self._slots[CACHED, i]) + wanted):
                rows[i] = wanted
                left -= wanted
            i += 1
        return rows[: self._n]

    def _reserve(self, slot: int, tokens: int) -> bool:
        """Blocks for `tokens`, preempting younger requests; False if the request had to give way itself."""
        need = -(-tokens // self.limits.block_size)
        while need - self._slots[HELD, slot] > self._free:
            youngest = self._n - 1
            uid = int(self._slots[UID, youngest])
            self._progress[uid] = int(self._slots[COMMITTED, youngest])
            self.waiting.appendleft(uid)
            self._n, self.preemptions = youngest, self.preemptions + 1
            if youngest == slot:
                return False
        self._slots[HELD, slot] = max(need, int(self._slots[HELD, slot]))
        return True

    def _admit_waiting(self, rows: np.ndarray) -> np.ndarray:
        if not self.waiting or self._n == self.limits.max_num_seqs:
            return rows
        left, added = self.limits.max_num_batched_tokens - int(rows.sum()), []
        while self.waiting and left > 0 and self._n < self.limits.max_num_seqs:
            uid = self.waiting[0]
            row = uid % len(self._prompt)
            prompt = int(self._prompt[row])
            committed = self._progress.get(uid, prompt)
            held = 0
            if self._blocks is not None:
                held = -(-(committed + 1) // self.limits.block_size)
                if held > self._free:
                    break
            self._progress.pop(uid, None)
            self.waiting.popleft()
            self._slots[:, self._n] = (
                *(uid, 0, committed, prompt + int(self._output[row]), held),
                *(1, 1),  # PREFILLING, FOLLOWED
            )
            self._n += 1
            added.append(min(committed, left))
            left -= added[-1]
        return np.concatenate((rows, np.array(added, dtype=np.int64)))

    def _ends(self, slots: np.ndarray) -> np.ndarray | int:
        """Tokens of a request at most, as the engine knows them: [R], or the same for all."""
        return slots[END] if self.limits.known_end else self._edge

    def _room(
        self, at: np.ndarray | slice, slots: np.ndarray, rows: np.ndarray, decoding: np.ndarray
    ) -> np.ndarray:
        """[R] drafts each could take, with blocks reserved for them."""
        most = np.clip(self._ends(slots) - slots[COMMITTED] - 1, 0, self.gamma)
        room = np.where(decoding, most, 0)
        if self._blocks is None:
            return room
        start, free, size = slots[CACHED] + rows, self._free, self.limits.block_size
        need = np.maximum(slots[HELD], np.where(room > 0, self._for(start + room), 0))
        if int((need - slots[HELD]).sum()) > free:
            need = slots[HELD].copy()
            for i in np.flatnonzero(room).tolist():  # oldest first takes what is left
                room[i] = max(0, min(int(room[i]), int(need[i] + free) * size - int(start[i])))
                wanted = max(int(need[i]), -(-int(start[i] + room[i]) // size))
                free -= wanted - int(need[i])
                need[i] = wanted
        self._slots[HELD, at] = need
        return room
