"""ECE, AUC, Brier and the sampling floor against plain loops and known answers."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.calibrate.metrics import (
    Bins,
    Reliability,
    area_under_curve,
    brier,
    ece_floor,
    expected_calibration_error,
)
from dspark.errors import DSparkError


def slow_width_ece(predicted, realised, count):
    """The definition, one bin at a time."""
    total = 0.0
    for b in range(count):
        inside = [
            i for i, p in enumerate(predicted) if b / count < p <= (b + 1) / count or (b == 0 and p == 0)
        ]
        if inside:
            gap = np.mean([predicted[i] for i in inside]) - np.mean([realised[i] for i in inside])
            total += len(inside) / len(predicted) * abs(gap)
    return total


def slow_auc(predicted, realised):
    wins = [
        (p > q) + (p == q) / 2
        for p, good in zip(predicted, realised, strict=True)
        if good
        for q, other in zip(predicted, realised, strict=True)
        if not other
    ]
    return sum(wins) / len(wins)


@pytest.fixture(params=[0, 1, 2])
def scored(request):
    rng = np.random.default_rng(request.param)
    predicted = np.round(rng.random(120) ** 2, 2)  # with ties, some at the edges of bins
    return predicted, (rng.random(120) < predicted**0.5).astype(float)


def test_metrics_equal_loops(scored):
    predicted, realised = scored
    assert expected_calibration_error(predicted, realised, Bins(10, "width")) == pytest.approx(
        slow_width_ece(predicted, realised, 10)
    )
    assert area_under_curve(predicted, realised) == pytest.approx(slow_auc(predicted, realised))
    slow = sum((p - y) ** 2 for p, y in zip(predicted, realised, strict=True)) / 120
    assert brier(predicted, realised) == pytest.approx(slow)


@pytest.mark.parametrize("kind", ["mass", "width"])
def test_error_is_the_weighted_gap_of_the_diagram(scored, kind):
    points = Reliability.of(*scored, Bins(8, kind))
    gaps = np.abs(points.predicted - points.realised) * points.count
    assert expected_calibration_error(*scored, Bins(8, kind)) == pytest.approx(gaps.sum() / 120)
    assert points.count.sum() == 120
    assert (np.diff(points.predicted) > 0).all()


def test_bins_of_equal_mass_are_even_and_keep_equal_predictions_together():
    distinct = np.random.default_rng(0).random(3000) ** 4
    counts = np.bincount(Bins(15).assign(distinct))
    assert len(counts) == 15
    assert counts.min() >= 199
    assert counts.max() <= 201
    tied = np.repeat([0.1, 0.2, 0.9], [50, 3, 7])
    where = Bins(15).assign(tied)
    assert all(len(set(where[tied == v])) == 1 for v in (0.1, 0.2, 0.9))


def test_one_class_or_nothing_has_no_auc_and_no_error():
    assert np.isnan(area_under_curve(np.array([0.1, 0.2]), np.array([1.0, 1.0])))
    empty = np.zeros(0)
    assert np.isnan(expected_calibration_error(empty, empty, Bins()))
    assert np.isnan(brier(empty, empty))


def test_floor_is_what_a_perfect_predictor_shows():
    rng = np.random.default_rng(1)
    conditional, lengths = rng.random((800, 3)), np.full(800, 3)
    lengths[:200] = 2
    floor = ece_floor(conditional, lengths, Bins(), 100, rng)
    assert floor.shape == (100, 3)
    drawn = (rng.random((800, 3)) < conditional).cumprod(axis=1)
    survival = conditional.cumprod(axis=1)
    for k, rows in enumerate((lengths > 0, lengths > 1, lengths > 2)):
        real = expected_calibration_error(survival[rows, k], drawn[rows, k].astype(float), Bins())
        spread = floor[:, k].std()
        assert abs(real - floor[:, k].mean()) < 4 * spread
    more = ece_floor(np.repeat(conditional, 16, axis=0), np.repeat(lengths, 16), Bins(), 20, rng)
    assert more.mean() == pytest.approx(floor.mean() / 4, rel=0.15)  # falls with the root of the rounds


def test_bins_refuse_nonsense():
    with pytest.raises(DSparkError, match="1 or more"):
        Bins(0)
    with pytest.raises(DSparkError, match="equal mass or width"):
        Bins(5, "depth")
