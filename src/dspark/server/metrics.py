"""What the server tells Prometheus, at /metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dspark.core import StepEvent

if TYPE_CHECKING:
    from dspark.async_llm import AsyncLLM

__all__ = ["ServerMetrics", "Stopwatch"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ServerMetrics:
    """Counts of what `AsyncLLM` tells, on a registry of its own. Names follow vLLM's, `dspark_` in front."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "dspark_request_success", "Finished requests by reason", ["finished_reason"], registry=registry
        )
        self._prompt = Counter(
            "dspark_prompt_tokens", "Tokens of finished requests' prompts", registry=registry
        )
        self._generated = Counter("dspark_generation_tokens", "Tokens generated", registry=registry)
        self._rounds = Counter(
            "dspark_spec_decode_num_drafts", "Rounds with drafts verified", registry=registry
        )
        self._drafted = Counter("dspark_spec_decode_num_draft_tokens", "Drafts verified", registry=registry)
        self._accepted = Counter(
            "dspark_spec_decode_num_accepted_tokens", "Drafts accepted", registry=registry
        )
        self.first_token = Histogram(
            "dspark_time_to_first_token_seconds", "From arrival", buckets=_SECONDS, registry=registry
        )
        self.latency = Histogram(
            "dspark_e2e_request_latency_seconds",
            "From arrival to the end",
            buckets=_SECONDS,
            registry=registry,
        )
        self._running = Gauge("dspark_num_requests_running", "Requests in the batch", registry=registry)
        self._waiting = Gauge("dspark_num_requests_waiting", "Requests that wait", registry=registry)

    def follow(self, llm: AsyncLLM) -> None:
        """Ask `llm` how many requests it has whenever somebody looks."""
        self._running.set_function(lambda: llm.num_running)
        self._waiting.set_function(lambda: llm.num_waiting)

    def count(self, events: Sequence[StepEvent]) -> None:
        """A step's events."""
        for event in events:
            self._generated.inc(len(event.token_ids))
            output = event.output
            if output is None:
                continue
            metrics = output.metrics
            self._requests.labels(output.finish_reason).inc()
            self._prompt.inc(len(output.prompt_token_ids))
            self._drafted.inc(metrics.scheduled)
            self._accepted.inc(metrics.accepted)
            self._rounds.inc(metrics.scheduled_per_position[0] if metrics.scheduled_per_position else 0)


class Stopwatch:
    """Times of one request."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics, self._start, self._first = metrics, time.monotonic(), False

    def see(self, event: StepEvent) -> None:
        elapsed = time.monotonic() - self._start
        if event.token_ids and not self._first:
            self._first = True
            self._metrics.first_token.observe(elapsed)
        if event.output is not None:
            self._metrics.latency.observe(elapsed)
