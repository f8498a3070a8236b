"""An engine with a constant number of requests in flight: what it answers, and how fast.

measured = measure(engine, prompts, params, concurrency=4)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dspark.core import DSparkError, RequestOutput, SamplingParams, StepEvent

__all__ = ["BenchEngine", "Measurement", "measure"]


class BenchEngine(Protocol):
    """What is needed of `dspark.engine.engine.Engine`. `timings` has steps, draft_s, verify_s and reset()."""

    timings: Any

    @property
    def has_unfinished(self) -> bool: ...

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None
    ) -> str: ...

    def step(self) -> list[StepEvent]: ...


@dataclass(frozen=True)
class Measurement:
    """One pass over the prompts. `outputs` are in the prompts' order; `seconds` include prompt processing.

    The decode figures cover only steps in which no request had its prompt processed.
    """

    outputs: list[RequestOutput]
    seconds: float
    decode_tokens: int
    decode_seconds: float
    draft_ms: float | None  # a step, mean
    verify_ms: float | None


def measure(
    engine: BenchEngine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    concurrency: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Run all prompts with exactly `concurrency` requests in flight until fewer are left.

    Raises:
        DSparkError: the engine is busy with other requests, or dropped one.
    """
    if engine.has_unfinished:
        raise DSparkError("the engine still has requests: wait for them before measuring")
    timings = getattr(engine, "timings", None)
    if timings is not None:
        timings.reset()
    waiting = deque(range(len(prompts)))
    running: dict[str, int] = {}  # request id -> prompt index
    started: set[str] = set()  # requests whose prompt is processed
    outputs: dict[int, RequestOutput] = {}
    decode_tokens, decode_seconds = 0, 0.0
    begin = clock()
    while True:
        while waiting and len(running) < concurrency:
            i = waiting.popleft()
            running[engine.add(list(prompts[i]), params[i])] = i
        if not running:
            break
        if not engine.has_unfinished:
            raise DSparkError(f"the engine dropped {len(running)} requests without an output")
        decoding = running.keys() <= started
        before = clock()
        events = engine.step()
        if decoding:
            decode_seconds += clock() - before
            decode_tokens += sum(len(event.token_ids) for event in events)
        for event in events:
            if event.token_ids:
                started.add(event.request_id)
            if event.output is not None:
                outputs[running.pop(event.request_id)] = event.output
    seconds = clock() - begin
    draft_ms, verify_ms = _step_means(timings)
    ordered = [outputs[i] for i in range(len(prompts))]
    return Measurement(ordered, seconds, decode_tokens, decode_seconds, draft_ms, verify_ms)


def _step_means(timings: Any) -> tuple[float | None, float | None]:
    """Milliseconds a step spent on drafting and on the target's pass, None where the engine took no times."""
    if timings is None or not timings.steps:
        return None, None
    return 1e3 * timings.draft_s / timings.steps, 1e3 * timings.verify_s / timings.steps
