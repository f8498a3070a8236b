"""What a run tells while it goes: log.jsonl, TensorBoard where asked for, and a warning when nothing is learned."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.core import DSparkError

__all__ = ["LengthWatch", "RunLog", "RunningMean"]

NEAR_ONE = 1.1  # accepted length, bonus included: 1 is a drafter that is never right
PATIENCE = 2  # evaluations in a row before a word is said
WARM_UP = (
    20_000  # blocks before which a short length says nothing; at 27,000 all methods had 1.27 (docs/log.md)
)

_log = logging.getLogger("dspark")


class RunLog:
    """Appends evaluation records to `directory`/log.jsonl and, with `tensorboard`, to event files beside it.

    Raises:
        DSparkError: TensorBoard is asked for and not installed.
    """

    def __init__(self, directory: Path, tensorboard: bool = False) -> None:
        self.path = directory / "log.jsonl"
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise DSparkError(
                    "tensorboard logs need the package: pip install tensorboard (or 'dspark[train]'), or set "
                    "tensorboard=false"
                ) from None
            self._board = SummaryWriter(str(directory / "tensorboard"))

    def cut(self, step: int) -> None:
        """Drop the records behind `step`, where the run goes on and writes them again, and torn lines."""
        if not self.path.exists():
            return
        lines = self.path.read_text("utf-8").splitlines(keepends=True)
        kept = [line for line in lines if _step(line) <= step]
        if len(kept) < len(lines):
            part = self.path.with_name(self.path.name + ".part")
            part.write_text("".join(kept), "utf-8")
            part.replace(self.path)

    def write(self, record: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
        if self._board is None:
            return
        for name, value in record.items():
            values = (
                {f"{name}/{i + 1}": v for i, v in enumerate(value)}
                if isinstance(value, list)
                else {name: value}
            )
            for tag, scalar in values.items():
                self._board.add_scalar(tag, scalar, record["step"])
        self._board.flush()


def _step(line: str) -> float:
    """The step of a record; infinity where a kill has torn it."""
    try:
        return float(json.loads(line)["step"]) if line.endswith("\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


class RunningMean:
    """Means of the steps' records since the last evaluation. `state` goes with the resume state."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self.state: dict[str, Any] = {"steps": 0, "sums": {}} if state is None else dict(state)

    def add(self, record: Mapping[str, float]) -> None:
        sums = self.state["sums"]
        self.state = {
            "steps": self.state["steps"] + 1,
            "sums": {name: sums.get(name, 0.0) + value for name, value in record.items()},
        }

    def take(self) -> dict[str, float]:
        """The means of one step or more; from here on those of the next ones."""
        steps, sums = self.state["steps"], self.state["sums"]
        self.state = {"steps": 0, "sums": {}}
        return {name: total / steps for name, total in sums.items()}


class LengthWatch:
    """Warns once if a held-out accepted length stays near 1: such a drafter costs time and gives nothing.

    Greedy or sampled, either says it. Of a flat target the sampled one is above 1 whatever the drafter has learned, as
    any two flat distributions overlap, and one that never finds the likeliest token is of no use to greedy requests.
    """

    def __init__(self) -> None:
        self._low = 0
        self._said = False

    def see(self, record: dict[str, Any]) -> None:
        """Look at an evaluation."""
        greedy, sampled = record["tau_greedy"], record["tau_sampled"]
        near = min(greedy, sampled) < NEAR_ONE and record["blocks"] >= WARM_UP
        self._low = self._low + 1 if near else 0
        if self._low < PATIENCE or self._said:
            return
        self._said = True
        _log.warning(
            "held-out accepted length is still %.2f greedy, %.2f sampled at step %d, 1 means that no draft is right: "
            "check that the data are the target's own answers, that taps suit the target (the last one near its end), "
            "that draft_vocab_size covers the answers; try warm_start=true or another lr",
            greedy, sampled, record["step"],
        )  # fmt: skip
