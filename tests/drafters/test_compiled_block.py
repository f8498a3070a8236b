"""A quantised block drafter in compiled form equals the same drafter layer by layer."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from compiled_drafts import (
    BLOCK,
    GREEDY,
    MIXED,
    SAMPLED,
    each_kind,
    needs_low_bit,
    quantised,
    served,
    with_floats,
)

from dspark.core import Draft, SamplingParams
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.base import ObserveBatch
from dspark.drafters.block import BlockDrafter, pack_blocks
from dspark.drafters.heads import MarkovHead
from dspark.drafters.slots import SlotSampler
from dspark.kernels import lowbit
from dspark.kv import KVPool
from dspark.target.layer import DecoderLayer
from dspark.testing import tiny_decoder, tiny_drafter

pytestmark = needs_low_bit


@pytest.fixture(params=[(True, False), (False, False), (False, True)], ids=["qk_norm", "plain", "bias"])
def drafter(request: pytest.FixtureRequest) -> BlockDrafter:
    target = tiny_decoder(hidden=128, dtype=torch.float32)
    model = tiny_drafter(target).model
    qk_norm, bias = request.param
    config = dataclasses.replace(model.config, qk_norm=qk_norm, attention_bias=bias)
    torch.manual_seed(0)
    other = BlockDrafterModel(config)
    torch.nn.init.normal_(other.hidden_norm.weight, 1.0, 0.2)
    for layer in other.layers:
        assert isinstance(layer, DecoderLayer)
        if bias:
            torch.nn.init.normal_(layer.qkv_proj.bias, 0.0, 0.5)
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


@pytest.mark.parametrize(("threads", "bias"), [(1, False), (2, False), (2, True)])
@each_kind
def test_blocks_in_one_call(
    method: str, head: str, vocab: int | None, threads: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.kernels.program.PARALLEL_WORK", 0)
    with_floats(monkeypatch)
    drafter, count = quantised(method, head, vocab, bias), torch.get_num_threads()
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


def test_blocks_lie_side_by_side() -> None:
    context, anchors, lengths = np.array([7, 2]), np.array([50, 60]), np.array([2, 1])
    tables = np.array([[3, 1], [2, 0]])
    query_start, tokens, positions, slots = pack_blocks(context, anchors, lengths, tables, 8, 9)
    assert query_start.tolist() == [0, 2, 3]
    assert tokens.tolist() == [50, 9, 60]
    assert positions.tolist() == [7, 8, 2]
    assert slots.tolist() == [31, 8, 18]
