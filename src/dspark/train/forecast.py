"""Forecasts of acceptance from teacher-forced passes over answers that were not trained on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Forecast"]


class Forecast:
    """Agreement of drafter and target by slot, batch by batch; blocks that a sequence cuts off are left out."""

    def __init__(self) -> None:
        self._overlap: list[Tensor] = []
        self._agree: list[Tensor] = []

    def add(self, overlap: Tensor, mask: Tensor, logits: Tensor, p_target: Tensor, rows: Tensor) -> None:
        """File n blocks.

        Args:
            overlap: sum(min(p_d, p_t)) of each slot [n, gamma] (eq. 8).
            mask: slots that have a label [n, gamma] bool.
            logits: draft logits [n, gamma, Vd].
            p_target: target probabilities of the draft vocabulary [R, Vd].
            rows: the row of `p_target` that belongs to each slot [n, gamma].
        """
        # The argmax may lie outside the draft vocabulary.
        outside = p_target.sum(-1) + p_target.amax(-1) < 1
        agree = (logits.argmax(-1) == p_target.argmax(-1)[rows]) & ~outside[rows]
        whole = mask.all(-1)
        self._overlap.append(overlap[whole])
        self._agree.append(agree[whole].float())

    def measures(self) -> dict[str, Any]:
        """`overlap` and `agreement` (of both argmaxes) by slot. `tau_sampled` is 1 + the sum of overlap's running
        products, `tau_greedy` that of agreement's: both forecast accepted length, bonus included."""
        overlap, agree = torch.cat(self._overlap), torch.cat(self._agree)
        return {
            "overlap": overlap.mean(0).tolist(),
            "tau_sampled": float(1 + overlap.cumprod(-1).sum(-1).mean()),
            "agreement": agree.mean(0).tolist(),
            "tau_greedy": float(1 + agree.cumprod(-1).sum(-1).mean()),
        }
