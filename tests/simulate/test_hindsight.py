"""Policies against the best static choice in hindsight, on rounds that are the same for all of them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dspark.calibrate.calibration import Calibration
from dspark.calibrate.formats import save_calibration
from dspark.calibrate.rounds import Answer, Rounds, Source, save_rounds
from dspark.cli import main
from dspark.errors import DSparkError
from dspark.schedule.cost import DraftCost, TableCost
from dspark.simulate.acceptance import Domain, SyntheticAcceptance
from dspark.simulate.figures import write_hindsight_figures
from dspark.simulate.hindsight import RAW, Comparison, Hindsight, compare, replay_file, streams
from dspark.simulate.machines import read_cost
from dspark.simulate.policies import policy_factory
from dspark.simulate.report import hindsight_markdown
from dspark.simulate.rounds import RecordedRounds, read_rounds

GAMMA = 5
COST = TableCost((1, 16, 256), (0.010, 0.012, 0.120), draft=DraftCost(0.001, 0.00001, 0.00001))


def rounds_of(domains, answers=60, length=25, seed=0):
    """Recorded answers whose confidences are calibrated: acceptance is drawn from them."""
    names = tuple(domains)
    of = np.arange(answers) % len(names)
    model = SyntheticAcceptance(domains)
    state = model.start(names, of, np.random.SeedSequence(seed))
    blocks = [state.block(np.arange(answers), True) for _ in range(length)]
    survival = np.stack([block.survival for block in blocks], axis=1).reshape(-1, model.gamma)
    before = np.concatenate((np.ones((len(survival), 1)), survival[:, :-1]), axis=1)
    run = np.stack([block.run for block in blocks], axis=1).ravel()
    request, domain = np.repeat(np.arange(answers), length), np.repeat(np.array(names)[of], length)
    return RecordedRounds(model.gamma, run, survival / before, request, domain)


def logits_of(rounds):
    return np.log(rounds.confidence / (1 - rounds.confidence))


def record(path, rounds, scale=1.0):
    """As .npz with logits; `scale` above 1: overconfident ones."""
    np.savez(
        path,
        confidence_logits=scale * logits_of(rounds),
        accepted=rounds.accepted,
        request=rounds.request,
        domain=rounds.domain,
    )
    return path


def domain(p, **spreads):
    return Domain((p,) * GAMMA, **{"slot_spread": 1.0, "request_spread": 0.5, **spreads})


def factories(*names, cost=COST):
    return {name: policy_factory(name, GAMMA, cost) for name in names}


def test_users_go_through_whole_answers_in_order():
    rounds = rounds_of({"chat": domain(0.6), "code": domain(0.9)}, answers=7, length=9)
    laid = streams(rounds, users=3, steps=40, seed=1)
    by_survival = {tuple(row): i for i, row in enumerate(rounds.confidence.cumprod(axis=1))}
    rows = np.array([[by_survival[tuple(row)] for row in step] for step in laid.survival])  # [T, R]
    np.testing.assert_array_equal(laid.run, rounds.accepted[rows])
    np.testing.assert_array_equal(laid.domain, rounds.domain[rows])
    same = laid.uids[1:] == laid.uids[:-1]
    assert (rows[1:][same] == rows[:-1][same] + 1).all()
    assert (rows[1:][~same] % 9 == 0).all(), "the next answer starts at its first round"
    new = laid.uids[1:][~same]
    assert (np.diff(new) > 0).all(), "uids count arrivals"
    assert set(laid.uids[0]) == {0, 1, 2}


def test_arms_equal_the_plain_loop():
    laid = streams(rounds_of({"any": domain(0.7)}), users=4, steps=60, seed=0)
    load = compare([laid], factories("fixed:2", "threshold:0.5"), COST, warmup=10, overhead_s=0.002).loads[0]
    for name, rule in {
        "fixed:2": lambda survival: 2,
        "threshold:0.5": lambda survival: int((survival >= 0.5).sum()),
    }.items():
        tokens = seconds = 0
        for t in range(10, 60):
            lengths = [rule(laid.survival[t, r]) for r in range(4)]
            tokens += 4 + sum(min(n, int(laid.run[t, r])) for r, n in enumerate(lengths))
            drafts = 4 * (2 if name == "fixed:2" else GAMMA)
            seconds += (
                float(COST.step_seconds(4, 4 + sum(lengths), 0) + COST.draft_seconds(4, drafts)) + 0.002
            )
        assert load.arms[name] == pytest.approx(tokens / seconds)
        assert load.policies[name] == pytest.approx(tokens / seconds), "the policy replayed, likewise"
        assert load.distance(name) == pytest.approx(1 - tokens / seconds / load.arms[load.best])


def test_policies_are_near_the_best_choice_at_each_load_and_beat_every_fixed_length_over_all():
    rounds = rounds_of({"any": domain(0.7, passage_spread=0.5)}, answers=80, length=40)
    names = ("prefix", "lagged", "auto")
    loads = [streams(rounds, users, max(6400 // users, 300), seed=0) for users in (1, 8, 48)]
    found = compare(loads, factories(*names), COST)
    best = [load.best_of("fixed") for load in found.loads]
    assert len(set(best)) > 1, "or one length would do for all loads"
    for name in names:
        assert found.worst(name) < 0.02
        assert found.beats_every_fixed(name)


@pytest.mark.parametrize("name", ["prefix", "lagged", "auto"])
def test_code_gets_longer_prefixes_than_chat(name):
    """In one batch, where rows cost time: drafts go where they are accepted."""
    laid = streams(rounds_of({"chat": domain(0.45), "code": domain(0.85)}), users=20, steps=400, seed=0)
    verified = compare([laid], factories(name), COST).loads[0].verified[name]
    assert verified["code"] > 2 * verified["chat"] > 0


def test_from_the_command_line(capsys, tmp_path):
    rounds = rounds_of({"chat": domain(0.6), "code": domain(0.9)}, answers=10)
    record(tmp_path / "r.npz", rounds)
    common = ["simulate", "--hindsight", "--concurrency", "1,4", "--rounds", "500", "--policies", "prefix"]
    assert main([*common, "--acceptance", str(tmp_path / "r.npz"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["hindsight"]["all rounds"]
    first = report["loads"][0]
    assert set(first["arms"]) >= {"plain", "fixed:5", "threshold:0.5"}
    assert first["distance"]["prefix"] == pytest.approx(
        1 - first["policies"]["prefix"] / first["arms"][first["best"]]
    )
    assert main([*common, "--acceptance", str(tmp_path / "r.npz")]) == 0
    assert "| 4 |" in capsys.readouterr().out
    assert main(common) == 2
    assert "recorded rounds" in capsys.readouterr().err


INFORMATIVE = {"any": domain(0.6, slot_spread=2.0)}


def test_temperatures_change_what_policies_do_and_raw_runs_stay_beside(tmp_path):
    path = record(tmp_path / "r.npz", rounds_of(INFORMATIVE))
    loads = []
    for temperature, offset in ((1.0, 0.0), (3.0, 0.5)):
        calibration = Calibration((temperature,) * GAMMA, offsets=(offset,) * GAMMA)
        found = replay_file(
            path, factories("prefix", "fixed"), COST, users=(8,), rounds=4000, calibration=calibration
        )
        loads.append(found["all rounds"].loads[0])
    same, other = loads
    assert list(same.policies) == ["prefix", "prefix" + RAW, "fixed"], "a fixed length reads no confidences"
    assert same.policies["prefix"] == same.policies["prefix" + RAW]
    assert same.arms["threshold:0.5"] == same.arms["threshold:0.5" + RAW]
    assert other.policies["prefix" + RAW] == same.policies["prefix" + RAW], "raw is raw"
    assert other.arms["threshold:0.5"] != same.arms["threshold:0.5"]
    assert other.policies["prefix"] != same.policies["prefix"]
    assert other.verified["prefix"] != other.verified["prefix" + RAW]


def test_an_overconfident_record_is_mended_by_its_calibration(tmp_path):
    rounds = rounds_of(INFORMATIVE)
    path = record(tmp_path / "r.npz", rounds, scale=4.0)
    calibration = Calibration((4.0,) * GAMMA)
    np.testing.assert_allclose(read_rounds(path, calibration=calibration).confidence, rounds.confidence)
    assert not np.allclose(read_rounds(path).confidence, rounds.confidence)
    options = {"users": (8,), "rounds": 8000, "calibration": calibration}
    found = replay_file(path, factories("prefix"), COST, **options)["all rounds"].loads[0]
    assert found.policies["prefix"] > 1.01 * found.policies["prefix" + RAW]
    head = hindsight_markdown(Comparison((found,)), "All rounds").split("\n")[2]
    assert "| prefix | prefix, raw confidences |" in head


def test_what_a_policy_knows_at_the_start_is_the_calibrations_acceptance(capsys, tmp_path):
    path = record(tmp_path / "r.npz", rounds_of(INFORMATIVE, answers=10))
    run = ["simulate", "--hindsight", "--concurrency", "4", "--rounds", "500", "--policies", "prefix"]
    verified = []
    for acceptance in ((), (0.05,) * GAMMA):
        save_calibration(tmp_path / "c.json", Calibration((1.0,) * GAMMA, acceptance=acceptance))
        files = ["--acceptance", str(path), "--calibration", str(tmp_path / "c.json")]
        assert main([*run, *files, "--machine", "cpu-135m", "--json"]) == 0
        load = json.loads(capsys.readouterr().out)["hindsight"]["all rounds"]["loads"][0]
        verified.append(load["verified"]["prefix"]["any"])
        assert load["verified"]["prefix" + RAW]["any"] == verified[-1]
    assert verified[0] > verified[1], "what is known to be hopeless is not tried"


def test_served_requests_see_calibrated_confidences(capsys, tmp_path):
    path = record(tmp_path / "r.npz", rounds_of(INFORMATIVE, answers=20), scale=4.0)
    save_calibration(tmp_path / "c.json", Calibration((4.0,) * GAMMA))
    run = ["simulate", "--concurrency", "2", "--policies", "threshold", "--duration", "2", "--warmup", "0"]
    run += ["--seeds", "1", "--acceptance", str(path), "--json"]
    reports = []
    for options in ([], ["--calibration", str(tmp_path / "c.json")]):
        assert main([*run, *options]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    raw, calibrated = reports
    assert calibrated["model"]["signal"]["any"]["ece"] < 0.5 * raw["model"]["signal"]["any"]["ece"]
    assert calibrated["model"]["acceptance_source"].endswith("confidences calibrated")
    budgets = [report["cells"][0]["metrics"]["budget_per_round"]["mean"] for report in reports]
    assert budgets[0] != budgets[1]


def test_a_calibration_that_does_not_fit_the_rounds_is_refused(tmp_path):
    rounds = rounds_of(INFORMATIVE, answers=4)
    np.savez(tmp_path / "p.npz", confidence=rounds.confidence, accepted=rounds.accepted)
    with pytest.raises(DSparkError, match="'confidence_logits' is missing"):
        read_rounds(tmp_path / "p.npz", calibration=Calibration((1.0,) * GAMMA))
    path = record(tmp_path / "r.npz", rounds)
    for gamma in (GAMMA - 1, GAMMA + 1):
        with pytest.raises(DSparkError, match=f"for {gamma} drafts, the recorded blocks have {GAMMA}"):
            read_rounds(path, calibration=Calibration((1.0,) * gamma))
    collected = Rounds(
        logits_of(rounds),
        np.full((len(rounds.accepted), GAMMA), 0.5),
        np.full(len(rounds.accepted), GAMMA),
        rounds.accepted,
        np.zeros(len(rounds.accepted), dtype=np.int64),
        (Answer("p", "chat", 0.0),),
        Source("t", "T", "d", "D", GAMMA, "ratio", "float32"),
    )
    path = tmp_path / "r.safetensors"
    save_rounds(path, collected)
    mine = Calibration((2.0,) * GAMMA, drafter_identity="D", target_identity="T")
    np.testing.assert_allclose(
        read_rounds(path, calibration=mine).confidence, mine.conditional(collected.logits)
    )
    with pytest.raises(DSparkError, match="fitted to another drafter"):
        read_rounds(path, calibration=replace(mine, drafter_identity="E"))


def test_figures_show_every_policy_and_arm_over_the_best_arm(capsys, tmp_path):
    path = record(tmp_path / "r.npz", rounds_of(INFORMATIVE, answers=10))
    run = ["simulate", "--hindsight", "--concurrency", "1,4", "--rounds", "500", "--policies", "prefix"]
    assert main([*run, "--acceptance", str(path), "--figures", str(tmp_path / "f"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["figures"] == [str(tmp_path / "f" / "hindsight.svg")]
    drawn = (tmp_path / "f" / "hindsight.svg").read_text()
    for name in ("prefix", "plain", f"fixed:{GAMMA}", "threshold:0.9", "users"):
        assert f"<!-- {name} -->" in drawn
    loads = (
        Hindsight(1, {"plain": 10.0, "fixed:1": 20.0}, {"prefix": 18.0}, {"prefix": {}}),
        Hindsight(4, {"plain": 40.0, "fixed:1": 32.0}, {"prefix": 42.0}, {"prefix": {}}),
    )
    assert Comparison(loads).over_best() == {
        "prefix": [0.9, 1.05], "plain": [0.5, 1.0], "fixed:1": [1.0, 0.8],
    }  # fmt: skip
    two = {"temperature 0": Comparison(loads), "temperature 1": Comparison(loads)}
    names = [path.name for path in write_hindsight_figures(two, tmp_path)]
    assert names == ["hindsight-temperature-0.svg", "hindsight-temperature-1.svg"]


def test_rounds_without_confidences_and_runs_that_are_too_short_are_refused():
    rounds = rounds_of({"any": domain(0.7)}, answers=4)
    with pytest.raises(DSparkError, match="without confidences"):
        streams(RecordedRounds(GAMMA, rounds.accepted, None, rounds.request, rounds.domain), 1, 10, 0)
    with pytest.raises(DSparkError, match="warm-up"):
        compare([streams(rounds, 1, 50, 0)], {}, COST)


def test_a_profile_is_a_cost_file(tmp_path):
    prices = {
        "tokens": [1, 8],
        "seconds": [0.01, 0.02],
        "draft": {"base": 0.001, "per_request": 0.0, "per_draft": 0.0},
        "context": {"per_position": 0.0, "per_pair": 0.0, "profiled_at": 64},
        "warning": None,
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"format": "dspark-cost-profile", "cost": prices}))
    assert read_cost(path) == TableCost(
        (1, 8), (0.01, 0.02), draft=DraftCost(0.001), context=read_cost(path).context
    )
    additive = {**prices, "requests": [1, 4], "alpha": [0.0, 0.003]}
    path.write_text(json.dumps({"format": "dspark-cost-profile", "cost": additive}))
    assert float(read_cost(path).step_seconds(4, 8, 0)) == pytest.approx(0.023)
    path.write_text(json.dumps({"format": "dspark-cost-profile"}))
    with pytest.raises(DSparkError, match="dspark profile"):
        read_cost(path)
