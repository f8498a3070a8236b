"""Where queueing theory and arithmetic know the answer, the simulation must give it."""

import numpy as np
import pytest

from dspark.core import DSparkError
from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.policies import FixedLength, PrefixScheduler
from dspark.simulate.acceptance import Domain, SyntheticAcceptance
from dspark.simulate.metrics import summarise
from dspark.simulate.server import Limits
from dspark.simulate.simulation import Scenario, run
from dspark.simulate.traffic import ClosedLoop, OpenLoop, Poisson
from dspark.simulate.workload import Lengths, Mix

STEP = 0.02
FLAT = TableCost((1, 2), (STEP, STEP))
RISING = TableCost((1, 101), (0.01, 0.11), draft=DraftCost(0.002))


def iid(alpha, gamma=5):
    return SyntheticAcceptance({"any": Domain((alpha,) * gamma)})


def closed(users, cost=FLAT, alpha=0.7, output=200, prompt=1, **changes):
    mix = Mix.parse("any", Lengths(prompt), Lengths.parse(str(output)))
    settings = {"warmup_s": 2.0, "duration_s": 8.0, **changes}
    return Scenario(traffic=ClosedLoop(users, mix), acceptance=iid(alpha), cost=cost, **settings)


@pytest.mark.parametrize("alpha", [0.3, 0.8])
@pytest.mark.parametrize("length", [1, 4])
def test_accepted_length_of_independent_drafts(alpha, length):
    scenario = closed(20, alpha=alpha)
    log = run(scenario, FixedLength(length), seed=1)
    rounds = log.step("decoding").sum()
    exact = (1 - alpha ** (length + 1)) / (1 - alpha)
    assert summarise(log, scenario).accepted_length == pytest.approx(exact, abs=5 * length / rounds**0.5)


@pytest.mark.parametrize("users", [1, 7, 50])
def test_plain_decoding_delivers_users_over_step_time(users):
    scenario = closed(users, cost=RISING, output=10**6)
    summary = summarise(run(scenario, FixedLength(0), seed=0), scenario)
    step = 0.01 + 0.001 * (users - 1)
    assert summary.tokens_per_s == pytest.approx(users / step, rel=2 * step / 8)
    assert summary.step_ms == pytest.approx(1e3 * step)
    assert summary.inter_token_ms_p50 == pytest.approx(1e3 * step, rel=1e-5)
    assert (summary.budget_per_round, summary.accepted_length, summary.plain_steps) == (0, 1, 1)


def test_a_step_costs_its_rows_its_drafts_and_the_overhead():
    scenario = closed(10, cost=RISING, alpha=1.0, output=10**6, overhead_s=0.5)
    log = run(scenario, FixedLength(3), seed=0)
    assert log.step("seconds")[5] == pytest.approx(0.01 + 0.001 * 39 + 0.002 + 0.5)
    assert summarise(log, scenario).accepted_length == 4


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_waiting_time_of_a_deterministic_server(load):
    """M/D/1 (Pollaczek and Khinchine): one seat, one token a request, so service takes exactly a step."""
    mix = Mix.parse("any", Lengths(1), Lengths(1))
    scenario = Scenario(
        traffic=OpenLoop(Poisson(load / STEP), mix),
        acceptance=iid(0.5),
        cost=FLAT,
        limits=Limits(max_num_seqs=1),
        warmup_s=5,
        duration_s=120,
    )
    log = run(scenario, FixedLength(0), seed=2)
    measured = (log.request("arrival") >= 5) & (log.request("arrival") < 125)
    wait = (log.request("first_token") - log.request("arrival"))[measured] - STEP
    assert wait.min() > -1e-9
    assert wait.mean() == pytest.approx(load * STEP / (2 * (1 - load)), rel=0.2)
    assert summarise(log, scenario).utilisation == pytest.approx(load, abs=0.03)


