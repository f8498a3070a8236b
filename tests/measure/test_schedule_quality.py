"""The bookkeeping of benchmarks/schedule_quality.py; the engines themselves run only by hand."""

import pytest


@pytest.fixture
def quality(script):
    return script("schedule_quality")


def runs(speeds):
    """{arm: [speed by repeat]} -> what `run_throughput` gives."""
    return [
        {"method": arm, "repeat": repeat, "decode_tokens_per_s": speed}
        for arm, own in speeds.items()
        for repeat, speed in enumerate(own)
    ]


def test_the_best_arm_is_chosen_and_judged_by_different_repeats(quality):
    # Arm 2 is lucky in the even repeats; what it is compared by are the odd ones.
    speeds = {"none": [10, 10, 10, 20], "1": [11, 12, 11, 24], "2": [15, 8, 14, 16], "auto": [12, 12, 12, 20]}
    speeds["none again"] = [10, 11, 10, 20]
    cell = quality.compare(runs(speeds), ["1", "2"], "auto")
    assert cell["best"] == "2"
    assert cell["policy_over_best"] == {"median": pytest.approx(1.375), "min": 1.25, "max": 1.5}
    assert cell["over_plain"]["auto"] == {"median": pytest.approx(1.1), "min": 1.0, "max": 1.2}
    assert cell["over_plain"][cell["best"]] == {"median": pytest.approx(0.8), "min": 0.8, "max": 0.8}
    assert cell["over_plain"]["none again"] == {"median": pytest.approx(1.05), "min": 1.0, "max": 1.1}
    assert cell["tokens_per_s"] == {"none": 10, "none again": 10.5, "1": 11.5, "2": 14.5, "auto": 12}


def test_plain_decoding_may_be_the_best_arm(quality):
    speeds = {"none": [10, 10], "none again": [10, 10], "1": [9, 9], "auto": [9, 9]}
    assert quality.compare(runs(speeds), ["1"], "auto")["best"] == "none"


def test_means_over_the_range_are_geometric(quality):
    cells = {
        1: {"tokens_per_s": {"none": 10.0, "1": 20.0, "auto": 20.0}},
        8: {"tokens_per_s": {"none": 50.0, "1": 25.0, "auto": 50.0}},
    }
    assert quality.over_the_range(cells) == pytest.approx({"none": 1.0, "1": 1.0, "auto": 2**0.5})


def test_the_figure_names_every_arm(quality, tmp_path):
    pytest.importorskip("matplotlib")
    arms = ("none", "none again", "1", "auto")
    cell = quality.compare(runs({arm: [10, 11] for arm in arms}), ["1"], "auto")
    quality.draw({1: cell, 4: cell}, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in ("none", "none again", "1 drafts", "auto"))
