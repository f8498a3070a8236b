"""Does the check of the simulator against a real engine find what it should?"""

from dataclasses import fields, replace

import numpy as np
import pytest

from dspark.core import DSparkError, StepEvent
from dspark.schedule.base import ScheduleState
from dspark.schedule.cost import AdditiveCost, ContextCost, DraftCost, TableCost
from dspark.schedule.policies import FixedLength
from dspark.simulate.acceptance import Domain, SyntheticAcceptance
from dspark.simulate.recording import (
    StepRecorder,
    StepRecords,
    read_steps,
    record_closed_loop,
    record_steps,
    write_steps,
)
from dspark.simulate.simulation import Scenario, run
from dspark.simulate.traffic import ClosedLoop, OpenLoop, Poisson
from dspark.simulate.validation import cross_validate, fit_cost, predict, scatter, validate_run
from dspark.simulate.workload import Lengths, Mix

TRUTH = AdditiveCost(
    0.02, (0, 64), (0.0, 0.016), (0, 32, 512), (0.0, 0.016, 0.52), DraftCost(0.005, 0.0002, 0.0001),
    ContextCost(per_position=1e-6),
)  # fmt: skip


def scenario(cost=TRUTH, alpha=0.7):
    mix = Mix.parse("any", Lengths.parse("geometric:60"), Lengths.parse("geometric:40"))
    acceptance = SyntheticAcceptance({"any": Domain((alpha,) * 4)})
    return Scenario(traffic=ClosedLoop(12, mix), acceptance=acceptance, cost=cost, warmup_s=3, duration_s=30)


@pytest.fixture(scope="module")
def engine_log():
    """What a noisy engine would have recorded: the counts of a run, times off by 5%."""
    log = run(scenario(), FixedLength(4), seed=7)
    late = (log.step("start") > 3) & (log.step("start") < 33)
    names = [f.name for f in fields(StepRecords)]
    columns = {name: log.step(name)[late] for name in names}
    noise = np.random.default_rng(0).lognormal(0, 0.05, int(late.sum()))
    columns = {name: values.astype(np.int64) for name, values in columns.items() if name != "seconds"}
    return StepRecords(seconds=log.step("seconds")[late] * noise, **columns)


def test_true_prices_predict_to_within_the_noise(engine_log):
    found = predict(engine_log, TRUTH)
    assert abs(found.error) < 0.01
    assert 0.02 < found.step_error_median < 0.05


def test_fitted_prices_predict_steps_they_have_not_seen(engine_log):
    found = cross_validate(engine_log)
    assert abs(found.error) < 0.02
    assert found.step_error_median < 0.06
    assert found.steps == len(engine_log)


def test_the_fit_finds_the_prices_of_a_run_without_noise():
    rng = np.random.default_rng(1)
    n = 400
    requests, rows = rng.integers(1, 64, n), rng.integers(0, 200, n)
    drafted_for = np.where(rng.random(n) < 0.5, rng.integers(1, 64, n), 0)
    drafted = drafted_for * rng.integers(1, 5, n)
    context = rng.integers(100, 50_000, n)
    cost = AdditiveCost(
        0.02, (0, 64), (0.0, 0.016), (0, 512), (0.0, 0.5), DraftCost(0.005, 0.0002, 0.0001), ContextCost(1e-6)
    )
    query = requests + rows
    seconds = cost.step_seconds(requests, query, context) + cost.draft_seconds(drafted_for, drafted)
    records = StepRecords(seconds, requests, query, context, drafted_for, drafted, np.zeros(n, int), requests)
    assert predict(records, fit_cost(records)).step_error_p90 < 1e-3


@pytest.mark.parametrize("users", [1, 8])
def test_the_fit_finds_mean_prices_whatever_the_scatter(users):
    """Times with a coefficient of variation of 0.4, a prompt of 40 tokens in every 64th step of a user, and a curve of
    rows that no convex one fits."""
    rng = np.random.default_rng(2)
    n = 2000
    prompts = rng.binomial(users, 1 / 64, n)
    query, context = users + 39 * prompts, rng.integers(40 * users, 104 * users, n)
    mean = 4e-3 + 1e-3 * np.minimum(query, 24) + 5e-4 * np.maximum(query - 24, 0)
    spread = np.sqrt(np.log1p(0.4**2))
    seconds = mean * rng.lognormal(-(spread**2) / 2, spread, n)
    constant, none = np.full(n, users), np.zeros(n, dtype=np.int64)
    records = StepRecords(seconds, constant, query, context, none, none, none, constant)
    cost = fit_cost(records)
    assert abs(predict(records, cost).error) < 1e-4
    assert abs(cross_validate(records).error) < 0.04
    decoding = replace(records, seconds=mean)[prompts == 0]
    assert abs(predict(decoding, cost).error) < 0.04, (
        "prompts are many rows, and do not move the price of a round"
    )


