"""The fast searches against plain loops, ties, empty rows and ragged blocks included."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.schedule import search
from dspark.schedule.base import ScheduleState
from dspark.schedule.cost import TableCost
from dspark.schedule.reference import admission_order, reference_early_stop, reference_global

SIZES = (1, 2, 3, 5, 8, 13, 21, 34)


@st.composite
def rounds(draw, max_requests=6, max_gamma=5):
    """Survivals with many ties (confidences from a small set), drafted lengths, pending rows and a cost table."""
    R, gamma = draw(st.integers(1, max_requests)), draw(st.integers(0, max_gamma))
    confidence = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.9, 1.0]) | st.floats(0, 1)
    c = [[draw(confidence) for _ in range(gamma)] for _ in range(R)]
    survival = search.prefix_survival(np.array(c, dtype=np.float64).reshape(R, gamma).cumprod(axis=1))
    drafted = np.array([draw(st.integers(0, gamma)) for _ in range(R)])
    pending = np.array([draw(st.integers(1, 3)) for _ in range(R)])
    rises = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]), min_size=7, max_size=7))
    cost = TableCost(SIZES, tuple(np.cumsum([1.0, *rises]).tolist()), executed=draw(st.booleans()))
    state = ScheduleState(np.arange(R), np.full(R, gamma), np.zeros(R, dtype=np.int64), pending)
    return survival, drafted, state, cost


@given(rounds(), st.sampled_from([0.0, 0.04, 0.5]), st.sampled_from([0.0, 0.3]))
@settings(max_examples=200)
def test_searches_equal_the_plain_loops(round_, min_gain, draft_seconds):
    survival, drafted, state, cost = round_
    ranking = search.rank(survival, drafted)
    order = list(zip(ranking.rows.tolist(), ranking.slots.tolist(), strict=True))
    assert order == admission_order(survival, drafted)
    curve = search.rate_curve(ranking, state, cost, draft_seconds)

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


def test_large_batches_rank_ties_as_small_ones_do():
    """Above a few thousand candidates another sort takes over."""
    rng = np.random.default_rng(0)
    for values in (np.full((2000, 4), 0.5), rng.choice([0.2, 0.5, 0.9], (2000, 4)), rng.random((2000, 4))):
        survival = search.prefix_survival(values.cumprod(axis=1))
        drafted = rng.integers(0, 5, 2000)
        ranking = search.rank(survival, drafted)
        order = list(zip(ranking.rows.tolist(), ranking.slots.tolist(), strict=True))
        assert len(order) > search._SMALL
        assert order == admission_order(survival, drafted)


@given(st.integers(0, 40), st.integers(1, 10), st.integers(0, 40))
def test_filling_goes_up_and_no_further_than_the_size(budget, rows, more):
    sizes = (4, 8, 16, 32)
    filled = search.fill_upwards(budget, rows, budget + more, sizes)
    assert budget <= filled <= budget + more
    size = next((s for s in sizes if s >= rows + budget), rows + budget)
    assert rows + filled == min(size, rows + budget + more)


def test_unusable_confidences_count_as_nothing():
    a = search.prefix_survival(np.array([[0.9, np.nan, 0.8], [1.5, 0.4, 0.6], [-1.0, 0.2, 0.2]]))
    np.testing.assert_array_equal(a, [[0.9, 0, 0], [1, 0.4, 0.4], [0, 0, 0]])
    assert search.prefix_survival(np.zeros((3, 0))).shape == (3, 0)
