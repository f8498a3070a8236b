"""Prices: interpolation, executed sizes, no clamping, refusals, and the tables of other engines."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.core import DSparkError
from dspark.schedule.cost import AdditiveCost, ContextCost, DraftCost, TableCost, monotone_medians
from dspark.schedule.cost_formats import (
    from_sglang,
    from_tensorrt_llm,
    minimum_predicted_gain,
    to_sglang,
    to_tensorrt_llm,
)

TABLE = TableCost((1, 4, 8), (1.0, 1.6, 4.0))
STAIRS = TableCost((1, 4, 8), (1.0, 1.6, 4.0), executed=True)
ADDITIVE = AdditiveCost(0.5, (1, 8), (0.0, 0.7), (1, 4, 8), (1.0, 1.6, 4.0))


def test_between_probes_and_beyond_them():
    sizes = np.array([0, 1, 2, 4, 6, 8, 9, 18])
    np.testing.assert_allclose(TABLE.step_seconds(1, sizes, 0), [1, 1, 1.2, 1.6, 2.8, 4, 4.6, 10])
    np.testing.assert_allclose(STAIRS.step_seconds(1, sizes, 0), [1, 1, 1.6, 1.6, 4, 4, 4.6, 10])
    np.testing.assert_allclose(
        ADDITIVE.step_seconds(15, sizes, 0), 0.5 + 1.4 + TABLE.step_seconds(1, sizes, 0)
    )


@given(
    st.lists(st.integers(0, 200), min_size=2, max_size=8, unique=True).map(sorted),
    st.lists(st.floats(0, 5), min_size=8, max_size=8),
    st.booleans(),
    st.sampled_from([ContextCost(), ContextCost(1e-3, 1e-4, 30)]),
    st.integers(0, 4000),
)
def test_more_rows_never_cost_less(tokens, rises, executed, context, cached):
    seconds = tuple(np.cumsum([1.0, *rises])[: len(tokens)].tolist())
    cost = TableCost(tuple(tokens), seconds, executed, context=context)
    curve = cost.step_seconds(3, np.arange(400), cached)
    assert (np.diff(curve) >= -1e-12).all()
    assert (curve > 0).all()
    if executed and context == ContextCost():
        assert (
            curve >= TableCost(tuple(tokens), seconds).step_seconds(3, np.arange(400), cached) - 1e-12
        ).all()


@pytest.mark.parametrize(
    ("tokens", "seconds", "message"),
    [
        ((), (), "at least two"),
        ((4,), (1.0,), "at least two"),
        ((1, 2), (1.0,), "one value a probe"),
        ((1, 2), (1.0, float("nan")), "finite"),
        ((1, 2), (1.0, float("inf")), "finite"),
        ((2, 2), (1.0, 1.5), "increase"),
        ((-1, 2), (1.0, 1.5), "increase"),
        ((1, 2, 4), (1.0, 2.0, 1.9), "4 costs less than 2"),
        ((1, 2), (0.0, 2.0), "above 0"),
    ],
)
def test_unusable_tables_are_refused(tokens, seconds, message):
    with pytest.raises(DSparkError, match=message):
        TableCost(tokens, seconds)
    if seconds[:1] != (0.0,):
        for tables in ((tokens, seconds, (1, 2), (0.0, 1.0)), ((1, 2), (0.0, 1.0), tokens, seconds)):
            with pytest.raises(DSparkError, match=message):
                AdditiveCost(0.1, *tables)


def test_costs_of_nothing_are_refused():
    with pytest.raises(DSparkError, match="costs nothing"):
        AdditiveCost(0.0, (1, 2), (0.0, 1.0), (1, 2), (0.0, 1.0))
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(DSparkError, match="0 or more"):
            DraftCost(base=bad)
        with pytest.raises(DSparkError, match="0 or more"):
            ContextCost(per_pair=bad)
        with pytest.raises(DSparkError, match="0 or more"):
            AdditiveCost(bad, (1, 2), (0.0, 1.0), (1, 2), (1.0, 2.0))


def test_flat_tables_are_said_aloud():
    assert TABLE.warning is None
    assert ADDITIVE.warning is None
    assert "every draft will be verified" in (TableCost((1, 64), (1.0, 1.01)).warning or "")
    assert "ends flat" in (TableCost((1, 8, 64), (1.0, 2.0, 2.0)).warning or "")
    assert "flat" in (AdditiveCost(5.0, (1, 2), (0, 1), (1, 64), (1.0, 1.01)).warning or "")


def test_drafts_and_context_have_prices():
    draft = DraftCost(1.0, 0.1, 0.01)
    np.testing.assert_allclose(draft.seconds(np.array([0, 2, 2]), np.array([0, 2, 10])), [0, 1.22, 1.3])
    cost = TableCost((1, 4, 8), (1.0, 1.6, 4.0), draft=draft, context=ContextCost(0.001, 0.01, 10))
    assert cost.draft_seconds(2, 10) == pytest.approx(1.3)
    # 2 requests of 110 positions, 10 of which the table holds: 200 beyond, 4 rows of 100 positions each.
    assert float(cost.step_seconds(2, 4, 220)) == pytest.approx(1.6 + 0.2 + 4.0)


def test_medians_are_made_monotone():
    assert monotone_medians([4, 1, 1, 1, 4, 8], [2.0, 1.0, 9.0, 1.2, 3.0, 2.2]) == (
        (1, 4, 8),
        (1.2, 2.5, 2.5),
    )
    with pytest.raises(DSparkError, match="at least one"):
        monotone_medians([], [])


@pytest.mark.parametrize("cost", [TABLE, ADDITIVE])
def test_other_engines_files_come_back_as_they_went(cost):
    sizes = np.arange(1, 30)
    for there, back in ((to_sglang, from_sglang), (to_tensorrt_llm, from_tensorrt_llm)):
        again = back(json.loads(json.dumps(there(cost))))
        assert type(again) is type(cost)
        np.testing.assert_allclose(again.step_seconds(3, sizes, 0), cost.step_seconds(3, sizes, 0))


def test_other_engines_numbers():
    table = {"sample_batch_tokens": [1, 9], "sample_steps_per_sec": [100, 50.0], "max_batch_tokens": 64}
    assert from_sglang(table) == TableCost((1, 9), (0.01, 0.02))
    trt = {
        "token_counts": [1, 9], "step_time_ms": [8.0, 18], "fixed_overhead_ms": 2.0, "batch_sizes": [],
        "batch_overhead_ms": [], "minimum_predicted_gain": 0.04,
    }  # fmt: skip
    np.testing.assert_allclose(from_tensorrt_llm(trt).step_seconds(1, np.array([1, 9]), 0), [0.01, 0.02])
    assert minimum_predicted_gain(trt) == 0.04
    trt |= {"batch_sizes": [1, 2], "batch_overhead_ms": [0.0, 1.0]}
    assert float(from_tensorrt_llm(trt).step_seconds(2, 9, 0)) == pytest.approx(0.021)
    assert to_tensorrt_llm(TABLE, 0.04)["minimum_predicted_gain"] == 0.04
    assert to_sglang(TABLE, max_batch_tokens=99)["max_batch_tokens"] == 99


@pytest.mark.parametrize(
    ("read", "table", "message"),
    [
        (from_sglang, {"sample_batch_tokens": [1, 2]}, "sample_steps_per_sec"),
        (from_sglang, {"bias_seconds": 1.0, "bs_probes": [1, 2]}, "alpha_seconds"),
        (from_tensorrt_llm, {"token_counts": [1, 2]}, "step_time_ms"),
        (minimum_predicted_gain, {}, "minimum_predicted_gain"),
        (from_sglang, to_sglang(TABLE) | {"sample_steps_per_sec": [1, 0, 2]}, "above 0"),
        (from_sglang, to_sglang(TABLE) | {"sample_steps_per_sec": [1, 2, 3]}, "costs less"),
        (from_sglang, to_sglang(TABLE) | {"sample_batch_tokens": [1, 4, 8.5]}, "whole numbers"),
        (from_sglang, to_sglang(TABLE) | {"sample_batch_tokens": "1,4,8"}, "list of numbers"),
        (from_sglang, to_sglang(TABLE) | {"max_batch_tokens": 7}, "below the last"),
        (from_tensorrt_llm, to_tensorrt_llm(TABLE) | {"fixed_overhead_ms": None}, "finite number"),
    ],
)
def test_unreadable_files_are_refused_by_key(read, table, message):
    with pytest.raises(DSparkError, match=message):
        read(table)
