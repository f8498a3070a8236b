"""Known answers, and what each scheduler does with the prices and the past."""

import numpy as np
import pytest

from dspark.core import DSparkError
from dspark.schedule.aim import AimConfig
from dspark.schedule.cost import AdditiveCost, DraftCost, TableCost
from dspark.schedule.policies import (
    Dependence,
    FixedLength,
    GlobalScheduler,
    LaggedScheduler,
    Observer,
    PrefixScheduler,
    ScheduleState,
    Threshold,
)
from dspark.schedule.search import Curve, decoding_curve, rank

# The course's example, rows A and B: confidences [.9, .5] and [.8, .25].
COURSE = np.array([[0.9, 0.45], [0.8, 0.2]])
COURSE_COST = TableCost((2, 4, 6), (1e-3, 1.2e-3, 2e-3), executed=True)
CHEAP_SIX = TableCost((2, 4, 6), (1e-3, 1.2e-3, 1.3e-3), executed=True)
# Appendix A: steps per second 1.0, 0.5, 0.45 at 1, 2, 3 tokens.
APPENDIX_COST = TableCost((1, 2, 3), (1 / 1.0, 1 / 0.5, 1 / 0.45))


def state_of(num_requests, room=9, first_uid=0):
    uids = np.arange(first_uid, first_uid + num_requests)
    return ScheduleState(uids, np.full(num_requests, room), np.full(num_requests, 100))


def verify(policy, survival, drafted=None):
    survival = np.asarray(survival, dtype=np.float64)
    full = np.full(len(survival), survival.shape[1]) if drafted is None else np.asarray(drafted)
    return policy.verify_lengths(state_of(len(survival)), survival, full).tolist()


@pytest.mark.parametrize("scheduler", [PrefixScheduler, GlobalScheduler])
def test_the_course_example(scheduler):
    ranking = rank(COURSE, np.array([2, 2]))
    assert list(zip(*ranking.order, strict=True)) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    curve, cheap = (
        Curve(ranking, 2, decoding_curve(state_of(2), cost, 4)) for cost in (COURSE_COST, CHEAP_SIX)
    )
    np.testing.assert_allclose(curve.tokens, [2, 2.9, 3.7, 4.15, 4.35])
    np.testing.assert_allclose(curve.rate / 1e3, [2, 2.4167, 3.0833, 2.075, 2.175], atol=1e-4)
    np.testing.assert_allclose(cheap.rate[3:] / 1e3, [3.1923, 3.3462], atol=1e-4)
    assert verify(scheduler(2, COURSE_COST), COURSE) == [1, 1]
    assert verify(scheduler(2, CHEAP_SIX), COURSE) == [2, 2]


def test_appendix_a():
    prefix, search = PrefixScheduler(2, APPENDIX_COST), GlobalScheduler(2, APPENDIX_COST)
    led_to_a, led_to_b = [[0.8, 0.8 * 0.9]], [[0.8, 0.0]]
    assert verify(prefix, led_to_a) == verify(prefix, led_to_b) == [0]
    assert verify(search, led_to_a) == [2]
    assert verify(search, led_to_b) == [0]


def test_declared_dependence():
    assert Threshold(3, 0.5).dependence is Dependence.CAUSAL
    assert PrefixScheduler.dependence is Dependence.CAUSAL
    assert LaggedScheduler.dependence is Dependence.LAGGED
    assert GlobalScheduler.dependence is Dependence.LIVE
    assert all(
        p.uses_survival for p in (Threshold(3, 0.5), PrefixScheduler, LaggedScheduler, GlobalScheduler)
    )
    assert isinstance(PrefixScheduler(2, COURSE_COST), Observer)
    assert not isinstance(FixedLength(2), Observer)


def test_threshold_stops_at_the_first_weak_slot():
    survival = [[0.9, 0.81, 0.405, 0.4], [0.3, 0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 0.0]]
    assert verify(Threshold(4, 0.5), survival) == [2, 0, 0]
    assert verify(Threshold(4, 0.5, on="confidence"), survival) == [4, 0, 0]
    assert verify(Threshold(4, 0.5, on="confidence"), [[0.9, 0.3, 0.3]]) == [1]
    assert verify(Threshold(4, 0.0), survival) == [4, 4, 4]
    assert verify(Threshold(4, 0.5), survival, [1, 4, 0]) == [1, 0, 0]
    assert Threshold(4, 0.5).draft_lengths(state_of(2, room=3)).tolist() == [3, 3]
    with pytest.raises(DSparkError, match="confidence head"):
        Threshold(4, 0.5).verify_lengths(state_of(1), None, np.array([2]))
    assert Threshold(4, 0.5).verify_lengths(state_of(1), None, np.array([0])).tolist() == [0]
    for bad in ({"threshold": 1.5}, {"length": -1, "threshold": 0.5}, {"threshold": 0.5, "on": "luck"}):
        with pytest.raises(DSparkError):
            Threshold(**{"length": 4, **bad})


