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


class _Divergences(torch.autograd.Function):
    """Per-row CE, KL cross term and L1 of softmax(logits) against p_t, with one shared softmax.

    Written out because autograd would keep and revisit several [n, Vd] arrays per term.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, p_target: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        log_p = F.log_softmax(logits.float(), -1)
        known = labels >= 0  # labels outside the draft vocabulary cannot be learned by CE
        ce = torch.where(known, -log_p.gather(1, labels.clamp(min=0)[:, None]).squeeze(1), 0.0)
        kl = -(log_p * p_target).sum(-1)
        p_draft = log_p.exp_()
        difference = p_draft - p_target
        inside = p_target.sum(-1, dtype=torch.float32)
        l1 = difference.abs().sum(-1) + (1 - inside)
        ctx.save_for_backward(p_draft, p_target, difference.sign_().to(torch.int8), labels, known, inside)
        overlap = 1 - 0.5 * l1
        ctx.mark_non_differentiable(overlap)
        return ce, kl, l1, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        g_ce, g_kl, g_l1, _ = grads
        p_draft, p_target, sign, labels, known, inside = ctx.saved_tensors
        g_ce = g_ce * known
        tilt = (sign * p_draft).sum(-1)  # d l1 / d logits = p_d (sign - sum(sign p_d))
        scale = g_ce + g_kl * inside - g_l1 * tilt
        grad = torch.addcmul(p_draft * scale[:, None], p_draft, sign * g_l1[:, None])
        grad.addcmul_(p_target, -g_kl[:, None].to(p_target.dtype).expand_as(p_target))
        grad.scatter_add_(1, labels.clamp(min=0)[:, None], -g_ce[:, None])
        return grad, None, None


def block_loss(
    logits: Tensor,
    p_target: Tensor,
    labels: Tensor,
    mask: Tensor,
    weights: LossWeights,
    confidence_logits: Tensor | None = None,
    hidden: Tensor | None = None,
    target_hidden: Tensor | None = None,
) -> BlockLoss:
    """Losses of n blocks.

    Args:
        logits: draft logits [n, gamma, Vd].
        p_target: target probabilities of the draft vocabulary [n, gamma, Vd]; rows sum to at most 1.
        labels: draft ids of the sequence's tokens [n, gamma], -1 where outside the draft vocabulary.
        mask: slots that count [n, gamma] bool (False past the end of the sequence).
        confidence_logits: [n, gamma]; trained on the detached overlap.
        hidden, target_hidden: [n, gamma, H] for the regression term.
    """
    n, gamma, size = logits.shape
    # Slots past the end are dropped, not zeroed: they would cost a full softmax each.
    rows = mask.flatten().nonzero().squeeze(1)
    flat = (t.reshape(n * gamma, size)[rows] for t in (logits, p_target))
    ce, kl, l1, overlap = _Divergences.apply(*flat, labels.flatten()[rows])
    weight = slot_weights(gamma, weights.decay, logits.device).repeat(n)[rows]
    norm = weight.sum().clamp(min=1e-9)

    def mean(values: Tensor) -> Tensor:
        return (values * weight).sum() / norm

    terms = {"ce": mean(ce), "l1": mean(l1), "kl": mean(kl)}
    total = weights.ce * terms["ce"] + weights.l1 * terms["l1"] + weights.kl * terms["kl"]
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
