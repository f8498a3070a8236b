"""A quantised block drafter in compiled form equals the same drafter layer by layer."""

import dataclasses

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


def propose_batch(lengths: list[int], cached: list[int], temperature: float = 0.0) -> ProposeBatch:
    params = SamplingParams(temperature=temperature, seed=5)
    requests = [
        Request(i, str(i), [(7 * i + j) % 60 + 1 for j in range(n + 1)], params, 5, 99, cached=n)
        for i, n in enumerate(cached)
    ]
    tables = np.arange(12).reshape(3, 4)[: len(cached)]
    shapers = [None] * len(cached)
    return ProposeBatch(requests, np.array(lengths), SamplingRows.of(requests), tables, shapers)


def served(drafter: BlockDrafter, temperature: float = 0.0, compiled: bool = True) -> list[Draft]:
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
        drafts.append(drafter.propose(propose_batch(lengths, cached, temperature)))
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


def test_sampled_blocks_come_from_the_same_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    with_floats(monkeypatch)
    drafter = quantised("dspark", "vanilla", 48)
    for mine, other in zip(served(drafter, 1.0), served(drafter, 1.0, compiled=False), strict=True):
        assert mine.probs is not None
        torch.testing.assert_close(mine.probs, other.probs, atol=1e-5, rtol=1e-5)
        assert torch.equal(mine.tokens, other.tokens)


def test_the_first_of_equal_scores_is_chosen() -> None:
    drafter = quantised("dspark", "vanilla", 48)
    assert isinstance(drafter.model.head, MarkovHead)
    for layer in (drafter.model.lm_head, drafter.model.head.w2):
        assert isinstance(layer, lowbit.LowBitLinear)
        layer.packed.zero_()
    assert all((draft.tokens[draft.lengths > 0] == drafter.model.vocab[0]).all() for draft in served(drafter))


@pytest.mark.parametrize("method", ["dspark", "dflash"])
def test_the_chain_equals_its_modules_on_the_same_logits(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with rounded activations, to the bit."""
    drafter, seen = quantised(method, "vanilla", 48), []
    chosen = SlotSampler.chosen

    def check(sampler: SlotSampler, tokens: torch.Tensor, confidence: torch.Tensor | None) -> Draft:
        bound = drafter._compiled._bound
        rows = int(sampler.lengths.sum())
        anchors = bound.tokens[0, : len(sampler.lengths)].numpy().copy()
        expected = drafter._fill(sampler, anchors, bound.hidden[:rows], bound.logits[:rows, :48])
        draft = chosen(sampler, tokens, confidence)
        assert torch.equal(draft.tokens, expected.tokens)
        if method == "dspark":
            torch.testing.assert_close(draft.confidence, expected.confidence, atol=1e-5, rtol=1e-5)
        seen.append(draft)
        return draft

    monkeypatch.setattr(SlotSampler, "chosen", check)
    served(drafter)
    assert len(seen) == 3
