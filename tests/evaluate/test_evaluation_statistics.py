"""Intervals against slow formulas; slots of a round against a walk along its tokens."""

from __future__ import annotations

import math
import random

import pytest

from dspark.core import DSparkError
from dspark.evaluate.rounds import AnswerCounts, live_slots
from dspark.evaluate.statistics import Z_95, bootstrap_ratio, wilson


@pytest.mark.parametrize(("successes", "trials"), [(0, 5), (1, 1), (3, 7), (40, 80), (999, 1000)])
def test_wilson_bounds_solve_the_score_equation(successes: int, trials: int) -> None:
    interval = wilson(successes, trials)
    assert interval is not None
    share = successes / trials
    for bound in interval:
        if bound in (0.0, 1.0):
            assert share == bound
            continue
        score = abs(share - bound) / math.sqrt(bound * (1 - bound) / trials)
        assert score == pytest.approx(Z_95, rel=1e-9)
    assert interval[0] <= share <= interval[1]


def test_wilson_without_trials_or_sense() -> None:
    assert wilson(0, 0) is None
    with pytest.raises(DSparkError, match="3 successes of 2 trials"):
        wilson(3, 2)


def test_bootstrap_resamples_prompts() -> None:
    top, bottom = [10.0, 30.0, 21.0, 8.0], [10.0, 10.0, 14.0, 4.0]
    interval = bootstrap_ratio(top, bottom, resamples=20_000)
    assert interval is not None
    draw = random.Random(1)
    ratios = []
    for _ in range(20_000):
        picked = [draw.randrange(4) for _ in range(4)]
        ratios.append(sum(top[i] for i in picked) / sum(bottom[i] for i in picked))
    ratios.sort()
    assert interval == pytest.approx((ratios[500], ratios[19_500]), abs=0.05)
    assert bootstrap_ratio(top, bottom, resamples=20_000) == interval


def test_bootstrap_has_nothing_to_say() -> None:
    assert bootstrap_ratio([3], [2]) is None
    assert bootstrap_ratio([0, 0], [0, 0]) is None
    assert bootstrap_ratio([4, 6], [2, 3]) == (2.0, 2.0)
    with pytest.raises(DSparkError, match="2 numerators came with 1 denominators"):
        bootstrap_ratio([1, 2], [1])


def walk(scheduled: int, accepted: int, kept: int) -> tuple[int, int]:
    """Slot by slot: is it judged in a context of the answer, and what is the judgement?"""
    reached = taken = 0
    for slot in range(scheduled):
        if slot > accepted or (kept <= accepted and slot >= kept):
            break
        reached += 1
        taken += slot < accepted
    return reached, taken


def test_live_slots_on_every_small_round() -> None:
    for scheduled in range(6):
        for accepted in range(scheduled + 1):
            for kept in range(1, accepted + 2):
                assert live_slots(scheduled, accepted, kept) == walk(scheduled, accepted, kept)


def test_counts_add_up_over_rounds_of_different_width() -> None:
    counts = AnswerCounts()
    counts.add_round(1, 0, [0.25])
    counts.add_round(3, 2, [0.5, 0.75, 0.125, 9.0])
    counts.add_round(2, 2, [1.0, 1.0])
    assert (counts.reached, counts.accepted, counts.soft) == ([3, 2, 1], [2, 2, 0], [1.75, 1.75, 0.125])
