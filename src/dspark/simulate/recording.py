"""Step records of a real engine: what each step held and how long it took.

recorder = StepRecorder(policy)
engine = Engine(target, drafter, recorder)
engine.add(...); ...
records = record_steps(engine, recorder)
write_steps(records, "run.jsonl")
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.base import Policy, ScheduleState
from dspark.schedule.forward import ForwardingPolicy

__all__ = [
    "StepRecorder",
    "StepRecords",
    "read_steps",
    "record_closed_loop",
    "record_steps",
    "write_steps",
]


@dataclass(frozen=True, eq=False)
class StepRecords:
    """S steps, one number each; in a .jsonl file one object a line with these keys.

    Raises:
        DSparkError: columns of different lengths, no steps, or a step that took no time.
    """

    seconds: np.ndarray  # [S] float64, of the whole step
    requests: np.ndarray  # [S] int64 in the pass
    query_tokens: np.ndarray  # [S] int64 rows without drafts
    context: np.ndarray  # [S] int64 cached positions of these requests
    drafted_requests: np.ndarray  # [S] int64
    drafted: np.ndarray  # [S] int64
    scheduled: np.ndarray  # [S] int64
    tokens: np.ndarray  # [S] int64 delivered

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, f.name)) for f in fields(self)}
        if len(lengths) != 1 or lengths == {0}:
            raise DSparkError(f"step records need equally many values in every column, got {sorted(lengths)}")
        if not (np.isfinite(self.seconds) & (self.seconds > 0)).all():
            raise DSparkError("step records hold a step that took no time")

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, steps: slice | np.ndarray) -> StepRecords:
        return StepRecords(**{f.name: getattr(self, f.name)[steps] for f in fields(self)})

    @property
    def tokens_per_s(self) -> float:
        return float(self.tokens.sum() / self.seconds.sum())


class SteppingEngine(Protocol):
    """What is needed of `dspark.engine.engine.Engine`."""

    @property
    def has_unfinished(self) -> bool: ...

    def step(self) -> list[Any]: ...


class StepRecorder(ForwardingPolicy):
    """A policy that decides as `policy` does and remembers what the step held."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.held: dict[str, int] | None = None  # of the last step

    def observe(
        self,
        state: ScheduleState,
        survival: np.ndarray | None,
        drafted: np.ndarray,
        scheduled: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        super().observe(state, survival, drafted, scheduled, accepted)
        self.held = {
            "requests": state.num_requests,
            "query_tokens": state.query_tokens,
            "context": state.context,
            "drafted_requests": int(np.count_nonzero(drafted)),
            "drafted": int(drafted.sum()),
            "scheduled": int(scheduled.sum()),
        }


def record_steps(
    engine: SteppingEngine,
    recorder: StepRecorder,
    between: Callable[[list[Any]], object] = lambda events: None,
    clock: Callable[[], float] = time.perf_counter,
) -> StepRecords:
    """Step until nothing is left. `between` sees each step's events and may add requests (a closed loop).

    Raises:
        DSparkError: the engine's policy is not the recorder, or there was nothing to do.
    """
    rows: list[dict[str, Any]] = []
    while engine.has_unfinished:
        recorder.held = None
        started = clock()
        events = engine.step()
        seconds = clock() - started
        if recorder.held is not None:
            tokens = sum(len(event.token_ids) for event in events)
            rows.append({"seconds": seconds, **recorder.held, "tokens": tokens})
        between(events)
    if not rows:
        raise DSparkError(
            "no step was recorded: give the recorder to the engine as its policy, and add requests"
        )
    return _records(rows)


def record_closed_loop(
    engine: SteppingEngine,
    recorder: StepRecorder,
    requests: Iterable[Callable[[], object]],
    users: int,
    clock: Callable[[], float] = time.perf_counter,
) -> StepRecords:
    """Steps of `users` users who send one request behind the other, as long as none of them is out of requests.

    `requests`: each adds one to the engine when it is called.

    Raises:
        DSparkError: as `record_steps`.
    """
    waiting, steps, full = iter(requests), 0, 0

    def send() -> bool:
        add = next(waiting, None)
        if add is not None:
            add()
        return add is not None

    def between(events: list[Any]) -> None:
        nonlocal steps, full
        steps += recorder.held is not None
        for event in events:
            if event.output is not None and not send() and not full:
                full = steps

    for _ in range(users):
        send()
    records = record_steps(engine, recorder, between, clock)
    return records[: full or len(records)]


def write_steps(records: StepRecords, path: str | Path) -> None:
    """One JSON object a step."""
    columns = {name: values.tolist() for name, values in asdict(records).items()}
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_steps(path: str | Path) -> StepRecords:
    """The records of a .jsonl file; more keys than `StepRecords` has are ignored.

    Raises:
        DSparkError: no such file, a key is missing, a value is no number.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
        if not rows:
            raise DSparkError(f"{path} holds no step records: record some first")
        return _records(rows)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError) as error:
        raise DSparkError(f"cannot read the step records of {path}: {error}") from None
    except KeyError as error:
        names = ", ".join(f.name for f in fields(StepRecords))
        raise DSparkError(f"{path}: key {error} is missing; a step has {names}") from None


def _records(rows: list[dict[str, Any]]) -> StepRecords:
    kinds = {f.name: np.float64 if f.name == "seconds" else np.int64 for f in fields(StepRecords)}
    try:
        return StepRecords(
            **{name: np.array([r[name] for r in rows], dtype=kind) for name, kind in kinds.items()}
        )
    except ValueError as error:
        raise DSparkError(f"step records: {error}") from None
