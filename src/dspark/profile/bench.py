"""An engine with made-up requests whose KV is filled: rounds of any size, as a running engine has them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from dspark.core import Draft, Request, SamplingParams
from dspark.drafters.base import Deferring, Drafter, ObserveBatch, ProposeBatch
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.engine.scheduler import Running
from dspark.engine.watch import AcceptanceWatch
from dspark.kv import KVPool
from dspark.profile.fit import Probe, Sample
from dspark.schedule.base import Dependence, ScheduleState
from dspark.target.base import Target

__all__ = ["Bench"]

BLOCK = 16


class _Asked:
    """A policy that has drafted and verified what a probe says. While it `rests`, no drafter follows."""

    dependence = Dependence.STATIC
    uses_survival = False

    def __init__(self) -> None:
        self.lengths = np.zeros(0, dtype=np.int64)  # [R]
        self.resting = False

    def rests(self, num_requests: int) -> float:
        return math.inf if self.resting else 0.0

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        return np.minimum(self.lengths, state.room)

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        return drafted


class _MadeUp:
    """In front of a drafter, or of none: drafts at random and for nothing, until it is to be `real`."""

    deterministic = True  # what is made up is one-hot

    def __init__(self, drafter: Drafter | None, gamma: int, target: Target) -> None:
        self.drafter, self.max_draft, self.real = drafter, gamma, False
        self.drafted = 0  # tokens of the last draft
        self.name = "none" if drafter is None else drafter.name
        self.taps, self.kv_specs = ((), ()) if drafter is None else (drafter.taps, drafter.kv_specs)
        self._random = torch.Generator().manual_seed(0)
        self._vocab_size, self._device = target.vocab_size, target.device

    def attach(self, pool: KVPool, first_layer: int) -> None:
        if self.drafter is not None:
            self.drafter.attach(pool, first_layer)

    def observe(self, batch: ObserveBatch) -> None:
        if self.drafter is not None:
            self.drafter.observe(batch)

    def propose(self, batch: ProposeBatch) -> Draft:
        if self.real:
            assert self.drafter is not None
            draft = self.drafter.propose(batch)
            draft.tokens.cpu()  # a GPU is to have finished before the clock is read
            self.drafted = int(draft.lengths.sum())
            return draft
        shape = len(batch.requests), int(batch.lengths.max())
        tokens = torch.randint(self._vocab_size, shape, generator=self._random)
        return Draft(tokens.to(self._device), batch.lengths)

    def forget(self, request: Request) -> None:
        if self.drafter is not None:
            self.drafter.forget(request)


class Bench:
    """Runs probes, each with requests of its own.

    Args:
        gamma: most drafts a request may have.
        requests: most of a probe.
        positions: of KV, for all requests of a probe together.
        temperature: of the requests.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        gamma: int,
        requests: int,
        positions: int,
        temperature: float,
        clock: Callable[[], float],
    ) -> None:
        self._target, self._drafter, self._clock = target, drafter, clock
        self._params = SamplingParams(temperature=temperature, seed=0, max_tokens=None, ignore_eos=True)
        self._random = np.random.default_rng(0)
        self._noise = torch.Generator(target.device).manual_seed(0)  # how far requests grow follows from it
        self._asked, self._made_up = _Asked(), _MadeUp(drafter, gamma, target)
        sizes = EngineConfig(
            max_num_seqs=requests,
            max_num_batched_tokens=requests,
            block_size=BLOCK,
            kv_cache_tokens=positions,
        )
        self._engine = Engine(target, self._made_up, self._asked, config=sizes, clock=clock)
        self._engine.watch = AcceptanceWatch(None)  # what is made up is hardly ever accepted
        pool = self._engine.pool
        # Memory never written is one page of zeros: reading it costs nothing.
        for layer in {id(t): t for t in (*pool.k, *pool.v)}.values():
            layer.normal_(std=0.5, generator=self._noise)

    def run(self, probe: Probe, lead: int = 0, count: int = 1) -> list[Sample]:
        """Times of `count` rounds behind `lead` others; those of a "draft" with the rest of their round ("behind").

        Requests grow by their rounds: they have the probe's context behind the lead.
        """
        kind, requests, rows, context = probe
        start = context if kind == "upkeep" else max(1, context - lead)
        group = [self._request(start) for _ in range(requests)]
        try:
            if kind == "upkeep":
                times = [self._upkeep(group, rows) for _ in range(lead + count)]
                return [Sample(*probe, t) for t in times[lead:]]
            drafts = rows if kind == "draft" else rows - requests
            self._asked.lengths = np.full(requests, drafts // requests)
            self._asked.lengths[: drafts % requests] += 1
            self._made_up.real = kind == "draft"
            self._asked.resting = kind == "step"
            if self._made_up.real:
                self._follow(group)
            rounds = [self._round(probe) for _ in range(lead + count)]
            return [sample for found in rounds[lead:] for sample in found]
        finally:
            for r in group:
                self._engine.abort(r.request.request_id)

    def _round(self, probe: Probe) -> list[Sample]:
        """One round. None where drafts at random were accepted up to the edge of the context."""
        kind, requests, _, context = probe
        if len(self._engine.scheduler.running) < requests:
            return []
        for r in self._engine.scheduler.running:
            r.followed = True  # or there would be no room for what is made up
        timings = self._engine.timings
        timings.reset()
        self._engine.step()
        rest = timings.total_s - timings.draft_s
        if kind == "step":
            return [Sample(*probe, rest)]
        behind = Sample("behind", requests, requests + self._made_up.drafted, context, rest)
        return [Sample(*probe, timings.draft_s), behind]

    def _request(self, context: int) -> Running:
        """A request with so many cached positions, among those that decode."""
        tokens = self._random.integers(self._target.vocab_size, size=context + 1).tolist()
        self._engine.add(tokens, self._params)
        scheduler = self._engine.scheduler
        r = scheduler.waiting.pop()
        reserved = self._engine.pool.reserve(r.table, context + 1)
        assert reserved, "the bench's pool holds its largest probe"
        r.request.cached, r.prefilling = context, False
        scheduler.running.append(r)
        return r

    def _follow(self, group: list[Running]) -> None:
        """Have the drafter know the whole context."""
        assert self._drafter is not None
        self._drafter.observe(self._observed(group, group[0].request.cached))
        if isinstance(self._drafter, Deferring):
            self._drafter.catch_up()

    def _upkeep(self, group: list[Running], rows: int) -> float:
        assert self._drafter is not None
        observed = self._observed(group, rows)
        started = self._clock()
        self._drafter.observe(observed)
        return self._clock() - started

    def _observed(self, group: list[Running], rows: int) -> ObserveBatch:
        """The first `rows` positions of every request, with made-up taps."""
        assert self._drafter is not None
        size, device = len(group), self._target.device
        slots = np.concatenate([self._engine.pool.slots(r.table, 0, rows) for r in group])
        width = len(self._drafter.taps) * self._target.hidden_size
        taps = None
        if width:
            shape, dtype = (size * rows, width), self._target.dtype
            taps = torch.randn(shape, generator=self._noise, dtype=dtype, device=device)
        return ObserveBatch(
            requests=[r.request for r in group],
            row_start=np.arange(size + 1) * rows,
            positions=torch.arange(rows, device=device).repeat(size),
            slots=torch.from_numpy(slots).to(device),
            taps=taps,
        )
