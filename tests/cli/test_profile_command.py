"""`dspark profile` without measuring: tables of other engines, refusals, and the options of scheduling."""

import argparse
import json

import pytest

from dspark.cli import main
from dspark.cli.options import add_model_options, add_schedule_options, load_llm, schedule_config
from dspark.profile import Sample

TABLE = {"sample_batch_tokens": [1, 4, 16], "sample_steps_per_sec": [40, 30, 15], "max_batch_tokens": 64}


def test_a_table_of_another_engine_is_shown(tmp_path, capsys):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    assert main(["profile", "--import", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert facts["tokens"] == [1, 4, 16]
    assert facts["seconds"] == pytest.approx([1 / 40, 1 / 30, 1 / 15])
    assert "does not say which machine" in err
    assert main(["profile", "--import", str(path)]) == 0
    assert "66.7" in capsys.readouterr().out


def test_additive_and_flat_tables(tmp_path, capsys):
    path = tmp_path / "table.json"
    additive = {
        "bias_seconds": 0.01, "bs_probes": [1, 9], "alpha_seconds": [0.0, 0.008],
        "m_probes": [1, 8], "theta_seconds": [0.002, 0.002],
    }  # fmt: skip
    path.write_text(json.dumps(additive))
    assert main(["profile", "--import", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "a further request: 1.00 ms" in out
    assert "warning" in err
    assert "flat" in err


def test_a_table_is_turned_into_another_engine_s(tmp_path, capsys):
    path, out = tmp_path / "table.json", tmp_path / "out.json"
    path.write_text(json.dumps(TABLE))
    argv = ["profile", "--import", str(path), "--export", str(out)]
    assert main([*argv, "--format", "tensorrt-llm"]) == 0
    assert "tensorrt-llm has no place for max_batch_tokens 64" in capsys.readouterr().err
    assert json.loads(out.read_text())["step_time_ms"] == pytest.approx([25, 1000 / 30, 1000 / 15])
    out.unlink()
    assert main(argv) == 2
    assert "holds what was measured" in capsys.readouterr().err
    assert not out.exists()


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The temperatures that were measured at, with times made up; profiles are kept in `tmp_path`."""
    measured = []

    def fake(target, drafter, gamma, max_num_seqs, settings, progress):
        measured.append(settings.temperature)
        progress(1.0)
        seconds = 0.02 + 0.01 * settings.temperature
        return [Sample("step", 1, n, c, n * seconds) for n in (1, 64) for c in (64, 512)]

    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("dspark.profile.store.measure_profile", fake)
    return measured


def test_export_takes_the_kept_profile(tiny_model, measured, tmp_path, capsys):
    out = tmp_path / "out.json"
    argv = ["profile", "--model", str(tiny_model), "--method", "none", "--dtype", "float64"]
    export = [*argv, "--export", str(out), "--format", "sglang"]
    assert main(argv) == main(argv) == 0
    assert measured == [0, 0]
    assert "kept for this machine" not in capsys.readouterr().err
    assert main(export) == 0
    assert "--fresh measures anew" in capsys.readouterr().err
    assert measured == [0, 0]
    assert json.loads(out.read_text())["sample_steps_per_sec"] == pytest.approx([50, 50 / 64])
    assert main([*export, "--fresh"]) == main([*export, "--seconds", "1"]) == 0
    assert measured == [0, 0, 0, 0]
    assert main([*export, "--temperature", "1"]) == main([*export, "--temperature", "1"]) == 0
    assert measured == [0, 0, 0, 0, 1]
    assert json.loads(out.read_text())["sample_steps_per_sec"][0] == pytest.approx(1 / 0.03)


def test_a_profile_made_at_the_start_shows_how_far_it_is(tiny_model, measured, monkeypatch):
    shown: list[object] = []

    class Line:
        def __init__(self, title):
            shown.append(title)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            shown.append("over")

        def show(self, share):
            shown.append(share)

    monkeypatch.setattr("dspark.cli.progress.ShareLine", Line)
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    args = parser.parse_args(["--model", str(tiny_model), "--dtype", "float64"])
    config = {"method": "ngram", "num_speculative_tokens": 2, "policy": "auto"}
    load_llm(args, config)
    assert shown == ["profile", 1.0, "over"]
    load_llm(args, config)
    assert shown == ["profile", 1.0, "over"], "the profile was kept: there is nothing to wait for"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["profile", "--import", "nowhere.json"], "cannot read a cost table"),
        (["profile", "--import", "nowhere.json", "--export", "no/such/place"], "create it first"),
        (["profile", "--import", "nowhere.json", "--temperature", "0"], "leave --temperature out"),
        (["profile", "--import", "nowhere.json", "--fresh"], "leave --fresh out"),
        (["profile", "--temperature", "-1"], "temperature of 0 or more"),
        (["profile", "--dtype", "float8"], "not supported"),
        (["profile", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["profile", "--format", "csv"], "invalid choice"),
        (["profile", "--format", "sglang"], "--format says how --export writes"),
        (["generate", "hi", "--policy", "best"], "unknown policy"),
        (["bench", "throughput", "--methods", "none,dspark:best"], "unknown policy"),
        (["bench", "throughput", "--methods", "none:auto"], "none has no policy"),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", [["profile"], ["bench", "round"], ["bench", "kernels"]])
def test_a_model_that_is_not_there_is_refused_before_kernels_are_compiled(verb, monkeypatch, capsys):
    monkeypatch.setattr(
        "dspark.kernels.compilation.compile_kernels", lambda report: pytest.fail("compiled for nothing")
    )
    assert main([*verb, "--model", "no-such-model"]) == 2
    assert "no model 'no-such-model'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "method", "policy", "config"),
    [
        ([], "dspark", None, {}),
        (["--policy", "auto"], "dspark", None, {"policy": "auto"}),
        (["--policy", "auto", "--cost-table", "t.json"], "none", None, {}),
        (["--policy", "auto", "--cost-table", "t.json"], "dspark", "fixed", {}),
        (
            ["--policy", "auto", "--cost-table", "t.json"],
            "ngram",
            "prefix",
            {"policy": "prefix", "cost_table": "t.json"},
        ),
        (["--acceptance", "shared_noise"], "none", None, {"acceptance": "shared_noise"}),
        (
            ["--policy", "threshold", "--threshold", "0.3"],
            "dspark",
            None,
            {"policy": "threshold", "threshold": 0.3},
        ),
        (["--threshold", "0.3"], "dspark", None, {"threshold": 0.3}),
    ],
)
def test_options_become_keys(options, method, policy, config):
    parser = argparse.ArgumentParser()
    add_schedule_options(parser)
    assert schedule_config(parser.parse_args(options), method, policy) == config
