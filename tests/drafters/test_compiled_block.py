"""A quantised block drafter in compiled form equals the same drafter layer by layer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dspark.core import Draft, Request, SamplingParams
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.drafters.block import BlockDrafter
from dspark.drafters.heads import MarkovHead
from dspark.drafters.slots import SlotSampler
from dspark.kernels import lowbit
from dspark.kv import KVPool
from dspark.sampling import SamplingRows
from dspark.shaping import LogitsShaper
from dspark.target.layer import DecoderLayer
from dspark.testing import tiny_decoder, tiny_drafter

pytestmark = pytest.mark.skipif(
    not lowbit.supports(), reason="no compiled low-bit products on this processor"
)

BLOCK = 16


@pytest.fixture(params=[True, False], ids=["qk_norm", "no_qk_norm"])
def drafter(request: pytest.FixtureRequest) -> BlockDrafter:
    target = tiny_decoder(hidden=128, dtype=torch.float32)
    model = tiny_drafter(target).model
    config = dataclasses.replace(model.config, qk_norm=request.param)
    torch.manual_seed(0)
    other = BlockDrafterModel(config)
    torch.nn.init.normal_(other.hidden_norm.weight, 1.0, 0.2)
    for layer in other.layers:
        assert isinstance(layer, DecoderLayer)
        for norm in (layer.k_norm, layer.q_norm):
            if norm is not None:
                torch.nn.init.normal_(norm.weight, 1.0, 0.2)
    return BlockDrafter(other, quantised=True)


def observe(drafter: BlockDrafter, rows: int, first_layer: int) -> KVPool:
    """Rows in two passes, of a pool in which `first_layer` layers lie before the drafter's."""
    specs = [drafter.kv_specs[0]] * first_layer + list(drafter.kv_specs)
    pool = KVPool(specs, 8, BLOCK)
    for part in (*pool.k, *pool.v):
        part.zero_()
    drafter.attach(pool, first_layer)
    taps = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1))
    slots = torch.randperm(8 * BLOCK, generator=torch.Generator().manual_seed(2))[:rows]
    for part in (slice(0, rows // 3), slice(rows // 3, rows)):
        at = torch.arange(rows)[part]
        drafter.observe(ObserveBatch([], np.array([0, len(at)]), at, slots[part], taps[part]))
        drafter.catch_up()
    return pool


@pytest.mark.parametrize(("rows", "first_layer"), [(2, 0), (50, 3)])
def test_context_keys_and_values(drafter: BlockDrafter, rows: int, first_layer: int) -> None:
    assert drafter._compiled is not None
    compiled = observe(drafter, rows, first_layer)
    drafter._compiled = None
    plain = observe(drafter, rows, first_layer)
    assert any(layer.any() for layer in plain.k)
    for mine, other in zip((*compiled.k, *compiled.v), (*plain.k, *plain.v), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_a_drafter_in_full_precision_has_no_compiled_form() -> None:
    drafter = tiny_drafter(tiny_decoder(hidden=128, dtype=torch.float32))
    assert drafter._compiled is None


def quantised(method: str, head: str, draft_vocab_size: int | None) -> BlockDrafter:
    torch.manual_seed(3)
    target = tiny_decoder(hidden=128, dtype=torch.float32)
    config = tiny_drafter(target, method, head, block_size=5, draft_vocab_size=draft_vocab_size).model.config  # type: ignore[arg-type]
    model = BlockDrafterModel(dataclasses.replace(config, markov_rank=32 if config.markov_rank else 0))
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):  # larger than the initial ones: heads and layers are to matter
            torch.nn.init.normal_(layer.weight, 0.0, 0.2)
    if draft_vocab_size is not None:
        model.vocab.copy_(torch.randperm(config.vocab_size)[:draft_vocab_size].sort().values)
    return BlockDrafter(model, quantised=True)


def with_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations in float32: rounded ones may differ by a code after sums in another order."""
    for module in ("block", "quantise"):
        monkeypatch.setattr(f"dspark.drafters.{module}.supports_integers", lambda: False)


GREEDY = (SamplingParams(temperature=0.0, seed=5),) * 3
SAMPLED = (SamplingParams(temperature=1.0, seed=5),) * 3
MIXED = tuple(SamplingParams(temperature=t, seed=5) for t in (0.7, 0.0, 2.5))


def propose_batch(lengths: list[int], cached: list[int], params: Sequence[SamplingParams]) -> ProposeBatch:
    requests = [
        Request(i, str(i), [(7 * i + j) % 60 + 1 for j in range(n + 1)], params[i], 5, 99, cached=n)
        for i, n in enumerate(cached)
    ]
    tables = np.arange(12).reshape(3, 4)[: len(cached)]
    shapers = [LogitsShaper.for_request(request, 64, []) for request in requests]
    return ProposeBatch(requests, np.array(lengths), SamplingRows.of(requests), tables, shapers)


def served(
    drafter: BlockDrafter, params: Sequence[SamplingParams] = GREEDY, compiled: bool = True
) -> list[Draft]:
    """Three rounds over three requests, some of which draft less or nothing; rows are observed in between."""
    before = drafter._compiled
    if not compiled:
        drafter._compiled = None
    pool = KVPool(drafter.kv_specs, 12, BLOCK)
    for part in (*pool.k, *pool.v):
        part.zero_()
    drafter.attach(pool, 0)
    drafts, cached = [], [0, 0, 0]
    g = torch.Generator().manual_seed(4)
    for new, lengths in (([20, 3, 9], [5, 2, 0]), ([1, 4, 0], [1, 1, 1]), ([0, 0, 0], [0, 5, 3])):
        if sum(new):
            at = [torch.arange(n, n + more) for n, more in zip(cached, new, strict=True)]
            slots = torch.cat([p + 4 * BLOCK * i for i, p in enumerate(at)])
            taps = torch.randn(len(slots), 256, generator=g)
            starts = np.cumsum([0, *new])
            drafter.observe(ObserveBatch([], starts, torch.cat(at), slots, taps))
        cached = [n + more for n, more in zip(cached, new, strict=True)]
        drafts.append(drafter.propose(propose_batch(lengths, cached, params)))
    drafter._compiled = before
    return drafts


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("method", "head", "vocab"),
    [
        ("dspark", "vanilla", 48),
        ("dspark", "vanilla", None),
        ("dspark", "gated", 48),
        ("dflash", "vanilla", 32),
    ],
)
def test_blocks_in_one_call(
    method: str, head: str, vocab: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.kernels.program.PARALLEL_WORK", 0)
    with_floats(monkeypatch)
    drafter, count = quantised(method, head, vocab), torch.get_num_threads()
    assert drafter._compiled is not None
    assert drafter._compiled.head.chained == (head == "vanilla")
    try:
        torch.set_num_threads(threads)
        together, apart = served(drafter), served(drafter, compiled=False)
    finally:
        torch.set_num_threads(count)
    seen = set()
    for mine, other in zip(together, apart, strict=True):
        assert mine.lengths.tolist() == other.lengths.tolist()
        assert mine.tokens.shape == other.tokens.shape
        for r, n in enumerate(mine.lengths.tolist()):
            assert mine.tokens[r, :n].tolist() == other.tokens[r, :n].tolist()
            seen |= set(mine.tokens[r, :n].tolist())
            if mine.confidence is not None:
                torch.testing.assert_close(
                    mine.confidence[r, :n], other.confidence[r, :n], atol=1e-5, rtol=1e-5
                )
        assert (mine.confidence is None) == (other.confidence is None) == (method == "dflash")
    assert len(seen) > 5, "a chain of one token would prove little"


@pytest.mark.parametrize("params", [SAMPLED, MIXED], ids=["sampled", "mixed"])
@pytest.mark.parametrize(
    ("method", "head", "vocab"),
    [
        ("dspark", "vanilla", 48),
        ("dspark", "vanilla", None),
        ("dspark", "gated", 48),
        ("dflash", "vanilla", 32),
    ],
)
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
    "odd",
    [
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.0, presence_penalty=1.5),
        SamplingParams(temperature=0.0, logit_bias={3: 4.0}),
        None,
    ],
    ids=["top_k", "top_p", "min_p", "penalty", "greedy_bias", "nothing"],
)
def test_filters_and_shapers_go_slot_by_slot(
    odd: SamplingParams | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One such request takes its whole batch along."""
    with_floats(monkeypatch)
    drafter, filled = quantised("dspark", "vanilla", 48), []
    params = SAMPLED if odd is None else (SAMPLED[0], odd, SAMPLED[2])
    slots_of, fill = [d.lengths for d in served(drafter, params)], BlockDrafter._fill

    def counted(self: BlockDrafter, sampler: SlotSampler, *rest: Any) -> Draft:
        filled.append(sampler)
        return fill(self, sampler, *rest)

    monkeypatch.setattr(BlockDrafter, "_fill", counted)
    together = served(drafter, params)
    assert len(filled) == (0 if odd is None else sum(lengths[1] > 0 for lengths in slots_of))
    for mine, other in zip(together, served(drafter, params, compiled=False), strict=True):
        torch.testing.assert_close(mine.probs, other.probs, atol=1e-5, rtol=1e-5)
        assert torch.equal(mine.tokens, other.tokens)


def ready(drafter: BlockDrafter, blocks: int) -> None:
    """Attached to a pool of so many blocks, nothing in it."""
    pool = KVPool(drafter.kv_specs, blocks, BLOCK)
    for part in (*pool.k, *pool.v):
        part.zero_()
    drafter.attach(pool, 0)


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


def test_the_first_of_equal_scores_is_chosen() -> None:
    drafter = quantised("dspark", "vanilla", 48)
    assert isinstance(drafter.model.head, MarkovHead)
    for layer in (drafter.model.lm_head, drafter.model.head.w2):
        assert isinstance(layer, lowbit.LowBitLinear)
        layer.packed.zero_()
    assert all((draft.tokens[draft.lengths > 0] == drafter.model.vocab[0]).all() for draft in served(drafter))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, MIXED], ids=["greedy", "sampled", "mixed"])
