"""Prompt lookup in front of a trained drafter: copy where a request's own tokens repeat, draft elsewhere.

Quotations, code and the loops of small models repeat what stands in the context, which a lookup drafts better and
for nothing (compare SAM decoding, Hu et al. 2024, which joins a suffix automaton and a drafter in the same way).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dspark.core import Draft, DSparkError, Request
from dspark.drafters.base import Deferring, Drafter, ObserveBatch, ProposeBatch
from dspark.drafters.ngram import NgramIndex, continued
from dspark.kv import KVPool

__all__ = ["LookupFirst"]

LONG_MATCH = 8  # tokens; acceptance is estimated apart for shorter matches and longer ones


@dataclass(frozen=True)
class _Copy:
    """A proposal: tokens that followed an earlier occurrence of the last `matched` tokens, asked at `length`."""

    tokens: list[int]
    matched: int
    length: int


class _Rate:
    """Conditional acceptance of copied tokens so far, with two tokens' worth of doubt."""

    def __init__(self) -> None:
        self.accepted, self.rejected = 1.0, 1.0

    @property
    def logit(self) -> float:
        return math.log(self.accepted / self.rejected)


class LookupFirst:
    """A drafter that asks `drafter` only for requests whose last tokens did not occur before.

    A match of n tokens proposes n + 1, up to `lookup_tokens`: a long one is seldom by chance. Copies are one-hot
    proposals at any temperature. Their confidence is how copies of their kind fared until now. They cost nothing,
    so that the engine gets them (`free`) in every round, also where the policy has the model draft nothing.

    Args:
        drafter: the trained drafter.
        model_tokens: most tokens it is asked for.
        lookup_tokens: most tokens that are copied.
        lookup_min, lookup_max: n-gram sizes that are looked up (vLLM's prompt_lookup_min / _max).
    """

    deterministic = False

    def __init__(
        self,
        drafter: Drafter,
        model_tokens: int,
        lookup_tokens: int,
        lookup_min: int = 2,
        lookup_max: int = 4,
    ) -> None:
        if not 1 <= lookup_min <= lookup_max:
            raise DSparkError(
                f"prompt_lookup_min {lookup_min} must lie between 1 and prompt_lookup_max {lookup_max}"
            )
        self.drafter, self.name = drafter, drafter.name
        self.model_tokens, self.lookup_tokens = min(model_tokens, drafter.max_draft), lookup_tokens
        self.max_draft = max(self.model_tokens, lookup_tokens)
        self.taps, self.kv_specs = drafter.taps, drafter.kv_specs
        self._sizes = range(lookup_min, lookup_max + 1)
        self._indices: dict[int, NgramIndex] = {}
        self._last: dict[int, _Copy] = {}
        self._free: dict[int, _Copy] = {}  # of this round, by uid
        self._rates = {False: _Rate(), True: _Rate()}  # by whether the match is long

    def attach(self, pool: KVPool, first_layer: int) -> None:
        self.drafter.attach(pool, first_layer)

    def observe(self, batch: ObserveBatch) -> None:
        self.drafter.observe(batch)

    def catch_up(self) -> None:
        if isinstance(self.drafter, Deferring):
            self.drafter.catch_up()

    def forget(self, request: Request) -> None:
        self._indices.pop(request.uid, None)
        self._last.pop(request.uid, None)
        self._free.pop(request.uid, None)
        self.drafter.forget(request)

    def free(self, requests: Sequence[Request], room: np.ndarray) -> np.ndarray:
        """[R] tokens to copy for each request; they wait for `propose`."""
        self._free = {
            request.uid: copy
            for request, most in zip(requests, room, strict=True)
            if most and (copy := self._look_up(request, int(most))) is not None
        }
        sizes = [len(self._free[r.uid].tokens) if r.uid in self._free else 0 for r in requests]
        return np.array(sizes, dtype=np.int64)

    def propose(self, batch: ProposeBatch) -> Draft:
        """`batch.lengths` are the model's; copies are those of `free`, or made here if it was not called."""
        copies = {}
        for r, (request, wanted) in enumerate(zip(batch.requests, batch.lengths, strict=True)):
            copy = self._free.pop(request.uid, None)
            if copy is None and wanted:
                copy = self._look_up(request, int(wanted))
            if copy is not None:
                copies[r] = copy
        lengths = np.minimum(batch.lengths, self.model_tokens)
        lengths[list(copies)] = 0
        if copies and not lengths.any():
            return self._copied(copies, len(lengths), batch.rows.device)
        draft = self.drafter.propose(replace(batch, lengths=lengths))
        return self._joined(draft, copies) if copies else draft

    def _look_up(self, request: Request, wanted: int) -> _Copy | None:
        self._learn(request)
        tokens = request.token_ids
        index = self._indices.setdefault(request.uid, NgramIndex(self._sizes))
        index.extend(tokens)
        end = index.find(tokens)
        if end is None:
            return None
        most = min(wanted, self.lookup_tokens)
        matched = _matched(tokens, end, LONG_MATCH + most)
        copy = _Copy(continued(tokens, end, min(matched + 1, most)), matched, len(tokens))
        self._last[request.uid] = copy
        return copy

    def _learn(self, request: Request) -> None:
        """Count how the last copy fared: its tokens stand behind the place where it was asked, or do not."""
        copy = self._last.pop(request.uid, None)
        if copy is None:
            return
        committed = request.token_ids[copy.length :]
        rate = self._rates[copy.matched >= LONG_MATCH]
        for proposed, token in zip(copy.tokens, committed, strict=False):
            if proposed != token:
                rate.rejected += 1
                return
            rate.accepted += 1

    def _confidence(self, copy: _Copy) -> float:
        return self._rates[copy.matched >= LONG_MATCH].logit

    def _copied(self, copies: dict[int, _Copy], count: int, device: torch.device | str) -> Draft:
        """A draft for so many requests in which nothing is modelled."""
        width = max(len(copy.tokens) for copy in copies.values())
        tokens, lengths = np.zeros((count, width), dtype=np.int64), np.zeros(count, dtype=np.int64)
        confidence = np.zeros((count, width), dtype=np.float32)
        for r, copy in copies.items():
            lengths[r] = size = len(copy.tokens)
            tokens[r, :size], confidence[r] = copy.tokens, self._confidence(copy)
        return Draft(
            tokens=torch.from_numpy(tokens).to(device),
            lengths=lengths,
            confidence=torch.from_numpy(confidence).to(device),
        )

    def _joined(self, draft: Draft, copies: dict[int, _Copy]) -> Draft:
        """The model's draft with the copied rows in it."""
        device, count = draft.tokens.device, len(draft.lengths)
        width = max(draft.gamma, *(len(copy.tokens) for copy in copies.values()))
        tokens, lengths = _widened(draft.tokens, width), draft.lengths.copy()
        probs, confidence = (
            None if values is None else _widened(values, width) for values in (draft.probs, draft.confidence)
        )
        one_hot = torch.zeros(count, dtype=torch.bool, device=device)
        for r, copy in copies.items():
            size = len(copy.tokens)
            tokens[r, :size] = torch.tensor(copy.tokens, device=device)
            lengths[r], one_hot[r] = size, True
            if confidence is not None:
                confidence[r] = self._confidence(copy)
        vocab = draft.vocab if probs is not None else None
        return Draft(tokens, lengths, probs, vocab, confidence, one_hot if probs is not None else None)


def _matched(tokens: Sequence[int], end: int, most: int) -> int:
    """How many tokens before `end` equal the last ones, up to `most`."""
    n = 0
    while n < most and n < end and tokens[end - 1 - n] == tokens[-1 - n]:
        n += 1
    return n


def _widened(rows: Tensor, width: int) -> Tensor:
    """[R, gamma, ...] with slots of zeros up to `width`, a copy."""
    out = rows.new_zeros(rows.shape[0], width, *rows.shape[2:])
    out[:, : rows.shape[1]] = rows
    return out
