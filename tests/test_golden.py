"""Numbers computed with the paper's own public code on tiny random weights (DeepSpec)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dspark.core import Request, SamplingParams
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.drafters.block import BlockDrafter
from dspark.drafters.checkpoint import load_drafter_model
from dspark.kv import BlockTable, KVPool
from dspark.sampling import SamplingRows
from dspark.target.base import ForwardBatch
from dspark.target.load import load_decoder
from dspark.train.blocks import block_forward, make_batch
from dspark.train.data import Sequence
from dspark.train.features import FeatureSource
from dspark.train.losses import LossWeights, block_loss

GOLDEN = Path(__file__).parents[2] / "shared" / "data" / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden numbers are not beside this checkout")
HEADS = ("none", "vanilla", "gated", "rnn")
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def expected():
    return load_file(GOLDEN / "expected.safetensors")


@pytest.fixture(scope="module")
def target():
    return load_decoder(GOLDEN / "target-qwen3-tiny")


def serve_prefix(target, drafter, ids: torch.Tensor):
    """Run the target over ids [n] and let the drafter observe all of them; returns pool, table, target output."""
    n = len(ids)
    pool = KVPool(target.kv_specs + drafter.kv_specs, 16)
    drafter.attach(pool, len(target.kv_specs))
    table = BlockTable()
    assert pool.reserve(table, n + drafter.max_draft)
    slots = torch.from_numpy(pool.slots(table, 0, n))
    tables = np.array([table.blocks])
    positions = torch.arange(n)
    batch = ForwardBatch(ids, positions, np.array([0, n]), np.zeros(1, np.int64), tables, slots)
    out = target.forward(batch, pool, drafter.taps)
    drafter.observe(ObserveBatch([], np.array([0, n]), positions, slots, out.taps))
    drafter.catch_up()
    return tables, out


def test_target_logits_features_and_last_hidden(expected, target):
    ids = expected["input_ids"]
    taps, last = target.hidden_states(ids, (0, 2, 4))
    torch.testing.assert_close(taps, expected["target_features"], **TOLERANCE)
    torch.testing.assert_close(last, expected["target_last_hidden"], **TOLERANCE)
    torch.testing.assert_close(target.lm_head(last), expected["target_logits"], **TOLERANCE)


@pytest.mark.parametrize("head", HEADS)
def test_serving_form(expected, target, head):
    for anchor in expected["anchors"].tolist():
        drafter = BlockDrafter(load_drafter_model(GOLDEN / f"drafter-{head}", target))
        ids = expected["input_ids"][0, : anchor + 1]
        tables, out = serve_prefix(target, drafter, ids[:-1])
        torch.testing.assert_close(out.taps, expected["target_features"][0, :anchor], **TOLERANCE)
        torch.testing.assert_close(out.logits, expected["target_logits"][0, :anchor], **TOLERANCE)
        request = Request(0, "r", ids.tolist(), SamplingParams(temperature=0), 0, 100, cached=anchor)
        batch = ProposeBatch([request], np.array([5]), SamplingRows.of([request]), tables, [None])
        hidden = drafter._backbone(drafter._rows(batch, np.array([0])))
        draft = drafter.propose(batch)
        key = f"{head}.anchor{anchor}"
        torch.testing.assert_close(hidden[None], expected[f"{key}.hidden"], **TOLERANCE)
        base = drafter.model.lm_head(hidden)[None]
        torch.testing.assert_close(base, expected[f"{key}.base_logits"], **TOLERANCE)
        assert draft.tokens.tolist() == expected[f"{key}.greedy_tokens"].tolist()
        if head != "none":
            torch.testing.assert_close(draft.confidence, expected[f"{key}.confidence_logits"], **TOLERANCE)
            previous = torch.cat((ids[-1:], draft.tokens[0, :-1]))[None]
            bias, _ = drafter.model.head.block(previous, hidden[None])
            torch.testing.assert_close(base + bias, expected[f"{key}.corrected_logits"], **TOLERANCE)


@pytest.mark.parametrize("head", HEADS)
def test_training_form_and_losses(expected, target, head):
    model = load_drafter_model(GOLDEN / f"drafter-{head}", target)
    mask = expected["loss_mask"][0].nonzero().squeeze(1)
    start, end = int(mask[0]), int(mask[-1]) + 1
    sequence = Sequence(expected["input_ids"][0, :end].tolist(), start)
    anchors = torch.arange(start, end - 1)
    batch = make_batch([sequence], FeatureSource(target, (0, 2, 4), keep=False)([sequence]), [anchors], 5)
    _, logits, confidence = block_forward(model, batch)
    key = f"{head}.train"
    assert torch.equal(batch.mask, expected[f"{key}.eval_mask"][0].bool())
    assert torch.equal(batch.tokens[:, 1:][batch.mask], expected[f"{key}.labels"][0][batch.mask])
    # Past the end of the mask the blocks' inputs differ (there are no tokens): compare where there are labels.
    torch.testing.assert_close(
        logits[batch.mask], expected[f"{key}.draft_logits"][0][batch.mask], **TOLERANCE
    )
    p_target = target.lm_head(batch.last_hidden).softmax(-1)
    loss = block_loss(logits, p_target, batch.tokens[:, 1:], batch.mask, LossWeights(), confidence)
    for term in ("ce", "l1"):
        torch.testing.assert_close(loss.terms[term], expected[f"{key}.loss_{term}"][0], **TOLERANCE)
    if head != "none":
        torch.testing.assert_close(
            confidence[batch.mask], expected[f"{key}.confidence_logits"][0][batch.mask], **TOLERANCE
        )
        torch.testing.assert_close(
            loss.terms["confidence"], expected[f"{key}.loss_confidence"][0], **TOLERANCE
        )
