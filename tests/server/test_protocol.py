"""What clients may ask for, and what they are told when they ask for something else."""

from pathlib import Path

import pytest

from dspark.core import RequestMetrics, RequestOutput, TokenLogprobs
from dspark.server.protocol import Chat, Completion, Reply, RequestError
from dspark.target.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def test_parameters_reach_the_sampler(tokenizer) -> None:
    body = {"messages": MESSAGES, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3}
    body |= {"max_completion_tokens": 5, "stop": "a", "logit_bias": {"7": -3}, "presence_penalty": 1}
    asked = Chat(tokenizer).parse({**body, "n": 1, "user": "me", "stream": None})
    assert asked.prompt == MESSAGES
    assert (asked.stream, asked.include_usage) == (False, False)
    params = asked.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (
        0.5,
        0.9,
        7,
        0.1,
        3,
    )
    assert (params.max_tokens, params.stop_strings, params.logit_bias) == (5, ("a",), {7: -3.0})
    assert params.presence_penalty == 1


def test_defaults_are_openais(tokenizer) -> None:
    chat = Chat(tokenizer).parse({"messages": MESSAGES}).params
    completion = Completion(tokenizer).parse({"prompt": "a"}).params
    assert (chat.temperature, chat.max_tokens, completion.max_tokens) == (1.0, None, 16)


def test_content_in_parts_and_prompts_as_ids(tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = Chat(tokenizer).parse({"messages": [{"role": "user", "content": parts}]})
    assert asked.prompt == [{"role": "user", "content": "ab"}]
    for prompt, understood in (
        ("a", "a"),
        (["a"], "a"),
        ([1, 2], {"prompt_token_ids": [1, 2]}),
        ([[1, 2]], {"prompt_token_ids": [1, 2]}),
    ):
        assert Completion(tokenizer).parse({"prompt": prompt}).prompt == understood


@pytest.mark.parametrize(
    ("more", "param", "says"),
    [
        ({"tools": []}, "tools", "tools is not supported"),
        ({"n": 2}, "n", "several times"),
        ({"temperature": -1}, "temperature", "0 \\(greedy\\) or more"),
        ({"temperature": "hot"}, "temperature", "finite number"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "set stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "nothing else"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "not both"),
        ({"logprobs": 2}, "logprobs", "true or false"),
        ({"logprobs": True, "stream": True}, "logprobs", "streams"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 50}, "logprobs", "0, 20"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": ["Hi"]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text alone"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "messages", "tool_calls"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tokenizer, more, param, says) -> None:
    with pytest.raises(RequestError, match=says) as refused:
        Chat(tokenizer).parse({"messages": MESSAGES, **more})
    assert refused.value.param == param


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [1.5], None, [True]])
def test_prompts_that_are_none(tokenizer, prompt) -> None:
    with pytest.raises(RequestError, match="one text, or one list of token ids"):
        Completion(tokenizer).parse({"prompt": prompt})


def test_responses(tokenizer) -> None:
    metrics = RequestMetrics(rounds=2, committed=3, drafted=4, scheduled=3, accepted=1)
    logprobs = [TokenLogprobs(1, -0.5, {1: -0.5, 2: -1.0})]
    output = RequestOutput("r", [1, 2], "xy", [3, 4, 5], "stop", "z", logprobs, 0, metrics)
    reply = Reply("tiny", "7", 99)
    whole = Chat(tokenizer).whole(reply, output)
    assert (whole["id"], whole["object"], whole["created"], whole["model"]) == (
        "chatcmpl-7",
        "chat.completion",
        99,
        "tiny",
    )
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": "xy"}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "stop", "z")
    (position,) = choice["logprobs"]["content"]
    one, two = (tokenizer.decode([i]) for i in (1, 2))
    assert (position["token"], position["logprob"], position["bytes"]) == (one, -0.5, list(one.encode()))
    assert [(top["token"], top["logprob"]) for top in position["top_logprobs"]] == [(one, -0.5), (two, -1.0)]
    assert whole["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "completion_tokens_details": {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 2},
    }
    completion = Completion(tokenizer).whole(reply, output)
    assert (completion["id"], completion["object"]) == ("cmpl-7", "text_completion")
    assert completion["choices"][0]["text"] == "xy"
