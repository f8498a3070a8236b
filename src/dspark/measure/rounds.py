"""Where a round's time goes: real rounds of an engine at a stated context, and each one's pass again in parts.

Each repeat goes through all numbers of rows: requests are added with so many tokens of real text, prefilled,
stepped a few times with so many drafts that a pass has the wanted number of rows, and aborted. The engine's parts
are watched from outside; what is in none of them is the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from dspark.core import DSparkError, SamplingParams
from dspark.drafters.base import Drafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.runner import Runner
from dspark.measure.replay import PARTS, WARM_UP, PassReplay
from dspark.measure.stopwatch import Stopwatch, Watched
from dspark.measure.timing import Clock, clock_name, spread, suitable_clock
from dspark.schedule.policies import Dependence, ScheduleState
from dspark.target.base import ForwardBatch, Target
from dspark.target.decoder import Decoder

__all__ = ["RoundSettings", "RowsPolicy", "measure_rounds"]

ROUND = ("round", "draft", "packing", "pass", "sampling", "observe", "engine")
BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """`rows` of a pass, with at most 1 + `drafts` of each request. `context`: tokens of each request before the first
    round. `rounds` are timed in each repeat, behind a few that are not."""

    rows: tuple[int, ...] = (1, 2, 4, 6, 8, 16, 64)
    drafts: int = 7
    context: int = 256
    repeats: int = 5
    rounds: int = 3
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 1:
            raise DSparkError(f"rows must be one or several numbers of 1 or more, got {self.rows}")
        for name, least in (("drafts", 0), ("context", 2), ("repeats", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise DSparkError(f"{name} must be {least} or more, got {getattr(self, name)}")

    def requests(self, rows: int) -> int:
        """As few as possible."""
        return -(-rows // (1 + self.drafts))


class RowsPolicy:
    """Drafts such that the pass has `rows` rows; none while prompts are processed (`rows` is 0)."""

    dependence = Dependence.STATIC
    uses_survival = False

    def __init__(self) -> None:
        self.rows = 0

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        count = len(state.room)
        each, more = divmod(max(0, self.rows - count), count)
        return np.minimum(state.room, each + (np.arange(count) < more))

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        return np.minimum(drafted, self.draft_lengths(state))


def measure_rounds(
    target: Decoder,
    drafter: Drafter | None,
    texts: Sequence[Sequence[int]],
    settings: RoundSettings | None = None,
    progress: Callable[[], None] = lambda: None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Time rounds and passes. The drafter must not be in use by another engine.

    Args:
        texts: token ids; they are joined and cut to make the requests' contexts.
        progress: called behind each repeat (the first, which only warms up, included).

    Returns:
        {"clock", "results", "ratios"} of plain JSON values; times in ms.

    Raises:
        DSparkError: the context does not fit the model, or there is no text.
    """
    settings, clock = settings or RoundSettings(), clock or suitable_clock()
    bench = _Bench(target, drafter, _tokens(texts), settings, clock)
    rounds: dict[int, list[dict[str, float]]] = {rows: [] for rows in settings.rows}
    passes: dict[int, list[dict[str, float]]] = {rows: [] for rows in settings.rows}
    for turn in range(settings.repeats + 1):
        for rows in settings.rows:
            with bench.requests(rows):
                some = bench.rounds()
                again = bench.replay()
            if turn:
                rounds[rows] += some
                passes[rows].append(again)
        progress()
    results = [_result(rows, settings.requests(rows), rounds[rows], passes[rows]) for rows in settings.rows]
    return {"clock": clock_name(clock), "results": results, "ratios": _ratios(results)}


def _tokens(texts: Sequence[Sequence[int]]) -> list[int]:
    tokens = [token for text in texts for token in text]
    if not tokens:
        raise DSparkError("a context needs text: give at least one prompt")
    return tokens


