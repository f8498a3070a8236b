"""What CAUSAL and LAGGED promise: decisions know admitted tokens alone, and outputs stay exact.

Two requests draft two binary tokens each; confidences are arbitrary functions of the tokens before them. All
sixteen blocks are enumerated, so the joint distribution of both outputs is exact, not sampled.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.schedule.cost import TableCost
from dspark.schedule.policies import (
    GlobalScheduler,
    LaggedScheduler,
    PrefixScheduler,
    ScheduleState,
    Threshold,
)
from dspark.schedule.search import Curve, decoding_curve, early_stop, rank

SIZES = (1, 2, 3, 4, 6, 10, 20)
LEVELS = st.sampled_from([0.0, 0.2, 0.5, 0.5, 0.9, 1.0]) | st.floats(0, 1)
STEPS = st.sampled_from([0.0, 0.1, 0.4, 1.0])


def table(rises, executed):
    return TableCost(SIZES, tuple(np.cumsum([1.0, *rises]).tolist()), executed=executed)


def after_two_rounds(policy, state, survivals):
    for survival in survivals:
        drafted = np.full(len(survival), survival.shape[1])
        scheduled = policy.verify_lengths(state, survival, drafted)
        policy.observe(state, survival, drafted, scheduled, scheduled // 2)
    return policy


def causal_policies(gamma, cost, state, rng):
    past = [rng.random((state.num_requests, gamma)).cumprod(axis=1) for _ in range(2)]
    return {
        "prefix": PrefixScheduler(gamma, cost),
        "prefix with gain guard": PrefixScheduler(gamma, cost, min_gain=0.2),
        "prefix filled upwards": PrefixScheduler(gamma, cost, sizes=(2, 5, 9)),
        "threshold": Threshold(gamma, 0.4),
        "threshold on confidence": Threshold(gamma, 0.5, on="confidence"),
        "lagged": after_two_rounds(LaggedScheduler(gamma, cost), state, past),
        "lagged, one round": after_two_rounds(LaggedScheduler(gamma, cost, sample=1), state, past),
        "lagged, old ranks": after_two_rounds(LaggedScheduler(gamma, cost, ranks="previous"), state, past),
    }


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_confidences_behind_the_frontier_change_nothing(data):
    """A row's frontier is the first slot that is not admitted. Its confidence is pre-token; those behind it have
    seen tokens that are not admitted, and whatever they say, every length of every row stays as it is."""
    R, gamma = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    confidences = st.lists(LEVELS, min_size=R * gamma, max_size=R * gamma)
    c, other = (np.array(data.draw(confidences)).reshape(R, gamma) for _ in range(2))
    cost = table(data.draw(st.lists(STEPS, min_size=6, max_size=6)), data.draw(st.booleans()))
    drafted = np.array([data.draw(st.integers(0, gamma)) for _ in range(R)])
    state = ScheduleState(np.arange(R), np.full(R, gamma), np.zeros(R, dtype=np.int64))
    for name, policy in causal_policies(gamma, cost, state, np.random.default_rng(0)).items():
        lengths = policy.verify_lengths(state, c.cumprod(axis=1), drafted)
        behind = np.arange(gamma) > lengths[:, None]
        changed = np.where(behind, other, c).cumprod(axis=1)
        np.testing.assert_array_equal(policy.verify_lengths(state, changed, drafted), lengths, name)


P_T = np.array([[0.7, 0.3], [0.2, 0.8]])  # by the token before; requests start behind token 0
P_D = np.array([[0.5, 0.5], [0.6, 0.4]])


def outcome(tokens, length):
    """[2, 2] distribution of a request's next two output tokens, given its block and scheduled length."""
    joint, alive, last = np.zeros((2, 2)), 1.0, 0
    for k in range(2):
        p, q, x = P_T[last], P_D[last], tokens[k]
        if k >= length:  # behind the scheduled drafts the target samples by itself
            accept, other = 0.0, p
        else:
            accept = min(1.0, p[x] / q[x])
            residual = np.maximum(p - q, 0)
            other = residual / residual.sum() if residual.any() else p
        for y in range(2):
            mass = alive * (1 - accept) * other[y]
            if k == 0:
                joint[y] += mass * P_T[y]  # the round ended: the next one is exact
            else:
                joint[tokens[0], y] += mass
        alive, last = alive * accept, x
    joint[tokens] += alive
    return joint