@pytest.mark.parametrize("vocab", [48, None])
@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_the_chain_equals_its_modules_on_the_same_logits(
    method: str, vocab: int | None, params: Sequence[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with rounded activations, to the bit."""
    drafter, seen = quantised(method, "vanilla", vocab), []
    chosen = SlotSampler.chosen

    def check(sampler: SlotSampler, tokens: torch.Tensor, *rest: torch.Tensor | None) -> Draft:
        bound = drafter._compiled._bound
        rows = int(sampler.lengths.sum())
        anchors = bound.chain.tokens[0, : len(sampler.lengths)].numpy().copy()
        draft = chosen(sampler, tokens, *rest)
        with monkeypatch.context() as inside:
            inside.setattr(SlotSampler, "chosen", chosen)
            expected = drafter._fill(
                sampler, anchors, bound.hidden[:rows], bound.logits[:rows, : vocab or 64]
            )
        assert torch.equal(draft.tokens, expected.tokens)
        assert (draft.probs is None) == (expected.probs is None) == sampler.rows.all_greedy
        if draft.probs is not None:
            assert torch.equal(draft.probs, expected.probs)
        if method == "dspark":
            torch.testing.assert_close(draft.confidence, expected.confidence, atol=1e-5, rtol=1e-5)
        seen.append(draft)
        return draft

    monkeypatch.setattr(SlotSampler, "chosen", check)
    served(drafter, params)
    assert len(seen) == 3
