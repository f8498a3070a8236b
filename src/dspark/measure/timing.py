"""Clocks and medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["Clock", "clock_name", "seconds", "spread", "suitable_clock"]

Clock = Callable[[], float]


def suitable_clock() -> Clock:
    """One thread is timed by its own CPU time (what it ran, not what it waited for a core), several by the wall's."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def clock_name(clock: Clock) -> str:
    """For reports."""
    names: dict[Clock, str] = {time.thread_time: "CPU time of the thread", time.perf_counter: "wall"}
    return names.get(clock, "other")


def seconds(call: Callable[[], object], clock: Clock) -> float:
    """How long one call takes."""
    start = clock()
    call()
    return clock() - start


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median and range of `values`, times `scale`."""
    scaled = [scale * value for value in values]
    return {"median": statistics.median(scaled), "min": min(scaled), "max": max(scaled)}