def test_scatter_is_told_of_steps_that_hold_the_same():
    """20 steps of 1, 1, 1, 5 seconds, 12 of 10, 10, 10, 50 with other rows, and 3 of a third kind that are too few."""
    seconds = np.array([1.0, 1, 1, 5] * 5 + [10.0, 10, 10, 50] * 3 + [7.0, 8, 90])
    rows = np.array([1] * 20 + [2] * 12 + [3] * 3)
    one, none = np.ones(35, dtype=np.int64), np.zeros(35, dtype=np.int64)
    records = StepRecords(seconds, one, rows, one, none, none, none, one)
    found = scatter(records)
    assert found.mean_over_median == pytest.approx((40 + 240) / (20 + 120))
    assert found.share == pytest.approx(280 / 385)
    assert scatter(replace(records, drafted=np.arange(35))) is None, "no two steps have as many drafts"


def test_wrong_prices_are_found_out(engine_log):
    wrong = TableCost((1, 64), (0.1, 0.11))
    assert predict(engine_log, wrong).step_error_median > 0.2


def test_a_whole_run_is_predicted(engine_log):
    found = validate_run(engine_log, scenario(fit_cost(engine_log)), lambda: FixedLength(4), (0, 1), 0.1)
    assert found.within
    assert abs(found.error) < 0.06
    assert found.slowest < found.simulated_tokens_per_s.mean < found.fastest


def test_a_drafter_that_is_worse_than_assumed_is_found_out(engine_log):
    found = validate_run(engine_log, scenario(alpha=0.95), lambda: FixedLength(4), (0, 1), 0.1)
    assert not found.within
    assert found.error > 0.1


@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_a_run_is_held_to_the_phase_that_was_recorded(warmup):
    """Sixty steps of a run, from its start or from the first second on, with the prompts that they hold."""
    mix = Mix.parse("any", Lengths.parse("50"), Lengths.parse("40"))
    acceptance = SyntheticAcceptance({"any": Domain((0.7,) * 4)})
    real = Scenario(
        traffic=ClosedLoop(12, mix), acceptance=acceptance, cost=TRUTH, warmup_s=warmup, duration_s=30
    )
    log = run(real, FixedLength(4), seed=3)
    first = int(np.searchsorted(log.step("start"), warmup))
    names = [f.name for f in fields(StepRecords)]
    columns = {name: log.step(name)[first : first + 60] for name in names}
    records = StepRecords(**columns)
    found = validate_run(records, real, lambda: FixedLength(4), (3,))
    assert found.error == pytest.approx(0, abs=1e-9)
    later = validate_run(records, replace(real, warmup_s=warmup + 1), lambda: FixedLength(4), (3,))
    assert abs(later.error) > 1e-3, "another phase, another speed"


def test_a_simulation_without_a_step_is_refused(engine_log):
    mix = Mix.parse("any", Lengths.parse("50"), Lengths.parse("40"))
    idle = replace(scenario(), traffic=OpenLoop(Poisson(1e-9), mix))
    with pytest.raises(DSparkError, match="raise the load"):
        validate_run(engine_log[:20], idle, lambda: FixedLength(4), (0,))


def test_records_survive_a_file(engine_log, tmp_path):
    write_steps(engine_log[:20], tmp_path / "steps.jsonl")
    back = read_steps(tmp_path / "steps.jsonl")
    for field in fields(StepRecords):
        np.testing.assert_array_equal(getattr(back, field.name), getattr(engine_log[:20], field.name))


def test_records_that_are_none(engine_log, tmp_path):
    (tmp_path / "steps.jsonl").write_text('{"seconds": 1.0}\n')
    with pytest.raises(DSparkError, match="'requests' is missing"):
        read_steps(tmp_path / "steps.jsonl")
    with pytest.raises(DSparkError, match="cannot read"):
        read_steps(tmp_path / "none.jsonl")
    with pytest.raises(DSparkError, match="took no time"):
        replace(engine_log, seconds=0 * engine_log.seconds)
    with pytest.raises(DSparkError, match="too few"):
        cross_validate(engine_log[:5])

    class Idle:
        has_unfinished = False

    with pytest.raises(DSparkError, match="as its policy"):
        record_steps(Idle(), None)


class Loop:
    """An engine whose requests take as many steps as they say, all side by side."""

    def __init__(self, recorder):
        self.recorder, self.left, self.sizes = recorder, [], []

    @property
    def has_unfinished(self):
        return bool(self.left)

    def step(self):
        n = len(self.left)
        self.sizes.append(n)
        state = ScheduleState(np.arange(n), np.zeros(n, dtype=np.int64), np.full(n, 5))
        none = np.zeros(n, dtype=np.int64)
        self.recorder.observe(state, None, none, none, none)
        self.left = [steps - 1 for steps in self.left]
        ended, self.left = self.left.count(0), [steps for steps in self.left if steps]
        return [StepEvent("r", [1], [], "", object() if i < ended else None) for i in range(n)]


def test_a_closed_loop_is_recorded_while_everybody_has_requests():
    recorder = StepRecorder(FixedLength(0))
    engine = Loop(recorder)
    requests = [lambda steps=steps: engine.left.append(steps) for steps in (3, 5, 2, 4)]
    records = record_closed_loop(engine, recorder, requests, users=2, clock=iter(range(100)).__next__)
    assert engine.sizes[:5] == [2] * 5
    assert len(records) == 5, "in the fifth step two requests end, and one of the two users has no other"
    assert (records.requests == 2).all()
    assert records.seconds.tolist() == [1.0] * 5
