"""A drafter that proposes what it is told to, with a known p_d."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from dspark.core import Draft, DSparkError, Request
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.kv import KVPool, LayerKV
from dspark.randomness import Purpose
from dspark.sampling import probabilities, sample
from dspark.target.base import Target
from dspark.testing.reference import fresh_pass

__all__ = ["ScriptedDrafter"]

SampledScript = Callable[[torch.Tensor, int], torch.Tensor]  # previous tokens [R], slot -> p_d [R, Vd]
TokenScript = Callable[[ProposeBatch, torch.Tensor], torch.Tensor]  # the batch, drafts so far [R, k] -> [R]


class ScriptedDrafter:
    """Proposals from a script; built with one of the class methods.

    It keeps no KV, but checks the engine's side of the protocol: what is observed of a request is consecutive
    and complete whenever it is asked to draft. What it returns past a row's length is garbage on purpose.

    `proposed` counts draft tokens. `confidence` are logits: one for all slots, or one a slot.
    """

    taps: tuple[int, ...] = ()
    kv_specs: tuple[LayerKV, ...] = ()

    def __init__(
        self,
        sampled: SampledScript | None,
        tokens: TokenScript | None,
        max_draft: int,
        *,
        vocab: Sequence[int] | None = None,
        confidence: float | Sequence[float] | None = None,
        name: str = "scripted",
        deterministic: bool = True,
    ) -> None:
        if (sampled is None) == (tokens is None):
            raise DSparkError("a script either samples or names tokens: give exactly one of the two")
        self.name = name
        self.deterministic = deterministic and tokens is not None
        self.max_draft = max_draft
        self.vocab = None if vocab is None else torch.tensor(vocab, dtype=torch.int64)
        self.proposed = 0
        self._sampled, self._tokens = sampled, tokens
        self._confidence = None if confidence is None else torch.tensor(confidence, dtype=torch.float64)
        self._observed: dict[int, int] = {}  # uid -> positions observed

    @classmethod
    def from_table(
        cls,
        q: torch.Tensor,
        max_draft: int,
        *,
        vocab: Sequence[int] | None = None,
        confidence: float | Sequence[float] | None = None,
    ) -> ScriptedDrafter:
        """Sample slot k from q[previous token]; q [V, Vd] holds probabilities, `vocab` [Vd] target ids."""
        if vocab is None and q.shape[0] != q.shape[1]:
            raise DSparkError(f"q is {list(q.shape)}: with a pruned draft vocabulary give `vocab`")
        return cls(lambda previous, k: q[previous], None, max_draft, vocab=vocab, confidence=confidence)

    @classmethod
    def from_slots(
        cls,
        q: torch.Tensor,
        *,
        vocab: Sequence[int] | None = None,
        confidence: float | Sequence[float] | None = None,
    ) -> ScriptedDrafter:
        """Sample slot k from q[k], whatever came before; q [gamma, Vd]: a purely parallel block."""
        return cls(
            lambda previous, k: q[k].repeat(len(previous), 1),
            None,
            q.shape[0],
            vocab=vocab,
            confidence=confidence,
        )

    @classmethod
    def fixed(cls, tokens: Sequence[int], confidence: float | None = None) -> ScriptedDrafter:
        """Propose `tokens` every round, with certainty (one-hot p_d)."""
        script = torch.tensor(tokens, dtype=torch.int64)
        return cls(
            None, lambda batch, drafts: script[drafts.shape[1]].repeat(len(drafts)), len(tokens),
            confidence=confidence, name="fixed",
        )  # fmt: skip

    @classmethod
    def copy_target(cls, target: Target, max_draft: int, confidence: float | None = None) -> ScriptedDrafter:
        """Propose the target's own argmax: always right at temperature 0. One-hot p_d."""
        return cls(
            None, lambda batch, drafts: _argmax(target, batch, drafts), max_draft,
            confidence=confidence, name="copy-target",
        )  # fmt: skip

    @classmethod
    def always_wrong(cls, target: Target, max_draft: int, confidence: float | None = None) -> ScriptedDrafter:
        """Propose the token after the target's argmax: never right at temperature 0. One-hot p_d."""
        return cls(
            None,
            lambda batch, drafts: (_argmax(target, batch, drafts) + 1) % target.vocab_size,
            max_draft,
            confidence=confidence,
            name="always-wrong",
        )

    @classmethod
    def unreliable(cls, target: Target, max_draft: int, error_rate: float = 0.3) -> ScriptedDrafter:
        """Propose the target's argmax, but with probability `error_rate` a slot the token after it."""

        def script(batch: ProposeBatch, drafts: torch.Tensor) -> torch.Tensor:
            u = batch.rows.uniform(torch.tensor([drafts.shape[1]]), Purpose.DRAFT)[:, 0]
            return (_argmax(target, batch, drafts) + (u < error_rate)) % target.vocab_size

        return cls(None, script, max_draft, name="unreliable", deterministic=False)

    def attach(self, pool: KVPool, first_layer: int) -> None:
        """No KV layers: nothing to remember."""

    def observe(self, batch: ObserveBatch) -> None:
        for request, start, stop in zip(
            batch.requests, batch.row_start[:-1], batch.row_start[1:], strict=True
        ):
            seen = self._observed.get(request.uid, 0)
            positions = batch.positions[int(start) : int(stop)].tolist()
            expected = list(range(seen, seen + len(positions)))
            assert positions == expected, (
                f"observed positions {positions} of request {request.uid}, expected {expected}"
            )
            self._observed[request.uid] = seen + len(positions)

    def propose(self, batch: ProposeBatch) -> Draft:
        R, gamma = len(batch.requests), int(batch.lengths.max(initial=0))
        if gamma == 0:
            return Draft.empty(R)
        self._check(batch)
        tokens = torch.zeros(R, gamma, dtype=torch.int64)
        probs = []
        u = batch.rows.uniform(torch.arange(gamma), Purpose.DRAFT)  # [R, gamma]
        previous = torch.tensor([r.token_ids[-1] for r in batch.requests])
        for k in range(gamma):
            if self._tokens is not None:
                previous = self._tokens(batch, tokens[:, :k])
            else:
                assert self._sampled is not None
                logits = _shaped(self._sampled(previous, k).log(), batch, tokens[:, :k], self.vocab)
                probs.append(probabilities(logits, batch.rows))
                drawn = sample(probs[-1], u[:, k])
                previous = drawn if self.vocab is None else self.vocab[drawn]
            tokens[:, k] = previous
        return self._finished(batch, tokens, torch.stack(probs, 1) if probs else None)

    def forget(self, request: Request) -> None:
        self._observed.pop(request.uid, None)

    def _check(self, batch: ProposeBatch) -> None:
        for request, length in zip(batch.requests, batch.lengths, strict=True):
            if length == 0:
                continue
            seen = self._observed.get(request.uid, 0)
            assert request.pending == 1, f"request {request.uid} drafts with {request.pending} pending tokens"
            assert seen == request.cached, (
                f"request {request.uid} drafts behind {request.cached} cached positions, {seen} were observed"
            )
        assert batch.lengths.max() <= self.max_draft, "more drafts wanted than max_draft"

    def _finished(self, batch: ProposeBatch, tokens: torch.Tensor, probs: torch.Tensor | None) -> Draft:
        R, gamma = tokens.shape
        self.proposed += int(batch.lengths.sum())
        unused = torch.arange(gamma) >= torch.from_numpy(batch.lengths)[:, None]
        confidence = None
        if self._confidence is not None:
            confidence = self._confidence.expand(self.max_draft)[:gamma].expand(R, gamma)
        return Draft(
            tokens=tokens.masked_fill(unused, -1),
            lengths=batch.lengths.copy(),
            probs=None if probs is None else probs.masked_fill(unused[..., None], float("nan")),
            vocab=self.vocab,
            confidence=confidence,
        )


def _argmax(target: Target, batch: ProposeBatch, drafts: torch.Tensor) -> torch.Tensor:
    """[R] the target's most likely token behind each request's tokens and drafts [R, k].

    0 where a request wants no more drafts: what lies there may be past its context.
    """
    best = torch.zeros(len(drafts), dtype=torch.int64)
    active = np.flatnonzero(batch.lengths > drafts.shape[1])
    sequences = [[*batch.requests[r].token_ids, *drafts[r].tolist()] for r in active.tolist()]
    logits = fresh_pass(target, sequences).last_logits
    for row, r in zip(logits, active.tolist(), strict=True):
        shaper = batch.shapers[r]
        if shaper is not None:
            shaper.shape_draft(row, None, drafts[r].tolist())
    best[torch.from_numpy(active)] = logits.argmax(-1)
    return best


def _shaped(
    logits: torch.Tensor, batch: ProposeBatch, drafts: torch.Tensor, vocab: torch.Tensor | None
) -> torch.Tensor:
    """Penalties, bias and masks of each request on logits [R, Vd], in place."""
    for row, shaper, drafted in zip(logits, batch.shapers, drafts.tolist(), strict=True):
        if shaper is not None:
            shaper.shape_draft(row, vocab, drafted)
    return logits
