"""`dspark bench kernels` on a tiny model: the table, the report, refusals."""

import json

import pytest

from dspark.cli import main
from dspark.cli.bench_kernels import WAYS
from dspark.kernels import lowbit
from dspark.measure import products

BENCH = ["bench", "kernels", "--rows", "1,3", "--repeats", "1"]


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    monkeypatch.setattr(products, "Arithmetic", lambda size, kind=products.Arithmetic: kind(16))


def test_the_names_of_ways_are_the_library_s():
    assert tuple(products.WAYS) == WAYS


def test_json_goes_to_stdout_alone(tiny_model, capsys):
    assert main([*BENCH, "--model", str(tiny_model), "--ways", "linear,packed", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "dspark-kernels"
    assert report["settings"]["rows"] == [1, 3]
    assert [(r["rows"], r["way"]) for r in report["results"]] == [
        (rows, way) for rows in (1, 3) for way in ("linear", "packed")
    ]
    assert report["limits"]["gflop_per_s"]["median"] > 0
    assert report["machine"]["threads"] >= 1


def test_table_and_file(tiny_model, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main([*BENCH, "--model", str(tiny_model), "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    ways = WAYS if lowbit.supports() else WAYS[:2]
    for way in ways:
        assert out.count(f" {way} ") >= 2
    assert "GFLOP/s" in out
    assert "rounded to 8 bits" in err
    assert [r["way"] for r in json.loads(path.read_text())["results"]][: len(ways)] == list(ways)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "0"], "rows must be"),
        (["--rows", "one"], "not a list of whole numbers"),
        (["--ways", "linear,blas"], "unknown way"),
        (["--repeats", "0"], "repeats"),
        (["--threads", "0"], "--threads"),
        (["--json", "nowhere/at/all.json"], "create it first"),
        (["--model", "nowhere.gguf"], "no model"),
    ],
)
def test_bad_input_is_one_line(options, message, capsys):
    assert main([*BENCH, *options]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
