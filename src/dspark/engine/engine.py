"""The engine: many requests, one round at a time.

engine.add(prompt_token_ids, SamplingParams(...))
while engine.has_unfinished:
    for event in engine.step(): ...
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dspark.acceptance import tolerates_live
from dspark.core import (
    Draft,
    DSparkError,
    Plan,
    Request,
    RequestOutput,
    SamplingParams,
    StepEvent,
    TokenOrigin,
)
from dspark.drafters.base import Drafter, ProposeBatch
from dspark.engine.config import EngineConfig
from dspark.engine.judge import Judgement, judge
from dspark.engine.runner import Runner, Verification
from dspark.engine.scheduler import Batch, Running, Scheduler
from dspark.engine.termination import OutputStream, Tokenizer
from dspark.kv import KVPool
from dspark.randomness import fresh_seed
from dspark.sampling import SamplingRows
from dspark.schedule.policies import Dependence, FixedLength, Policy
from dspark.schedule.survival import survival
from dspark.shaping import Constraint, LogitsShaper
from dspark.target.base import Target

__all__ = ["Engine", "StepTimings"]


@dataclass
class StepTimings:
    """Where wall time went, in seconds, summed over steps (host clock: meaningful on a CPU)."""

    steps: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    def add(self, started: float, proposed: float, verified: float) -> None:
        """Count a step whose proposal and verification were done at these clock readings; it ends now."""
        self.steps += 1
        self.draft_s += proposed - started
        self.verify_s += verified - proposed
        self.total_s += time.perf_counter() - started

    def reset(self) -> None:
        self.steps, self.draft_s, self.verify_s, self.total_s = 0, 0.0, 0.0, 0.0


class Engine:
    """Continuous batching with speculative decoding.

    Args:
        target: the model whose distribution the output follows.
        drafter: proposes tokens; None decodes plainly.
        policy: how much to draft and verify; by default every draft the drafter can make.
        tokenizer: for text and stop strings; without one outputs carry ids only.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.policy = policy or FixedLength(drafter.max_draft if drafter else 0)
        self.max_model_len = self.config.model_len(target.max_context)
        specs = target.kv_specs + (drafter.kv_specs if drafter else ())
        size = self.config.block_size
        blocks = -(-self.config.kv_tokens(target.max_context) // size)
        self.pool = KVPool(specs, blocks, size, target.dtype, target.device)
        if drafter is not None:
            drafter.attach(self.pool, len(target.kv_specs))
        self.runner = Runner(target, self.pool, drafter.taps if drafter else ())
        max_draft = drafter.max_draft if drafter else 0
        self.scheduler = Scheduler(
            self.pool, self.config.max_num_seqs, self.config.max_num_batched_tokens, max_draft
        )
        self.timings = StepTimings()
        self._by_id: dict[str, Running] = {}
        self._ended: list[StepEvent] = []  # requests that end without a forward pass
        self._next_uid = 0

    @property
    def has_unfinished(self) -> bool:
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
                larger than the KV pool, id in use.
        """
        prompt = [int(t) for t in prompt_token_ids]
        request_id = request_id if request_id is not None else f"request-{self._next_uid}"
        max_total = self._check(prompt, params, request_id)
        seed = params.seed if params.seed is not None else fresh_seed()
        request = Request(self._next_uid, request_id, prompt, params, seed, max_total)
        stream = OutputStream(request, self.target.eos_token_ids, self.tokenizer)
        shaper = LogitsShaper.for_request(
            request, self.target.vocab_size, self.target.eos_token_ids, self.target.device, constraint
        )
        self._next_uid += 1
        r = Running(request, stream, shaper)
        self._by_id[request_id] = r
        self.scheduler.waiting.append(r)
        if params.max_tokens == 0:
            request.finish_reason = "length"
            self._ended.append(StepEvent(request_id, [], [], "", self._finish(r)))
        return request_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request at once and return what it has; None if it is not running (any more)."""
        r = self._by_id.get(request_id)
        if r is None:
            return None
        r.request.finish_reason = "abort"
        return self._finish(r)

    @torch.inference_mode()
    def step(self) -> list[StepEvent]:
        """One round: admit, aim, propose, plan, verify, judge, commit."""
        started = time.perf_counter()
        ended, self._ended = self._ended, []
        batch = self._admit()
        if not batch.running:
            return ended
        want = self.policy.draft_lengths(batch.state)
        draft = self._propose(batch, want)
        alive = survival(draft) if self.policy.uses_survival else None
        plan = Plan(self.policy.verify_lengths(batch.state, alive, draft.lengths))
        proposed = time.perf_counter()
        seen = self.runner.verify(batch, draft, plan)
        judgement = judge(batch, draft, seen)
        verified = time.perf_counter()
        events = self._commit(batch, draft, plan, seen, judgement)
        self.timings.add(started, proposed, verified)
        return ended + events

    def _admit(self) -> Batch:
        batch = self.scheduler.admit()
        for request in self.scheduler.preempted:
            if self.drafter is not None:
                self.drafter.forget(request)
        self.scheduler.preempted.clear()
        return batch

    def _propose(self, batch: Batch, want: np.ndarray) -> Draft:
        if self.drafter is None or not want.any():
            return Draft.empty(len(batch.running), self.target.device)
        rows = SamplingRows.of(batch.requests, self.target.device)
        shapers = [r.shaper for r in batch.running]
        return self.drafter.propose(ProposeBatch(batch.requests, want, rows, batch.block_tables(), shapers))

    def _commit(
        self, batch: Batch, draft: Draft, plan: Plan, seen: Verification, judgement: Judgement
    ) -> list[StepEvent]:
        """Roll back, append, end requests, and let the drafter follow."""
        tokens = draft.tokens.cpu().numpy()
        accepted = np.zeros(len(batch.running), dtype=np.int64)
        accepted[seen.sampling] = judgement.verdict.num_accepted.cpu().numpy()
        for i, r in enumerate(batch.running):
            length = int(plan.lengths[i])
            r.request.cached += int(batch.rows[i]) + length  # optimistic: as if all were accepted
            r.request.cached -= length - int(accepted[i])
        events = []
        for s, next_token in enumerate(judgement.verdict.next_token.tolist()):
            i = int(seen.sampling[s])
            new = [*tokens[i, : accepted[i]].tolist(), next_token]
            counts = (int(draft.lengths[i]), int(plan.lengths[i]), int(accepted[i]))
            events.append(self._append(batch.running[i], new, counts, judgement, int(seen.logit_start[s])))
        observed = self.runner.observed(batch, seen, accepted) if self.drafter is not None else None
        if self.drafter is not None and observed is not None:
            self.drafter.observe(observed)
        for event in events:
            if event.output is not None:
                self._finish(self._by_id[event.request_id])
        return events

    def _append(
        self, r: Running, new: list[int], counts: tuple[int, int, int], judgement: Judgement, start: int
    ) -> StepEvent:
        """Commit the tokens of one request up to its end; `counts`: drafted, scheduled, accepted."""
        request, params = r.request, r.request.params
        kept, text = r.stream.commit(new)
        if request.logprobs is not None:
            request.logprobs += judgement.logprobs(
                start, new[:kept], params.logprobs or 0, params.raw_logprobs
            )
        if not r.prefilling:
            request.metrics.count(*counts)
        r.prefilling = False
        request.round += 1
        _, scheduled, accepted = counts
        last: TokenOrigin = "plain" if not scheduled else "bonus" if accepted == scheduled else "corrected"
        origins: list[TokenOrigin] = ["accepted" for _ in range(accepted)]
        origins = [*origins, last][:kept]
        if not request.finished:
            assert request.pending == 1, "exactly the anchor has no KV"
            self.pool.truncate(r.table, request.cached)
            if r.shaper is not None:
                r.shaper.commit(new)
        output = _output(r) if request.finished else None
        return StepEvent(request.request_id, new[:kept], origins, text, output)

    def _finish(self, r: Running) -> RequestOutput:
        """Return what a request holds."""
        self.scheduler.finish(r)
        if self.drafter is not None:
            self.drafter.forget(r.request)
        del self._by_id[r.request.request_id]
        return _output(r)

    def _check_sound(self, params: SamplingParams) -> None:
        """Refuse a policy that would bias this request's output (DESIGN seam 3)."""
        drafter = self.drafter
        if drafter is None or not params.speculative or self.policy.dependence is not Dependence.LIVE:
            return
        if not tolerates_live(np.array([params.greedy]), drafter.deterministic)[0]:
            raise DSparkError(
                "this policy looks at the block whose verification it decides (LIVE): with sampled drafts at a "
                "temperature above 0 that biases the output. Use temperature 0, a deterministic drafter, a CAUSAL or "
                "LAGGED policy, or speculative=False"
            )

    def _check(self, prompt: list[int], params: SamplingParams, request_id: str) -> int:
        """Refuse what cannot run; the most tokens the sequence may reach."""
        if request_id in self._by_id:
            raise DSparkError(f"request id {request_id!r} is in use; choose another")
        if not prompt:
            raise DSparkError("the prompt has no tokens; give it some text")
        vocab_size = self.target.vocab_size
        outside = next((t for t in (*prompt, *params.stop_token_ids) if not 0 <= t < vocab_size), None)
        if outside is not None:
            raise DSparkError(f"token id {outside} is outside the model's vocabulary of {vocab_size}")
        if len(prompt) >= self.max_model_len:
            raise DSparkError(
                f"the prompt has {len(prompt)} tokens, the context holds {self.max_model_len}: shorten the prompt"
            )
        self._check_sound(params)
        capacity = self.pool.num_blocks * self.pool.block_size
        edge = min(self.max_model_len, capacity)
        wanted = self.max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        if (params.max_tokens is not None and min(wanted, self.max_model_len) > capacity) or len(
            prompt
        ) >= capacity:
            raise DSparkError(
                f"the request needs {min(wanted, self.max_model_len)} KV positions, the pool has {capacity}: "
                "lower max_tokens or raise kv_cache_tokens"
            )
        return min(wanted, edge)


def _output(r: Running) -> RequestOutput:
    request = r.request
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        text=r.stream.text,
        token_ids=request.output_token_ids,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        logprobs=request.logprobs,
        seed=request.seed,
        metrics=request.metrics,
    )
