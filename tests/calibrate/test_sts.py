"""Sequential temperature scaling: known temperatures come back, errors fall, worse fits are refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from synthetic import synthetic_rounds

from dspark.calibrate import Bins, Calibration, Rounds, evaluate, fit, identity_calibration, with_results
from dspark.calibrate.fit import mean_acceptance
from dspark.calibrate.metrics import expected_calibration_error
from dspark.calibrate.report import ENOUGH_ROUNDS
from dspark.calibrate.sts import HIGHEST, at_the_edge, fit_sts
from dspark.errors import DSparkError

TRUE = (2.0, 0.5, 4.0)


def slot_errors(rounds: Rounds, calibration: Calibration, labels: np.ndarray, bins: Bins) -> list[float]:
    a = calibration.survival(rounds.logits)
    return [
        expected_calibration_error(a[rounds.observed[:, k], k], labels[rounds.observed[:, k], k], bins)
        for k in range(calibration.gamma)
    ]


@pytest.mark.parametrize("kind", ["mass", "width"])
@pytest.mark.parametrize("ragged", [False, True])
def test_known_temperatures_come_back(kind, ragged):
    found = fit(synthetic_rounds(TRUE, ragged=ragged), Bins(15, kind)).temperatures
    assert found == pytest.approx(TRUE, rel=0.03)


def test_mean_acceptance_is_of_drafts_that_were_reached_and_seen():
    survival = np.array([[0.5, 0.25], [1.0, 0.5], [0.5, 0.0]])
    observed = np.array([[True, True], [True, True], [True, False]])
    assert mean_acceptance(survival, observed) == pytest.approx((2 / 3, 0.75 / 1.5))
    found = fit(synthetic_rounds(TRUE), Bins()).acceptance
    rounds = synthetic_rounds(TRUE)
    expected = rounds.expected_survival
    assert found[0] == pytest.approx(expected[:, 0].mean())


def test_outcomes_alone_give_them_too_with_more_noise():
    found = fit(synthetic_rounds(TRUE, n=12_000), Bins(), "realised").temperatures
    assert found == pytest.approx(TRUE, rel=0.2)


def test_each_slot_is_fitted_behind_those_before_it():
    """A first slot whose error no temperature mends is made up for by the second, not by an isolated fit."""
    rounds = synthetic_rounds((1.0, 1.0))
    shifted = replace(rounds, logits=rounds.logits + np.array([2.0, 0.0]))  # slot 1 is far too sure
    first, second = fit(shifted, Bins()).temperatures
    alone = fit_sts(shifted.logits[:, 1:], rounds.acceptance[:, 1:], rounds.observed[:, 1:], Bins())
    assert alone == pytest.approx((1.0,), rel=0.05)
    grid = np.geomspace(0.4, 2.5, 80)
    frozen = [
        slot_errors(shifted, Calibration((first, float(t))), rounds.expected_survival, Bins())[1]
        for t in grid
    ]
    assert second == pytest.approx(grid[int(np.argmin(frozen))], rel=0.05)
    assert abs(np.log(second / alone[0])) > 0.1


def test_no_slot_gets_worse_on_the_rounds_it_was_fitted_to():
    """Slot k against temperature 1 at slot k, with the same temperatures before it."""
    rng = np.random.default_rng(3)
    for seed, kind in itertools.product(range(3), ("mass", "width")):
        bins = Bins(10, kind)
        rounds = synthetic_rounds((1.0, 3.0, 0.3), n=400, seed=seed)
        noisy = replace(rounds, logits=rounds.logits + rng.normal(0, 2, rounds.logits.shape))
        found = fit(noisy, bins)
        fitted = slot_errors(noisy, found, noisy.expected_survival, bins)
        for k in range(3):
            without = replace(
                found, temperatures=(*found.temperatures[:k], 1.0, *found.temperatures[k + 1 :])
            )
            assert fitted[k] <= slot_errors(noisy, without, noisy.expected_survival, bins)[k] + 1e-12


def test_order_within_a_slot_is_kept():
    rounds = synthetic_rounds(TRUE, n=200)
    c = fit(rounds, Bins()).conditional(rounds.logits)
    for k in range(3):
        order = np.argsort(rounds.logits[:, k])
        assert (np.diff(c[order, k]) >= 0).all()


def test_held_out_error_falls_to_the_floor():
    to_fit, held_out = synthetic_rounds(TRUE, n=8000).split(0.5)
    evaluation = evaluate(held_out, fit(to_fit, Bins()), Bins())
    assert evaluation.refusal is None
    g = evaluation.all
    assert g.ece_before > 0.05
    assert g.ece_after < 1.5 * g.floor_95
    assert [group.name for group in evaluation.groups] == [
        "all", "domain chat", "domain math", "temperature 0", "temperature 1",
    ]  # fmt: skip
    assert sum(group.rounds for group in evaluation.groups[1:3]) == g.rounds == len(held_out)
    for slot in g.slots:
        assert slot.after.brier < slot.before.brier
        assert slot.after.predicted == pytest.approx(slot.realised, abs=0.03)
        assert sum(slot.after.reliability.count) == slot.rounds


def test_few_rounds_are_said_aloud():
    _, held_out = synthetic_rounds(n=3000).split(0.5)
    evaluation = evaluate(held_out, identity_calibration(3), Bins())
    assert f"only {len(held_out)} held-out rounds, fewer than {ENOUGH_ROUNDS}" in evaluation.warnings[0]
    many = evaluate(synthetic_rounds(n=ENOUGH_ROUNDS), identity_calibration(3), Bins())
    assert not any("held-out rounds" in w for w in many.warnings)


@pytest.mark.parametrize(
    ("true", "given", "why"),
    [
        ((1.0, 1.0, 1.0), (3.0, 3.0, 3.0), "make it worse"),
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), "nothing to mend"),
        (TRUE, (1.005, 1.0, 1.0), "no improvement beyond chance"),
    ],
)
def test_what_is_no_improvement_is_refused(true, given, why):
    evaluation = evaluate(synthetic_rounds(true), Calibration(given), Bins())
    assert why in evaluation.refusal


def test_a_domain_that_gets_worse_is_named():
    chat, math = (synthetic_rounds(t, seed=i) for i, t in enumerate(((4.0, 4.0, 4.0), (1.0, 1.0, 1.0))))
    rounds = Rounds.join(
        [
            part.of_answers([a.domain == domain for a in part.answers])
            for part, domain in ((chat, "chat"), (math, "math"))
        ]
    )
    evaluation = evaluate(rounds, Calibration((3.0, 3.0, 3.0)), Bins())
    assert evaluation.refusal is None
    assert any(w.startswith("domain math: worse") for w in evaluation.warnings)
    assert not any(w.startswith("domain chat") for w in evaluation.warnings)


def test_a_slot_that_gets_worse_is_named_though_the_mean_improves():
    """Slot 1 was right and is made worse by its temperature; the others gain more than it loses."""
    rounds = synthetic_rounds((1.0, 6.0, 6.0), n=4000)
    evaluation = evaluate(rounds, Calibration((2.0, 6.0, 6.0)), Bins())
    right = evaluate(rounds, Calibration((1.0, 6.0, 6.0)), Bins())
    assert evaluation.refusal is None
    assert [slot.worse for slot in evaluation.all.slots] == [True, False, False]
    (warning,) = [w for w in evaluation.warnings if "worse" in w and w.startswith("slot")]
    assert warning.startswith("slot 1: worse than before (")
    assert [s["worse"] for s in evaluation.as_dict()["groups"][0]["slots"]] == [True, False, False]
    assert not any("worse" in w for w in right.warnings)


def test_a_slot_that_gets_worse_by_chance_is_not_named():
    """A perfect calibration of heads that are as good: what differs is the noise of binning."""
    right, slots = (1.05, 0.95, 1.0), []
    for seed in range(5):
        rounds = synthetic_rounds(right, n=400, seed=seed)
        slots += evaluate(rounds, Calibration(right), Bins()).all.slots
    assert any(slot.after.ece > max(slot.before.ece, slot.floor_95) for slot in slots)
    assert not any(slot.worse for slot in slots)


def test_a_temperature_at_the_edge_is_said():
    rounds = synthetic_rounds((1.0,), n=500)
    constant = replace(rounds, logits=np.abs(rounds.logits) + 3, acceptance=np.full((500, 1), 0.5))
    found = fit(constant, Bins())
    assert found.temperatures[0] == pytest.approx(HIGHEST)
    assert at_the_edge(found.temperatures[0])
    assert any("as far as the search goes" in w for w in evaluate(constant, found, Bins()).warnings)


def test_results_go_into_the_calibration():
    to_fit, held_out = synthetic_rounds().split(0.5)
    calibration = fit(to_fit, Bins())
    full = with_results(calibration, evaluate(held_out, calibration, Bins()))
    assert full.rounds_fit + full.rounds_held_out == 6000
    assert (full.prompts_fit, full.prompts_held_out) == (10, 10)
    assert full.sampling_temperatures == (0.0, 1.0)
    assert (full.acceptance_rule, full.drafter_identity) == ("ratio", "d" * 16)
    assert all(a < b for a, b in zip(full.ece_after, full.ece_before, strict=True))


def test_too_few_rounds_at_a_slot_are_an_error():
    rounds = synthetic_rounds(n=100)
    short = rounds.select(np.arange(100))
    lengths = np.where(np.arange(100) < 95, 2, 3)
    accepted = np.minimum(short.accepted, lengths)
    with pytest.raises(DSparkError, match="slot 3 was verified in 5 rounds, fewer than the 15 bins"):
        fit(replace(short, lengths=lengths, accepted=accepted), Bins())
    with pytest.raises(DSparkError, match="expected or realised"):
        fit(rounds, Bins(), "hopeful")
    with pytest.raises(DSparkError, match="2 drafts, the rounds have 3"):
        evaluate(rounds, identity_calibration(2), Bins())