def test_the_queue_grows_where_more_comes_than_can_be_served():
    mix = Mix.parse("any", Lengths(1), Lengths(1))
    limits = Limits(max_num_seqs=1)
    scenario = Scenario(
        traffic=OpenLoop(Poisson(2 / STEP), mix),
        acceptance=iid(0.5),
        cost=FLAT,
        limits=limits,
        warmup_s=1,
        duration_s=8,
    )
    summary = summarise(run(scenario, FixedLength(0), seed=0), scenario)
    assert summary.utilisation == pytest.approx(1)
    assert summary.unserved > 0.03
    assert summary.ttft_s_p50 > 4


@pytest.mark.parametrize("known_end", [False, True])
def test_tokens_are_conserved(known_end):
    limits = Limits(max_num_seqs=16, max_num_batched_tokens=64, kv_cache_tokens=3000, known_end=known_end)
    mix = Mix.parse("any", Lengths.parse("geometric:60"), Lengths.parse("lognormal:40:1"))
    scenario = Scenario(
        traffic=OpenLoop(Poisson(3.0), mix),
        acceptance=iid(0.8),
        cost=RISING,
        limits=limits,
        warmup_s=0,
        duration_s=15,
        drain_s=100,
    )
    log = run(scenario, PrefixScheduler(5, RISING), seed=4)
    done = ~np.isnan(log.request("finish"))
    prompts = log.step("query_tokens").sum() + log.step("accepted").sum()
    assert done.sum() > 20
    served = log.request("output")[done].sum()
    # Requests that came behind the measured ones are still running; their tokens are delivered, too.
    running = log.step("tokens").sum() - served
    assert 0 <= running <= log.request("output")[~done].sum()
    assert log.deliveries[:, 2].sum() == log.step("tokens").sum()
    assert prompts >= log.request("prompt")[done].sum() + served - done.sum()
    assert (log.step("accepted") <= log.step("scheduled")).all()
    assert (log.step("scheduled") <= log.step("drafted")).all()
    assert log.step("wasted").sum() == 0 if known_end else log.step("wasted").sum() > 0
    np.testing.assert_allclose(log.step("start")[1:], np.maximum(
        log.step("start")[1:], (log.step("start") + log.step("seconds"))[:-1]
    ))  # fmt: skip


def test_a_seed_repeats_a_run_and_another_one_does_not():
    scenario = closed(5, cost=RISING, output="geometric:30", warmup_s=0.5, duration_s=2.0)
    first, again, other = (run(scenario, PrefixScheduler(5, RISING), seed=s) for s in (3, 3, 4))
    np.testing.assert_array_equal(first.steps, again.steps)
    np.testing.assert_array_equal(first.requests, again.requests)
    assert len(first.steps) != len(other.steps) or (first.steps != other.steps).any()


def test_policies_meet_the_same_requests():
    scenario = closed(5, cost=RISING, output="geometric:30", warmup_s=0.5, duration_s=2.0)
    logs = [run(scenario, policy, seed=3) for policy in (FixedLength(0), FixedLength(4))]
    n = min(len(log.requests) for log in logs)
    np.testing.assert_array_equal(logs[0].request("output")[:n], logs[1].request("output")[:n])


def test_a_policy_that_drafts_too_much_is_refused():
    class Greedy(FixedLength):
        def draft_lengths(self, state):
            return state.room + 1

    with pytest.raises(DSparkError, match="draft_lengths gave"):
        run(closed(2), Greedy(3), seed=0)


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(DSparkError, match="raise kv_cache_tokens"):
        run(closed(2, limits=Limits(kv_cache_tokens=64)), FixedLength(0), seed=0)


def test_policies_get_time_and_what_tolerates_a_look():
    seen = []

    class Curious(FixedLength):
        def timed(self, state, drafted, scheduled, draft_s, step_s):
            seen.append((state.may_look, draft_s, step_s))

    run(closed(10, cost=RISING, alpha=1.0, output=10**6, greedy=True), Curious(3), seed=0)
    assert seen[5] == (True, pytest.approx(0.002), pytest.approx(0.01 + 0.001 * 39))
