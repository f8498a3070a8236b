"""Offsets beside temperatures: known ones come back, none where nothing is to be shifted, hints that hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic import synthetic_rounds

from dspark.calibrate import Bins, Calibration, Rounds, evaluate, fit, offsets_hint
from dspark.calibrate.sts import fit_sts_with_offsets, matching_offset
from dspark.calibrate.tables import slot_table

TRUE = (2.0, 0.5, 4.0)
SHIFT = (-0.8, 0.5, -0.3)  # what must be added after the division


def shifted_rounds(n: int = 6000, ragged: bool = False) -> Rounds:
    """Slot k is accepted with sigmoid(logit_k / T_k + b_k)."""
    rounds = synthetic_rounds(TRUE, n=n, ragged=ragged)
    return replace(rounds, logits=rounds.logits - np.multiply(TRUE, SHIFT))


@pytest.mark.parametrize("kind", ["mass", "width"])
@pytest.mark.parametrize("ragged", [False, True])
def test_known_temperatures_and_offsets_come_back(kind, ragged):
    found = fit(shifted_rounds(ragged=ragged), Bins(15, kind), offsets=True)
    assert found.temperatures == pytest.approx(TRUE, rel=0.03)
    assert found.offsets == pytest.approx(SHIFT, abs=0.03)


def test_outcomes_alone_give_them_too_with_more_noise():
    found = fit(shifted_rounds(n=12_000), Bins(), "realised", offsets=True)
    assert found.temperatures == pytest.approx(TRUE, rel=0.25)
    assert found.offsets == pytest.approx(SHIFT, abs=0.25)


def test_nothing_is_shifted_where_temperatures_suffice():
    rounds = synthetic_rounds(TRUE)
    plain, found = fit(rounds, Bins()), fit(rounds, Bins(), offsets=True)
    assert plain.offsets == ()
    assert found.offsets == pytest.approx((0.0, 0.0, 0.0), abs=0.01)
    assert found.temperatures == pytest.approx(plain.temperatures, rel=0.02)
    honest = fit(synthetic_rounds((1.0, 1.0)), Bins(), offsets=True)
    assert honest.temperatures == (1.0, 1.0)
    assert honest.offsets == pytest.approx((0.0, 0.0), abs=1e-5)


def test_the_mean_is_right_at_every_slot():
    """Whatever the temperatures leave: the predicted mean of the fitting rounds is the realised one."""
    rounds = synthetic_rounds((1.0, 1.0, 1.0), n=2000)
    noise = np.random.default_rng(1).normal(1.0, 2.0, rounds.logits.shape)
    y, observed = rounds.survived, rounds.observed
    temperatures, offsets = fit_sts_with_offsets(rounds.logits + noise, y, observed, Bins())
    predicted = Calibration(temperatures, offsets=offsets).survival(rounds.logits + noise)
    assert predicted.mean(axis=0) == pytest.approx(y.mean(axis=0), abs=1e-8)


def test_matching_offset_is_a_root_or_as_near_as_allowed():
    rng = np.random.default_rng(0)
    before, scaled = rng.random(500), rng.normal(0, 3, 500)
    for b in (-6.0, -0.3, 0.0, 2.0, 6.0):
        y = before / (1 + np.exp(-(scaled + b)))
        assert matching_offset(before, scaled, y) == pytest.approx(b, abs=1e-6)
    steep = scaled * 1e4  # a staircase: no slope to follow
    reached = np.mean(before * (steep + matching_offset(before, steep, before / 2) > 0))
    assert reached <= before.sum() / 500
    assert matching_offset(before, scaled, np.zeros(500)) == pytest.approx(-10)
    assert matching_offset(before, scaled, np.ones(500)) == pytest.approx(10)


def test_a_hint_only_where_offsets_help():
    right = synthetic_rounds((1.0, 1.0, 1.0))
    timid = replace(right, logits=right.logits - np.array([1.0, 0.0, 0.0]))  # slot 1, throughout
    to_fit, held_out = timid.split(0.5)
    plain = evaluate(held_out, fit(to_fit, Bins()), Bins())
    assert plain.all.slots[0].errs_one_way
    hint = offsets_hint(to_fit, plain)
    assert hint is not None
    assert hint.startswith("--offsets may help: slot")
    mended = evaluate(held_out, fit(to_fit, Bins(), offsets=True), Bins())
    assert mended.refusal is None
    assert mended.all.ece_after < plain.all.ece_after / 2
    assert not any(slot.errs_one_way for slot in mended.all.slots)
    for honest in (right, synthetic_rounds(TRUE)):
        fitted_to, others = honest.split(0.5)
        assert offsets_hint(fitted_to, evaluate(others, fit(fitted_to, Bins()), Bins())) is None
    # held-out rounds say that something is wrong; those fitted to, that offsets would not mend it
    fitted_to, _ = right.split(0.5)
    wrong = evaluate(held_out, fit(fitted_to, Bins()), Bins())
    assert wrong.all.slots[0].errs_one_way
    assert offsets_hint(fitted_to, wrong) is None


def test_worse_offsets_are_refused_and_the_table_has_a_column():
    evaluation = evaluate(
        synthetic_rounds((1.0, 1.0, 1.0)), Calibration((1.0,) * 3, offsets=(1.0,) * 3), Bins()
    )
    assert "the temperatures and offsets make it worse" in (evaluation.refusal or "")
    assert [c.header for c in slot_table(evaluation).columns][:3] == ["slot", "T", "b"]
    assert evaluation.as_dict()["offsets"] == [1.0, 1.0, 1.0]
