"""The automatic choice of a search: the strongest that is sound for the batch at hand."""

import numpy as np
import pytest

from dspark.audit import appendix_a, audit, random_world
from dspark.audit.builtin import APPENDIX_A_COST, cases, settings
from dspark.schedule.auto import AutoScheduler
from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.policies import (
    Dependence,
    GlobalScheduler,
    LaggedScheduler,
    PrefixScheduler,
    ScheduleState,
)

CONVEX = TableCost((1, 4, 8, 64), (1.0, 1.1, 1.5, 12.0), draft=DraftCost(0.1))
STAIRS = TableCost((4, 8, 12, 64), (1.0, 1.4, 1.8, 12.0), executed=True, draft=DraftCost(0.1))
DRAFTED = np.array([4, 4, 4])
SURVIVAL = np.array([[0.9, 0.8, 0.75, 0.7], [0.5, 0.1, 0.1, 0.0], [0.95, 0.9, 0.9, 0.85]])


def state_of(tolerates, room=4):
    R = len(DRAFTED)
    return ScheduleState(
        np.arange(R),
        np.full(R, room),
        np.full(R, 9),
        tolerates_live=None if tolerates is None else np.array(tolerates),
    )


def after_rounds(policy, state, survival=SURVIVAL, rounds=30):
    for _ in range(rounds):
        want = policy.draft_lengths(state)
        policy.observe(state, survival, want, want, np.minimum(want, [3, 0, 4]))
    return policy


@pytest.mark.parametrize("cost", [CONVEX, STAIRS])
def test_a_batch_that_tolerates_it_is_searched_globally(cost):
    state = state_of([True, True, True])
    auto, best = (after_rounds(kind(4, cost), state) for kind in (AutoScheduler, GlobalScheduler))
    for seed in range(20):
        survival = np.random.default_rng(seed).uniform(0.3, 1, (3, 4)).cumprod(1)
        np.testing.assert_array_equal(
            auto.verify_lengths(state, survival, DRAFTED), best.verify_lengths(state, survival, DRAFTED)
        )


def test_one_sampled_row_forbids_to_look():
    for tolerates in ([True, False, True], None):
        state = state_of(tolerates)
        for cost, kind in ((CONVEX, PrefixScheduler), (STAIRS, LaggedScheduler)):
            auto, other = (after_rounds(k(4, cost), state) for k in (AutoScheduler, kind))
            for seed in range(20):
                survival = np.random.default_rng(seed).uniform(0.3, 1, (3, 4)).cumprod(1)
                np.testing.assert_array_equal(
                    auto.verify_lengths(state, survival, DRAFTED),
                    other.verify_lengths(state, survival, DRAFTED),
                )


def test_rows_that_cannot_draft_do_not_matter():
    state = ScheduleState(np.arange(2), np.array([3, 0]), np.zeros(2), tolerates_live=np.array([True, False]))
    assert state.may_look


@pytest.mark.parametrize("requests", [1, 2])
def test_it_is_exact_in_every_setting(requests):
    """Under the ratio rule it does not look; where it may, it does, and nothing changes."""
    for case in cases(requests, 2):
        for setting in settings():
            world = setting.apply(case.world)
            assert world.tolerates_live == setting.exact_for_live
            result = audit(world, AutoScheduler(2, case.cost), 3 if requests == 1 else 2)
            assert result.max_tv < 1e-12, (case.name, setting.name)


def test_it_would_be_biased_if_it_looked():
    class Careless(AutoScheduler):
        def verify_lengths(self, state, survival, drafted):
            state = ScheduleState(
                state.uids, state.room, state.context_lens, tolerates_live=np.full(len(state.uids), True)
            )
            return super().verify_lengths(state, survival, drafted)

    result = audit(appendix_a(), Careless(2, APPENDIX_A_COST), 1)
    assert result.biased
    assert result.first_token[0] == pytest.approx(0.85)
    assert AutoScheduler.dependence is Dependence.LAGGED
    assert not random_world(0).tolerates_live
