"""Speculation never changes greedy text: every drafter, length and batch gives plain decoding's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from dspark.core import RequestOutput, SamplingParams
from dspark.drafters.base import Drafter
from dspark.drafters.lookup import LookupFirst
from dspark.drafters.ngram import NgramDrafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.kv import KVPool
from dspark.schedule.policies import Dependence, FixedLength, ScheduleState
from dspark.target.base import ForwardBatch, TargetOutput
from dspark.target.decoder import Decoder
from dspark.target.tokenizer import Tokenizer
from dspark.testing import ScriptedDrafter, SlowOutput, run_engine, slow_generate, tiny_decoder, tiny_drafter
from dspark.testing import tiny_tokenizer as make_tokenizer
from dspark.testing.chain import tiny_chain_drafter

VOCAB, EOS = 12, 5  # few tokens: random drafters are right now and then
GAMMAS = (1, 2, 3, 5, 7)

DRAFTERS: dict[str, Callable[[Decoder], Drafter | None]] = {
    "none": lambda target: None,
    "ngram": lambda target: NgramDrafter(7, lookup_max=3, lookup_min=1),
    "dspark-vanilla": lambda target: tiny_drafter(target, head="vanilla"),
    "dspark-gated": lambda target: tiny_drafter(target, head="gated"),
    "dspark-rnn": lambda target: tiny_drafter(target, head="rnn"),
    "dspark-pruned": lambda target: tiny_drafter(target, head="vanilla", draft_vocab_size=7),
    "dflash": lambda target: tiny_drafter(target, method="dflash"),
    "copy-target": lambda target: ScriptedDrafter.copy_target(target, 7),
    "always-wrong": lambda target: ScriptedDrafter.always_wrong(target, 7),
    "unreliable": lambda target: ScriptedDrafter.unreliable(target, 7),
    "eagle3": lambda target: tiny_chain_drafter(target),
    "eagle3-pruned": lambda target: tiny_chain_drafter(target, draft_vocab_size=7),
    "mtp": lambda target: tiny_chain_drafter(target, "mtp"),
    "dspark+lookup": lambda target: LookupFirst(tiny_drafter(target, draft_vocab_size=7), 3, 7, 1, 3),
    "eagle3+lookup": lambda target: LookupFirst(tiny_chain_drafter(target), 2, 5, 1, 2),
}

GREEDY = SamplingParams(temperature=0, max_tokens=16)
WORK: list[tuple[list[int], SamplingParams]] = [
    ([1, 2, 3], GREEDY),
    ([7], replace(GREEDY, ignore_eos=True, max_tokens=28)),
    ([5] * 9, replace(GREEDY, max_tokens=1)),
    ([4, 9], replace(GREEDY, max_tokens=0)),
    (list(range(12)) * 3, replace(GREEDY, min_tokens=10, max_tokens=24)),
    ([0, 8, 11, 2], replace(GREEDY, ignore_eos=True, stop_token_ids=(9, 2), max_tokens=40)),
    ([3, 1, 4, 1, 5, 9, 2, 6], replace(GREEDY, repetition_penalty=1.7, max_tokens=20)),
    ([10, 10], replace(GREEDY, presence_penalty=1.5, frequency_penalty=0.8, ignore_eos=True)),
    ([6, 5, 4], replace(GREEDY, logit_bias={7: 6.0, EOS: -20.0, 1: 2.5}, frequency_penalty=1.2)),
    ([2] * 17, replace(GREEDY, speculative=False, ignore_eos=True)),
    ([11, 3], replace(GREEDY, stop=("hgg", "ikelhg"), ignore_eos=True, max_tokens=40)),
    (
        [8, 0, 7],
        replace(GREEDY, stop="gjb", include_stop_str_in_output=True, ignore_eos=True, max_tokens=40),
    ),
]

ALL = slice(None)


@cache
def target() -> Decoder:
    return tiny_decoder(seed=1, vocab_size=VOCAB, eos_token_ids=(EOS,), max_context=128)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)


@pytest.fixture(scope="module")
def expected(tokenizer: Tokenizer) -> list[SlowOutput]:
    return [slow_generate(target(), prompt, params, tokenizer) for prompt, params in WORK]


def assert_same(outputs: list[RequestOutput], expected: list[SlowOutput], which: slice = ALL) -> None:
    for (prompt, params), got, want in zip(WORK[which], outputs, expected, strict=True):
        assert got.token_ids == want.token_ids, (prompt, params)
        reasons = (got.finish_reason, got.stop_reason)
        assert reasons == (want.finish_reason, want.stop_reason), (prompt, params)
        assert got.text == want.text, (prompt, params)
        assert got.prompt_token_ids == prompt


def run(
    drafter: Drafter | None, gamma: int, config: EngineConfig, tokenizer: Tokenizer, which: slice = ALL
) -> list[RequestOutput]:
    engine = Engine(target(), drafter, FixedLength(gamma) if drafter else None, tokenizer, config)
    prompts, params = zip(*WORK[which], strict=True)
    return run_engine(engine, prompts, params)


def test_the_workload_ends_in_every_way(expected: list[SlowOutput]) -> None:
    reasons = {(o.finish_reason, o.stop_reason is None, isinstance(o.stop_reason, str)) for o in expected}
    assert reasons == {
        ("length", True, False),
        ("stop", True, False),
        ("stop", False, False),
        ("stop", False, True),
    }
    assert len({tuple(o.token_ids[:4]) for o in expected}) > 8


# The drafters that ask the target themselves are slow, plain decoding has no length: three cases do.
CASES = [
    (name, gamma, (16, 4, 1, 4, 16)[(i + j) % 5])
    for (i, name), (j, gamma) in product(enumerate(DRAFTERS), enumerate(GAMMAS))
    if name not in ("none", "copy-target", "always-wrong") or j in (i % 2, 2, 4)
]


@pytest.mark.parametrize(("name", "gamma", "concurrency"), CASES)
def test_speculation_gives_plain_decodings_output(
    name: str, gamma: int, concurrency: int, tokenizer: Tokenizer, expected: list[SlowOutput]
) -> None:
    config = EngineConfig(max_num_seqs=concurrency)
    every = slice(None, None, 2 if concurrency == 1 else 1)  # one at a time is slow
    outputs = run(DRAFTERS[name](target()), gamma, config, tokenizer, every)
    assert_same(outputs, expected[every], every)


SHORT = {
    "chunked": (16, 7, None),
    "blocks-of-one": (1, 512, 90),
    "preempted": (4, 512, 76),
    "all": (3, 5, 100),
}


@pytest.mark.parametrize(
    "name",
    [
        "none",
        "ngram",
        "dspark-rnn",
        "dspark-pruned",
        "dflash",
        "unreliable",
        "eagle3",
        "mtp",
        "dspark+lookup",
    ],
)
@pytest.mark.parametrize("kind", SHORT)
def test_short_memory_and_chunked_prefill_change_nothing(
    name: str, kind: str, tokenizer: Tokenizer, expected: list[SlowOutput]
) -> None:
    block_size, rows, positions = SHORT[kind]
    config = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=rows, block_size=block_size, kv_cache_tokens=positions
    )
    assert_same(run(DRAFTERS[name](target()), 5, config, tokenizer), expected)


def test_the_small_pool_does_preempt(tokenizer: Tokenizer) -> None:
    config = EngineConfig(max_num_seqs=8, block_size=4, kv_cache_tokens=76)
    drafter = ScriptedDrafter.unreliable(target(), 7)
    forgotten: list[int] = []
    forget = drafter.forget

    def counted(request: object) -> None:
        forgotten.append(1)
        forget(request)  # type: ignore[arg-type]

    drafter.forget = counted  # type: ignore[assignment, method-assign]
    run(drafter, 5, config, tokenizer)
    assert len(forgotten) > len(WORK)  # once at each end, the rest are preemptions


@dataclass(frozen=True)
class Jagged:
    """Drafts and verifies differently for every request and round, sometimes nothing."""

    dependence: Dependence = Dependence.STATIC
    uses_survival: bool = False

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        return np.minimum(state.room, (3 * state.uids + 5 * state.context_lens) % 8)

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        return np.maximum(drafted - (state.uids + state.context_lens) % 4, 0)


@pytest.mark.parametrize(
    "name", ["ngram", "dspark-gated", "dspark-pruned", "dflash", "unreliable", "eagle3-pruned", "mtp"]
)
def test_lengths_may_change_with_every_round(
    name: str, tokenizer: Tokenizer, expected: list[SlowOutput]
) -> None:
    for config in (EngineConfig(), EngineConfig(block_size=3, max_num_batched_tokens=11, kv_cache_tokens=90)):
        engine = Engine(target(), DRAFTERS[name](target()), Jagged(), tokenizer, config)
        outputs = run_engine(engine, [prompt for prompt, _ in WORK], [params for _, params in WORK])
        assert_same(outputs, expected)
        assert 0 < sum(o.metrics.scheduled for o in outputs) < sum(o.metrics.drafted for o in outputs)


class CountingTarget:
    """A decoder that counts its forward passes."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.forwards = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.decoder, name)

    def forward(self, batch: ForwardBatch, pool: KVPool, taps: tuple[int, ...] = ()) -> TargetOutput:
        self.forwards += 1
        return self.decoder.forward(batch, pool, taps)


