"""The fast searches against plain loops, ties, empty rows and ragged blocks included."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.schedule import search
from dspark.schedule.base import ScheduleState
from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.loops import NO_DRAFT
from dspark.schedule.reference import admission_order, reference_early_stop, reference_global

SIZES = (1, 2, 3, 5, 8, 13, 21, 34)


@st.composite
def rounds(draw, max_requests=6, max_gamma=5):
    """Survivals with many ties (confidences from a small set), drafted lengths, pending rows and a cost table."""
    R, gamma = draw(st.integers(1, max_requests)), draw(st.integers(0, max_gamma))
    confidence = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.9, 1.0]) | st.floats(0, 1)
    c = [[draw(confidence) for _ in range(gamma)] for _ in range(R)]
    survival = np.array(c, dtype=np.float64).reshape(R, gamma).cumprod(axis=1)
    drafted = np.array([draw(st.integers(0, gamma)) for _ in range(R)])
    pending = np.array([draw(st.integers(1, 3)) for _ in range(R)])
    rises = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]), min_size=7, max_size=7))
    cost = TableCost(SIZES, tuple(np.cumsum([1.0, *rises]).tolist()), executed=draw(st.booleans()))
    state = ScheduleState(np.arange(R), np.full(R, gamma), np.zeros(R, dtype=np.int64), pending)
    return survival, drafted, state, cost


@given(rounds(), st.sampled_from([0.0, 0.04, 0.5]), st.sampled_from([0.0, 0.3]))
@settings(max_examples=200, deadline=None)
def test_searches_equal_the_plain_loops(round_, min_gain, draft_seconds):
    survival, drafted, state, cost = round_
    ranking = search.rank(survival, drafted)
    assert in_order(ranking) == admission_order(survival, drafted)
    seconds = search.decoding_curve(state, cost, len(ranking)) + draft_seconds
    curve = search.Curve(ranking, state.outputs, seconds)

    R, rows, D = (
        state.num_requests,
        state.query_tokens,
        int((state.pending == 1).sum()),
    )  # requests, of them decoding

    def price(budget):
        seconds, alone = float(cost.step_seconds(R, rows + budget, 0)), float(cost.step_seconds(D, D, 0))
        return (
            seconds
            - (max(float(cost.step_seconds(R, rows, 0)) - alone, 0.0) if rows > R else 0.0)
            + draft_seconds
        )

    budget = search.early_stop(curve, min_gain)
    expected = reference_early_stop(survival, drafted, state.outputs, price, min_gain)
    assert ranking.lengths(budget).tolist() == expected
    best = search.best_budget(curve)
    assert (best, ranking.lengths(best).tolist()) == reference_global(survival, drafted, state.outputs, price)
    assert curve.rate[best] >= curve.rate[search.early_stop(curve)]


def in_order(ranking):
    return list(zip(*(part.tolist() for part in ranking.order), strict=True))


def test_large_batches_rank_ties_as_small_ones_do():
    rng = np.random.default_rng(0)
    for values in (np.full((2000, 4), 0.5), rng.choice([0.2, 0.5, 0.9], (2000, 4)), rng.random((2000, 4))):
        survival = values.cumprod(axis=1)
        drafted = rng.integers(0, 5, 2000)
        ranking = search.rank(survival, drafted)
        order = admission_order(survival, drafted)
        for budget in (0, 1, 700, len(order) - 1, len(order)):
            rows = [r for r, _ in order[:budget]]
            np.testing.assert_array_equal(ranking.lengths(budget), np.bincount(rows, minlength=2000))


@given(rounds(), st.floats(0, 0.5), st.floats(0, 0.2), st.floats(0, 0.1))
@settings(max_examples=200, deadline=None)
def test_what_to_draft_equals_the_plain_loop(round_, base, per_request, per_draft):
    """Every budget is tried; each request among the first K, and each of its drafts, has its price."""
    survival, room, state, cost = round_
    if not room.sum():
        return
    cost = replace(cost, draft=DraftCost(base, per_request, per_draft))
    order = admission_order(survival, room)
    seconds = search.decoding_curve(state, cost, len(order))
    rates, tau = [], float(state.outputs)
    for budget, candidate in enumerate(order, 1):
        tau += float(survival[candidate])
        requests = len({r for r, _ in order[:budget]})
        rates.append(tau / (seconds[budget] + cost.draft_price(requests, budget)))
    best, (wider, some, drafts) = search.best_to_draft(survival, room, state.outputs, seconds, cost)
    lengths, budget, requests, tokens = best
    assert budget == lengths.sum()
    assert requests == np.count_nonzero(lengths)
    assert rates[budget - 1] == pytest.approx(max(rates), rel=1e-9)
    assert tokens == pytest.approx(state.outputs + sum(float(survival[c]) for c in order[:budget]))
    assert (lengths <= room).all()
    np.testing.assert_array_equal(wider, np.minimum(lengths + 1, room))
    assert (some, drafts) == (np.count_nonzero(wider), wider.sum())


@given(st.integers(0, 40), st.integers(1, 10), st.integers(0, 40))
def test_filling_goes_up_and_no_further_than_the_size(budget, rows, more):
    sizes = (4, 8, 16, 32)
    filled = search.fill_upwards(budget, rows, budget + more, sizes)
    assert budget <= filled <= budget + more
    size = next((s for s in sizes if s >= rows + budget), rows + budget)
    assert rows + filled == min(size, rows + budget + more)


def test_unusable_confidences_count_as_nothing():
    a = np.array([[0.9, np.nan, 0.8], [1.5, 0.4, 0.6], [-1.0, 0.2, 0.2], [0.5, 0.4, 0.3]])
    alive = search.rank(a, np.array([3, 3, 3, 1])).alive
    np.testing.assert_array_equal(alive, [[0.9, 0, 0], [1, 0.4, 0.4], [0, 0, 0], [0.5, NO_DRAFT, NO_DRAFT]])
    assert search.rank(np.zeros((3, 0)), np.zeros(3, dtype=np.int64)).alive.shape == (3, 0)
