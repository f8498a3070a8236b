"""The offline LLM on a tiny model: what it refuses, and when; several answers; closing it."""

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


@pytest.mark.parametrize("acceptance", ["ratio", "shared_noise"])
def test_several_answers_to_a_prompt(tiny_model, acceptance):
    config = {"method": "ngram", "acceptance": acceptance}

    def answers(*counts, seed=5):
        """Of a new LLM, so that requests have the same numbers each time."""
        with LLM(tiny_model, speculative_config=config, kv_cache_tokens=512, max_num_seqs=4) as llm:
            params = [SamplingParams(n=n, temperature=1.0, max_tokens=12, seed=seed) for n in counts]
            return llm.generate(["abcab", "hello"][: len(counts)], params)

    alone, several = answers(1, 1), answers(3, 2)
    assert [out.outputs for out in alone] == [[out] for out in alone]
    assert [len(out.outputs) for out in several] == [3, 2]
    for one, out in zip(alone, several, strict=True):
        assert (out.text, out.token_ids, out.seed) == (one.text, one.token_ids, 5)
        assert out.outputs[0] is out
        assert len({answer.seed for answer in out.outputs}) == len(out.outputs)
        assert len({answer.text for answer in out.outputs}) == len(out.outputs)
        assert all(answer.prompt_token_ids == one.prompt_token_ids for answer in out.outputs)
        assert all(answer.finished and answer.metrics.rounds > 0 for answer in out.outputs)
    again = answers(3, 2)
    assert [[a.token_ids for a in out.outputs] for out in again] == [
        [a.token_ids for a in out.outputs] for out in several
    ]
    seeds = [[a.seed for a in out.outputs] for out in answers(2, 2, seed=None)]
    assert len({*seeds[0], *seeds[1]}) == 4, "without a seed each draws its own"


def test_several_answers_are_refused_where_there_is_one(tiny_model):
    with pytest.raises(DSparkError, match="n must be 1 at temperature 0"):
        SamplingParams(n=2, temperature=0)
    for n in (0, 1.5, True):
        with pytest.raises(DSparkError, match="n must be a whole number, 1 or more"):
            SamplingParams(n=n)
    with LLM(tiny_model, kv_cache_tokens=256) as llm:
        with pytest.raises(DSparkError, match=r"n = 2 are for LLM\.generate"):
            llm.stream("abc", SamplingParams(n=2))
        with pytest.raises(DSparkError, match="outside the model's vocabulary"):
            llm.generate(
                ["abc", "abc"], [SamplingParams(n=2, max_tokens=8), SamplingParams(n=2, stop_token_ids=[99])]
            )
        assert not llm.engine.has_unfinished


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
