"""Training form = serving form, and nothing leaks past the anchor."""

import numpy as np
import pytest
import torch

from dspark.core import Request, SamplingParams
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.kv import BlockTable, KVPool
from dspark.sampling import SamplingRows
from dspark.target.base import ForwardBatch
from dspark.testing import tiny_decoder, tiny_drafter
from dspark.train.blocks import block_forward, draw_anchors, make_batch
from dspark.train.data import Sequence
from dspark.train.features import FeatureSource

TOKENS = torch.randint(0, 60, (30,), generator=torch.Generator().manual_seed(1)).tolist()
VARIANTS = [("dspark", "vanilla"), ("dspark", "gated"), ("dspark", "rnn"), ("dflash", "vanilla")]


def train_form(target, drafter, sequences, anchors):
    source = FeatureSource(target, drafter.taps, keep="compute")
    batch = make_batch(sequences, source(sequences), anchors, drafter.max_draft)
    return batch, *block_forward(drafter.model, batch)


def serve_form(target, drafter, tokens, anchor):
    """Prefill tokens[:anchor], let the drafter observe, and return its propose batch."""
    pool = KVPool(target.kv_specs + drafter.kv_specs, 8, 16, target.dtype)
    drafter.attach(pool, len(target.kv_specs))
    table = BlockTable()
    assert pool.reserve(table, anchor + drafter.max_draft)
    slots, positions = torch.from_numpy(pool.slots(table, 0, anchor)), torch.arange(anchor)
    start, tables = np.array([0, anchor]), np.array([table.blocks])
    ids = torch.tensor(tokens[:anchor])
    out = target.forward(
        ForwardBatch(ids, positions, start, np.zeros(1, np.int64), tables, slots), pool, drafter.taps
    )
    drafter.observe(ObserveBatch([], start, positions, slots, out.taps))
    drafter.catch_up()
    request = Request(0, "r", tokens[: anchor + 1], SamplingParams(temperature=0), 0, 99, cached=anchor)
    return ProposeBatch([request], np.array([drafter.max_draft]), SamplingRows.of([request]), tables, [None])


@pytest.mark.parametrize(
    ("kind", "method", "head"),
    [*(("llama", *variant) for variant in VARIANTS), ("qwen2", "dspark", "vanilla")],
)
def test_training_form_equals_serving_form(kind, method, head):
    target = tiny_decoder(kind=kind)
    drafter = tiny_drafter(target, method, head, block_size=4, draft_vocab_size=40)
    anchors = [torch.tensor([12, 19]), torch.tensor([9])]
    sequences = [Sequence(TOKENS, 8), Sequence(TOKENS[:16], 6)]
    batch, hidden, logits, confidence = train_form(target, drafter, sequences, anchors)
    at = [(TOKENS, 12), (TOKENS, 19), (TOKENS[:16], 9)]
    for i, (tokens, anchor) in enumerate(at):
        propose = serve_form(target, drafter, tokens, anchor)
        served = drafter._backbone(drafter._rows(propose, np.array([0])))
        torch.testing.assert_close(hidden[i], served)
        draft = drafter.propose(propose)
        # Serving is greedy and training teacher-forced: slot 1 has the same previous token in both.
        vocab = drafter.model.vocab
        assert vocab[logits[i, 0].argmax()] == draft.tokens[0, 0]
        if confidence is not None:
            torch.testing.assert_close(confidence[i, 0], draft.confidence[0, 0], check_dtype=False)
        assert batch.tokens[i].tolist() == tokens[anchor : anchor + 5]


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_head_block_equals_its_steps(head):
    model = tiny_drafter(tiny_decoder(), head=head).model
    g = torch.Generator().manual_seed(2)
    previous = torch.randint(0, 60, (3, 5), generator=g)
    hidden = torch.randn(3, 5, 32, generator=g, dtype=torch.float64)
    bias, embedded = model.head.block(previous, hidden)
    state = model.head.initial_state(hidden[:, 0])
    for k in range(5):
        features, state = model.head.step(embedded[:, k], hidden[:, k], state)
        torch.testing.assert_close(model.head.w2(features), bias[:, k])


def test_nothing_at_or_behind_the_anchor_leaks_into_a_block():
    target = tiny_decoder()
    drafter = tiny_drafter(target, block_size=4)
    anchor = torch.tensor([14])
    _, hidden, _, _ = train_form(target, drafter, [Sequence(TOKENS, 8)], [anchor])
    later = [*TOKENS[:15], *[(t + 7) % 60 for t in TOKENS[15:]]]
    _, same, _, _ = train_form(target, drafter, [Sequence(later, 8)], [anchor])
    torch.testing.assert_close(hidden, same, rtol=0, atol=0)
    before = [*TOKENS[:13], (TOKENS[13] + 1) % 60, *TOKENS[14:]]
    _, other, _, _ = train_form(target, drafter, [Sequence(before, 8)], [anchor])
    assert (hidden - other).abs().max() > 1e-6
    source = FeatureSource(target, drafter.taps, keep="compute")
    features = source([Sequence(TOKENS, 8)])
    features[0].taps[14:] += 100.0  # the anchor's own features are not context
    batch = make_batch([Sequence(TOKENS, 8)], features, [anchor], 4)
    torch.testing.assert_close(hidden, block_forward(drafter.model, batch)[0], rtol=0, atol=0)


def test_drawn_anchors_have_a_label_and_never_repeat():
    sequence = Sequence(TOKENS, 20)
    anchors = draw_anchors(sequence, 100, torch.Generator().manual_seed(0)).tolist()
    assert anchors == list(range(20, 29))
    few = draw_anchors(sequence, 4, torch.Generator().manual_seed(0)).tolist()
    assert len(set(few)) == 4
    assert set(few) <= set(anchors)
