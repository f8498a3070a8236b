"""The offline LLM on a tiny model: what it refuses, and when."""

import pytest

from dspark import LLM, DSparkError


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