def test_the_gain_guard_prices_each_token():
    """One request, linear cost: a token must bring (1 + g) times its share of time."""
    cost = TableCost((1, 11), (1.0, 2.0))  # a tenth of the first token's time each
    survival = np.array([[0.9, 0.6, 0.3, 0.2, 0.1]])
    # Rates at budgets 0..5: 1, 1.727, 2.083, 2.154, 2.143: the fourth does not pay at all.
    assert verify(PrefixScheduler(5, cost), survival) == [3]
    # The third brings .3 for .1 s, where the rate is 2.083: 1.44 times its price.
    assert verify(PrefixScheduler(5, cost, min_gain=0.4), survival) == [3]
    assert verify(PrefixScheduler(5, cost, min_gain=0.5), survival) == [2]


def test_the_batch_is_filled_upwards():
    smooth = TableCost((2, 4, 8), (1.0, 1.4, 2.6))
    survival = [[0.9, 0.4, 0.1], [0.8, 0.1, 0.05]]
    assert verify(PrefixScheduler(3, smooth), survival) == [1, 1]
    assert verify(PrefixScheduler(3, smooth, sizes=(2, 4, 8)), survival) == [1, 1]
    assert verify(PrefixScheduler(3, smooth, sizes=(2, 5, 8)), survival) == [2, 1]
    assert verify(PrefixScheduler(3, smooth, sizes=(2, 7)), survival) == [3, 2]
    assert verify(PrefixScheduler(3, smooth, sizes=(2, 3)), survival) == [1, 1]
    with pytest.raises(DSparkError, match="increase"):
        PrefixScheduler(3, smooth, sizes=(4, 4))


def test_draft_time_counts_as_part_of_the_round():
    """Time already spent makes a pass worth filling: with a slow draft the second token pays as well."""
    cost = TableCost((1, 3), (1.0, 3.0))
    slow = TableCost((1, 3), (1.0, 3.0), draft=DraftCost(base=2.0))
    assert verify(PrefixScheduler(2, cost), [[0.9, 0.5]]) == [0]
    assert verify(PrefixScheduler(2, slow), [[0.9, 0.5]]) == [2]


def test_drafts_are_priced_beside_prompts():
    """Few rows come along for nothing; beside 600 prompt tokens each costs what it costs there. The prompt itself is
    no reason to verify: it has to be processed whatever is drafted."""
    cost = TableCost((1, 8, 1001), (1.0, 1.1, 994.1))  # a second a row behind the eighth
    state = ScheduleState(
        np.arange(2), np.array([3, 0]), np.array([50, 0]), np.array([1, 600]), np.array([True, False])
    )
    survival, drafted = np.array([[0.6, 0.4, 0.1], [0, 0, 0]]), np.array([3, 0])
    assert verify(PrefixScheduler(3, cost), survival[:1]) == [3]
    assert PrefixScheduler(3, cost).verify_lengths(state, survival, drafted).tolist() == [0, 0]


def observe(policy, state, survival, accepted=None):
    survival = np.asarray(survival, dtype=np.float64)
    drafted = np.full(len(survival), survival.shape[1])
    scheduled = policy.verify_lengths(state, survival, drafted)
    accepted = np.zeros_like(drafted) if accepted is None else np.minimum(accepted, scheduled)
    policy.observe(state, survival, drafted, scheduled, accepted)


def test_the_lagged_budget_is_two_rounds_old():
    policy, state = LaggedScheduler(2, COURSE_COST, sample=1), state_of(2)
    observe(policy, state, COURSE)  # worth a budget of 2
    observe(policy, state, np.zeros((2, 2)))  # worth nothing
    drafted = np.array([2, 2])
    assert policy.budget(state, drafted) == 2
    now = np.array([[0.2, 0.1], [0.7, 0.6]])
    assert policy.verify_lengths(state, now, drafted).tolist() == [0, 2]
    observe(policy, state, now)
    assert policy.budget(state, drafted) == 0
    assert policy.verify_lengths(state, np.ones((2, 2)), drafted).tolist() == [0, 0]


