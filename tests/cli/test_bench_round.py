"""`dspark bench round` on a tiny model: the tables, the report, refusals."""

import json
from types import SimpleNamespace

import pytest

from dspark.cli import main

BENCH = ["bench", "round", "--context", "40", "--repeats", "1", "--rounds", "1"]
PROMPT = SimpleNamespace(messages=[{"role": "user", "content": "wherefore"}])


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    """Text that the one-character tokenizer knows."""
    monkeypatch.setattr("dspark.data.load_prompts", lambda: [PROMPT])


def test_json_goes_to_stdout_alone(tiny_model, capsys):
    argv = [*BENCH, "--model", str(tiny_model), "--method", "none", "--rows", "1,2", "--json", "-"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "dspark-round"
    assert report["drafts"] == 0
    assert [(r["rows"], r["requests"]) for r in report["results"]] == [(1, 1), (2, 2)]
    first = report["results"][0]
    assert first["context"]["min"] >= 40
    assert first["round"]["draft"]["max"] == 0.0
    assert first["round"]["round"]["median"] >= first["round"]["pass"]["median"] > 0
    assert report["ratios"][0]["pass"] == 1.0


def test_tables(tiny_model, capsys):
    assert main([*BENCH, "--model", str(tiny_model), "--method", "none", "--rows", "1,2"]) == 0
    out = capsys.readouterr().out
    assert "observe" in out
    assert "2 rows cost as much as" in out
    assert "no compiled pass" in out  # heads of 8 fill no vector


def report(**parts):
    spread = {"median": 2.5, "min": 2.0, "max": 3.0}
    names = ("round", "draft", "packing", "pass", "sampling", "observe", "engine")
    inner = {name: {"in_place": spread, "alone": spread} for name in ("products", "attention", "small")}
    inner |= dict.fromkeys(("rest", "lm_head", "around"), spread)
    return {
        "rows": 6, "requests": 1, "context": spread, "round": dict.fromkeys(names, spread), "pass": spread,
        "by_modules": spread, "parts": inner,
    }  # fmt: skip


def test_the_table_of_parts_fits_a_terminal(capsys):
    from dspark.cli.bench_round import _show

    ratios = [{"rows": 6, "pass": 1.4, "by_modules": 1.2, "round": 1.6}]
    _show({"results": [report()], "ratios": ratios, "machine": {"threads": 1}, "clock": "wall"})
    out = capsys.readouterr().out
    assert "2.0..3.0" in out
    assert "6 rows cost as much as 1.40 passes" in out
    tables = [line for line in out.splitlines() if line.startswith((" rows", "    6"))]
    assert len(tables) == 4
    assert all(len(line) <= 80 for line in tables)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "rows must be"),
        (["--rows", "one"], "not a list of whole numbers"),
        (["--context", "1"], "context"),
        (["--rounds", "0"], "rounds"),
        (["--method", "ngram"], "no fixed number of rows"),
        (["--device", "cuda"], "leave --device"),
        (["--method", "none", "--num-speculative-tokens", "3"], "no meaning"),
        (["--json", "nowhere/at/all.json"], "create it first"),
    ],
)
def test_bad_input_is_one_line(options, message, capsys):
    assert main([*BENCH, *options]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
