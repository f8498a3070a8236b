"""The target's judgement of a step: shaped logits, acceptance, and log-probabilities of what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dspark.acceptance import AcceptanceRule, greedy_rule, ratio_rule, shared_noise_choice
from dspark.core import Draft, Request, TokenLogprobs
from dspark.engine.runner import Verification
from dspark.engine.scheduler import Batch
from dspark.kernels import ratio
from dspark.randomness import Purpose
from dspark.sampling import SamplingRows, argmax, log_probabilities, probabilities, top_logprobs

__all__ = ["Judgement", "judge"]


@dataclass(frozen=True)
class Judgement:
    """What was decided for the S sampling requests of a step, and the logits it rests on."""

    accepted: np.ndarray  # [S] int64 drafts
    next_tokens: np.ndarray  # [S] int64: the correction or bonus behind them
    logits: torch.Tensor  # [n, V] shaped
    raw: torch.Tensor | None  # [n, V] as the target gave them, where a request asks for raw logprobs
    requests: Sequence[Request]  # [S]
    counts: np.ndarray  # [S] rows of each

    @cached_property
    def rows(self) -> SamplingRows:
        """[n]; made when asked for, which greedy requests without logprobs never do."""
        return SamplingRows.of(self.requests, self.logits.device).repeat(self.counts)

    def logprobs(self, start: int, tokens: Sequence[int], top: int, raw: bool) -> list[TokenLogprobs]:
        """Log-probabilities of `tokens`, committed from rows start, start + 1, ..., with the `top` likeliest."""
        index = range(start, start + len(tokens))
        source = self.raw if raw and self.raw is not None else self.logits
        log_p = log_probabilities(source[start : start + len(tokens)], self.rows.select(list(index)), raw)
        return top_logprobs(log_p, tokens, top)


def judge(batch: Batch, draft: Draft, seen: Verification, rule: AcceptanceRule = "ratio") -> Judgement:
    """Accept or correct the scheduled drafts by `rule` (both have the same limit where all rows are greedy).

    Penalties, bias and masks act per position: a row's history counts the drafts before it in.
    """
    logits = seen.output.logits
    running = [batch.running[r] for r in seen.sampling.tolist()]
    requests = [r.request for r in running]
    wants_raw = any(r.params.raw_logprobs and r.params.logprobs is not None for r in requests)
    raw = logits.clone() if wants_raw else None
    for s, r in enumerate(running):
        if r.shaper is not None:
            start, length = seen.logit_start[s], seen.lengths[s]
            shaped = logits[start : start + length + 1]
            r.shaper.shape(shaped, draft.tokens[seen.sampling[s], :length].tolist())
    tokens = draft.tokens
    if len(requests) < len(tokens):
        tokens = tokens[torch.from_numpy(seen.sampling).to(logits.device)]
    if all(request.params.greedy for request in requests):
        found = None if any(r.shaper for r in running) else seen.output.argmax
        best = argmax(logits) if found is None else found
        decided = greedy_rule(tokens, seen.lengths, best, seen.logit_start)
    else:
        decide = _by_shared_noise if rule == "shared_noise" else _by_ratio
        decided = decide(requests, draft, tokens, seen)
    return Judgement(*decided, logits, raw, requests, seen.lengths + 1)


def _by_shared_noise(
    requests: Sequence[Request], draft: Draft, tokens: torch.Tensor, seen: Verification
) -> tuple[np.ndarray, np.ndarray]:
    """[S] accepted drafts and [S] next tokens. `tokens` [S, gamma] are those of `draft`."""
    logits = seen.output.logits
    rows = SamplingRows.of(requests, logits.device).repeat(seen.lengths + 1)
    positions = _positions(requests, seen).to(logits.device)
    choice = shared_noise_choice(probabilities(logits, rows), rows.seed, positions)
    return greedy_rule(tokens, seen.lengths, choice, seen.logit_start)


def _by_ratio(
    requests: Sequence[Request], draft: Draft, tokens: torch.Tensor, seen: Verification
) -> tuple[np.ndarray, np.ndarray]:
    """As `_by_shared_noise`."""
    logits = seen.output.logits
    rows = SamplingRows.of(requests, logits.device)
    if ratio.fits(logits, draft):
        return ratio.decide(
            logits, rows.host, rows.address, seen.logit_start, seen.lengths, draft, seen.sampling
        )
    index, lengths, row_start = (
        torch.from_numpy(x).to(logits.device) for x in (seen.sampling, seen.lengths, seen.logit_start)
    )
    slots = torch.arange(draft.gamma + 1, device=logits.device)
    verdict = ratio_rule(
        tokens,
        lengths,
        None if draft.probs is None else draft.probs[index],
        draft.vocab,
        probabilities(logits, rows.repeat(seen.lengths + 1)),
        row_start,
        accept_u=rows.uniform(slots[:-1], Purpose.ACCEPT),
        resample_u=rows.uniform(slots[:1], Purpose.RESAMPLE)[:, 0],
        one_hot=None if draft.one_hot is None else draft.one_hot[index],
    )
    return verdict.num_accepted.cpu().numpy(), verdict.next_token.cpu().numpy()


def _positions(requests: Sequence[Request], seen: Verification) -> torch.Tensor:
    """[n] int64 absolute position of the token that each logit row decides."""
    counts = seen.lengths + 1
    committed = np.array([r.committed for r in requests], dtype=np.int64)
    within = np.arange(int(counts.sum())) - np.repeat(seen.logit_start, counts)
    return torch.from_numpy(np.repeat(committed, counts) + within)
