"""What a round means for one request: tokens appended, counts, events, outputs."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from dspark.core import RequestOutput, StepEvent, TokenOrigin
from dspark.engine.judge import Judgement
from dspark.engine.scheduler import Running

__all__ = ["Round", "append", "output_of"]


@dataclass(frozen=True)
class Round:
    """One request's part of a step: `tokens` are the accepted drafts and the target's own token."""

    rows: int  # pending tokens processed
    drafted: int
    scheduled: int
    tokens: list[int]
    first_row: int  # logit row that decided tokens[0]

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1


def append(r: Running, step: Round, judgement: Judgement) -> StepEvent:
    """Commit a round's tokens up to the request's end, and roll back the KV of rejected drafts."""
    request, params = r.request, r.request.params
    request.cached += step.rows + step.scheduled  # optimistic: as if all were accepted
    request.cached -= step.scheduled - step.accepted
    kept, text = r.stream.commit(step.tokens)
    if request.logprobs is not None:
        tokens = step.tokens[:kept]
        request.logprobs += judgement.logprobs(
            step.first_row, tokens, params.logprobs or 0, params.raw_logprobs
        )
    if not r.prefilling:
        request.metrics.count(step.drafted, step.scheduled, min(step.accepted, kept), kept)
    r.prefilling = False
    request.round += 1
    if not request.finished:
        assert request.pending == 1, "exactly the anchor has no KV"
        if r.shaper is not None:
            r.shaper.commit(step.tokens)
    output = output_of(r) if request.finished else None
    return StepEvent(request.request_id, step.tokens[:kept], _origins(step)[:kept], text, output)


def _origins(step: Round) -> list[TokenOrigin]:
    last: TokenOrigin = "corrected"
    if step.accepted == step.scheduled:
        last = "bonus" if step.scheduled else "plain"
    origins: list[TokenOrigin] = ["accepted" for _ in range(step.accepted)]
    return [*origins, last]


def output_of(r: Running) -> RequestOutput:
    """A request's output as it stands, independent of what happens to the request later."""
    request = r.request
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        text=r.stream.text,
        token_ids=request.output_token_ids,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        logprobs=None if request.logprobs is None else list(request.logprobs),
        seed=request.seed,
        metrics=copy.deepcopy(request.metrics),
    )
