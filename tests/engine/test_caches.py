"""After every step the caches hold what a pass from scratch over the committed tokens would have written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dspark.core import SamplingParams
from dspark.drafters.base import Deferring
from dspark.drafters.block import BlockDrafter
from dspark.drafters.chain import ChainDrafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.kernels.attention import is_fast
from dspark.kv import BlockTable, KVPool
from dspark.target.decoder import Decoder
from dspark.testing import (
    FreshPass,
    ScriptedDrafter,
    check_step,
    fresh_pass,
    run_engine,
    slow_generate,
    tiny_decoder,
    tiny_drafter,
)
from dspark.testing.chain import tiny_chain_drafter

VOCAB = 12
PROMPTS = [[1, 2, 3], [7], list(range(12)) * 2, [5, 5], [9, 1, 0, 4, 4], [3] * 11]
GREEDY = SamplingParams(temperature=0, max_tokens=14, seed=1)
HOT = SamplingParams(temperature=2.0, max_tokens=14, seed=1)  # most random drafts are accepted


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_decoder(seed=2, vocab_size=VOCAB, max_context=128)


DRAFTERS: dict[str, Callable[[Decoder], ScriptedDrafter | BlockDrafter | ChainDrafter]] = {
    "always-right": lambda target: ScriptedDrafter.copy_target(target, 5),
    "always-wrong": lambda target: ScriptedDrafter.always_wrong(target, 5),
    "unreliable": lambda target: ScriptedDrafter.unreliable(target, 5),
    "dspark": lambda target: tiny_drafter(target, head="gated"),
    "dspark-pruned": lambda target: tiny_drafter(target, head="rnn", draft_vocab_size=8),
    "dflash": lambda target: tiny_drafter(target, method="dflash", block_size=4),
    "eagle3": lambda target: tiny_chain_drafter(target, draft_vocab_size=8),
    "mtp": lambda target: tiny_chain_drafter(target, "mtp", block_size=4),
}


def draft_kv(
    drafter: BlockDrafter | ChainDrafter, taps: torch.Tensor, layer: int, tokens: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Context keys and values of positions 0, 1, ... straight from eqs. 2-3, or from the features and the tokens
    behind them."""
    rotary = drafter.model.rotary(torch.arange(len(taps)), taps.dtype)
    if isinstance(drafter, ChainDrafter):
        behind = torch.tensor(tokens[1 : len(taps) + 1])
        kv = drafter._project(drafter.model.kv_rows(behind, drafter.model.fuse(taps)))
        return drafter.model.split_kv(kv, rotary)
    return drafter.model.context_kv(layer, drafter.model.context(taps), rotary)


def assert_close(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], where: str) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= 1e-9, where


@torch.inference_mode()
def assert_caches(engine: Engine, target: Decoder) -> None:
    drafter = engine.drafter
    live = [r for r in engine.scheduler.running if r.request.cached]
    if not live:
        return
    taps = drafter.taps if drafter is not None else ()
    if isinstance(drafter, Deferring):
        drafter.catch_up()
    fresh = fresh_pass(target, [r.request.token_ids[: r.request.cached] for r in live], taps)
    for i, r in enumerate(live):
        length, where = r.request.cached, f"request {r.request.uid} at {r.request.cached} positions"
        for layer in range(len(target.kv_specs)):
            got = engine.pool.read(layer, r.table, length)
            assert_close(got, fresh.pool.read(layer, fresh.tables[i], length), f"{where}, layer {layer}")
        if isinstance(drafter, BlockDrafter | ChainDrafter) and r.request.params.speculative:
            tokens = r.request.token_ids
            assert_draft_cache(engine.pool, r.table, drafter, fresh, i, len(target.kv_specs), where, tokens)


def assert_draft_cache(
    pool: KVPool,
    table: BlockTable,
    drafter: BlockDrafter | ChainDrafter,
    fresh: FreshPass,
    i: int,
    first: int,
    where: str,
    tokens: list[int],
) -> None:
    assert fresh.taps is not None
    taps = fresh.taps[int(fresh.start[i]) : int(fresh.start[i + 1])]
    for layer in range(len(drafter.kv_specs)):
        got = pool.read(first + layer, table, len(taps))
        assert_close(got, draft_kv(drafter, taps, layer, tokens), f"{where}, draft layer {layer}")