class _Bench:
    """An engine whose target, drafter and runner are watched."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        tokens: list[int],
        settings: RoundSettings,
        clock: Clock,
    ) -> None:
        self._settings, self._tokens, self._decoder = settings, tokens, target
        most = max(settings.requests(rows) for rows in settings.rows)
        self._room = (settings.rounds + 2 + WARM_UP + most) * (1 + settings.drafts) + 2
        if settings.context + self._room > target.max_context:
            raise DSparkError(
                f"a context of {settings.context} leaves too little room in the model's {target.max_context}: "
                f"at most {target.max_context - self._room} here"
            )
        self._stopwatch, self._policy = Stopwatch(clock), RowsPolicy()
        self._target = Watched(target, ["forward"], self._stopwatch)
        watched = None if drafter is None else Watched(drafter, ["propose", "observe"], self._stopwatch)
        blocks = most * (-(-(settings.context + self._room) // BLOCK) + 1)
        config = EngineConfig(max_num_seqs=most, block_size=BLOCK, kv_cache_tokens=BLOCK * blocks)
        self._engine = Engine(
            cast(Target, self._target),
            cast("Drafter | None", watched),
            self._policy,
            config=config,
            clock=clock,
        )
        self._engine.runner = cast(Runner, Watched(self._engine.runner, ["verify"], self._stopwatch))
        self._next = 0  # token that the next request's text begins with

    @contextmanager
    def requests(self, rows: int) -> Iterator[None]:
        """The requests of a pass of `rows` rows, prefilled, with some rounds behind them."""
        settings, engine = self._settings, self._engine
        params = SamplingParams(
            temperature=settings.temperature, seed=settings.seed, max_tokens=self._room, ignore_eos=True
        )
        ids = [engine.add(self._text(), params) for _ in range(settings.requests(rows))]
        self._policy.rows = 0
        while len(engine.scheduler.running) < len(ids) or any(r.prefilling for r in engine.scheduler.running):
            engine.step()
        self._policy.rows = rows
        try:
            for _ in range(WARM_UP):
                engine.step()
            yield
        finally:
            for request_id in ids:
                engine.abort(request_id)

    def _text(self) -> list[int]:
        size, count = self._settings.context, len(self._tokens)
        start, self._next = self._next, self._next + size
        return [self._tokens[i % count] for i in range(start, start + size)]

    def rounds(self) -> list[dict[str, float]]:
        return [self._round() for _ in range(self._settings.rounds)]

    def _round(self) -> dict[str, float]:
        """Seconds of one round and its parts; rows of its pass and mean context."""
        engine, watch = self._engine, self._stopwatch
        engine.timings.reset()
        watch.reset()
        started = watch.clock()
        engine.step()
        whole, spent = watch.clock() - started, watch.spent
        batch = self._batch()
        draft, observe = (spent.get(name, 0.0) for name in ("propose", "observe"))
        sampling = engine.timings.verify_s - spent["verify"]
        return {
            "round": whole,
            "draft": draft,
            "packing": spent["verify"] - spent["forward"],
            "pass": spent["forward"],
            "sampling": sampling,
            "observe": observe,
            "engine": whole - draft - spent["verify"] - sampling - observe,
            "rows": batch.num_rows,
            "context": float(batch.context_lens.mean()),
        }

    def _batch(self) -> ForwardBatch:
        batch: ForwardBatch = self._target.last["forward"][0]
        return batch

    def replay(self) -> dict[str, float]:
        """The last round's pass again, whole and in parts."""
        batch, pool, taps = self._target.last["forward"]
        return PassReplay(self._decoder, batch, pool, taps).times(self._stopwatch.clock)


def _result(
    rows: int, requests: int, rounds: Sequence[Mapping[str, float]], passes: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """One number of rows: medians and ranges in ms, of rounds and of passes."""
    result: dict[str, Any] = {
        "rows": rows,
        "requests": requests,
        "rows_run": spread([r["rows"] for r in rounds]),
        "context": spread([r["context"] for r in rounds]),
        "round": {name: spread([r[name] for r in rounds], 1e3) for name in ROUND},
        "pass": spread([p["pass"] for p in passes], 1e3),
        "by_modules": spread([p["modules"] for p in passes], 1e3),
        "parts": None,
    }
    if all("program" in p for p in passes):
        result["parts"] = _parts(passes)
    return result


def _parts(passes: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The compiled pass in parts. Differences are taken within a repeat."""
    parts: dict[str, Any] = {}
    for name in PARTS:
        parts[name] = {
            "in_place": spread([p["program"] - p[f"without {name}"] for p in passes], 1e3),
            "alone": spread([p[f"only {name}"] - p["empty"] for p in passes], 1e3),
        }
    parts["steps"] = spread([p["empty"] for p in passes], 1e3)
    rest = [p["program"] - sum(p["program"] - p[f"without {name}"] for name in PARTS) for p in passes]
    parts["rest"] = spread(rest, 1e3)
    parts["layers"] = spread([p["program"] for p in passes], 1e3)
    parts["lm_head"] = spread([p["lm_head"] for p in passes], 1e3)
    parts["around"] = spread([p["pass"] - p["program"] - p["lm_head"] for p in passes], 1e3)
    return parts


def _ratios(results: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """How much dearer passes and rounds are than those of one row, from the medians; empty without one row."""
    one = next((r for r in results if r["rows"] == 1), None)
    if one is None:
        return []
    return [
        {
            "rows": r["rows"],
            "pass": r["pass"]["median"] / one["pass"]["median"],
            "by_modules": r["by_modules"]["median"] / one["by_modules"]["median"],
            "round": r["round"]["round"]["median"] / one["round"]["round"]["median"],
        }
        for r in results
    ]
