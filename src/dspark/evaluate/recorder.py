"""Watching the rounds of an engine from outside: its drafter, target and policy, each behind a recording wrapper.

    recorder = RoundRecorder(target, thresholds)
    engine = recorder.engine(drafter, policy, tokenizer, config)
    recorder.settle(engine.step())             # behind every step
    counts, suspects = recorder.take(request_id)

The wrappers change nothing that the engine sees. What recording itself costs is summed in `overhead_s`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dspark.core import Draft, Request, StepEvent
from dspark.drafters.base import Copier, Drafter, ObserveBatch, ProposeBatch
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.evaluate.collisions import Suspect
from dspark.evaluate.rounds import AnswerCounts, CollisionThresholds, live_slots
from dspark.kv import KVPool
from dspark.sampling import SamplingRows, log_probabilities
from dspark.schedule.forward import ForwardingPolicy
from dspark.schedule.policies import Policy, ScheduleState
from dspark.target.base import ForwardBatch, Target, TargetOutput
from dspark.target.tokenizer import Tokenizer

__all__ = ["RoundRecorder"]


@dataclass
class _Round:
    """One request's last round, until the step's events tell how many of its tokens were kept."""

    scheduled: int
    accepted: int
    soft: list[float]  # [reached]
    pairs: list[bool]  # slot k begins a pair
    suspects: dict[int, Suspect]  # by slot


@dataclass
class _Answer:
    counts: AnswerCounts = field(default_factory=AnswerCounts)
    suspects: list[Suspect] = field(default_factory=list)


class RoundRecorder:
    """Collects `AnswerCounts` and collision suspects by request id; see the module."""

    def __init__(self, target: Target, thresholds: CollisionThresholds) -> None:
        self.target, self.thresholds = target, thresholds
        self.reset()

    def reset(self) -> None:
        """Forget all answers and times."""
        self.draft_s, self.draft_steps, self.overhead_s = 0.0, 0, 0.0
        self._answers: dict[str, _Answer] = {}
        self._open: dict[str, _Round] = {}
        self.begin_round()

    def engine(
        self, drafter: Drafter, policy: Policy, tokenizer: Tokenizer | None, config: EngineConfig
    ) -> Engine:
        """An engine that drafts with `drafter` and is watched."""
        watched = _RecordingCopier if isinstance(drafter, Copier) else _RecordingDrafter
        return Engine(
            _RecordingTarget(self.target, self),
            watched(drafter, self),
            _RecordingPolicy(policy, self),
            tokenizer,
            config,
        )

    def now(self) -> float:
        """Host clock, once the device has done its work."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def begin_round(self) -> None:
        self._requests: Sequence[Request] = ()
        self._draft: Draft | None = None
        self._logits: torch.Tensor | None = None

    def drafted(self, batch: ProposeBatch, draft: Draft, seconds: float) -> None:
        self._requests, self._draft = batch.requests, draft
        self.draft_s += seconds
        self.draft_steps += 1

    def verified(self, output: TargetOutput) -> None:
        """NOTE: the engine shapes these logits in place, so that `judged` sees those the verdict rests on."""
        self._logits = output.logits

    def judged(self, samples: np.ndarray | None, scheduled: np.ndarray, accepted: np.ndarray) -> None:
        """Score the round; all arrays [R]."""
        draft, logits = self._draft, self._logits
        if draft is None or logits is None or not scheduled.any():
            return
        begin = self.now()
        sampling = np.flatnonzero(np.ones(len(scheduled), dtype=bool) if samples is None else samples)
        start = np.zeros(len(scheduled), dtype=np.int64)
        start[sampling] = np.concatenate(([0], np.cumsum(scheduled[sampling] + 1)))[:-1]
        for i in np.flatnonzero(scheduled).tolist():
            length, request = int(scheduled[i]), self._requests[i]
            rows = SamplingRows.of([request], logits.device).repeat([length + 1])
            first = int(start[i])
            p_t = log_probabilities(logits[first : first + length + 1], rows).exp()  # [length + 1, V]
            self._open[request.request_id] = self._score(request, draft, i, p_t, int(accepted[i]))
        self.overhead_s += self.now() - begin

    def _score(self, request: Request, draft: Draft, i: int, p_t: torch.Tensor, accepted: int) -> _Round:
        length = len(p_t) - 1
        tokens = draft.tokens[i, :length]
        p_x = p_t[:-1].gather(1, tokens[:, None])[:, 0]
        reached = min(accepted + 1, length)
        soft = p_x[:reached]
        copied = draft.one_hot is not None and bool(draft.one_hot[i])
        if draft.probs is not None and not copied and not request.params.greedy:
            p = p_t[:reached] if draft.vocab is None else p_t[:reached, draft.vocab]
            soft = torch.minimum(p, draft.probs[i, :reached].to(p.dtype)).sum(-1)
        x, chance = tokens.tolist(), p_x.tolist()
        pairs = [k + 1 < length and x[k] not in self.target.eos_token_ids for k in range(reached)]
        t = self.thresholds
        suspects = {
            k: self._suspect(request, k, x, chance, p_t[k])
            for k in range(reached)
            if pairs[k] and chance[k] >= t.probable and chance[k + 1] <= t.improbable
        }
        return _Round(length, accepted, soft.tolist(), pairs, suspects)

    def _suspect(self, request: Request, k: int, x: list[int], p: list[float], p_t: torch.Tensor) -> Suspect:
        others = p_t.index_fill(0, torch.tensor([x[k]], device=p_t.device), 0)
        top = others.topk(min(self.thresholds.alternatives, len(others)))
        return Suspect(
            position=request.committed + k,
            token=x[k + 1],
            known=p[k] * p[k + 1],
            alternatives=tuple(top.indices.tolist()),
            weights=tuple(top.values.tolist()),
        )

    def settle(self, events: Sequence[StepEvent]) -> None:
        """Close the rounds of a step: drafts behind the end of an answer are dropped."""
        begin = time.perf_counter()
        for event in events:
            seen = self._open.pop(event.request_id, None)
            if seen is None:
                continue
            kept = len(event.token_ids)
            reached, accepted = live_slots(seen.scheduled, seen.accepted, kept)
            answer = self._answers.setdefault(event.request_id, _Answer())
            answer.counts.add_round(reached, accepted, seen.soft)
            inside = kept - 1 if kept <= seen.accepted else reached  # a pair needs its second slot, too
            answer.counts.pairs += sum(seen.pairs[:inside])
            found = [suspect for k, suspect in seen.suspects.items() if k < inside]
            answer.counts.suspects += len(found)
            answer.suspects += found
        self.overhead_s += time.perf_counter() - begin

    def take(self, request_id: str) -> tuple[AnswerCounts, list[Suspect]]:
        """What was seen of a finished request; it is forgotten."""
        answer = self._answers.pop(request_id, _Answer())
        return answer.counts, answer.suspects


