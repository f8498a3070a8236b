"""The engine: many requests, one round at a time.

engine.add(prompt_token_ids, SamplingParams(...))
while engine.has_unfinished:
    for event in engine.step(): ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from dspark.acceptance import tolerates_live
from dspark.core import (
    Draft,
    FinishReason,
    Plan,
    Request,
    RequestOutput,
    SamplingParams,
    StepEvent,
)
from dspark.drafters.base import Copier, Drafter, ProposeBatch
from dspark.engine.commit import Round, append, output_of
from dspark.engine.config import EngineConfig
from dspark.engine.intake import (
    check_lengths,
    check_policy,
    check_prompt,
    check_sound,
    longest_total,
    unused_id,
)
from dspark.engine.judge import Judgement, judge
from dspark.engine.runner import Runner, Verification
from dspark.engine.scheduler import Batch, Running, Scheduler
from dspark.engine.shared_noise import couple
from dspark.engine.termination import OutputStream
from dspark.engine.watch import AcceptanceWatch, StepTimings
from dspark.kv import KVPool
from dspark.randomness import fresh_seed
from dspark.sampling import SamplingRows
from dspark.schedule.policies import FixedLength, Observer, Policy, Resting, ScheduleState, Timed
from dspark.schedule.survival import Calibrate, survival
from dspark.shaping import Constraint, LogitsShaper
from dspark.target.base import Target
from dspark.target.tokenizer import Tokenizer

__all__ = ["Engine", "StepTimings"]


class Engine:
    """Continuous batching with speculative decoding.

    Args:
        target: the model whose distribution the output follows.
        drafter: proposes tokens; None decodes plainly.
        policy: how much to draft and verify; by default every draft the drafter can make.
        tokenizer: for text and stop strings; without one outputs carry ids only.
        calibrate: probabilities of conditional acceptance [R, gamma] from confidence logits; by default a sigmoid.
        clock: seconds; what durations are taken with.

    Raises:
        DSparkError: sizes the model or the memory cannot bear, or a policy that contradicts itself.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        *,
        calibrate: Calibrate | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config or EngineConfig()
        self.calibrate, self._clock = calibrate, clock
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self._device = target.device  # asking the model takes a microsecond
        self.policy = policy or FixedLength(drafter.max_draft if drafter else 0)
        self._observer = self.policy if isinstance(self.policy, Observer) else None
        self._timed = self.policy if isinstance(self.policy, Timed) else None
        self._resting = self.policy if isinstance(self.policy, Resting) and drafter and drafter.taps else None
        self._copier = drafter if isinstance(drafter, Copier) else None
        check_policy(self.policy)
        self.max_model_len = self.config.model_len(target.max_context)
        specs = target.kv_specs + (drafter.kv_specs if drafter else ())
        size = self.config.block_size
        blocks = -(-self.config.kv_tokens(target.max_context) // size)
        self.pool = KVPool(specs, blocks, size, target.kv_dtype, target.device)
        if drafter is not None:
            drafter.attach(self.pool, len(target.kv_specs))
        self.runner = Runner(target, self.pool, drafter.taps if drafter else ())
        max_draft = drafter.max_draft if drafter else 0
        self.scheduler = Scheduler(
            self.pool, self.config.max_num_seqs, self.config.max_num_batched_tokens, max_draft
        )
        self.timings = StepTimings()
        self.watch = AcceptanceWatch(drafter)
        self._by_id: dict[str, Running] = {}
        self._ended: list[StepEvent] = []  # of requests that ended without a forward pass
        self._next_uid = 0

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has work or events to deliver."""
        return bool(self._by_id or self._ended)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        constraint: Constraint | None = None,
    ) -> str:
        """Queue a request; returns its id.

        Raises:
            DSparkError: empty prompt, token outside the vocabulary, prompt at or past the context edge, request
                larger than the KV pool, id in use, policy unsound for it. Nothing was queued then.
        """
        prompt = list(prompt_token_ids)
        check_prompt(prompt, params, self.target.vocab_size, self.max_model_len)
        check_sound(self.policy, self.drafter, params, self.config.rule)
        capacity = self.pool.num_blocks * self.pool.block_size
        max_total = longest_total(len(prompt), params.max_tokens, self.max_model_len, capacity)
        request_id = unused_id(request_id, self._next_uid, self._by_id)
        seed = params.seed if params.seed is not None else fresh_seed()
        request = Request(self._next_uid, request_id, prompt, params, seed, max_total)
        stream = OutputStream(request, self.target.eos_token_ids, self.tokenizer)
        shaper = LogitsShaper.for_request(
            request, self.target.vocab_size, self.target.eos_token_ids, self._device, constraint
        )
        r = Running(request, stream, shaper)
        self._next_uid += 1
        self._by_id[request_id] = r
        self.scheduler.waiting.append(r)
        if params.max_tokens == 0:
            self._ended.append(StepEvent(request_id, [], [], "", self._end_now(r, "length")))
        return request_id

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is waiting or running."""
        return request_id in self._by_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request and return what it has; no event tells of it. None if it is not running."""
        self._ended = [event for event in self._ended if event.request_id != request_id]
        r = self._by_id.get(request_id)
        return None if r is None else self._end_now(r, "abort")

    @torch.inference_mode()
    def step(self) -> list[StepEvent]:
        """One round: admit, aim, propose, plan, verify, judge, commit.

        If a part of it raises, the requests of the round are aborted and the error goes on; the next step tells, also
        what was decided before.
        """
        started = self._clock()
        batch = self._admit()
        if not batch.running:
            return self._delivered([])
        state, events = self._state(batch), list[StepEvent]()
        try:
            want = check_lengths("draft_lengths", self.policy.draft_lengths(state), state.room)
            aimed = self._clock()
            draft = self._propose(batch, want, state.free)
            alive, plan = self._plan(state, draft)
            proposed = self._clock()
            follow = self._resting is None or batch.outlasts(self._resting.rests(state.num_requests))
            seen = self.runner.verify(batch, draft, plan, follow)
            judgement = judge(batch, draft, seen, self.config.rule)
            verified = self._clock()
            accepted = seen.spread(judgement.accepted)
            if self._observer is not None:
                self._observer.observe(state, alive, draft.lengths, plan.lengths, accepted)
            events = self._commit(batch, draft, plan, seen, judgement, accepted, follow)
            ended = self._clock()
            if self._timed is not None:
                drafting = proposed - aimed
                self._timed.timed(state, draft.lengths, plan.lengths, drafting, ended - started - drafting)
        except BaseException:
            self._ended += events
            self._abandon(batch)
            raise
        self.timings.add(ended - started, proposed - aimed, verified - proposed)
        return self._delivered(events)

    def _delivered(self, events: list[StepEvent]) -> list[StepEvent]:
        """The events of requests that ended outside a round, then these."""
        ended, self._ended = self._ended, []
        return ended + events

    def _admit(self) -> Batch:
        batch = self.scheduler.admit()
        for request in self.scheduler.preempted:
            if self.drafter is not None:
                self.drafter.forget(request)
        self.scheduler.preempted.clear()
        return batch

    def _state(self, batch: Batch) -> ScheduleState:
        greedy = np.array([r.params.greedy for r in batch.requests], dtype=bool)
        deterministic = self.drafter is None or self.drafter.deterministic
        free = None
        if self._copier is not None:
            free = check_lengths("free", self._copier.free(batch.requests, batch.room), batch.room)
        tolerant = tolerates_live(greedy, deterministic, self.config.rule)
        return batch.state(tolerant, free)

    def _propose(self, batch: Batch, want: np.ndarray, free: np.ndarray | None) -> Draft:
        most = want if free is None else np.where(free > 0, free, want)
        if self.drafter is None or not most.any():
            return Draft.empty(len(batch.running), self._device)
        rows = SamplingRows.of(batch.requests, self._device)
        shapers = [r.shaper for r in batch.running]
        if self.config.rule == "shared_noise":
            rows, shapers = couple(batch.running, rows)
        draft = self.drafter.propose(ProposeBatch(batch.requests, want, rows, batch.block_tables, shapers))
        return replace(draft, lengths=check_lengths(f"drafter {self.drafter.name}", draft.lengths, most))

    def _plan(self, state: ScheduleState, draft: Draft) -> tuple[np.ndarray | None, Plan]:
        """Survivals [R, gamma], if the policy reads them, and what to verify. Without drafts nobody is asked."""
        if not draft.gamma:
            return None, Plan(draft.lengths)
        alive = survival(draft, self.calibrate, state.free) if self.policy.uses_survival else None
        lengths = self.policy.verify_lengths(state, alive, draft.lengths)
        return alive, Plan(check_lengths("verify_lengths", lengths, draft.lengths))

    def _commit(
        self,
        batch: Batch,
        draft: Draft,
        plan: Plan,
        seen: Verification,
        judgement: Judgement,
        accepted: np.ndarray,
        follow: bool,
    ) -> list[StepEvent]:
        """Append each request's tokens, let the drafter follow, and release what ended."""
        drafts = draft.tokens.tolist() if plan.budget else [[]] * len(batch.running)
        next_tokens = judgement.next_tokens.tolist()
        for i in np.flatnonzero(~batch.samples):  # prefill chunks that do not reach the end of the prompt
            batch.requests[i].cached += int(batch.rows[i])
        events = []
        for s, i in enumerate(seen.sampling.tolist()):
            r = batch.running[i]
            tokens = [*drafts[i][: accepted[i]], next_tokens[s]]
            part = Round(
                rows=int(batch.rows[i]),
                drafted=int(draft.lengths[i]),
                scheduled=int(plan.lengths[i]),
                tokens=tokens,
                first_row=int(seen.logit_start[s]),
            )
            events.append(append(r, part, judgement))
            self.pool.truncate(r.table, r.request.cached)
            self.watch.count(part.scheduled, part.accepted)
        self._observe(batch, seen, accepted, follow)
        for event in events:
            if event.output is not None:
                self._release(self._by_id[event.request_id])
        return events

    def _observe(self, batch: Batch, seen: Verification, accepted: np.ndarray, follow: bool) -> None:
        if not follow:
            for r in batch.running:
                r.followed = False
        elif self.drafter is not None:
            observed = self.runner.observed(batch, seen, accepted)
            if observed is not None:
                self.drafter.observe(observed)

    def _end_now(self, r: Running, reason: FinishReason) -> RequestOutput:
        """End a request outside a round."""
        r.request.finish_reason = reason
        r.stream.flush()
        self._release(r)
        return output_of(r)

    def _release(self, r: Running) -> None:
        """Return everything a request holds."""
        self.scheduler.finish(r)
        if self.drafter is not None:
            self.drafter.forget(r.request)
        del self._by_id[r.request.request_id]
        if not self._by_id:
            self.pool.check_integrity([])

    def _abandon(self, batch: Batch) -> None:
        """A round failed half way: what its requests hold cannot be trusted any more."""
        for r in batch.running:
            request_id = r.request.request_id
            if request_id in self._by_id:
                output = self._end_now(r, r.request.finish_reason or "abort")
                self._ended.append(StepEvent(request_id, [], [], "", output))
