"""Where a request ends, and what its output says about it, is decided per token, not per block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dspark.core import DSparkError, SamplingParams
from dspark.drafters.base import Drafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.schedule.policies import FixedLength
from dspark.target.decoder import Decoder
from dspark.target.tokenizer import Tokenizer
from dspark.testing import (
    ScriptedDrafter,
    TableTarget,
    run_engine,
    slow_generate,
    tiny_decoder,
    tiny_drafter,
    tiny_tokenizer,
)

V = 10
CYCLE = np.roll(np.eye(V), 1, axis=1)  # token i is always followed by i + 1: abcdefghij abcdefghij ...
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), V)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return tiny_decoder(seed=4, vocab_size=12, max_context=64)


def cycle_engine(
    tokenizer: Tokenizer | None = None,
    eos: tuple[int, ...] = (),
    gamma: int = 7,
    config: EngineConfig | None = None,
) -> Engine:
    """The cycle, drafted without an error: every block is accepted as a whole."""
    target = TableTarget(CYCLE, eos)
    return Engine(target, ScriptedDrafter.copy_target(target, 7), FixedLength(gamma), tokenizer, config)


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 5, 7])
@pytest.mark.parametrize("eos", range(1, 9))
def test_end_of_sequence_inside_an_accepted_prefix(eos: int, gamma: int, tokenizer: Tokenizer) -> None:
    (output,) = run_engine(cycle_engine(tokenizer, (eos,), gamma), [[0]], GREEDY)
    assert output.token_ids == list(range(1, eos + 1))
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.text == "bcdefghij"[: eos - 1]


def test_end_of_sequence_can_be_ignored() -> None:
    (output,) = run_engine(cycle_engine(eos=(3,)), [[0]], replace(GREEDY, ignore_eos=True))
    assert output.token_ids == [*range(1, 10), 0, 1, 2]
    assert output.finish_reason == "length"


@pytest.mark.parametrize("gamma", [0, 2, 7])
def test_stop_ids_name_themselves(gamma: int) -> None:
    params = replace(GREEDY, stop_token_ids=(6, 4))
    (output,) = run_engine(cycle_engine(eos=(9,), gamma=gamma), [[0]], params)
    assert output.token_ids == [1, 2, 3, 4]
    assert (output.finish_reason, output.stop_reason) == ("stop", 4)


@pytest.mark.parametrize("gamma", [0, 1, 3, 7])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "length", "which"),
    [
        ("ef", 5, "ef"),
        ("b", 1, "b"),
        (("hi", "fgh"), 7, "fgh"),
        (("jab", "xyz"), 11, "jab"),
        ("dx", 12, None),
    ],
)
def test_stop_strings_across_rounds(
    stop: str | Sequence[str], length: int, which: str | None, include: bool, gamma: int, tokenizer: Tokenizer
) -> None:
    params = replace(GREEDY, stop=stop, include_stop_str_in_output=include)
    (output,) = run_engine(cycle_engine(tokenizer, gamma=gamma), [[0]], params)
    text = "bcdefghijabc"[:length]
    assert len(output.token_ids) == length
    assert output.stop_reason == which
    assert output.finish_reason == ("stop" if which else "length")
    assert output.text == (text if include or which is None else text.removesuffix(which))


def test_a_stop_string_needs_a_tokenizer() -> None:
    with pytest.raises(DSparkError, match="tokenizer"):
        cycle_engine().add([0], replace(GREEDY, stop="a"))


@pytest.mark.parametrize("gamma", [0, 1, 3, 7])
@pytest.mark.parametrize("max_tokens", range(10))
def test_exactly_max_tokens(max_tokens: int, gamma: int) -> None:
    (output,) = run_engine(cycle_engine(gamma=gamma), [[0]], replace(GREEDY, max_tokens=max_tokens))
    assert output.token_ids == list(range(1, max_tokens + 1))
    assert (output.finish_reason, output.stop_reason) == ("length", None)


@pytest.mark.parametrize("max_tokens", [None, 100])
@pytest.mark.parametrize("gamma", [0, 3, 7])
def test_the_context_edge(max_tokens: int | None, gamma: int) -> None:
    config = EngineConfig(max_model_len=14, block_size=4)
    params = replace(GREEDY, max_tokens=max_tokens)
    outputs = run_engine(cycle_engine(gamma=gamma, config=config), [[0], list(range(10)), [1] * 13], params)
    assert [len(o.token_ids) for o in outputs] == [13, 4, 1]
    assert {o.finish_reason for o in outputs} == {"length"}
    with pytest.raises(DSparkError, match="context"):
        cycle_engine(config=config).add([0] * 14, params)


def test_the_last_token_may_be_the_end(tokenizer: Tokenizer) -> None:
    """A stop at max_tokens is a stop."""
    (by_id,) = run_engine(cycle_engine(eos=(5,)), [[0]], replace(GREEDY, max_tokens=5))
    (by_text,) = run_engine(cycle_engine(tokenizer), [[0]], replace(GREEDY, max_tokens=5, stop="ef"))
    assert (by_id.finish_reason, by_text.finish_reason) == ("stop", "stop")
    assert by_text.text == "bcd"


@pytest.mark.parametrize("gamma", [0, 2, 7])
def test_min_tokens_mask_every_end(gamma: int) -> None:
    """From 3 the cycle goes on to 4, or, where that is forbidden, back to 0."""
    table = CYCLE.copy()
    table[3] = np.eye(V)[4] * 0.9 + np.eye(V)[0] * 0.1
    target = TableTarget(table, eos_token_ids=(4,))
    for params in (
        replace(GREEDY, min_tokens=6),
        replace(GREEDY, min_tokens=6, ignore_eos=True, stop_token_ids=(4,)),
    ):
        drafter = ScriptedDrafter.copy_target(target, 7)
        (output,) = run_engine(Engine(target, drafter, FixedLength(gamma)), [[0]], params)
        assert output.token_ids == [1, 2, 3, 0, 1, 2, 3, 4]
        assert output.finish_reason == "stop"


def test_an_abort_keeps_what_there_is() -> None:
    engine = cycle_engine(gamma=2)
    doomed, other = engine.add([0], replace(GREEDY, max_tokens=50)), engine.add([5], GREEDY)
    for _ in range(3):
        engine.step()
    output = engine.abort(doomed)
    assert output is not None
    assert output.finish_reason == "abort"
    assert output.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert engine.abort(doomed) is None
    events = []
    while engine.has_unfinished:
        events += engine.step()
    assert {e.request_id for e in events} == {other}
    assert events[-1].output is not None
    assert len(events[-1].output.token_ids) == 12
    assert engine.pool.num_free == engine.pool.num_blocks


def test_events_say_where_tokens_came_from() -> None:
    target = TableTarget(CYCLE)
    engine = Engine(target, ScriptedDrafter.fixed([2, 3, 9]), FixedLength(3))
    engine.add([0], replace(GREEDY, max_tokens=9))
    seen = []
    while engine.has_unfinished:
        seen += [(e.token_ids, e.origins) for e in engine.step()]
    assert seen == [
        ([1], ["plain"]),
        ([2, 3, 4], ["accepted", "accepted", "corrected"]),
        ([5], ["corrected"]),
        ([6], ["corrected"]),
        ([7], ["corrected"]),
        ([8], ["corrected"]),
        ([9], ["plain"]),  # one token to go: nothing is drafted
    ]


def test_an_accepted_block_ends_with_a_bonus() -> None:
    engine = cycle_engine(gamma=2)
    engine.add([0], replace(GREEDY, max_tokens=7))
    origins = []
    while engine.has_unfinished:
        origins += [e.origins for e in engine.step()]
    assert origins == [["plain"], ["accepted", "accepted", "bonus"], ["accepted", "accepted", "bonus"]]


DRAFTERS: dict[str, Callable[[Decoder], Drafter]] = {
    "dspark": lambda decoder: tiny_drafter(decoder),
    "unreliable": lambda decoder: ScriptedDrafter.unreliable(decoder, 7),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, logprobs=3),
        replace(GREEDY, logprobs=0, raw_logprobs=True, presence_penalty=1.0),
        replace(GREEDY, logprobs=2, repetition_penalty=1.4, logit_bias={3: 2.0}),
        replace(GREEDY, logprobs=5, min_tokens=4, stop_token_ids=(1,)),
    ],
    ids=["plain", "raw", "shaped", "stopped"],
)
def test_logprobs_equal_plain_decodings(name: str, params: SamplingParams, decoder: Decoder) -> None:
    prompts = [[1, 2, 3], [7, 7], list(range(12))]
    plain = run_engine(Engine(decoder), prompts, params)
    fast = run_engine(Engine(decoder, DRAFTERS[name](decoder)), prompts, params)
    for prompt, a, b in zip(prompts, plain, fast, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs is not None
        assert b.logprobs is not None
        assert [x.token_id for x in b.logprobs] == b.token_ids
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-9)
            assert list(x.top) == list(y.top)
            assert list(x.top.values()) == pytest.approx(list(y.top.values()), abs=1e-9)
        if not params.raw_logprobs:
            slow = slow_generate(decoder, prompt, params)
            want = [np.log(p[t]) for p, t in zip(slow.distributions, slow.token_ids, strict=True)]
            assert [x.logprob for x in b.logprobs] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_counts_add_up(gamma: int, decoder: Decoder) -> None:
    engine = Engine(decoder, ScriptedDrafter.unreliable(decoder, 7), FixedLength(gamma))
    prompts = [[1, 2, 3], [7], [4, 4, 4]]
    for output in run_engine(engine, prompts, replace(GREEDY, max_tokens=30)):
        m = output.metrics
        assert 0 < m.accepted <= m.scheduled <= m.drafted
        # The prefill decides one token, a round its accepted drafts and one more; nothing is cut off here.
        assert len(output.token_ids) == 1 + m.rounds + m.accepted == 30
        for name in ("drafted", "scheduled", "accepted"):
            per_position = getattr(m, f"{name}_per_position")
            assert sum(per_position) == getattr(m, name)
            assert per_position == sorted(per_position, reverse=True)
            assert len(per_position) <= gamma
        assert m.accepted_length == pytest.approx(1 + m.accepted / m.rounds)


def test_bad_requests_are_refused() -> None:
    engine = cycle_engine(config=EngineConfig(kv_cache_tokens=32))
    for prompt, params, message in (
        ([], GREEDY, "no tokens"),
        ([V], GREEDY, "vocabulary"),
        ([0], replace(GREEDY, stop_token_ids=(V,)), "vocabulary"),
        ([0], replace(GREEDY, logit_bias={V: 1.0}), "vocabulary"),
        ([0], replace(GREEDY, max_tokens=40), "KV"),
    ):
        with pytest.raises(DSparkError, match=message):
            engine.add(prompt, params)
    engine.add([0], GREEDY, "mine")
    with pytest.raises(DSparkError, match="in use"):
        engine.add([0], GREEDY, "mine")
    while engine.has_unfinished:
        engine.step()
    assert engine.add([0], GREEDY, "mine") == "mine"
