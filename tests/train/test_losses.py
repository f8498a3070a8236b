"""Losses against a plain autograd computation, and what the pruned vocabulary does to them."""

import pytest
import torch
import torch.nn.functional as F

from dspark.train.losses import LossWeights, block_loss, slot_weights

WEIGHTS = LossWeights(ce=0.3, l1=0.9, confidence=0.7, kl=0.4, regression=0.2, decay=3.0)


@pytest.fixture
def case():
    g = torch.Generator().manual_seed(0)
    n, gamma, size, hidden = 5, 4, 11, 6
    whole = torch.randn(n, gamma, size + 3, generator=g).softmax(-1)
    mask = torch.rand(n, gamma, generator=g) < 0.8
    mask[:, 0] = True
    labels = torch.randint(-1, size, (n, gamma), generator=g)
    return {
        "logits": torch.randn(n, gamma, size, generator=g, requires_grad=True),
        "p_target": whole[..., :size],  # three tokens lie outside the draft vocabulary
        "labels": labels,
        "mask": mask,
        "confidence_logits": torch.randn(n, gamma, generator=g, requires_grad=True),
        "hidden": torch.randn(n, gamma, hidden, generator=g, requires_grad=True),
        "target_hidden": torch.randn(n, gamma, hidden, generator=g),
    }


def plain_loss(logits, p_target, labels, mask, confidence_logits, hidden, target_hidden):
    """The same sums, term by term, with autograd."""
    p_draft = logits.softmax(-1)
    weight = slot_weights(mask.shape[1], WEIGHTS.decay) * mask
    overlap = torch.minimum(p_draft, p_target).sum(-1)
    l1 = (p_draft - p_target).abs().sum(-1) + 1 - p_target.sum(-1)
    ce = F.cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
    ce = ce.view_as(mask) * (labels >= 0)
    kl = -(p_target * logits.log_softmax(-1)).sum(-1)
    bce = F.binary_cross_entropy_with_logits(confidence_logits, overlap.detach(), reduction="none")
    regression = (hidden - target_hidden).square().mean(-1)
    total = WEIGHTS.ce * ce + WEIGHTS.l1 * l1 + WEIGHTS.kl * kl + WEIGHTS.confidence * bce
    return ((total + WEIGHTS.regression * regression) * weight).sum() / weight.sum(), overlap


def test_values_and_gradients_equal_plain_autograd(case):
    leaves = [case[k] for k in ("logits", "confidence_logits", "hidden")]
    loss = block_loss(**case, weights=WEIGHTS)
    grads = torch.autograd.grad(loss.total, leaves)
    expected, overlap = plain_loss(**case)
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(loss.overlap, overlap.detach() * case["mask"])
    for mine, plain in zip(grads, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(mine, plain, atol=1e-6, rtol=1e-4)


def test_confidence_label_is_detached(case):
    loss = block_loss(**case, weights=LossWeights(ce=0, l1=0, kl=0, regression=0, confidence=1.0))
    (grad,) = torch.autograd.grad(loss.total, [case["logits"]], allow_unused=True)
    assert grad is None or not grad.any()


def test_target_mass_outside_the_draft_vocabulary_counts_in_full():
    p_target = torch.tensor([[[0.5, 0.1]]])  # 0.4 outside
    logits = torch.tensor([[[0.5, 0.5]]]).log()
    loss = block_loss(
        logits, p_target, torch.tensor([[0]]), torch.ones(1, 1, dtype=torch.bool), LossWeights()
    )
    assert loss.terms["l1"].item() == pytest.approx(0.0 + 0.4 + 0.4)
    assert loss.overlap.item() == pytest.approx(0.6)


def test_slot_weights_decay():
    assert slot_weights(3, 4.0).tolist() == pytest.approx([1.0, 0.7788008, 0.6065307])
