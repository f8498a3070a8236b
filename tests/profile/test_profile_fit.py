"""Prices from samples: what was put in comes out, noise is pooled, flat or falling times are dealt with."""

import numpy as np
import pytest

from dspark.core import DSparkError
from dspark.profile.fit import Sample, fit_cost, flat, isotonic, pooled_noise
from dspark.schedule.cost import AdditiveCost, TableCost


def test_isotonic_is_the_nearest_rising_sequence():
    np.testing.assert_allclose(isotonic([1, 3, 2, 2, 5]), [1, 7 / 3, 7 / 3, 7 / 3, 5])
    np.testing.assert_allclose(isotonic([3, 2, 1]), [2, 2, 2])
    np.testing.assert_allclose(isotonic([2, 1], [3, 1]), [1.75, 1.75])
    assert isotonic([]).tolist() == []
    rng = np.random.default_rng(0)
    values = np.cumsum(rng.normal(0.3, 1, 40))
    fitted = isotonic(values)
    assert (np.diff(fitted) >= -1e-12).all()
    for _ in range(50):  # no rising sequence beside it is nearer
        other = np.maximum.accumulate(fitted + rng.normal(0, 0.1, 40))
        assert ((other - values) ** 2).sum() >= ((fitted - values) ** 2).sum() - 1e-9


def price(kind, requests, rows, context, alpha=0.0):
    if kind == "step":
        step = 20e-3 + 2e-3 * rows + alpha * (requests - 1)
        return step + 1e-6 * requests * (context - 64) + 3e-7 * rows * (context - 64)
    if kind == "draft":
        return 4e-3 + 5e-4 * requests + 2e-4 * rows
    return 1e-3 + 1e-4 * rows


def samples(alpha=0.0, noise=0.0, repeats=5, seed=0):
    rng = np.random.default_rng(seed)
    probes = [("step", 1 if n <= 8 else -(-n // 8), n, 64) for n in (1, 2, 4, 8, 16, 32)]
    probes += [("step", 1, n, c) for n in (1, 8) for c in (512, 1536)] + [("step", 8, 8, 64)]
    probes += [("draft", r, r * k, 64) for r in (1, 8) for k in (1, 7)] + [
        ("upkeep", 1, n, 0) for n in (1, 8)
    ]
    return [
        Sample(*p, price(*p, alpha) * float(np.exp(rng.normal(0, noise))))
        for p in probes
        for _ in range(repeats)
    ]


def test_prices_that_were_put_in_come_out():
    cost = fit_cost(samples())
    assert isinstance(cost, TableCost)
    for requests, rows, context in (
        (1, 1, 64),
        (1, 6, 64),
        (4, 12, 4 * 64),
        (2, 2, 2 * 1000),
        (8, 100, 8 * 64),
    ):
        each = context / requests
        expected = 20e-3 + 2e-3 * rows + 1e-6 * (context - 64 * requests) + 3e-7 * rows * (each - 64)
        assert float(cost.step_seconds(requests, rows, context)) == pytest.approx(expected, rel=1e-6)
    assert float(cost.draft_seconds(3, 9)) == pytest.approx(4e-3 + 15e-4 + 9 * 3e-4, rel=1e-6)
    assert float(cost.draft_seconds(0, 0)) == 0
    assert cost.warning is None


def test_requests_get_a_price_where_they_have_one():
    cost = fit_cost(samples(alpha=2e-3))
    assert isinstance(cost, AdditiveCost)
    step = [float(cost.step_seconds(r, 8, 64 * r)) for r in (1, 8)]
    assert step[1] - step[0] == pytest.approx(14e-3, rel=1e-6)
    assert float(cost.step_seconds(20, 40, 64 * 20)) == pytest.approx(20e-3 + 80e-3 + 38e-3, rel=1e-6)


def test_what_a_draft_does_to_the_pass_behind_it_is_part_of_its_price():
    """Passes behind drafts take 3 ms longer than alone; where they take less, there is no bonus."""
    for late, expected in ((3e-3, 3e-3), (-1e-3, 0.0)):
        behind = [
            Sample("behind", r, n, 64, price("step", r, n, 64) + late)
            for r, n in ((1, 2), (1, 8))
            for _ in "123"
        ]
        cost = fit_cost(samples() + behind)
        assert cost.draft.displacement == cost.displacement == pytest.approx(expected)
        assert float(cost.draft_seconds(3, 9)) == pytest.approx(4e-3 + 15e-4 + 9 * 3e-4 + expected, rel=1e-6)
        assert cost.draft_price(3, 9) == pytest.approx(float(cost.draft_seconds(3, 9)))
        assert float(cost.draft_seconds(0, 0)) == cost.draft_price(0, 0) == 0
        assert cost.draft_terms[0] == pytest.approx(4e-3 + expected, rel=1e-6)


def test_noise_is_pooled_and_outliers_do_not_count():
    noisy = samples(noise=0.05, repeats=9)
    assert pooled_noise(noisy) == pytest.approx(0.05, rel=0.35)
    assert pooled_noise(samples()) == pytest.approx(0, abs=1e-9)
    spoiled = [s._replace(seconds=10 * s.seconds) if i % 9 == 0 else s for i, s in enumerate(noisy)]
    cost = fit_cost(spoiled)
    for rows in (1, 8, 32):
        assert float(cost.step_seconds(1, rows, 64)) == pytest.approx(20e-3 + 2e-3 * rows, rel=0.12)
    assert (np.diff(cost.seconds if isinstance(cost, TableCost) else cost.theta) >= 0).all()


def test_a_flat_profile_says_so():
    alike = [Sample("step", 1, n, 64, 0.02 * (1 + 0.1 * ((i + n) % 3))) for n in (1, 4, 16) for i in range(3)]
    assert flat(alike) == "the profile is flat: 16 rows cost no more than 1 beyond noise"
    assert (np.diff(fit_cost(alike).seconds) >= 0).all()
    assert flat(samples()) is None
    assert flat(samples(alpha=2e-3)) is None
    with pytest.raises(DSparkError, match="two sizes"):
        fit_cost(alike[:3])


def test_a_profile_without_a_drafter_prices_passes_alone():
    cost = fit_cost([s for s in samples() if s.kind == "step"])
    assert float(cost.draft_seconds(1, 5)) == 0
    assert float(cost.step_seconds(1, 1, 64)) == pytest.approx(22e-3)
