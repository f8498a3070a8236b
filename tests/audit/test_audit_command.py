"""`dspark audit` on shipped policies and on one given by import path."""

from __future__ import annotations

import json

import pytest

from dspark.cli import main

SMALL = ["audit", "--requests", "1", "--rounds", "2"]


def audited(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict]:
    code = main([*SMALL, "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_shipped_policies(capsys):
    code, report = audited(capsys)
    assert code == 0
    assert report["sound"] is True
    rows = {(a["policy"], a["setting"]): a for a in report["audits"]}
    ratio = {name: row["biased"] for (name, setting), row in rows.items() if setting == "ratio, T > 0"}
    assert ratio.pop("global") is True
    assert {"fixed", "prefix", "lagged"} <= set(ratio)
    assert not any(ratio.values())
    live = {setting: row["biased"] for (name, setting), row in rows.items() if name == "global"}
    assert sorted(live.items()) == [
        ("greedy", False), ("one-hot drafts", False), ("ratio, T > 0", True), ("shared noise", False),
    ]  # fmt: skip
    auto = {setting: row["biased"] for (name, setting), row in rows.items() if name == "auto"}
    assert auto == dict.fromkeys(live, False), "auto looks where it may: each of these is tried"


def test_text_shows_verdicts_and_the_witness(capsys):
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    assert "biased, as declared" in out
    assert "yes: request 0 drafts (0 0), survival (0.80 0.72), verifies 2" in out
    assert "(0.8500 0.1500), the target says (0.7000 0.3000)" in out


@pytest.mark.parametrize(
    ("factory", "code", "biased"), [("make_liar", 1, True), ("make_live", 0, True), ("make_sound", 0, False)]
)
def test_a_policy_by_import_path(capsys, factory, code, biased):
    found, report = audited(capsys, "--policy", f"loop_policies:{factory}")
    assert found == code
    assert report["sound"] is (code == 0)
    assert report["audits"][0]["biased"] is biased


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "loop_policies"], "module:factory"),
        (["--policy", "no_such_module:make"], "no_such_module"),
        (["--policy", "loop_policies:nothing"], "nothing"),
        (["--policy", "json:JSONDecoder"], "which has no dependence"),
        (["--rounds", "0"], "--rounds must be between 1 and 4"),
        (["--requests", "9"], "--requests"),
    ],
)
def test_errors_are_one_line(capsys, options, message):
    assert main(["audit", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
