"""The simulation: requests come, the engine takes steps, time passes as the cost model says.

    scenario = Scenario(traffic=ClosedLoop(16, mix), acceptance=acceptance, cost=cost)
    log = run(scenario, FixedLength(5), seed=0)
    summary = summarise(log, scenario)

The policy is the engine's own object and is called as the engine calls it: `draft_lengths` before the block exists,
`verify_lengths` with the survivals of the block, `observe` after acceptance, in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from dspark.errors import DSparkError
from dspark.schedule.base import Observer, Policy, Resting, ScheduleState, Timed
from dspark.schedule.cost import CostModel
from dspark.simulate.acceptance import Acceptance, AcceptanceState, Block
from dspark.simulate.log import Growing, RunLog
from dspark.simulate.server import Limits, Server, StepBatch
from dspark.simulate.traffic import Source, Traffic

__all__ = ["Scenario", "run"]

MAX_STEPS = 50_000_000


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated. Seconds are simulated seconds.

    Requests that arrive, and steps that end, between `warmup_s` and `warmup_s + duration_s` are measured. The
    engine then goes on, under the same traffic, until every measured request is served, for `drain_s` at most
    (default: `duration_s`); those not served then are counted as they stand.

    `cost`: what steps really take. Policies bring their own prices. `overhead_s` is added to every step.
    `greedy`: every request is at temperature 0, so policies that may look at the block do.

    Raises:
        DSparkError: a time out of range.
    """

    traffic: Traffic
    acceptance: Acceptance
    cost: CostModel
    limits: Limits = field(default_factory=Limits)
    warmup_s: float = 20.0
    duration_s: float = 60.0
    drain_s: float | None = None
    overhead_s: float = 0.0
    greedy: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (
            ("warmup_s", self.warmup_s, 0.0),
            ("duration_s", self.duration_s, 1e-9),
            ("drain_s", self.drain_s or 0.0, 0.0),
            ("overhead_s", self.overhead_s, 0.0),
        ):
            if not np.isfinite(value) or value < least:
                raise DSparkError(f"{name} must be {'above 0' if least else '0 or more'}, got {value}")

    @property
    def measured_until(self) -> float:
        return self.warmup_s + self.duration_s

    @property
    def ends(self) -> float:
        return self.measured_until + (self.duration_s if self.drain_s is None else self.drain_s)


def run(scenario: Scenario, policy: Policy, seed: int) -> RunLog:
    """Simulate one engine with a fresh `policy`. The same seed gives the same traffic and difficulty to every policy.

    Raises:
        DSparkError: the policy gives impossible lengths, or steps take no time.
    """
    of_traffic, of_drafts = np.random.SeedSequence(seed).spawn(2)
    source = scenario.traffic.start(np.random.default_rng(of_traffic), scenario.ends)
    pool = source.pool.within(scenario.limits.max_model_len)
    drafts = scenario.acceptance.start(pool.domains, pool.domain, of_drafts)
    server = Server(scenario.limits, scenario.acceptance.gamma, pool.prompt, pool.output)
    return _Run(scenario, policy, source, drafts, server, len(pool)).to_the_end()


