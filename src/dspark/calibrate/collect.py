"""Collect rounds from an engine that verifies everything it drafts.

for answer_rounds in collect(engine, jobs, source, concurrency=8):
    ...  # the rounds of one finished answer; answers come in the order in which they end

Verification in full is what makes the rounds usable: a schedule would show only slots it believed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from dspark.acceptance import AcceptanceRule
from dspark.calibrate.rounds import Answer, Rounds, Source
from dspark.core import Draft, DSparkError, Plan, SamplingParams
from dspark.drafters.base import ObserveBatch
from dspark.engine.engine import Engine
from dspark.engine.runner import Runner, Verification
from dspark.engine.scheduler import Batch
from dspark.sampling import SamplingRows, probabilities
from dspark.schedule.policies import FixedLength

__all__ = ["Job", "RoundRecorder", "acceptance_probability", "collect"]


@dataclass(frozen=True)
class Job:
    """One answer to be written. Greedy rows and sampled ones mix in a batch; sorted by temperature it is faster."""

    answer: Answer
    prompt_token_ids: Sequence[int]
    params: SamplingParams


@dataclass
class _Record:
    """Rounds of one request so far."""

    logits: list[np.ndarray] = field(default_factory=list)  # each [gamma], NaN past the length
    acceptance: list[np.ndarray] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def acceptance_probability(draft: Draft, rows: np.ndarray, p_target: torch.Tensor) -> torch.Tensor:
    """min(1, p_t(x_k) / p_d(x_k)) of the drafts of batch rows `rows` [S], float64 [S, gamma].

    The probability with which the ratio rule takes x_k once it is asked. `p_target` [S, gamma, V] are the
    distributions that score each slot. A one-hot p_d is 1 at its token; p_d(x) = 0 counts as the rule reads it.
    """
    index = torch.from_numpy(rows).to(p_target.device)
    tokens = draft.tokens[index].clamp(min=0)
    p = p_target.gather(-1, tokens[..., None]).squeeze(-1).double()
    if draft.probs is None:
        return p.clamp(max=1)
    ids = tokens
    if draft.vocab is not None:
        inverse = torch.zeros(p_target.shape[-1], dtype=torch.int64, device=tokens.device)
        inverse[draft.vocab] = torch.arange(len(draft.vocab), device=tokens.device)
        ids = inverse[tokens]
    q = draft.probs[index].gather(-1, ids[..., None]).squeeze(-1).double()
    return torch.where(q > 0, (p / q).clamp(max=1), (p > 0).double())


class RoundRecorder(Runner):
    """An engine's runner that keeps what each round drafted and what became of it."""

    def __init__(self, runner: Runner, gamma: int, rule: AcceptanceRule) -> None:
        super().__init__(runner.target, runner.pool, runner.taps)
        self.gamma, self.rule = gamma, rule
        self._records: dict[str, _Record] = {}
        self._round: tuple[Draft, Plan] | None = None

    def take(self, request_id: str) -> _Record:
        """The rounds of a request that ended; they are forgotten here."""
        return self._records.pop(request_id, _Record())

    def verify(self, batch: Batch, draft: Draft, plan: Plan, follow: bool = True) -> Verification:
        self._round = (draft, plan)
        return super().verify(batch, draft, plan, follow)

    def observed(self, batch: Batch, seen: Verification, accepted: np.ndarray) -> ObserveBatch | None:
        """Called once a round is decided: `seen` holds the logits it was decided by, shaping included."""
        assert self._round is not None
        draft, plan = self._round
        if plan.budget:
            self._record(batch, draft, plan, seen, accepted)
        return super().observed(batch, seen, accepted)

    def _record(
        self, batch: Batch, draft: Draft, plan: Plan, seen: Verification, accepted: np.ndarray
    ) -> None:
        if draft.confidence is None:
            raise DSparkError(
                "this drafter has no confidence head: there is nothing to calibrate; train one with confidence > 0"
            )
        assert (plan.lengths == draft.lengths).all(), "rounds to calibrate on are verified in full"
        has = seen.lengths > 0
        rows, lengths = seen.sampling[has], seen.lengths[has]
        if self.rule == "ratio":
            start = seen.logit_start[has]
            acceptance = self._acceptance(batch, draft, seen, rows, start, int(lengths.max()))
        else:  # drafts and verdict follow from one noise: nothing is left to chance once a token is drafted
            acceptance = (np.arange(draft.gamma) < accepted[rows][:, None]).astype(np.float64)
        logits = draft.confidence[torch.from_numpy(rows)].double().cpu().numpy()
        for i, (r, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
            taken = int(accepted[r])
            _check_verdict(acceptance[i, :length], taken)
            record = self._records.setdefault(batch.requests[r].request_id, _Record())
            record.logits.append(self._padded(logits[i, :length]))
            record.acceptance.append(self._padded(acceptance[i, :length]))
            record.lengths.append(length)
            record.accepted.append(taken)

    def _acceptance(
        self, batch: Batch, draft: Draft, seen: Verification, rows: np.ndarray, start: np.ndarray, width: int
    ) -> np.ndarray:
        """[S, width] float64; slots past a length hold no meaning."""
        logits = seen.output.logits
        at = np.minimum(start[:, None] + np.arange(width), len(logits) - 1)  # [S, width]
        index = torch.from_numpy(at.ravel()).to(logits.device)
        requests = SamplingRows.of([batch.requests[r] for r in rows], logits.device)
        if requests.all_greedy:
            best = logits.argmax(-1)[index].unflatten(0, at.shape)
            drafted = draft.tokens[torch.from_numpy(rows).to(logits.device), :width]
            return (best == drafted).double().cpu().numpy()
        p = probabilities(logits[index], requests.repeat(np.full(len(rows), width)))
        narrow = Draft(
            tokens=draft.tokens[:, :width],
            lengths=draft.lengths,
            probs=None if draft.probs is None else draft.probs[:, :width],
            vocab=draft.vocab,
        )
        return acceptance_probability(narrow, rows, p.unflatten(0, at.shape)).cpu().numpy()

    def _padded(self, values: np.ndarray) -> np.ndarray:
        out = np.full(self.gamma, np.nan)
        out[: len(values)] = values
        return out


def _check_verdict(acceptance: np.ndarray, accepted: int) -> None:
    """The verdict must be a possible one, or these are not the probabilities it came from."""
    possible = bool((acceptance[:accepted] > 0).all())
    if accepted < len(acceptance):
        possible = possible and bool(acceptance[accepted] < 1)
    if not possible:
        raise DSparkError(
            "the engine's verdict contradicts the recorded probabilities of acceptance: it follows another rule than "
            "its configuration says, and these rounds are of no use"
        )


@contextmanager
def _recording(engine: Engine, gamma: int) -> Iterator[tuple[Engine, RoundRecorder]]:
    """An engine of the same parts that drafts and verifies gamma tokens of every request, and its recorder."""
    twin = Engine(engine.target, engine.drafter, FixedLength(gamma), engine.tokenizer, engine.config)
    recorder = RoundRecorder(twin.runner, gamma, engine.config.rule)
    twin.runner = recorder
    try:
        yield twin, recorder
    finally:
        if engine.drafter is not None:  # the twin's pool took it over
            engine.drafter.attach(engine.pool, len(engine.target.kv_specs))


def collect(engine: Engine, jobs: Sequence[Job], source: Source, concurrency: int = 8) -> Iterator[Rounds]:
    """Write the answers, `concurrency` at a time, and yield each one's rounds when it ends.

    Every round drafts and verifies `source.gamma` tokens (fewer at the end of an answer), whatever the engine's
    policy is: its model, drafter and configuration are used, behind a KV pool of their own. Closing the iterator
    aborts what still runs. Drafts behind an end token are judged like any other.

    Raises:
        DSparkError: a busy engine, or a drafter without confidences or with too few slots.
    """
    _check(engine, source.gamma, concurrency)
    waiting, running = deque(jobs), dict[str, Job]()
    with _recording(engine, source.gamma) as (twin, recorder):
        try:
            while waiting or running:
                while waiting and len(running) < concurrency:
                    job = waiting.popleft()
                    running[twin.add(list(job.prompt_token_ids), job.params)] = job
                for event in twin.step():
                    if event.output is not None:
                        job = running.pop(event.request_id)
                        yield _rounds(recorder.take(event.request_id), job.answer, source)
        finally:
            for request_id in running:
                twin.abort(request_id)


def _check(engine: Engine, gamma: int, concurrency: int) -> None:
    if engine.drafter is None:
        raise DSparkError("there is no drafter, hence nothing to calibrate: choose the method dspark")
    if gamma > engine.drafter.max_draft:
        raise DSparkError(f"the drafter makes {engine.drafter.max_draft} drafts, {gamma} were asked for")
    if engine.has_unfinished:
        raise DSparkError("the engine still has requests: wait for them before collecting")
    if concurrency < 1:
        raise DSparkError(f"the number of answers at a time must be 1 or more, got {concurrency}")


def _rounds(record: _Record, answer: Answer, source: Source) -> Rounds:
    n = len(record.lengths)
    return Rounds(
        logits=np.array(record.logits).reshape(n, source.gamma),
        acceptance=np.array(record.acceptance).reshape(n, source.gamma),
        lengths=np.array(record.lengths, dtype=np.int64),
        accepted=np.array(record.accepted, dtype=np.int64),
        answer=np.zeros(n, dtype=np.int64),
        answers=(answer,),
        source=source,
    )
