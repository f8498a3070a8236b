"""The offline LLM on a tiny model: what it refuses, and when; closing it."""

import weakref

import pytest

from dspark import LLM, DSparkError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"method": "ngram", "tokens": 3},
            "'tokens' is not supported .*num_speculative_tokens.* scheduling policy",
        ),
        ({"method": "medusa"}, "'medusa' is not known"),
        ({"policy": "auto"}, "method None is not known"),
        ("ngram", "must be a mapping"),
    ],
)
def test_speculative_configurations_are_checked_before_anything_is_loaded(
    tiny_model, monkeypatch, config, message
):
    monkeypatch.setattr("dspark.llm.load_target", lambda *args: pytest.fail("loaded for nothing"))
    with pytest.raises(DSparkError, match=message):
        LLM(tiny_model, speculative_config=config)


def test_a_closed_llm_says_so_and_holds_nothing(tiny_model):
    with LLM(tiny_model, speculative_config={"method": "ngram"}, kv_cache_tokens=256) as llm:
        (whole,) = llm.generate("abc", GREEDY)
        stream = llm.stream("abc", GREEDY)
        assert next(stream).token_ids == whole.token_ids[:1]
        held = [weakref.ref(x) for x in (llm.engine, llm.engine.pool, llm.engine.target, llm.engine.drafter)]
    assert not any(ref() for ref in held)
    for use in (
        lambda: llm.generate("abc", GREEDY),
        lambda: llm.stream("abc", GREEDY),
        lambda: next(stream),
        lambda: llm.engine,
    ):
        with pytest.raises(DSparkError, match="this LLM is closed: make another one"):
            use()
    assert llm._inbox == {}
    llm.close()  # again does nothing
    with pytest.raises(DSparkError, match="weights_of is an LLM that was closed"):
        LLM(tiny_model, weights_of=llm)


def test_closing_leaves_weights_to_those_who_share_them(tiny_model):
    first = LLM(tiny_model, kv_cache_tokens=256)
    second = LLM(tiny_model, kv_cache_tokens=256, weights_of=first)
    before = second.generate("abc", GREEDY)[0].token_ids
    weights, pool = weakref.ref(first.engine.target), weakref.ref(first.engine.pool)
    first.close()
    assert weights() is second.engine.target
    assert pool() is None
    assert second.generate("abc", GREEDY)[0].token_ids == before
    second.close()
    assert weights() is None


def test_closing_while_answers_are_awaited_ends_them(tiny_model):
    llm = LLM(tiny_model, kv_cache_tokens=256)
    with pytest.raises(DSparkError, match="is closed"):
        llm.generate(["abc", "def"], GREEDY, on_event=lambda event: llm.close())
    assert llm._inbox == {}