class _Run:
    def __init__(
        self,
        scenario: Scenario,
        policy: Policy,
        source: Source,
        drafts: AcceptanceState,
        server: Server,
        pool_size: int,
    ) -> None:
        self.scenario, self.policy, self.source, self.drafts = scenario, policy, source, drafts
        self.server, self.pool_size = server, pool_size
        self.observer = policy if isinstance(policy, Observer) else None
        self.timed = policy if isinstance(policy, Timed) else None
        self.resting = policy if isinstance(policy, Resting) else None
        self.now = 0.0
        self.steps, self.deliveries = Growing(13), _Deliveries()
        self.arrivals: list[float] = []
        self.times: dict[int, list[float]] = {}  # uid -> first token, last token
        self.last_delivery = np.full(1024, np.nan)
        self.unserved = 0  # measured requests that are not done

    def to_the_end(self) -> RunLog:
        scenario = self.scenario
        for _ in range(MAX_STEPS):
            self._arrive()
            if not self.server.busy:
                if not np.isfinite(self.source.next_time) or self.source.next_time >= scenario.ends:
                    break
                self.now = self.source.next_time
                continue
            if self.now >= scenario.ends or (self.now >= scenario.measured_until and not self.unserved):
                break
            self._step()
        else:
            raise DSparkError(
                f"more than {MAX_STEPS} steps: steps take hardly any time, check the cost model"
            )
        return self._log()

    def _arrive(self) -> None:
        scenario = self.scenario
        for uid, arrival in self.source.take(self.now):
            assert uid == len(self.arrivals)
            self.arrivals.append(arrival)
            self.server.waiting.append(uid)
            self.unserved += scenario.warmup_s <= arrival < scenario.measured_until
        if len(self.arrivals) > len(self.last_delivery):
            more = np.full(2 * len(self.arrivals), np.nan)
            more[: len(self.last_delivery)] = self.last_delivery
            self.last_delivery = more

    def _step(self) -> None:
        batch = self.server.admit()
        tolerant = np.full(batch.state.num_requests, self.scenario.greedy)
        state = replace(batch.state, tolerates_live=tolerant)
        drafted, block = self._draft(state)
        survival = block.survival if block else None
        scheduled = self.policy.verify_lengths(state, survival, drafted)
        _check("verify_lengths", scheduled, drafted)
        if self.resting is not None:
            self.server.rest(batch, self.resting.rests(state.num_requests))
        accepted = np.minimum(block.run, scheduled) if block else np.zeros_like(drafted)
        drafted_for, drafts, budget = int(np.count_nonzero(drafted)), int(drafted.sum()), int(scheduled.sum())
        draft_s = float(self.scenario.cost.draft_seconds(drafted_for, drafts))
        rows = state.query_tokens + budget
        step_s = float(self.scenario.cost.step_seconds(state.num_requests, rows, state.context))
        seconds = draft_s + step_s + self.scenario.overhead_s
        if not seconds > 0:
            raise DSparkError(f"the cost model says that a step takes {seconds} s: every step must take time")
        if self.observer is not None:
            self.observer.observe(state, survival, drafted, scheduled, accepted)
        if self.timed is not None:
            self.timed.timed(state, drafted, scheduled, draft_s, step_s)
        waiting, start = len(self.server.waiting), self.now
        self.now += seconds
        tokens, ended = self.server.commit(batch, accepted)
        self._deliver(batch, tokens, ended)
        total, accepts = int(tokens.sum()), int(accepted.sum())
        decoding = int(np.count_nonzero(batch.decoding))
        wasted = accepts + int(np.count_nonzero(batch.samples)) - total
        held = (state.num_requests, state.query_tokens, decoding, drafts, budget, accepts, total, wasted)
        self.steps.append((start, seconds, *held, state.context, waiting, drafted_for))

    def _draft(self, state: ScheduleState) -> tuple[np.ndarray, Block | None]:
        """Drafts made [R] and how they fare; None where nothing was drafted."""
        want = self.policy.draft_lengths(state)
        _check("draft_lengths", want, state.room)
        if not want.any():
            return np.zeros_like(state.room), None
        return want, self.drafts.block(state.uids % self.pool_size, self.policy.uses_survival)

    def _deliver(self, batch: StepBatch, tokens: np.ndarray, ended: np.ndarray) -> None:
        got = tokens > 0
        uids = batch.state.uids[got]
        gaps = self.now - self.last_delivery[uids]
        self.last_delivery[uids] = self.now
        self.deliveries.add(self.now, gaps, tokens[got])
        for uid in uids[np.isnan(gaps)].tolist():
            self.times[uid] = [self.now, np.nan]
        if ended.any():
            gone = batch.state.uids[ended].tolist()
            for uid in gone:
                self.times[uid][1] = self.now
                arrival = self.arrivals[uid]
                self.unserved -= self.scenario.warmup_s <= arrival < self.scenario.measured_until
            self.source.finished(self.now, len(gone))

    def _log(self) -> RunLog:
        n, pool = len(self.arrivals), self.source.pool.within(self.scenario.limits.max_model_len)
        uids = np.arange(n)
        times = np.full((n, 2), np.nan)
        if self.times:
            times[list(self.times)] = list(self.times.values())
        rows = uids % self.pool_size
        requests = np.column_stack(
            (uids, self.arrivals, times, pool.prompt[rows], pool.output[rows], pool.domain[rows])
        ).astype(np.float64)
        return RunLog(
            self.steps.rows.copy(),
            requests.reshape(n, 7),
            self.deliveries.rows,
            self.server.preemptions,
            self.now,
        )


class _Deliveries:
    """Tokens as they reach their readers; a first token has no gap before it (NaN)."""

    def __init__(self) -> None:
        self._data = np.empty((4096, 3), dtype=np.float32)
        self._n = 0

    def add(self, now: float, gaps: np.ndarray, tokens: np.ndarray) -> None:
        stop = self._n + len(gaps)
        if stop > len(self._data):
            self._data = np.concatenate((self._data, np.empty((stop + len(self._data), 3), dtype=np.float32)))
        rows = self._data[self._n : stop]
        rows[:, 0], rows[:, 1], rows[:, 2] = now, gaps, tokens
        self._n = stop

    @property
    def rows(self) -> np.ndarray:
        """[D, 3]"""
        return self._data[: self._n].copy()


def _check(what: str, lengths: np.ndarray, limit: np.ndarray) -> None:
    if lengths.shape != limit.shape or (lengths < 0).any() or (lengths > limit).any():
        raise DSparkError(f"{what} gave lengths {lengths.tolist()}, allowed are 0 to {limit.tolist()}")
