"""Recorded request traces: arrival time, prompt and output tokens (the Azure LLM inference traces' CSV)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from dspark.errors import DSparkError

__all__ = ["Trace", "read_trace"]

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, eq=False)
class Trace:
    """N requests in order of arrival; the first comes at 0 s."""

    seconds: np.ndarray  # [N] float64, non-decreasing
    prompt: np.ndarray  # [N] int64
    output: np.ndarray  # [N] int64

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def duration_s(self) -> float:
        return float(self.seconds[-1])

    @property
    def cv(self) -> float:
        """Standard deviation / mean of the time between arrivals."""
        gaps = np.diff(self.seconds)
        return float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else float("nan")


def read_trace(path: str | Path) -> Trace:
    """A CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens; more columns are ignored.

    TIMESTAMP is a date with time (UTC unless it names another zone; fractions beyond microseconds are cut) or a
    number of seconds. Counts of 0 are taken as 1: a request without a token would never be served.

    Raises:
        DSparkError: no such file, a column is missing, a row cannot be read, or there is none.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in _COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise DSparkError(f"{path}: column {missing[0]!r} is missing; it needs {', '.join(_COLUMNS)}")
            rows = [_row(row, f"{path}, line {reader.line_num}") for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DSparkError(f"cannot read the trace {path}: {error}") from None
    if not rows:
        raise DSparkError(f"{path} holds no requests")
    rows.sort(key=lambda row: row[0])
    seconds, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    return Trace(seconds - seconds[0], prompt.astype(np.int64), output.astype(np.int64))


def _row(row: dict[str, str], where: str) -> tuple[float, int, int]:
    try:
        prompt, output = (int(row[column]) for column in _COLUMNS[1:])
        if min(prompt, output) < 0:
            raise ValueError("a count is negative")
        return _seconds(row["TIMESTAMP"].strip()), max(prompt, 1), max(output, 1)
    except (ValueError, TypeError, AttributeError) as error:
        raise DSparkError(f"{where}: expected a time and two token counts ({error})") from None


def _seconds(text: str) -> float:
    if text[:1].isdigit() and "-" not in text and ":" not in text:
        return float(text)
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.timestamp()
