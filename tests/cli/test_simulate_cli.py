"""`dspark simulate`, through `main`."""

import json

import numpy as np
import pytest

from dspark.cli import main

SHORT = ("--duration", "2", "--warmup", "0.5", "--seeds", "2")
LENGTHS = ("--output-tokens", "30", "--prompt-tokens", "20")
FAST = (*SHORT, *LENGTHS)


def simulate(capsys, *args, common=FAST):
    code = main(["simulate", *common, *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_sweep_as_a_table(capsys, tmp_path):
    code, out, _ = simulate(
        capsys, "--policies", "plain,fixed:3", "--concurrency", "1,4", "--csv", str(tmp_path / "a.csv"),
        "--markdown", str(tmp_path / "a.md"),
    )  # fmt: skip
    assert code == 0
    assert "| 4 | fixed:3 |" in out
    assert "assumption, not a measurement" in out
    assert "AUC 0.8" in out
    assert out.strip() == (tmp_path / "a.md").read_text().strip()
    assert (tmp_path / "a.csv").read_text().count("\n") == 5


def test_json_is_complete_and_repeatable(capsys):
    code, out, _ = simulate(capsys, "--policies", "prefix", "--concurrency", "4", "--json", "--gamma", "4")
    again = simulate(capsys, "--policies", "prefix", "--concurrency", "4", "--json", "--gamma", "4")[1]
    report = json.loads(out)
    assert code == 0
    assert out == again
    assert report["model"]["machine_is_an_assumption"] is True
    assert report["model"]["signal"]["chat"]["accepted_length"] > 1
    cell = report["cells"][0]
    assert cell["metrics"]["tokens_per_s"]["n"] == 2
    assert 0 < cell["metrics"]["budget_per_round"]["mean"] <= 4


def test_open_loop_and_trace(capsys, tmp_path):
    code, out, _ = simulate(
        capsys, "--policies", "plain", "--rate", "3", "--arrivals", "gamma:3", "--json", "--no-confidence"
    )
    assert code == 0
    assert json.loads(out)["model"]["cv_of_arrivals"] == [3.0]
    rows = "".join(f"{t},20,30\n" for t in np.linspace(0, 3, 40))
    (tmp_path / "t.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    code, out, _ = simulate(
        capsys, "--policies", "fixed", "--trace", str(tmp_path / "t.csv"), "--speed", "1,2", common=SHORT
    )
    assert code == 0
    assert "| 2 | fixed |" in out
    assert "the trace ends" in out


def test_capacity(capsys):
    code, out, _ = simulate(
        capsys, "--capacity", "40", "--policies", "plain", "--most", "4", "--machine", "cpu-135m", "--json",
        "--acceptance", "smollm2-135m",
    )  # fmt: skip
    found = json.loads(out)["capacities"][0]
    assert code == 0
    assert (found["load"], found["fails_at"]) == (3, 4)


def test_a_capacity_that_is_not_settled_says_what_to_do(capsys):
    """Around 10 tokens/s with a speed that depends on the seed: two short runs cannot tell."""
    args = ("--capacity", "42", "--policies", "plain", "--most", "4", "--machine", "cpu-135m", "--prompt-tokens",
            "lognormal:500:1")  # fmt: skip
    code, out, _ = simulate(capsys, *args, common=(*SHORT, "--output-tokens", "30"))
    assert code == 0
    assert "| plain | unknown | 1 (undecided) |" in out
    assert "raise --duration or --seeds" in out
    found = json.loads(simulate(capsys, *args, "--json", common=(*SHORT, "--output-tokens", "30"))[1])
    assert found["capacities"][0]["undecided"] is True
    settled = simulate(capsys, "--capacity", "4000", "--policies", "plain")[1]
    assert "| plain | 0 | 1 (no) |" in settled
    assert "raise --duration" not in settled


@pytest.fixture
def steps(tmp_path):
    """A plain run of one to four users: 20 ms a step and 1 ms a row."""
    rng = np.random.default_rng(0)
    rows = [
        {"seconds": 0.02 + 0.001 * n, "requests": n, "query_tokens": n, "context": 100 * n, "drafted_requests": 0,
         "drafted": 0, "scheduled": 0, "tokens": n}
        for n in rng.integers(1, 5, 200).tolist()
    ]  # fmt: skip
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_validation_judges(capsys, steps):
    code, out, _ = simulate(capsys, "--validate", str(steps), common=())
    assert code == 0
    assert "held-out halves" in out
    assert "take 1.00 times their median on average (100% of the time)" in out
    run = ("--validate", str(steps), "--concurrency", "4", "--policies", "plain", "--json")
    code, out, _ = simulate(capsys, *run, common=LENGTHS)
    report = json.loads(out)
    assert code == 1  # the recorded run had fewer users most of the time
    assert not report["within"]
    assert report["runs"]["plain"]["error"] > 0.1
    assert "beforehand" not in report
    assert report["step_times"] == pytest.approx({"mean_over_median": 1, "share": 1})


def test_an_end_that_is_known_spares_the_drafts_behind_it(capsys):
    run = ("--concurrency", "2", "--policies", "fixed:5", "--output-tokens", "3", "--json")
    drafted = []
    for known in ((), ("--known-end",)):
        [cell] = json.loads(simulate(capsys, *run, *known)[1])["cells"]
        drafted.append(cell["metrics"]["drafted_per_round"]["mean"])
    assert drafted[0] == 5
    assert drafted[1] <= 1, "behind the first of 3 tokens there is room for one draft"


def test_validation_at_prices_that_were_measured_before(capsys, steps, tmp_path):
    right, wrong = tmp_path / "right.json", tmp_path / "wrong.json"
    right.write_text(json.dumps({"tokens": [1, 4], "seconds": [0.021, 0.024]}))
    wrong.write_text(json.dumps({"tokens": [1, 4], "seconds": [0.042, 0.048]}))
    for path, error, expected in ((right, 0.0, 0), (wrong, -0.5, 1)):
        code, out, _ = simulate(capsys, "--validate", str(steps), "--machine", str(path), "--json", common=())
        report = json.loads(out)
        assert code == expected
        assert report["beforehand"]["machine"] == path.name
        assert report["beforehand"]["prices"]["error"] == pytest.approx(error, abs=1e-6)
        assert abs(report["prices"]["error"]) < 0.01, "fitted prices are right whatever the profile says"
    run = ("--validate", str(steps), "--machine", str(wrong), "--concurrency", "4", "--policies", "plain")
    report = json.loads(simulate(capsys, *run, "--json", common=LENGTHS)[1])
    speed, at_wrong = (
        each["runs"]["plain"]["simulated_tokens_per_s"]["mean"] for each in (report, report["beforehand"])
    )
    assert at_wrong == pytest.approx(0.5 * speed, rel=0.05)
    out = simulate(capsys, *run, common=LENGTHS)[1]
    assert "| simulated at fitted prices, plain |" in out
    assert "| simulated at wrong.json, plain |" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--policies", "best"), "no policy 'best'"),
        (("--machine", "abacus"), "no machine"),
        (("--concurrency", "0"), "at least 1 user"),
        (("--concurrency", "x"), "not a list of whole numbers"),
        (("--rate", "1", "--arrivals", "gamma"), "gamma:CV"),
        (("--rate", "1", "--trace", "x"), "not allowed with"),
        (("--seeds", "0"), "--seeds"),
        (("--capacity", "30", "--csv", "x"), "--csv is of use only for a sweep"),
        (("--csv", "/no/where.csv"), "create it first"),
        (("--mix", "law=1"), "no acceptance for domain 'law'"),
        (("--kv-cache-tokens", "16"), "raise kv_cache_tokens"),
    ],
)
def test_bad_input_is_one_line(capsys, args, message):
    code, out, err = simulate(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err


TRACE, STEPS = ("--trace", "/nowhere.csv"), ("--validate", "/nowhere.jsonl")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--arrivals", "poisson"), "--arrivals is of use only with --rate: leave it out here"),
        (("--rate", "1", "--speed", "2"), "--speed is of use only with --trace"),
        (("--rate", "1", "--think", "0"), "--think is of use only for a closed loop"),
        ((*TRACE, "--prompt-tokens", "9"), "--prompt-tokens is of use only without --trace"),
        (TRACE, "cannot read the trace"),
        (("--ttft", "1"), "--ttft is of use only with --capacity"),
        (("--capacity", "30", "--tolerance", "0.2"), "--tolerance is of use only with --validate"),
        (("--capacity", "30", "--concurrency", "1,4"), "name one to start from"),
        (("--rounds", "100"), "--rounds is of use only with --hindsight"),
        (("--hindsight", "--csv", "x"), "--csv is of use only for a sweep"),
        (("--capacity", "30", "--figures", "x"), "--figures is of use only for a sweep or --hindsight"),
        (("--hindsight", "--rate", "1"), "--rate is of use only without --hindsight"),
        (("--hindsight", "--duration", "60"), "--duration is of use only without --hindsight"),
        ((*STEPS, "--duration", "20"), "--duration is of use only without --validate"),
        ((*STEPS, "--greedy"), "--greedy is of use only if --validate also gets --concurrency"),
        ((*STEPS, "--concurrency", "1,4"), "the one load that was recorded"),
        (("--no-confidence", "--confidence-noise", "1"), "only without --no-confidence"),
    ],
)
def test_an_option_without_a_use_is_refused(capsys, args, message):
    code, out, err = simulate(capsys, *args, common=())
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