def joint_outputs(policy, state, first, second):
    """[2] * (2 R) exact joint distribution of all outputs; request r's c_2 after x_1 is second[r][x_1]."""
    R = len(first)
    total = np.zeros((2,) * (2 * R))
    for blocks in product(product(range(2), repeat=2), repeat=R):
        c = np.array([[first[r], second[r][blocks[r][0]]] for r in range(R)])
        lengths = policy.verify_lengths(state, c.cumprod(axis=1), np.full(R, 2))
        drawn, outputs = 1.0, np.ones(())
        for tokens, length in zip(blocks, lengths, strict=True):
            drawn *= P_D[0, tokens[0]] * P_D[tokens[0], tokens[1]]
            outputs = np.multiply.outer(outputs, outcome(tokens, int(length)))
        total += drawn * outputs
    return total


def exact(R):
    one, total = P_T[0][:, None] * P_T, np.ones(())
    for _ in range(R):
        total = np.multiply.outer(total, one)
    return total


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_outputs_are_jointly_exact(data):
    R = data.draw(st.integers(1, 2))
    first = [data.draw(LEVELS) for _ in range(R)]
    second = [[data.draw(LEVELS), data.draw(LEVELS)] for _ in range(R)]
    cost = table(data.draw(st.lists(STEPS, min_size=6, max_size=6)), data.draw(st.booleans()))
    state = ScheduleState(np.arange(R), np.full(R, 2), np.zeros(R, dtype=np.int64))
    for name, policy in causal_policies(2, cost, state, np.random.default_rng(1)).items():
        np.testing.assert_allclose(
            joint_outputs(policy, state, first, second), exact(R), atol=1e-12, err_msg=name
        )


APPENDIX = TableCost((1, 2, 3), (1 / 1.0, 1 / 0.5, 1 / 0.45))
ONE = ScheduleState(np.arange(1), np.full(1, 2), np.zeros(1, dtype=np.int64))


@pytest.mark.parametrize(("policy", "p_a"), [(PrefixScheduler, 0.7), (GlobalScheduler, 0.85)])
def test_appendix_a_in_distribution(policy, p_a):
    """x_1 = A leads to c_2 = .9, B to 0: the search verifies A and drops B."""
    joint = joint_outputs(policy(2, APPENDIX), ONE, [0.8], [[0.9, 0.0]])
    np.testing.assert_allclose(joint.sum(axis=1), [p_a, 1 - p_a])


@dataclass
class RoundedDown:
    """Algorithm 1, then down to the executed size below: what must not be done."""

    cost: TableCost
    sizes: tuple[int, ...] = (1, 3)

    def verify_lengths(self, state, survival, drafted):
        ranking = rank(survival, drafted)
        seconds = decoding_curve(state, self.cost, len(ranking))
        rows = state.query_tokens + early_stop(Curve(ranking, state.outputs, seconds))
        return ranking.lengths(max(s for s in self.sizes if s <= rows) - state.query_tokens)


def test_rounding_down_is_live():
    """x_1 is admitted by itself, and withdrawn where x_1 made x_2 look bad."""
    policy = RoundedDown(TableCost((1, 2, 3), (1.0, 1.2, 1.4)))
    joint = joint_outputs(policy, ONE, [0.8], [[0.9, 0.0]])
    np.testing.assert_allclose(joint.sum(axis=1), [0.85, 0.15])
