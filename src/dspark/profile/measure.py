"""Time the parts of a round: the target's pass with judgement, the draft, and the upkeep of its context.

The engine's own packing, judgement and drafter are run on made-up requests whose KV is filled, so what is timed is
what a round does. Probes take turns, so that a slow moment of the machine meets all of them; each is run some times in
a row, of which the first do not count, so that it finds the caches as it would leave them itself. Passes are timed
behind passes, and those of drafted rounds behind their drafts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from dspark.core import Draft, DSparkError, Plan, Request, SamplingParams
from dspark.drafters.base import Deferring, Drafter, ObserveBatch, ProposeBatch
from dspark.engine.judge import judge
from dspark.engine.runner import Runner
from dspark.engine.scheduler import Batch, Running
from dspark.engine.termination import OutputStream
from dspark.kv import KVPool
from dspark.profile.fit import Kind, Sample
from dspark.sampling import SamplingRows
from dspark.schedule.feedback import SETTLED
from dspark.target.base import Target

__all__ = ["ProfileSettings", "largest_pass", "measure_profile"]

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
BLOCK = 16
IN_A_ROW = 2  # runs of a probe that count, at a turn
FEW_ROWS = 8  # up to which a pass takes as long as it takes to read the weights, or nearly


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """`seconds`: about how long to measure (each probe at least `repeats` times, at most `most`).
    `max_rows`: largest pass that is timed; `context_lengths`: cached positions a request, shortest first.
    `temperature`: of drafts and judgement: sampling and the ratio rule take longer than the argmax at 0."""

    seconds: float = 4.0
    repeats: int = 3
    most: int = 25
    max_rows: int = 64
    context_lengths: tuple[int, ...] = (64, 512, 1536)
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.most < self.repeats or self.max_rows < 2:
            raise DSparkError(
                "a profile needs repeats of 1 or more, at most `most`, and max_rows of 2 or more"
            )
        if not 0 <= self.temperature < math.inf:
            raise DSparkError(f"a profile needs a temperature of 0 or more, got {self.temperature}")
        if len(set(self.context_lengths)) < 3 or list(self.context_lengths) != sorted(self.context_lengths):
            raise DSparkError(
                f"a profile needs three context lengths at least, in rising order, got {self.context_lengths}"
            )


def measure_profile(
    target: Target,
    drafter: Drafter | None,
    gamma: int,
    max_num_seqs: int = 16,
    settings: ProfileSettings | None = None,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Sample]:
    """Raw times, in no particular order. The drafter must not be in use by an engine: it is attached elsewhere.

    Args:
        gamma: most drafts a request may have; 0 without a drafter.
        max_num_seqs: the engine's; larger passes than it can have are not timed.
        progress: gets the share of the work that is done, above 0 and at most 1, behind each probe.
    """
    settings = settings or ProfileSettings()
    bench = _Bench(target, drafter, gamma, _lengths(settings, target, gamma), settings, clock)
    probes = bench.probes(largest_pass(settings, gamma, max_num_seqs), max_num_seqs)
    random = Random(0)
    with torch.inference_mode():
        for probe in probes:
            bench.run(probe)  # warm up: compiled kernels, caches, memory
        samples: list[Sample] = []
        began = clock()
        for repeat in range(settings.most):
            random.shuffle(probes)
            for i, probe in enumerate(probes):
                samples += bench.run(probe, _lead(probe[2]), IN_A_ROW)
                spent, turns = clock() - began, repeat + (i + 1) / len(probes)
                progress(_share(turns, spent, settings))
            if repeat + 1 >= settings.repeats and spent * (repeat + 2) / (repeat + 1) > settings.seconds:
                break
    return samples


def _share(turns: float, spent: float, settings: ProfileSettings) -> float:
    """Of `turns` that took `spent` seconds, among all that will be made at this pace."""
    fitting = turns * settings.seconds // spent if spent > 0 else settings.most
    return min(1.0, turns / min(max(fitting, settings.repeats), settings.most))


def largest_pass(settings: ProfileSettings, gamma: int, max_num_seqs: int) -> int:
    """Rows of the largest pass that is timed: what the engine can have, as far as the settings go."""
    return max(n for n in SIZES if n <= max(2, min(settings.max_rows, max_num_seqs * (1 + gamma))))


def _lengths(settings: ProfileSettings, target: Target, gamma: int) -> tuple[int, ...]:
    """The context lengths as far as the model's context goes: shorter ones in proportion where it is short."""
    room = target.max_context - gamma - 2
    longest = settings.context_lengths[-1]
    lengths = [n if longest <= room else max(1, n * room // longest) for n in settings.context_lengths]
    if len(set(lengths)) < 3:
        raise DSparkError(f"the model's context of {target.max_context} is too short for a cost profile")
    return tuple(lengths)


Probe = tuple[Kind, int, int, int]


def _lead(rows: int) -> int:
    """Runs at a turn that do not count: few rows find the caches as those before left them, for several passes."""
    return SETTLED if rows <= FEW_ROWS else 1


class _Bench:
    """Made-up requests in a pool of their own."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        gamma: int,
        contexts: tuple[int, ...],
        settings: ProfileSettings,
        clock: Callable[[], float],
    ) -> None:
        self.target, self.drafter, self.gamma, self.contexts = target, drafter, gamma, contexts
        self._clock, self._uid = clock, 0
        self._params = SamplingParams(temperature=settings.temperature, seed=0)
        self._random = np.random.default_rng(0)
        specs = target.kv_specs + (drafter.kv_specs if drafter else ())
        requests = max(2, -(-settings.max_rows // (1 + gamma)), 8)
        room = max(contexts[-1] + gamma + 2, requests * (contexts[0] + gamma + 2 + BLOCK))
        self._pool = KVPool(specs, -(-room // BLOCK) + 1, BLOCK, target.kv_dtype, target.device)
        for layer in {id(t): t for t in (*self._pool.k, *self._pool.v)}.values():
            layer.normal_(std=0.5)  # memory never written is one page of zeros: reading it costs nothing
        if drafter is not None:
            drafter.attach(self._pool, len(target.kv_specs))
        self._runner = Runner(target, self._pool, drafter.taps if drafter else ())

    def probes(self, max_rows: int, max_num_seqs: int) -> list[Probe]:
        """What is timed. Passes by rows at the shortest context, two sizes at the longer ones, one size with many
        requests; drafts of one and of several requests; upkeep of one row and of a block's."""
        short, width = self.contexts[0], 1 + self.gamma
        sizes = [n for n in SIZES if n <= max_rows]
        requests = {n: -(-n // width) for n in sizes}
        probes: list[Probe] = [("step", requests[n], n, short) for n in sizes if requests[n] <= max_num_seqs]
        some = max(n for n in sizes if n <= max(width, 2))
        if self.gamma:
            probes += [("step", 1, n, long) for long in self.contexts[1:] for n in (1, min(some, width))]
        else:
            probes += [("step", 1, 1, long) for long in self.contexts[1:]]
        several = min(8, max_num_seqs, max_rows)
        if several > 1 and several in sizes:
            probes += [("step", several, several, short)]
        if self.drafter is not None:
            counts = sorted({1, several})
            probes += [("draft", r, r * k, short) for r in counts for k in sorted({1, self.gamma})]
            if not isinstance(self.drafter, Deferring):
                probes += [("upkeep", 1, n, 0) for n in (1, width)]
        return list(dict.fromkeys(probes))

    def run(self, probe: Probe, lead: int = 0, count: int = 1) -> list[Sample]:
        """Times of `count` calls behind `lead` others; of a "draft", and of the pass behind it."""
        kind, requests, rows, context = probe
        group = [self._request(context, rows) for _ in range(requests)]
        batch = Batch(
            group,
            rows=np.ones(requests, dtype=np.int64),
            samples=np.ones(requests, dtype=bool),
            room=np.full(requests, self.gamma),
        )
        try:
            if kind == "draft":
                self._follow(batch, context)
            samples = [self._sample(probe, batch) for _ in range(lead + count)]
            return [sample for found in samples[lead:] for sample in found]
        finally:
            for r in group:
                self._pool.release(r.table)
                if self.drafter is not None:
                    self.drafter.forget(r.request)

    def _sample(self, probe: Probe, batch: Batch) -> list[Sample]:
        kind, requests, rows, context = probe
        if kind == "draft":
            draft, seconds = self._draft(batch, rows)
            behind = self._verify(batch, draft, Plan(draft.lengths))
            passed = requests + int(draft.lengths.sum())
            return [Sample(*probe, seconds), Sample("behind", requests, passed, context, behind)]
        call = {"step": self._step, "upkeep": self._upkeep}[kind]
        return [Sample(*probe, call(batch, rows))]

    def _request(self, context: int, rows: int) -> Running:
        self._uid += 1
        observed = rows + 1 if context == 0 else 0  # "upkeep": rows and what follows them
        tokens = self._random.integers(self.target.vocab_size, size=context + 1 + observed).tolist()
        request = Request(
            self._uid, str(self._uid), tokens, self._params, 0, context + rows + 2, cached=context
        )
        running = Running(request, OutputStream(request, (), None), None, prefilling=False)
        reserved = self._pool.reserve(
            running.table, context + 1 + max(self.gamma, rows if context == 0 else 0)
        )
        assert reserved, "the bench's pool holds its largest probe"
        return running

    def _step(self, batch: Batch, rows: int) -> float:
        count = len(batch.running)
        lengths = np.full(count, (rows - count) // count)
        lengths[: (rows - count) % count] += 1
        width = max(int(lengths.max()), 0)
        tokens = torch.from_numpy(self._random.integers(self.target.vocab_size, size=(count, width)))
        return self._verify(batch, Draft(tokens.to(self.target.device), lengths), Plan(lengths))

    def _verify(self, batch: Batch, draft: Draft, plan: Plan) -> float:
        started = self._clock()
        seen = self._runner.verify(batch, draft, plan)
        judge(batch, draft, seen)
        return self._clock() - started

    def _follow(self, batch: Batch, context: int) -> None:
        """Have the drafter know the whole context."""
        assert self.drafter is not None
        self.drafter.observe(self._observed(batch, context))
        if isinstance(self.drafter, Deferring):
            self.drafter.catch_up()

    def _draft(self, batch: Batch, rows: int) -> tuple[Draft, float]:
        assert self.drafter is not None
        if isinstance(
            self.drafter, Deferring
        ):  # upkeep is a part of drafting: a round leaves a row or two behind
            self.drafter.observe(self._observed(batch, 1))
        want = np.full(len(batch.running), rows // len(batch.running))
        sampling = SamplingRows.of(batch.requests, self.target.device)
        shapers = [None] * len(batch.running)
        started = self._clock()
        draft = self.drafter.propose(
            ProposeBatch(batch.requests, want, sampling, batch.block_tables, shapers)
        )
        draft.tokens.cpu()
        return draft, self._clock() - started

    def _upkeep(self, batch: Batch, rows: int) -> float:
        assert self.drafter is not None
        observed = self._observed(batch, rows)
        started = self._clock()
        self.drafter.observe(observed)
        return self._clock() - started

    def _observed(self, batch: Batch, rows: int) -> ObserveBatch:
        """The first `rows` positions of every request, with made-up taps."""
        assert self.drafter is not None
        count, device = len(batch.running), self.target.device
        slots = np.concatenate([self._pool.slots(r.table, 0, rows) for r in batch.running])
        width = len(self.drafter.taps) * self.target.hidden_size
        return ObserveBatch(
            requests=batch.requests,
            row_start=np.arange(count + 1) * rows,
            positions=torch.arange(rows, device=device).repeat(count),
            slots=torch.from_numpy(slots).to(device),
            taps=torch.randn(count * rows, width, dtype=self.target.dtype, device=device) if width else None,
        )
