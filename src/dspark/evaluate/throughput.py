"""Throughput of several decoding methods on the same prompts, measured so that they compare.

    report = run_throughput({"none": plain, "dspark": drafted}, prompts, ThroughputSettings())

Methods take turns within every repeat, so that whatever slows the machine for a minute slows all of them, and
ratios are taken within a repeat. Outputs end where the model ends them. A looping output is easy to draft:
accepted lengths are given with and without such outputs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dspark.core import DSparkError, RequestOutput, SamplingParams
from dspark.evaluate.closed_loop import BenchEngine, Measurement, measure
from dspark.evaluate.repetition import is_looping, repeated_ngrams

__all__ = [
    "Run",
    "ThroughputSettings",
    "check_prompts",
    "plan_runs",
    "run_throughput",
    "summarise",
]

PLAIN = "none"  # the method others are compared with


@dataclass(frozen=True, kw_only=True)
class ThroughputSettings:
    """What is varied and what is held fixed.

    Raises:
        DSparkError: a value out of range, or nothing to measure.
    """

    concurrency: tuple[int, ...] = (1, 4, 16)
    temperature: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 128
    repeats: int = 3
    warmup_tokens: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1:
            raise DSparkError(
                f"concurrency must be one or several numbers of 1 or more, got {self.concurrency}"
            )
        if not self.temperature:
            raise DSparkError("give at least one temperature")
        for temperature in self.temperature:
            SamplingParams(temperature=temperature, seed=self.seed)  # refuses what cannot be sampled
        for name, least in (("max_tokens", 1), ("repeats", 1), ("warmup_tokens", 0)):
            if getattr(self, name) < least:
                raise DSparkError(f"{name} must be {least} or more, got {getattr(self, name)}")


def check_prompts(count: int, settings: ThroughputSettings) -> None:
    """Refuse fewer prompts than the highest concurrency: it would never be reached."""
    most = max(settings.concurrency)
    if count < most:
        raise DSparkError(f"concurrency {most} needs at least {most} prompts, got {count}: give more")


@dataclass(frozen=True)
class Run:
    """One cell of the plan."""

    method: str
    concurrency: int
    temperature: float
    repeat: int


def plan_runs(methods: Sequence[str], settings: ThroughputSettings) -> Iterator[Run]:
    """Every run in order: within a repeat the methods take turns (A B C, A B C, ...)."""
    for temperature in settings.temperature:
        for concurrency in settings.concurrency:
            for repeat in range(settings.repeats):
                for method in methods:
                    yield Run(method, concurrency, temperature, repeat)


def run_throughput(
    engines: Mapping[str, BenchEngine],
    prompts: Sequence[list[int]],
    settings: ThroughputSettings,
    progress: Callable[[Run], None] = lambda run: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Measure every engine over the plan.

    Args:
        engines: method name -> its engine; "none" is the plain one that ratios and identity refer to.
        prompts: token ids; each is one request of every run.
        progress: called behind each run.

    Returns:
        {"runs": [...], "summary": [...]} of plain JSON values.

    Raises:
        DSparkError: no engine, or fewer prompts than the highest concurrency.
    """
    if not engines:
        raise DSparkError("a benchmark needs at least one method")
    check_prompts(len(prompts), settings)
    _warm_up(engines, prompts, settings)
    runs: list[dict[str, Any]] = []
    ids: dict[Run, list[list[int]]] = {}
    for run in plan_runs(tuple(engines), settings):
        params = [_params(run, i, settings) for i in range(len(prompts))]
        measured = measure(engines[run.method], prompts, params, run.concurrency, clock)
        runs.append({**asdict(run), **_figures(measured)})
        if run.temperature == 0:
            ids[run] = [list(output.token_ids) for output in measured.outputs]
        progress(run)
    return {"runs": runs, "summary": summarise(runs, _identical(ids))}


def _warm_up(
    engines: Mapping[str, BenchEngine], prompts: Sequence[list[int]], settings: ThroughputSettings
) -> None:
    """Compile kernels and touch memory, with the beginnings of prompts, in every batch size of the plan."""
    tokens = settings.warmup_tokens
    for concurrency in settings.concurrency if tokens else ():
        some = [list(prompt[:32]) for prompt in prompts[:concurrency]]
        for temperature in settings.temperature:
            params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=settings.seed)
            for engine in engines.values():
                measure(engine, some, [params] * len(some), concurrency)


