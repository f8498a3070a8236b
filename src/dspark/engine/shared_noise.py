"""The draft side of the shared-noise rule: noise laid over a drafter's logits, so that its argmax is its draw.

A drafter that honours shapers and takes the argmax of greedy rows is coupled by this without knowing of it; one
that proposes without logits (prompt lookup) stays as it is, and is accepted where the target happens to draw the
same. Whatever a drafter does, the output is the target's own draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from dspark.acceptance import token_noise
from dspark.core import Request
from dspark.engine.scheduler import Running
from dspark.sampling import SamplingRows, probabilities
from dspark.shaping import LogitsShaper

__all__ = ["couple"]


def couple(running: Sequence[Running], rows: SamplingRows) -> tuple[SamplingRows, list[LogitsShaper | None]]:
    """What to hand a drafter in place of `rows` and the requests' shapers: greedy rows, and shapers with noise."""
    shapers = [
        r.shaper if r.request.params.greedy else _NoisyShaper(r, rows.select([i]))
        for i, r in enumerate(running)
    ]
    if rows.all_greedy:
        return rows, shapers
    greedy = replace(rows, host=np.tile([0.0, 0.0, 1.0, 0.0], (len(rows), 1)))
    return greedy, shapers


class _NoisyShaper(LogitsShaper):
    """Shapes a draft slot as the request's shaper does, then replaces the logits by p_d / noise."""

    def __init__(self, running: Running, row: SamplingRows) -> None:
        self._inner, self._row = running.shaper, row
        self._request: Request = running.request

    def shape_draft(
        self, logits: torch.Tensor, vocab: torch.Tensor | None, drafts_so_far: Sequence[int] = ()
    ) -> torch.Tensor:
        """Scores [Vd], in place, whose argmax is the draw at the slot behind `drafts_so_far`."""
        if self._inner is not None:
            self._inner.shape_draft(logits, vocab, drafts_so_far)
        ids = torch.arange(len(logits), device=logits.device) if vocab is None else vocab
        position = torch.tensor([self._request.committed + len(drafts_so_far)], device=logits.device)
        noise = token_noise(self._row.seed, position, ids)
        return logits.copy_((probabilities(logits[None], self._row).double() / noise)[0])
