"""Policies against the best static choice in hindsight, on rounds that are the same for all of them."""

import json

import numpy as np
import pytest

from dspark.calibrate.calibration import Calibration
from dspark.calibrate.formats import save_calibration
from dspark.cli import main
from dspark.errors import DSparkError
from dspark.schedule.cost import DraftCost, TableCost
from dspark.simulate.acceptance import Domain, SyntheticAcceptance
from dspark.simulate.hindsight import compare, streams
from dspark.simulate.machines import read_cost
from dspark.simulate.policies import policy_factory
from dspark.simulate.rounds import RecordedRounds

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
    np.savez(
        tmp_path / "r.npz",
        confidence=rounds.confidence,
        accepted=rounds.accepted,
        request=rounds.request,
        domain=rounds.domain,
    )
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
    save_calibration(tmp_path / "c.json", Calibration((1.0,) * GAMMA, acceptance=(0.05,) * GAMMA))
    dear = [*common, "--acceptance", str(tmp_path / "r.npz"), "--machine", "cpu-135m", "--json"]
    verified = []
    for options in ([], ["--calibration", str(tmp_path / "c.json")]):
        assert main([*dear, *options]) == 0
        loads = json.loads(capsys.readouterr().out)["hindsight"]["all rounds"]["loads"]
        verified.append(sum(loads[-1]["verified"]["prefix"].values()))
    assert verified[0] > verified[1], "what is known to be hopeless is not tried"
    assert main(common) == 2
    assert "recorded rounds" in capsys.readouterr().err


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