def test_one_old_block_is_no_sample():
    """A single request: two rounds ago its block happened to look hopeless, all those before looked good."""
    policy, one = (
        LaggedScheduler(2, TableCost((1, 3), (1.0, 1.2)), aim=AimConfig(trial_rounds=50)),
        state_of(1),
    )
    luck = LaggedScheduler(2, policy.cost, sample=1, aim=AimConfig(trial_rounds=50))
    for survival in ([0.9, 0.8],) * 10 + ([0.0, 0.0], [0.9, 0.8]):
        for each in (policy, luck):
            observe(each, one, [survival], np.array([2]) if survival[0] else np.array([0]))
    assert luck.budget(one, np.array([2])) == 0
    assert policy.budget(one, np.array([2])) == 2


def test_the_last_round_can_set_the_lengths():
    policy, state = LaggedScheduler(2, COURSE_COST, ranks="previous", sample=1), state_of(2)
    observe(policy, state, COURSE)
    observe(policy, state, [[0.2, 0.1], [0.7, 0.6]])
    lengths = policy.verify_lengths(state, np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([2, 2]))
    assert lengths.tolist() == [0, 2]
    assert policy.verify_lengths(state, np.ones((2, 2)), np.array([2, 1])).tolist() == [1, 1]
    with pytest.raises(DSparkError, match="current or previous"):
        LaggedScheduler(2, COURSE_COST, ranks="next")


def test_nobody_inherits_another_requests_past():
    """A new request in an old one's place is expected to do as well as requests do on average, not to be perfect."""
    cost = TableCost((2, 4, 6), (1.0, 1.2, 1.7), executed=True)  # size 6 is for the nearly perfect
    policy, state = LaggedScheduler(2, cost, sample=1), state_of(2)
    for _ in range(3):
        observe(policy, state, np.ones((2, 2)), np.array([2, 2]))
    drafted = np.array([2, 2])
    assert policy.budget(state, drafted) == 4
    fresh = LaggedScheduler(2, cost, sample=1)
    expected = fresh.aim.history.survival(np.array([7, 8]))
    assert (expected < 0.7).all()
    assert fresh.budget(state_of(2, first_uid=7), drafted) == 2
    np.testing.assert_array_equal(fresh.aim.history.past_survival(np.array([7, 8]), 1), expected)
    observe(policy, state_of(2, first_uid=2), np.zeros((2, 2)))
    observe(policy, state_of(2, first_uid=2), np.zeros((2, 2)))
    assert policy.budget(state_of(2, first_uid=2), drafted) == 0
    assert policy.budget(state_of(2, first_uid=0), drafted) == 4, "requests that were away keep their own"


@pytest.mark.parametrize("scheduler", [PrefixScheduler, GlobalScheduler, LaggedScheduler])
def test_decisions_are_repeatable_and_within_the_draft(scheduler):
    rng = np.random.default_rng(3)
    cost = AdditiveCost(0.01, (1, 64), (0, 0.01), (1, 64), (0.01, 0.03))
    policy = scheduler(5, cost, aim=AimConfig(trial_rounds=2))
    for _ in range(12):
        R = int(rng.integers(1, 9))
        uids = rng.choice(20, R, replace=False)
        state = ScheduleState(uids, rng.integers(0, 7, R), rng.integers(0, 99, R))
        want = policy.draft_lengths(state)
        assert (want == policy.draft_lengths(state)).all()
        assert (want <= np.minimum(state.room, 5)).all()
        assert (want >= 0).all()
        drafted = rng.integers(0, want + 1)
        survival = rng.random((R, 5)).cumprod(axis=1)
        lengths = policy.verify_lengths(state, survival, drafted)
        assert (lengths == policy.verify_lengths(state, survival, drafted)).all()
        assert (lengths <= drafted).all()
        assert (lengths >= 0).all()
        policy.observe(state, survival, drafted, lengths, rng.integers(0, lengths + 1))


def test_without_confidences_all_that_was_asked_for_is_verified():
    policy = PrefixScheduler(3, COURSE_COST)
    assert policy.verify_lengths(state_of(2), None, np.array([3, 1])).tolist() == [3, 1]
    assert policy.warning is None
    assert "flat" in (PrefixScheduler(3, TableCost((1, 9), (1.0, 1.0))).warning or "")
    with pytest.raises(DSparkError, match="gamma"):
        PrefixScheduler(0, COURSE_COST)
    with pytest.raises(DSparkError, match="min_gain"):
        PrefixScheduler(3, COURSE_COST, min_gain=-0.1)
