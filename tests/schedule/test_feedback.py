"""Prices follow the machine: bounded steps, outliers without effect, and never much slower than plain decoding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.core import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.schedule.auto import AutoScheduler
from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.feedback import FRESH, SETTLED, STEP, Drift, LiveCost
from dspark.schedule.loops import tally
from dspark.schedule.policies import FixedLength, ScheduleState
from dspark.testing import ScriptedDrafter, TableTarget, run_engine

BASE = TableCost((1, 8, 64), (10.0, 17.0, 100.0), draft=DraftCost(2.0, 0.1, 0.1))
ONE = ScheduleState(np.arange(1), np.array([7]), np.array([50]))
NONE = np.array([0])


def rounds(cost, count, plain, rows, draft, scheduled=7, noise=lambda: 1.0):
    """Some plain rounds, then as many drafted ones, on a machine whose prices are `base` times these factors."""
    for i in range(count):
        lengths = np.array([scheduled if i // (2 * SETTLED) % 2 else 0])
        floor = float(BASE.step_seconds(1, 1, 50))
        further = float(BASE.step_seconds(1, 1 + int(lengths[0]), 50)) - floor
        step = plain * (floor + rows * further) * noise()
        drafting = draft * float(BASE.draft_seconds(1, int(lengths[0]))) * noise()
        cost.observe(ONE, *tally(lengths, lengths), drafting, step)


def test_factors_are_found():
    cost = LiveCost(BASE)
    rounds(cost, 200, plain=1.6, rows=1.4, draft=0.7)
    assert cost.factors == pytest.approx((1.6, 1.4, 0.7), rel=1e-6)
    assert float(cost.step_seconds(1, 8, 50)) == pytest.approx(1.6 * (10 + 1.4 * 7))
    assert float(cost.draft_seconds(2, 5)) == pytest.approx(0.7 * 2.7)
    assert float(cost.draft_seconds(0, 0)) == 0


def test_a_step_is_small_and_outliers_are_nothing():
    cost = LiveCost(BASE)
    cost.observe(ONE, *tally(NONE, NONE), 0.0, 30.0)
    assert abs(np.log(cost.factors[0])) <= STEP + 1e-12
    cost = LiveCost(BASE)
    rounds(cost, 40, 1.0, 1.0, 1.0)
    for spike in (1000.0, 0.001, 5000.0):
        cost.observe(ONE, *tally(NONE, NONE), 0.0, spike)
    assert cost.factors == pytest.approx((1, 1, 1), abs=1e-9)


def test_a_pass_soon_behind_a_draft_tells_nothing_of_plain_decoding():
    """It takes twice as long here; only behind some others without drafts does a pass take what plain decoding does."""
    cost, two, floor = LiveCost(BASE), np.array([2]), float(BASE.step_seconds(1, 1, 50))
    for _ in range(20):
        cost.observe(
            ONE, *tally(two, two), float(BASE.draft_seconds(1, 2)), 2 * float(BASE.step_seconds(1, 3, 50))
        )
        for behind in range(2 * SETTLED):
            cost.observe(ONE, *tally(NONE, NONE), 0.0, floor * (1.0 if behind >= SETTLED else 2.0))
    assert cost.factors[0] == pytest.approx(1.0)


def test_what_a_draft_displaces_is_no_price_of_rows():
    """Drafts that make the pass behind them slower by 1.5: their own time and that of rows are as the profile says."""
    base = replace(BASE, draft=replace(BASE.draft, displacement=1.5))
    cost, lengths = LiveCost(base), np.array([7])
    drafting = float(BASE.draft_seconds(1, 7))
    for i in range(200):
        drafted = i // (2 * SETTLED) % 2
        rows = lengths if drafted else NONE
        step = 3.0 * (float(base.step_seconds(1, 1 + int(rows[0]), 50)) + 1.5 * drafted)
        cost.observe(ONE, *tally(rows, rows), 2.0 * drafting * drafted, step)
    assert cost.factors == pytest.approx((3.0, 1.0, 2.0))
    expected = 2.0 * drafting + 3.0 * 1.5
    assert cost.draft_price(1, 7) == pytest.approx(expected)
    assert float(cost.draft_seconds(1, 7)) == pytest.approx(expected)
    fixed, request, draft = cost.draft_terms
    assert fixed + request + 7 * draft == pytest.approx(expected)
    assert cost.draft_price(0, 0) == float(cost.draft_seconds(0, 0)) == 0


def test_noise_stays_within_bounds():
    rng = np.random.default_rng(1)
    cost = LiveCost(BASE)
    rounds(cost, 600, 1.2, 1.0, 1.0, noise=lambda: float(np.exp(rng.normal(0, 0.15))))
    plain, rows, draft = cost.factors
    assert plain == pytest.approx(1.2, rel=0.2)
    assert 0.25 <= rows <= 4.0
    assert draft == pytest.approx(1.0, rel=0.2)
    drift = Drift(np.log(4))
    for _ in range(500):
        drift.follow(1e9)
    assert drift.factor == pytest.approx(4.0)


def test_without_plain_rounds_the_whole_pass_is_taken_to_have_changed():
    cost = LiveCost(BASE)
    rounds(cost, 60, 1.0, 1.0, 1.0)
    lengths = np.array([7])
    for _ in range(3 * FRESH):
        cost.observe(ONE, *tally(lengths, lengths), 2.8, 2 * 17.0)
    assert cost.factors == pytest.approx((2.0, 1.0, 1.0), rel=1e-3)


def test_rounds_with_prompts_say_nothing():
    cost = LiveCost(BASE)
    state = ScheduleState(np.arange(1), np.array([0]), np.array([0]), np.array([40]))
    cost.observe(state, *tally(NONE, NONE), 1.0, 999.0)
    assert cost.factors == (1.0, 1.0, 1.0)


def test_prices_keep_rising():
    cost = LiveCost(BASE)
    rounds(cost, 100, 3.0, 0.1, 3.0)
    assert (np.diff(cost.step_seconds(1, np.arange(1, 90), 50)) > 0).all()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowTarget(TableTarget):
    """Passes take base price times `slower` on the clock it is given."""

    clock: Clock
    slower = 1.0

    def forward(self, batch, pool, taps=()):
        self.clock.now += self.slower * float(BASE.step_seconds(batch.num_requests, batch.num_rows, 0))
        return super().forward(batch, pool, taps)


def seconds_a_token(policy, ahead=None, draft_price=1.0, confidence=None, max_tokens=400):
    """Decode one request on the fake clock. The target counts 0 1 ... 7 0 ...; the drafter adds `ahead` to a token,
    so 1 is always right and 2 always wrong; None: no drafter."""
    clock = Clock()
    target = SlowTarget(np.full((8, 8), 1e-3) + np.roll(np.eye(8), 1, axis=1))
    target.clock = clock
    drafter = None if ahead is None else counting_drafter(clock, ahead, draft_price, confidence)
    config = EngineConfig(kv_cache_tokens=max_tokens + 32)
    engine = Engine(target, drafter, policy, None, config, clock=clock)
    (output,) = run_engine(engine, [[1]], SamplingParams(temperature=0.0, max_tokens=max_tokens))
    assert output.token_ids == [(2 + i) % 8 for i in range(max_tokens)]
    return clock.now / max_tokens


def counting_drafter(clock, ahead, price, confidence):
    def script(batch, drafts):
        clock.now += price * (0.1 if drafts.shape[1] else float(BASE.draft_seconds(1, 1)))
        last = drafts[:, -1] if drafts.shape[1] else torch.tensor([r.token_ids[-1] for r in batch.requests])
        return (last + ahead) % 8

    return ScriptedDrafter(None, script, 7, confidence=confidence)


@pytest.mark.parametrize("confidence", [None, 2.0])
def test_a_useless_drafter_costs_next_to_nothing(confidence):
    plain = seconds_a_token(FixedLength(0))
    auto = seconds_a_token(AutoScheduler(7, LiveCost(BASE)), 2, 1.0, confidence, max_tokens=2000)
    fixed = seconds_a_token(FixedLength(7), 2, 1.0, confidence)
    assert fixed > 1.5 * plain
    assert auto < 1.03 * plain


def test_a_drafter_that_is_dearer_than_its_profile_says_is_left():
    """Right at every token, but a draft takes 40 times what the profile promised: plain decoding is faster."""
    plain = seconds_a_token(FixedLength(0))
    blind = seconds_a_token(AutoScheduler(7, BASE), 1, 40.0, 3.0)
    policy = AutoScheduler(7, LiveCost(BASE))
    for _ in range(2):
        seconds_a_token(policy, 1, 40.0, 3.0)
    after = seconds_a_token(policy, 1, 40.0, 3.0)
    assert blind > 1.2 * plain
    assert after < 1.02 * plain


def test_a_good_drafter_is_used():
    plain = seconds_a_token(FixedLength(0))
    auto = seconds_a_token(AutoScheduler(7, LiveCost(BASE)), 1, 1.0, 3.0)
    assert auto < 0.35 * plain


def test_batches_too_large_for_drafts_are_left_alone():
    """Passes of 40 rows are compute-bound here: not even perfect drafts pay, so not even a trial is made."""
    steep = TableCost((1, 8, 64), (10.0, 80.0, 640.0), draft=DraftCost(2.0, 0.1, 0.1))
    policy = AutoScheduler(7, LiveCost(steep))
    state = ScheduleState(np.arange(40), np.full(40, 7), np.full(40, 9))
    for _ in range(50):
        assert not policy.draft_lengths(state).any()
        policy.observe(state, None, np.zeros(40, int), np.zeros(40, int), np.zeros(40, int))


def test_durations_come_from_the_engine_s_clock():
    class Listening(FixedLength):
        heard: list = []  # noqa: RUF012

        def timed(self, state, drafted, scheduled, draft_s, step_s):
            self.heard.append((int(drafted.sum()), draft_s, step_s))

    seconds_a_token(Listening(3), 1, 1.0, max_tokens=9)
    drafted, draft_s, step_s = Listening.heard[1]
    assert drafted == 3
    assert draft_s == pytest.approx(2.4)
    assert step_s == pytest.approx(float(BASE.step_seconds(1, 4, 0)))
    assert torch.is_inference_mode_enabled() is False