class _RecordingDrafter:
    """A drafter whose proposals are timed and shown to the recorder."""

    def __init__(self, inner: Drafter, recorder: RoundRecorder) -> None:
        self._inner, self._recorder = inner, recorder
        self.name, self.deterministic, self.max_draft = inner.name, inner.deterministic, inner.max_draft
        self.taps, self.kv_specs = inner.taps, inner.kv_specs

    def attach(self, pool: KVPool, first_layer: int) -> None:
        self._inner.attach(pool, first_layer)

    def observe(self, batch: ObserveBatch) -> None:
        self._inner.observe(batch)

    def propose(self, batch: ProposeBatch) -> Draft:
        begin = self._recorder.now()
        draft = self._inner.propose(batch)
        self._recorder.drafted(batch, draft, self._recorder.now() - begin)
        return draft

    def forget(self, request: Request) -> None:
        self._inner.forget(request)


class _RecordingCopier(_RecordingDrafter):
    """The same of a drafter with drafts for nothing. Looking for them is a part of its time."""

    _inner: Any  # a Drafter and a Copier

    def free(self, requests: Sequence[Request], room: np.ndarray) -> np.ndarray:
        begin = self._recorder.now()
        sizes: np.ndarray = self._inner.free(requests, room)
        self._recorder.draft_s += self._recorder.now() - begin
        return sizes


class _RecordingTarget:
    """A target whose logits are shown to the recorder."""

    def __init__(self, inner: Target, recorder: RoundRecorder) -> None:
        self._inner, self._recorder = inner, recorder
        self.vocab_size, self.hidden_size, self.max_context = (
            inner.vocab_size,
            inner.hidden_size,
            inner.max_context,
        )
        self.eos_token_ids, self.kv_specs, self.identity = inner.eos_token_ids, inner.kv_specs, inner.identity

    @property
    def dtype(self) -> torch.dtype:
        return self._inner.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        return self._inner.kv_dtype

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def forward(self, batch: ForwardBatch, pool: KVPool, taps: tuple[int, ...] = ()) -> TargetOutput:
        output = self._inner.forward(batch, pool, taps)
        self._recorder.verified(output)
        return output


class _RecordingPolicy(ForwardingPolicy):
    """A policy through whose `observe` the engine tells the verdict; the policy's own still hears of it."""

    def __init__(self, inner: Policy, recorder: RoundRecorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        self._recorder.begin_round()
        return super().draft_lengths(state)

    def observe(
        self,
        state: ScheduleState,
        survival: np.ndarray | None,
        drafted: np.ndarray,
        scheduled: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        super().observe(state, survival, drafted, scheduled, accepted)
        self._recorder.judged(state.samples, scheduled, accepted)
