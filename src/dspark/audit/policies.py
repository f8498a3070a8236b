"""Policies as values: stored as bytes, so that every branch has its own and equal histories are explored once."""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.policies import Policy, ScheduleState

__all__ = ["PolicyStates"]


class PolicyStates:
    """The states a policy goes through, numbered; 0 is the one it was given in. Its own object stays as it is.

    Every call works on a copy, and its result is remembered: a policy must be a function of its state and its
    arguments. Functions and classes it holds (local ones, too) are shared, not copied.

    Raises (from each call):
        DSparkError: the policy cannot be copied, raised, or returned lengths outside what it may.
    """

    def __init__(self, policy: Policy) -> None:
        self.name = type(policy).__name__
        self._states: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._results: dict[Hashable, tuple[Any, int]] = {}
        self._shared: dict[int, Any] = {}
        self.uses_survival = bool(policy.uses_survival)
        self.observes = hasattr(policy, "observe")
        self._number(policy)

    def draft_lengths(self, number: int, state: ScheduleState) -> tuple[np.ndarray, int]:
        """Drafts wanted [R], and the state the policy is in then."""
        return self._lengths("draft_lengths", number, state.room, state)

    def verify_lengths(
        self, number: int, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> tuple[np.ndarray, int]:
        """Scheduled lengths [R], and the state the policy is in then."""
        seen = survival if self.uses_survival else None
        return self._lengths("verify_lengths", number, drafted, state, seen, drafted)

    def observe(
        self,
        number: int,
        state: ScheduleState,
        survival: np.ndarray | None,
        drafted: np.ndarray,
        scheduled: np.ndarray,
        accepted: np.ndarray,
    ) -> int:
        """The state a policy that learns (`Observer`) is in behind a round."""
        seen = survival if self.uses_survival else None
        return self._call("observe", number, state, seen, drafted, scheduled, accepted)[1]

    def _lengths(self, method: str, number: int, most: np.ndarray, *args: Any) -> tuple[np.ndarray, int]:
        answer, after = self._call(method, number, *args)
        try:
            lengths = np.array(answer, dtype=np.int64)
        except (TypeError, ValueError):
            lengths = np.full(0, -1)
        if lengths.shape != most.shape or (lengths < 0).any() or (lengths > most).any():
            raise DSparkError(
                f"{method} of {self.name} returned {answer}: give one length a request, 0 to {most.tolist()}"
            )
        return lengths, after

    def _call(self, method: str, number: int, state: ScheduleState, *arrays: np.ndarray | None) -> Any:
        key = (method, number, _key(state.context_lens), *(_key(a) for a in arrays))
        if key not in self._results:
            policy = _Unpickler(io.BytesIO(self._states[number]), self._shared).load()
            try:
                # Copies: the policy may keep or change what it is given.
                given = (None if a is None else a.copy() for a in arrays)
                own = ScheduleState(
                    state.uids.copy(),
                    state.room.copy(),
                    state.context_lens.copy(),
                    tolerates_live=None if state.tolerates_live is None else state.tolerates_live.copy(),
                )
                answer = getattr(policy, method)(own, *given)
            except Exception as error:
                message = f"{method} of {self.name} raised {type(error).__name__}: {error}"
                raise DSparkError(message) from error
            self._results[key] = answer, self._number(policy)
        return self._results[key]

    def _number(self, policy: Policy) -> int:
        buffer = io.BytesIO()
        try:
            _Pickler(buffer, self._shared).dump(policy)
        except Exception as error:
            raise DSparkError(
                f"{self.name} cannot be copied; keep plain values in a policy: {error}"
            ) from error
        key = buffer.getvalue()
        if key not in self._numbers:
            self._numbers[key] = len(self._states)
            self._states.append(key)
        return self._numbers[key]


class _Pickler(pickle.Pickler):
    """Leaves functions, classes and modules out; `shared` keeps them by id."""

    def __init__(self, file: io.BytesIO, shared: dict[int, Any]) -> None:
        super().__init__(file, protocol=5)
        self._shared = shared

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, type | FunctionType | BuiltinFunctionType | ModuleType):
            return None
        self._shared[id(obj)] = obj
        return id(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: dict[int, Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: Any) -> Any:
        return self._shared[pid]


def _key(array: np.ndarray | None) -> Hashable:
    return None if array is None else (array.shape, array.tobytes())
