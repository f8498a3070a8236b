"""Training losses of a block drafter (eqs. 9-12), over rows of one slot each.

The draft distribution lives on the draft vocabulary. The target's mass outside it can never be drafted: it
counts in full in the total-variation term and lowers the acceptance label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BlockLoss", "LossWeights", "block_loss", "slot_weights"]


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms. `ce`, `l1` and `confidence` are the paper's 0.1, 0.9, 1.0 (eq. 12).

    `kl` adds -sum p_t log p_d (a denser signal early on), `regression` pulls the block's hidden states
    towards the target's last hidden state. `decay` is g of w_k = exp(-(k - 1) / g).
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    kl: float = 0.0
    regression: float = 0.0
    decay: float = 4.0


@dataclass(frozen=True)
class BlockLoss:
    """Weighted means over slots, and the per-slot acceptance overlap sum(min(p_d, p_t)) (eq. 8)."""

    total: Tensor
    terms: dict[str, Tensor]
    overlap: Tensor  # [n, gamma], detached; eq. (8), the confidence label


def slot_weights(gamma: int, decay: float, device: torch.device | None = None) -> Tensor:
    """w_k = exp(-(k - 1) / decay) for slots k = 1..gamma. Shape [gamma]."""
    return torch.exp(-torch.arange(gamma, device=device) / decay)


CHUNK_ELEMENTS = 1 << 17  # of [rows, Vd] at a time: temporaries of half a megabyte stay in the cache


class _Divergence(torch.autograd.Function):
    """Weighted sum of CE, KL cross term and L1 of softmax(logits) against p_t, with its gradient.

    Value and gradient are made together, a few rows at a time: [n * gamma, Vd] temporaries in main memory, which
    autograd would keep and revisit, cost more than all matrix products of a step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [N, Vd]
        p_target: Tensor,  # [R, Vd]
        rows: Tensor,  # [M] rows of logits that count
        target_rows: Tensor,  # [M] the row of p_target that belongs to each
        labels: Tensor,  # [M]
        weight: Tensor,  # [M]
        weights: LossWeights,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad = torch.zeros_like(logits) if ctx.needs_input_grad[0] else None
        terms, overlap = torch.zeros(3, device=logits.device), torch.empty(len(rows), device=logits.device)
        size = max(1, CHUNK_ELEMENTS // logits.shape[1])
        for at in range(0, len(rows), size):
            part = slice(at, at + size)
            p_t, w = p_target[target_rows[part]].float(), weight[part]
            log_p = F.log_softmax(logits[rows[part]].float(), -1)
            known = (labels[part] >= 0).float()  # labels outside the draft vocabulary cannot be learned by CE
            index = labels[part].clamp(min=0)[:, None]
            ce = -log_p.gather(1, index).squeeze(1) * known
            kl = -(log_p * p_t).sum(-1)
            p_d = log_p.exp_()
            gap, inside = p_d - p_t, p_t.sum(-1)
            l1 = gap.abs().sum(-1) + (1 - inside)
            overlap[part] = 1 - 0.5 * l1
            terms += torch.stack(((ce * w).sum(), (l1 * w).sum(), (kl * w).sum()))
            if grad is None:
                continue
            # d l1 / d logits = p_d (sign - sum(sign p_d)); CE and KL are the familiar p_d - target.
            sign = gap.sign_()
            tilt = (sign * p_d).sum(-1)
            scale = weights.ce * known + weights.kl * inside - weights.l1 * tilt
            d = sign.mul_(weights.l1).add_(scale[:, None]).mul_(p_d).sub_(p_t, alpha=weights.kl)
            d.scatter_add_(1, index, -(weights.ce * known)[:, None])
            grad[rows[part]] = d.mul_(w[:, None]).to(grad.dtype)
        ctx.grad = grad
        ctx.mark_non_differentiable(terms, overlap)
        total = weights.ce * terms[0] + weights.l1 * terms[1] + weights.kl * terms[2]
        return total, terms, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, ctx.grad = ctx.grad, None  # once: it is scaled in place
        return grad.mul_(grads[0]), None, None, None, None, None, None


def block_loss(
    logits: Tensor,
    p_target: Tensor,
    labels: Tensor,
    mask: Tensor,
    weights: LossWeights,
    confidence_logits: Tensor | None = None,
    hidden: Tensor | None = None,
    target_hidden: Tensor | None = None,
    target_rows: Tensor | None = None,
    total_weight: float | None = None,
) -> BlockLoss:
    """Losses of n blocks.

    Args:
        logits: draft logits [n, gamma, Vd].
        p_target: target probabilities of the draft vocabulary [n, gamma, Vd]; rows sum to at most 1.
        labels: draft ids of the sequence's tokens [n, gamma], -1 where outside the draft vocabulary.
        mask: slots that count [n, gamma] bool (False past the end of the sequence).
        confidence_logits: [n, gamma]; trained on the detached overlap.
        hidden, target_hidden: [n, gamma, H] for the regression term.
        target_rows: [n, gamma] int64. Given, p_target is [R, Vd] and this says which row belongs to each slot.
        total_weight: sum of slot weights that the means divide by; that of these slots by default. With that of
            several batches, the batches' losses and gradients add up to those of one.
    """
    n, gamma, size = logits.shape
    # Slots past the end are dropped, not zeroed: they would cost a full softmax each.
    rows = mask.flatten().nonzero().squeeze(1)
    weight = slot_weights(gamma, weights.decay, logits.device).repeat(n)[rows]
    weight = weight / (weight.sum().clamp(min=1e-9) if total_weight is None else total_weight)
    total, (ce, l1, kl), overlap = _Divergence.apply(
        logits.reshape(n * gamma, size),
        p_target.reshape(-1, size),
        rows,
        rows if target_rows is None else target_rows.flatten()[rows],
        labels.flatten()[rows],
        weight,
        weights,
    )

    def mean(values: Tensor) -> Tensor:
        return (values * weight).sum()

    terms = {"ce": ce, "l1": l1, "kl": kl}
    if confidence_logits is not None:
        scores = confidence_logits.flatten()[rows].float()
        label = overlap.detach().clamp(0, 1)
        terms["confidence"] = mean(F.binary_cross_entropy_with_logits(scores, label, reduction="none"))
        total = total + weights.confidence * terms["confidence"]
    if weights.regression and hidden is not None and target_hidden is not None:
        gap = hidden.flatten(0, 1)[rows].float() - target_hidden.flatten(0, 1)[rows].float()
        terms["regression"] = mean(gap.square().mean(-1))
        total = total + weights.regression * terms["regression"]
    full = overlap.new_zeros(n * gamma).index_put((rows,), overlap.detach()).unflatten(0, (n, gamma))
    return BlockLoss(total, {k: v.detach() for k, v in terms.items()}, full)
