"""What benchmarks/simulator_check.py rests its prediction on; the engines themselves run only by hand."""

from argparse import Namespace
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dspark.calibrate.rounds import Answer, Rounds, Source, save_rounds


@pytest.fixture
def check(script):
    return script("simulator_check")


def test_half_of_the_prompts_tells_the_acceptance_of_the_other(check):
    """A token a character: all are long enough, and cut to one length."""
    tokenizer = SimpleNamespace(apply_chat_template=lambda messages: [ord(c) for c in str(messages)])
    cut = check.prompts(SimpleNamespace(tokenizer=tokenizer))
    known, sent = cut[::2], cut[1::2]
    assert not {prompt.id for prompt in known} & {prompt.id for prompt in sent}
    assert len({len(prompt.ids) for prompt in cut}) == 1
    assert Counter(prompt.domain for prompt in known) == Counter(prompt.domain for prompt in sent)
    assert len(set(Counter(prompt.domain for prompt in sent).values())) == 1, (
        "the simulation draws them equally often"
    )


def test_rounds_of_the_runs_temperature_are_taken(check, tmp_path):
    answers = (Answer("p", "chat", 0.0), Answer("p", "chat", 1.0))
    source = Source("t", "t", "d", "d", 2, "ratio", "float32")
    ones = np.ones((3, 2))
    rounds = Rounds(
        ones, ones, np.array([2, 2, 2]), np.array([2, 2, 2]), np.array([0, 1, 1]), answers, source
    )
    path = tmp_path / "r.safetensors"
    save_rounds(path, rounds)
    assert check.known_rounds(Namespace(rounds=None, temperature=0.0)) is None
    assert len(check.known_rounds(Namespace(rounds=path, temperature=1.0))) == 2
    with pytest.raises(SystemExit, match="no rounds at temperature"):
        check.known_rounds(Namespace(rounds=path, temperature=0.5))


def test_a_line_tells_errors_at_both_prices_and_the_scatter(check):
    run = {
        "measured_tokens_per_s": 200.0,
        "simulated_tokens_per_s": {"mean": 210.0},
        "slowest": 190.0,
        "fastest": 230.0,
    }
    report = {
        "runs": {"plain": {**run, "error": 0.01}},
        "prices": {"error": 0.02},
        "beforehand": {"runs": {"plain": {**run, "error": 0.05}}, "prices": {"error": 0.04}},
        "step_times": {"mean_over_median": 1.08},
    }
    line = "| 4 | plain | 200.0 | 210.0 (190.0 to 230.0) | +5.0% | +4.0% | +1.0% | +2.0% | {} |"
    assert check.row(4, "plain", report) == line.format("1.08")
    assert check.row(4, "plain", {**report, "step_times": None}) == line.format("-")