def poison(engine: Engine) -> None:
    """Overwrite every position that holds no committed token's KV."""
    pool = engine.pool
    stale = torch.ones(pool.num_blocks * pool.block_size, dtype=torch.bool)
    for r in engine.scheduler.running:
        stale[torch.from_numpy(pool.slots(r.table, 0, r.request.cached))] = False
    stale = stale.view(pool.num_blocks, pool.block_size)
    for k, v in zip(pool.k, pool.v, strict=True):
        k.masked_fill_(stale[:, None, None, :], float("nan"))
        v.masked_fill_(stale[:, None, :, None], float("nan"))


CONFIGS = {
    "roomy": EngineConfig(max_num_seqs=6, block_size=4),
    "tight": EngineConfig(max_num_seqs=6, block_size=3, max_num_batched_tokens=9, kv_cache_tokens=60),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_caches_equal_a_pass_from_scratch(
    name: str, params: SamplingParams, config: str, target: Decoder
) -> None:
    engine = Engine(target, DRAFTERS[name](target), config=CONFIGS[config])
    outputs = run_engine(engine, PROMPTS, params, after_step=lambda e: assert_caches(e, target))
    accepted = sum(o.metrics.accepted for o in outputs)
    scheduled = sum(o.metrics.scheduled for o in outputs)
    if params is GREEDY:
        wanted = {"always-right": scheduled, "always-wrong": 0}
        assert accepted == wanted.get(name, accepted)
    assert scheduled > 0


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["unreliable", "dspark", "dspark-pruned", "dflash", "eagle3", "mtp"])
def test_rejected_and_free_positions_are_never_read(name: str, config: str, target: Decoder) -> None:
    plain = [slow_generate(target, prompt, GREEDY).token_ids for prompt in PROMPTS]
    for params in (GREEDY, HOT):
        clean = run_engine(Engine(target, DRAFTERS[name](target), config=CONFIGS[config]), PROMPTS, params)
        engine = Engine(target, DRAFTERS[name](target), config=CONFIGS[config])
        poison(engine)
        outputs = run_engine(engine, PROMPTS, params, after_step=poison)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in clean]
        assert [o.metrics for o in outputs] == [o.metrics for o in clean]
        if params is GREEDY:
            assert [o.token_ids for o in outputs] == plain


def test_the_compiled_attention_reads_no_stale_position_either() -> None:
    model = tiny_decoder(seed=2, vocab_size=VOCAB, max_context=128, hidden=64, dtype=torch.float32)
    config = EngineConfig(max_num_seqs=6, block_size=16)
    clean = run_engine(Engine(model, tiny_drafter(model), config=config), PROMPTS, GREEDY)
    engine = Engine(model, tiny_drafter(model), config=config)
    assert is_fast(engine.pool.k[0], 16, 16)
    poison(engine)
    outputs = run_engine(engine, PROMPTS, GREEDY, after_step=poison)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in clean]
    assert [o.metrics for o in outputs] == [o.metrics for o in clean]


def test_a_request_without_speculation_shares_the_pool(target: Decoder) -> None:
    engine = Engine(target, tiny_drafter(target), config=CONFIGS["roomy"])
    params = [replace(GREEDY, speculative=i % 2 == 0) for i in range(len(PROMPTS))]
    run_engine(engine, PROMPTS, params, after_step=lambda e: (assert_caches(e, target), poison(e))[1])


def test_an_abort_returns_its_blocks_at_once(target: Decoder) -> None:
    engine = Engine(target, tiny_drafter(target), config=EngineConfig(max_num_seqs=2, block_size=4))
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:3]]
    for _ in range(3):
        engine.step()
    before = engine.pool.num_free
    table = next(r.table for r in engine.scheduler.running if r.request.request_id == ids[0])
    held = len(table.blocks)
    output = engine.abort(ids[0])
    assert output is not None
    assert held > 0
    assert engine.pool.num_free == before + held
    check_step(engine)
    assert engine.abort(ids[2]) is not None  # still waiting
    assert engine.abort(ids[1]) is not None
    assert engine.pool.num_free == engine.pool.num_blocks
    assert not engine.has_unfinished
    assert engine.step() == []