def _params(run: Run, prompt: int, settings: ThroughputSettings) -> SamplingParams:
    """Methods share a prompt's seed within a repeat; repeats differ, so that T > 0 averages over samples."""
    seed = settings.seed + 1_000_003 * run.repeat + prompt
    return SamplingParams(temperature=run.temperature, max_tokens=settings.max_tokens, seed=seed)


def _figures(measured: Measurement) -> dict[str, Any]:
    """The JSON entry of a run, less what was planned."""
    outputs = measured.outputs
    steady = [output for output in outputs if not is_looping(output.token_ids)]
    tokens = _tokens(outputs)
    counts = [repeated_ngrams(output.token_ids) for output in outputs]
    ngrams = sum(count for _, count in counts)
    return {
        "output_tokens": tokens,
        "seconds": measured.seconds,
        "output_tokens_per_s": _ratio(tokens, measured.seconds),
        "decode_tokens_per_s": _ratio(measured.decode_tokens, measured.decode_seconds),
        "accepted_length": _accepted_length(outputs),
        "rounds": sum(output.metrics.rounds for output in outputs),
        "draft_ms": measured.draft_ms,
        "verify_ms": measured.verify_ms,
        "repetition_share": sum(repeats for repeats, _ in counts) / ngrams if ngrams else 0.0,
        "non_looping": {
            "output_tokens": _tokens(steady),
            "accepted_length": _accepted_length(steady),
            "requests": len(steady),
        },
    }


def _tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(output.token_ids) for output in outputs)


def _ratio(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


def _accepted_length(outputs: Sequence[RequestOutput]) -> float | None:
    """Tokens a round decides, bonus included, over the rounds of all requests together."""
    rounds = sum(output.metrics.rounds for output in outputs)
    return sum(output.metrics.committed for output in outputs) / rounds if rounds else None


def _identical(ids: Mapping[Run, list[list[int]]]) -> dict[tuple[str, int, float], tuple[int, int]]:
    """(n equal to the plain method's outputs of the same repeat, of m) for each greedy cell."""
    counts: dict[tuple[str, int, float], tuple[int, int]] = {}
    for run, outputs in ids.items():
        plain = ids.get(replace(run, method=PLAIN))
        if plain is None or run.method == PLAIN:
            continue
        cell = (run.method, run.concurrency, run.temperature)
        equal, total = counts.get(cell, (0, 0))
        same = sum(a == b for a, b in zip(outputs, plain, strict=True))
        counts[cell] = (equal + same, total + len(outputs))
    return counts


def summarise(
    runs: Sequence[Mapping[str, Any]],
    identical: Mapping[tuple[str, int, float], tuple[int, int]] | None = None,
) -> list[dict[str, Any]]:
    """One entry per (method, concurrency, temperature), in order of appearance.

    Figures are {median, min, max} over repeats; `ratio_to_none` is taken within each repeat first. It and
    `identical` are None where there is no plain run to compare with.
    """
    cells: dict[tuple[str, int, float], list[Mapping[str, Any]]] = {}
    for run in runs:
        cells.setdefault((run["method"], run["concurrency"], run["temperature"]), []).append(run)
    summary = []
    for (method, concurrency, temperature), repeats in cells.items():
        plain = {run["repeat"]: run for run in cells.get((PLAIN, concurrency, temperature), [])}
        ratios = [
            _ratio(run["output_tokens_per_s"], plain[run["repeat"]]["output_tokens_per_s"])
            for run in repeats
            if run["repeat"] in plain
        ]
        same = (identical or {}).get((method, concurrency, temperature))
        summary.append(
            {
                "method": method,
                "concurrency": concurrency,
                "temperature": temperature,
                "output_tokens_per_s": _spread(run["output_tokens_per_s"] for run in repeats),
                "decode_tokens_per_s": _spread(run["decode_tokens_per_s"] for run in repeats),
                "ratio_to_none": _spread(ratios),
                "accepted_length": _spread(run["accepted_length"] for run in repeats),
                "accepted_length_non_looping": _spread(
                    run["non_looping"]["accepted_length"] for run in repeats
                ),
                "repetition_share": _spread(run["repetition_share"] for run in repeats),
                "identical": None if same is None else f"{same[0]} of {same[1]}",
            }
        )
    return summary


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}
