"""Sampled blocks in one compiled call: from the same probabilities, and the same tokens, as module by module."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from compiled_drafts import (
    GREEDY,
    MIXED,
    SAMPLED,
    each_kind,
    needs_low_bit,
    propose_batch,
    quantised,
    ready,
    served,
    with_floats,
)

from dspark.core import Draft, Request, SamplingParams
from dspark.drafters.base import ProposeBatch
from dspark.drafters.block import BlockDrafter
from dspark.drafters.slots import SlotSampler
from dspark.sampling import SamplingRows

pytestmark = needs_low_bit


@pytest.mark.parametrize("params", [SAMPLED, MIXED], ids=["sampled", "mixed"])
@each_kind
def test_sampled_blocks_come_from_the_same_probabilities(
    method: str,
    head: str,
    vocab: int | None,
    params: Sequence[SamplingParams],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dspark.kernels.program.PARALLEL_WORK", 0)
    with_floats(monkeypatch)
    drafter = quantised(method, head, vocab)
    for mine, other in zip(served(drafter, params), served(drafter, params, compiled=False), strict=True):
        assert mine.probs is not None
        torch.testing.assert_close(mine.probs, other.probs, atol=1e-5, rtol=1e-5)
        assert torch.equal(mine.tokens, other.tokens)


@pytest.mark.parametrize(
    ("odd", "shaped"),
    [
        (SamplingParams(temperature=1.0, top_k=5), False),
        (SamplingParams(temperature=1.0, top_p=0.8), False),
        (SamplingParams(temperature=1.0, min_p=0.1), False),
        (SamplingParams(temperature=1.0, presence_penalty=1.5), True),
        (SamplingParams(temperature=0.0, logit_bias={3: 4.0}), True),
    ],
    ids=["top_k", "top_p", "min_p", "penalty", "greedy_bias"],
)
def test_shapers_go_slot_by_slot_and_filters_do_not(
    odd: SamplingParams, shaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shaped request takes its whole batch along."""
    with_floats(monkeypatch)
    drafter, filled = quantised("dspark", "vanilla", 48), []
    params = (SAMPLED[0], odd, SAMPLED[2])
    slots_of, fill = [d.lengths for d in served(drafter, params)], BlockDrafter._fill

    def counted(self: BlockDrafter, sampler: SlotSampler, *rest: Any) -> Draft:
        filled.append(sampler)
        return fill(self, sampler, *rest)

    monkeypatch.setattr(BlockDrafter, "_fill", counted)
    together = served(drafter, params)
    assert len(filled) == (sum(lengths[1] > 0 for lengths in slots_of) if shaped else 0)
    for mine, other in zip(together, served(drafter, params, compiled=False), strict=True):
        torch.testing.assert_close(mine.probs, other.probs, atol=1e-5, rtol=1e-5)
        assert torch.equal(mine.tokens, other.tokens)


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_a_draw_does_not_depend_on_the_rest_of_the_batch(method: str) -> None:
    drafter, lengths, cached = quantised(method, "vanilla", 48), [3, 5, 2], [20, 3, 9]
    ready(drafter, 12)
    together = drafter.propose(propose_batch(lengths, cached, MIXED))
    assert together.probs is not None
    for r, n in enumerate(lengths):
        alone = drafter.propose(propose_batch([n * (r == i) for i in range(3)], cached, MIXED))
        assert torch.equal(alone.tokens[r, :n], together.tokens[r, :n])
        if r != 1:  # a batch of greedy rows has none
            assert alone.probs is not None
            assert torch.equal(alone.probs[r, :n], together.probs[r, :n])
    one_hot = together.probs[1, :5]
    assert one_hot.max(-1).values.tolist() == [1.0] * 5
    assert one_hot.count_nonzero() == 5


def test_a_draft_is_never_written_to_again() -> None:
    drafter = quantised("dspark", "vanilla", 48)
    ready(drafter, 12)
    kept = drafter.propose(propose_batch([5, 5, 5], [20, 3, 9], SAMPLED))
    assert kept.probs is not None
    assert kept.confidence is not None
    parts = (kept.tokens, kept.probs, kept.confidence)
    before = [part.clone() for part in parts]
    other = drafter.propose(propose_batch([5, 5, 5], [21, 4, 10], MIXED))
    drafter.propose(propose_batch([5, 5, 5], [22, 5, 11], GREEDY))
    assert not torch.equal(other.tokens, kept.tokens)
    assert all(torch.equal(part, copy) for part, copy in zip(parts, before, strict=True))


def test_tokens_follow_their_probabilities() -> None:
    """In each slot: how often each token came, against how often it was to come, in standard deviations."""
    drafter, count, slots = quantised("dspark", "vanilla", 48), 60, 2
    ready(drafter, count)
    params, index = SamplingParams(temperature=1.5, seed=1), torch.full((64,), -1)
    index[drafter.model.vocab] = torch.arange(48)
    excess, variance = torch.zeros(slots, 48), torch.zeros(slots, 48)
    for number in range(40):
        requests = [Request(i, str(i), [7], params, 1, 99, cached=0, round=number + 1) for i in range(count)]
        tables, lengths = np.arange(count)[:, None], np.full(count, slots)
        batch = ProposeBatch(requests, lengths, SamplingRows.of(requests), tables, [None] * count)
        draft = drafter.propose(batch)
        assert draft.probs is not None
        came = torch.nn.functional.one_hot(index[draft.tokens], 48)
        excess += (came - draft.probs).sum(0)
        variance += (draft.probs * (1 - draft.probs)).sum(0)
    often = variance > 5
    assert (often.sum(-1) > 5).all()
    assert (excess / variance.sqrt())[often].abs().max() < 4.5
    assert excess.abs().sum() > 1, "as many as expected, to the last one, would not be draws"
