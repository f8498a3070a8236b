"""Left-to-right choice of draft tokens from scores that arrive slot by slot."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dspark.core import Draft
from dspark.drafters.base import ProposeBatch
from dspark.kernels.slots import Draws
from dspark.randomness import Purpose
from dspark.sampling import argmax, probabilities, sample

__all__ = ["SlotSampler"]


class SlotSampler:
    """The tokens that A active requests of a batch draft, and what they were sampled from.

    `vocab` [Vd] maps draft to target ids, None means they are the same. `active` [A] are rows of the batch.
    """

    def __init__(
        self, batch: ProposeBatch, active: np.ndarray, vocab: Tensor | None, device: torch.device
    ) -> None:
        self.count, self.active, self.vocab = len(batch.lengths), active, vocab
        self.lengths = batch.lengths[active]
        self.rows = batch.rows if len(active) == self.count else batch.rows.select(active)
        self.shapers = [batch.shapers[r] for r in active]
        self.uniforms: Tensor | None = None  # [A, width]
        if not self.rows.all_greedy:
            slots = torch.arange(int(self.lengths.max()), device=device)
            self.uniforms = self.rows.uniform(slots, Purpose.DRAFT)
        self.tokens: list[Tensor] = []  # per slot [A]
        self.probs: list[Tensor] = []  # per slot [A, Vd]

    def choose(self, scores: Tensor) -> Tensor:
        """The next slot's tokens [A] (target ids) from its scores [A, Vd]; rows past their length hold no meaning."""
        scores, k = self._shaped(scores), len(self.tokens)
        if self.uniforms is None:
            chosen = argmax(scores)
        else:  # the very array that the ratio rule will divide by
            self.probs.append(probabilities(scores.contiguous(), self.rows))
            chosen = sample(self.probs[-1], self.uniforms[:, k])
        self.tokens.append(chosen if self.vocab is None else self.vocab[chosen])
        return self.tokens[-1]

    @property
    def plain(self) -> bool:
        """Whether all choices are made from scores as they are: none is shaped."""
        return all(s is None for s in self.shapers)

    @property
    def draws(self) -> Draws | None:
        """How the tokens are drawn; None: all by argmax."""
        if self.uniforms is None:
            return None
        return Draws(self.rows.host, self.uniforms.contiguous())

    def chosen(self, tokens: Tensor, confidence: Tensor | None, probs: Tensor | None) -> Draft:
        """The block of the whole batch from tokens [A, width] chosen elsewhere, where `plain`, as `draws` says."""
        confidence = None if confidence is None else self._spread(confidence)
        probs = None if probs is None else self._spread(probs)
        return Draft(self._spread(tokens), self._lengths(), probs, self.vocab, confidence)

    def padded(self, rows: Tensor) -> Tensor:
        """Ragged rows [sum(lengths), d] -> [A, width, d]; slots past a length repeat its last row."""
        width = int(self.lengths.max())
        if (self.lengths == width).all():
            return rows.unflatten(0, (-1, width))
        starts = np.cumsum(self.lengths) - self.lengths
        index = starts[:, None] + np.minimum(np.arange(width), self.lengths[:, None] - 1)
        return rows[torch.from_numpy(index).to(rows.device)]

    def draft(self, confidence: Tensor | None) -> Draft:
        """The block of the whole batch; `confidence` [A, width] as logits."""
        probs = torch.stack(self.probs, 1) if self.probs else None
        return self.chosen(torch.stack(self.tokens, 1), confidence, probs)

    def _lengths(self) -> np.ndarray:
        lengths = np.zeros(self.count, dtype=np.int64)
        lengths[self.active] = self.lengths
        return lengths

    def _shaped(self, scores: Tensor) -> Tensor:
        """Penalties, bias and masks of the requests that have any."""
        wanted = [
            i for i, s in enumerate(self.shapers) if s is not None and self.lengths[i] > len(self.tokens)
        ]
        if wanted:
            scores = scores.clone()
        for i in wanted:
            shaper = self.shapers[i]
            assert shaper is not None
            shaper.shape_draft(scores[i], self.vocab, [int(t[i]) for t in self.tokens])
        return scores

    def _spread(self, values: Tensor) -> Tensor:
        """[A, ...] -> [R, ...], zeros for requests that draft nothing."""
        if len(self.active) == self.count:
            return values
        out = values.new_zeros(self.count, *values.shape[1:])
        out[torch.from_numpy(self.active).to(values.device)] = values
        return out