@pytest.mark.parametrize("name", DRAFTERS)
def test_never_more_forward_passes_than_plain_decoding(name: str) -> None:
    params = replace(GREEDY, ignore_eos=True, max_tokens=20)
    for prompt in ([1, 2, 3], list(range(12)) * 2):
        counting = CountingTarget(target())
        engine = Engine(counting, DRAFTERS[name](target()), config=EngineConfig(max_num_seqs=1))  # type: ignore[arg-type]
        run_engine(engine, [prompt], params)
        assert counting.forwards <= 20
        if name in ("none", "always-wrong"):
            assert counting.forwards == 20
        if name == "copy-target":
            assert counting.forwards == 1 + 3  # 1 token of the prefill, then 8, 8 and 3


def test_plain_requests_are_never_drafted_for() -> None:
    drafter = ScriptedDrafter.copy_target(target(), 4)
    engine = Engine(target(), drafter)
    params = replace(GREEDY, ignore_eos=True)
    plain, fast = run_engine(engine, [[1, 2], [1, 2]], [replace(params, speculative=False), params])
    assert plain.token_ids == fast.token_ids
    assert plain.metrics.drafted == 0
    assert fast.metrics.drafted == drafter.proposed > 0


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("windows", [(), (None, 6, 3)], ids=["full", "windows"])
def test_other_families_and_sliding_windows(kind: str, windows: tuple[int | None, ...]) -> None:
    model = tiny_decoder(seed=3, kind=kind, vocab_size=VOCAB, max_context=128, windows=windows)  # type: ignore[arg-type]
    prompts = [[1, 2, 3], [7], list(range(12)) * 2]
    expected = [slow_generate(model, prompt, GREEDY).token_ids for prompt in prompts]
    for drafter in (None, tiny_drafter(model, head="rnn"), ScriptedDrafter.unreliable(model, 5)):
        outputs = run_engine(Engine(model, drafter, config=EngineConfig(block_size=4)), prompts, GREEDY)
        assert [o.token_ids for o in outputs] == expected


def test_a_drafter_in_single_precision_changes_nothing() -> None:
    """float32 throughout: batching may change the last bits of a logit, not a well separated argmax."""
    model = tiny_decoder(seed=1, vocab_size=VOCAB, dtype=torch.float32, max_context=128)
    prompts = [[1, 2, 3], [7], list(range(12)) * 2]
    expected = [slow_generate(model, prompt, GREEDY).token_ids for prompt in prompts]
    for drafter in (tiny_drafter(model), ScriptedDrafter.unreliable(model, 7)):
        assert [o.token_ids for o in run_engine(Engine(model, drafter), prompts, GREEDY)] == expected
