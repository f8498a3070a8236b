"""The learning lab as a reader runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LAB = Path(__file__).parents[2] / "labs" / "inference_lab.py"


def lab(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(LAB), *options], capture_output=True, text=True, env=environment, check=False
    )


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """The lab as a module: starting Python for every option would take most of the time."""
    spec = importlib.util.spec_from_file_location("inference_lab", LAB)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def numbers(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The JSON that the lab prints for some options."""

    def run(*options: str) -> dict[str, Any]:
        assert module.main([*options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def column(result: dict, name: str) -> list[float]:
    return [row[name] for row in result["rows"]]


def test_spec_reproduces_the_course():
    done = lab("spec", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["admission_order"] == ["A1", "B1", "A2", "B2"]
    assert column(result, "queries") == [2, 3, 4, 5, 6]
    assert column(result, "executed") == [2, 4, 4, 6, 6]
    assert column(result, "expected") == pytest.approx([2, 2.9, 3.7, 4.15, 4.35])
    assert column(result, "tokens_per_ms") == pytest.approx([2, 2.417, 3.083, 2.075, 2.175], abs=5e-4)
    assert result["chosen"] == 4
    assert result["queries_per_request"] == {"A": 2, "B": 2}


def test_spec_exercise(numbers):
    result = numbers("spec", "--t6", "1.3")
    assert column(result, "tokens_per_ms")[3:] == pytest.approx([3.192, 3.346], abs=5e-4)
    assert result["chosen"] == 6
    assert result["queries_per_request"] == {"A": 3, "B": 3}


def test_spec_prices_sampler_and_slope(numbers):
    result = numbers("spec", "--sampler-ms", "0.5", "--slope-ms", "0.1")
    assert column(result, "ms") == pytest.approx([1.7, 2.0, 2.1, 3.0, 3.1])


def test_spec_text_draws_the_curve():
    lines = lab("spec").stdout.splitlines()
    chosen = next(line for line in lines if line.endswith("<- chosen"))
    assert chosen.split()[:5] == ["4", "3.70", "4", "1.20", "3.083"]
    assert chosen.count("#") == max(line.count("#") for line in lines)


def test_png_without_matplotlib_says_so(tmp_path, monkeypatch):
    (tmp_path / "matplotlib.py").write_text("raise ImportError")  # found before an installed one
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = lab("spec", "--png", str(tmp_path / "curve.png"))
    assert done.returncode == 2
    assert "pip install matplotlib" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("accepted", [1, 0, 3])
def test_rollback(numbers, accepted):
    result = numbers("rollback", "--accepted", str(accepted))
    states = [(s["cache"], s["length"]) for s in result["states"]]
    after = (101 + accepted, 102 + accepted)
    assert states == [(100, 101), (104, 101), after, after]
    assert [(s["cache"], s["length"]) for s in result["engine"]] == [(100, 101), after]


def test_bias_is_appendix_a(numbers):
    result = numbers("bias")
    first = {name: policy["first_token"] for name, policy in result["policies"].items()}
    assert first["global"] == pytest.approx([0.85, 0.15], abs=1e-12)
    assert first["prefix"] == pytest.approx([0.7, 0.3], abs=1e-12)
    assert first["lagged"] == pytest.approx([0.7, 0.3], abs=1e-12)
    assert list(result["why"]) == ["global"]


@pytest.mark.parametrize(
    "options",
    [
        ["none"],
        ["spec", "--t2", "0"],
        ["spec", "--slope-ms", "-1"],
        ["rollback", "--accepted", "4"],
        ["rollback", "--block-size", "0"],
    ],
)
def test_bad_options_end_with_2(module, options):
    with pytest.raises(SystemExit) as ended:
        module.main(options)
    assert ended.value.code == 2


def test_a_table_that_falls_is_refused(module, capsys):
    assert module.main(["spec", "--t6", "0.5"]) == 2
    assert capsys.readouterr().err.startswith("error: cost table: 6 costs less than 4")


def test_rollback_and_bias_in_words():
    done = lab("rollback")
    assert "the engine, same round: cache 100 -> 102, length 101 -> 103" in done.stdout, done.stderr
    done = lab("bias")
    assert "(0.8500 0.1500)" in done.stdout, done.stderr
