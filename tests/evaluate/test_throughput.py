from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from dspark.core import DSparkError, RequestMetrics, RequestOutput, SamplingParams, StepEvent
from dspark.evaluate.closed_loop import measure
from dspark.evaluate.throughput import (
    Run,
    ThroughputSettings,
    plan_runs,
    run_throughput,
    summarise,
)


class Clock:
    """Time passes only when an engine works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Timings:
    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0

    def reset(self) -> None:
        self.steps, self.draft_s, self.verify_s = 0, 0.0, 0.0


@dataclass
class FakeEngine:
    """Prefills for one step without a token, then commits `block` tokens a step (the first alone).

    The answer to prompt [n, ...] is n, n + 1, ... ; `loop` makes it n, n, n, ...; a step takes `cost` seconds.
    """

    clock: Clock
    block: int = 1
    cost: float = 1.0
    loop: frozenset[int] = frozenset()
    wrong: frozenset[int] = frozenset()
    timings: Timings = field(default_factory=Timings)
    in_flight: list[int] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    running: dict[str, tuple[list[int], int, list[int], RequestMetrics, bool]] = field(default_factory=dict)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def add(self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None) -> str:
        self.params.append(params)
        name = f"r{len(self.params)}"
        assert params.max_tokens is not None
        self.running[name] = (prompt_token_ids, params.max_tokens, [], RequestMetrics(), False)
        return name

    def step(self) -> list[StepEvent]:
        self.clock.now += self.cost
        self.timings.steps += 1
        self.timings.draft_s += self.cost / 4
        self.timings.verify_s += self.cost / 2
        self.in_flight.append(len(self.running))
        events = []
        for name, (prompt, limit, ids, metrics, prefilled) in list(self.running.items()):
            if not prefilled:
                self.running[name] = (prompt, limit, ids, metrics, True)
                continue
            n = min(self.block, limit - len(ids)) if ids else 1
            if ids:
                metrics.count(n - 1, n - 1, n - 1, n)
            stride = 0 if prompt[0] in self.loop else 1
            new = [prompt[0] + stride * (len(ids) + i) + (prompt[0] in self.wrong) for i in range(n)]
            ids.extend(new)
            output = None
            if len(ids) == limit:
                del self.running[name]
                output = RequestOutput(name, prompt, "", list(ids), "length", None, None, 0, metrics)
            events.append(StepEvent(name, new, ["plain"] * n, "", output))
        return events


PROMPTS = [[100 * i, 1, 2] for i in range(5)]


def params(max_tokens: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=max_tokens)] * len(PROMPTS)


def test_keeps_exactly_the_concurrency_in_flight() -> None:
    clock = Clock()
    engine = FakeEngine(clock)
    lengths = [3, 5, 4, 6, 3]
    each = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
    measured = measure(engine, PROMPTS, each, 2, clock)
    busy = engine.in_flight
    assert max(busy) == 2
    tail = busy.index(1) if 1 in busy else len(busy)
    assert set(busy[:tail]) == {2}
    assert set(busy[tail:]) <= {1}
    assert sum(busy) == sum(n + 1 for n in lengths)
    assert [output.prompt_token_ids for output in measured.outputs] == PROMPTS
    assert [len(output.token_ids) for output in measured.outputs] == lengths


def test_decode_figures_leave_prompt_processing_out() -> None:
    clock = Clock()
    measured = measure(FakeEngine(clock, block=3, cost=0.5), PROMPTS, params(7), 1, clock)
    # a request: one step of prefill, one with the first token, two of three tokens
    assert measured.seconds == pytest.approx(5 * 4 * 0.5)
    assert measured.decode_seconds == pytest.approx(5 * 2 * 0.5)
    assert measured.decode_tokens == 5 * 6
    assert (measured.draft_ms, measured.verify_ms) == pytest.approx((125, 250))


def test_refuses_a_busy_engine() -> None:
    engine = FakeEngine(Clock())
    engine.add([1], SamplingParams(max_tokens=4))
    with pytest.raises(DSparkError, match="still has requests"):
        measure(engine, PROMPTS, params(4), 1)


def test_notices_a_dropped_request() -> None:
    class Forgetful(FakeEngine):
        def step(self) -> list[StepEvent]:
            self.running.clear()
            return []

    with pytest.raises(DSparkError, match="dropped 2 requests"):
        measure(Forgetful(Clock()), PROMPTS, params(4), 2)


def test_methods_take_turns_within_a_repeat() -> None:
    settings = ThroughputSettings(concurrency=(1, 4), temperature=(0.0,), repeats=2)
    runs = list(plan_runs(("none", "dspark"), settings))
    assert [(run.concurrency, run.repeat, run.method) for run in runs] == [
        (c, r, m) for c in (1, 4) for r in (0, 1) for m in ("none", "dspark")
    ]


def run_pair(**settings: Any) -> tuple[dict[str, Any], list[Run], dict[str, FakeEngine]]:
    clock = Clock()
    engines = {
        "none": FakeEngine(clock, loop=frozenset({100})),
        "dspark": FakeEngine(clock, block=4, loop=frozenset({100}), wrong=frozenset({200})),
    }
    seen: list[Run] = []
    chosen = ThroughputSettings(**{"concurrency": (2,), "max_tokens": 9, "repeats": 2, **settings})
    return run_throughput(engines, PROMPTS, chosen, seen.append, clock), seen, engines


def test_report() -> None:
    report, seen, _ = run_pair()
    assert len(seen) == len(report["runs"]) == 2 * 2 * 2  # temperatures x repeats x methods
    run = next(run for run in report["runs"] if run["method"] == "dspark")
    assert run["output_tokens"] == 45
    assert run["rounds"] == 5 * 2
    assert run["accepted_length"] == pytest.approx(4)
    assert run["output_tokens_per_s"] == pytest.approx(45 / run["seconds"])
    assert run["repetition_share"] == pytest.approx(5 / 30)  # prompt 100 repeats 5 of its 6 4-grams
    assert run["non_looping"] == {"output_tokens": 36, "accepted_length": 4.0, "requests": 4}
    json.dumps(report, allow_nan=False)


def test_identity_counts_greedy_outputs_equal_to_plain_ones() -> None:
    report, _, _ = run_pair()
    found = {(cell["method"], cell["temperature"]): cell["identical"] for cell in report["summary"]}
    assert found == {
        ("none", 0.0): None,
        ("dspark", 0.0): "8 of 10",
        ("none", 1.0): None,
        ("dspark", 1.0): None,
    }


def test_methods_share_seeds_and_repeats_do_not() -> None:
    _, _, engines = run_pair(temperature=(1.0,), warmup_tokens=0)
    plain, drafted = ([p.seed for p in engine.params] for engine in engines.values())
    assert plain == drafted
    assert len(set(plain)) == 2 * len(PROMPTS)


def figures(method: str, repeat: int, rate: float, length: float | None) -> dict[str, Any]:
    return {
        "method": method,
        "concurrency": 1,
        "temperature": 0.0,
        "repeat": repeat,
        "output_tokens_per_s": rate,
        "decode_tokens_per_s": None,
        "accepted_length": length,
        "repetition_share": 0.0,
        "non_looping": {"accepted_length": None},
    }


def test_ratios_are_taken_within_a_repeat() -> None:
    runs = []
    for repeat, (plain, drafted) in enumerate([(10, 20), (40, 40), (20, 60)]):
        runs += [figures("none", repeat, plain, 1.0), figures("dspark", repeat, drafted, None)]
    none, dspark = summarise(runs)
    assert none["ratio_to_none"] == {"median": 1, "min": 1, "max": 1}
    assert dspark["ratio_to_none"] == {"median": 2, "min": 1, "max": 3}
    assert dspark["output_tokens_per_s"] == {"median": 40, "min": 20, "max": 60}
    assert dspark["accepted_length"] is None
    assert dspark["decode_tokens_per_s"] is None


def test_without_a_plain_run_there_is_no_ratio() -> None:
    (cell,) = summarise([figures("dspark", 0, 5.0, 2.0)])
    assert cell["ratio_to_none"] is None
    assert cell["identical"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": ()},
        {"concurrency": (1, 0)},
        {"temperature": ()},
        {"temperature": (math.nan,)},
        {"temperature": (-1.0,)},
        {"max_tokens": 0},
        {"max_tokens": -4},
        {"repeats": 0},
        {"seed": -1},
    ],
)
def test_refuses_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(DSparkError):
        ThroughputSettings(**wrong)


def test_refuses_fewer_prompts_than_requests_in_flight() -> None:
    with pytest.raises(DSparkError, match="needs at least 6 prompts"):
        run_pair(concurrency=(1, 6))
    with pytest.raises(DSparkError, match="at least one method"):
        run_throughput({}, PROMPTS, ThroughputSettings(concurrency=(1,)))
