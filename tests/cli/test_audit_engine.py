"""`dspark audit --engine` on a tiny model: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark import data
from dspark.cli import main

FAULTS = Path(__file__).parents[1] / "audit"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAULTS))


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model has room for 128 characters."""
    prompts = [
        data.Prompt(id=str(i), domain="chat", messages=[{"role": "user", "content": text}])
        for i, text in enumerate(("abcab", "xy"))
    ]
    monkeypatch.setattr(data, "load_prompts", lambda limit: prompts[:limit])


def audited(capsys: pytest.CaptureFixture[str], model: Path, *options: str) -> tuple[int, dict]:
    sizes = [
        "--prompts",
        "2",
        "--tokens",
        "4",
        "--concurrency",
        "40",
        "--dtype",
        "float64",
        "--draft-lengths",
        "2",
    ]
    code = main(["audit", "--engine", "--model", str(model), "--json", *sizes, *options])
    return code, json.loads(capsys.readouterr().out)


def test_a_sound_drafter_and_a_shipped_policy(capsys, short_prompts, tiny_model):
    options = ("--drafters", "ngram", "--policy", "fixed", "--samples", "20")
    code, report = audited(capsys, tiny_model, *options)
    assert code == 0
    assert report["sound"] is True
    assert {c["mix"] for c in report["exact"]} == {"alone", "batched", "mixed", "staggered"}
    assert {c["kind"] for c in report["exact"]} == {"greedy", "shared noise"}
    assert set(report["detectable_tv"]) == {"position", "pair", "neighbours"}


def test_a_drafter_and_a_policy_by_import_path(capsys, short_prompts, tiny_model):
    options = (
        "--drafters",
        "engine_faults:make_wrong_temperature",
        "--policy",
        "engine_faults:make_too_long",
    )
    code, report = audited(capsys, tiny_model, *options, "--samples", "2")
    assert code == 1
    assert report["sound"] is False
    assert all("verify_lengths" in c["error"] for c in report["exact"] if c["drafter"] != "none")


def test_wrong_draft_probabilities_end_with_1(capsys, short_prompts, tiny_model):
    options = ("--drafters", "engine_faults:make_wrong_temperature", "--policy", "fixed", "--samples", "600")
    code, report = audited(capsys, tiny_model, *options)
    assert code == 1
    assert not any(c["failed"] for c in report["exact"])
    assert min(t["adjusted"] for t in report["tests"]) <= 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "3"], "--samples belongs to the audit with --engine"),
        (["--engine", "--rounds", "2"], "--rounds belongs to the audit without --engine"),
        (["--engine", "--samples", "3"], "samples must be an even number"),
        (["--engine", "--prompts", "0"], "--prompts must be 1 or more"),
        (["--engine", "--policy", "best"], "neither one that ships"),
        (["--engine", "--temperature", "0"], "above 0"),
        (["--engine", "--draft-lengths", "a"], "list of whole numbers"),
    ],
)
def test_errors_are_one_line(capsys, options, message):
    assert main(["audit", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("name", ["none", "nobody", "engine_faults:nothing", "json:loads"])
def test_drafters_that_are_none(capsys, tiny_model, name):
    assert (
        main(["audit", "--engine", "--model", str(tiny_model), "--drafters", name, "--dtype", "float64"]) == 2
    )
    assert name in capsys.readouterr().err
