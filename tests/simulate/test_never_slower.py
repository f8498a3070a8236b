"""With speculation on, throughput is plain decoding's where speculation cannot win, and near the best fixed length's
where it can: over prices, acceptance, load and bursts, with prompts in between."""

import numpy as np
import pytest

from dspark.schedule.aim import AimConfig, DraftGate
from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.policies import PrefixScheduler, ScheduleState
from dspark.schedule.search import decoding_curve
from dspark.simulate.acceptance import Domain, SyntheticAcceptance
from dspark.simulate.metrics import summarise
from dspark.simulate.policies import policy_factory
from dspark.simulate.simulation import Scenario, run
from dspark.simulate.traffic import ClosedLoop, OnOff, OpenLoop
from dspark.simulate.workload import Lengths, Mix

GAMMA = 4
MIX = Mix.parse("any", Lengths(60, "geometric"), Lengths(60, "geometric"))
# A pass over one row, and what each further row adds: memory-bound at first, bound by arithmetic behind the corner.
CORNER = TableCost((1, 16, 256), (0.010, 0.012, 0.120), draft=DraftCost(0.001, 0.00001, 0.00001))
DEAR = TableCost((1, 16, 256), (0.010, 0.014, 0.130), draft=DraftCost(0.006, 0.0001, 0.00002))


def throughput(policy, cost, p, users, traffic=None, rounds=260):
    domain = Domain((p,) * GAMMA, slot_spread=1.0, request_spread=0.5, passage_spread=0.5)
    step = float(cost.step_seconds(users, users, 0))
    scenario = Scenario(
        traffic=traffic or ClosedLoop(users, MIX),
        acceptance=SyntheticAcceptance({"any": domain}),
        cost=cost,
        warmup_s=100 * step,
        duration_s=rounds * step,
        drain_s=0,
    )
    return summarise(run(scenario, policy_factory(policy, GAMMA, cost)(), 0), scenario).tokens_per_s


@pytest.mark.parametrize("policy", ["prefix", "auto"])
@pytest.mark.parametrize(
    ("cost", "p", "users"),
    [(CORNER, 0.3, 100), (CORNER, 0.7, 100), (DEAR, 0.3, 1), (DEAR, 0.3, 16), (DEAR, 0.6, 100)],
)
def test_where_speculation_cannot_win_nothing_is_lost(policy, cost, p, users):
    assert throughput(policy, cost, p, users) > 0.97 * throughput("plain", cost, p, users)


@pytest.mark.parametrize("policy", ["prefix", "auto"])
@pytest.mark.parametrize(("cost", "p", "users"), [(CORNER, 0.7, 1), (CORNER, 0.7, 4), (DEAR, 0.9, 4)])
def test_where_it_wins_it_is_near_the_best_length(policy, cost, p, users):
    lengths = [throughput(f"fixed:{k}", cost, p, users) for k in (1, 2, GAMMA)]
    assert max(lengths) > 1.1 * throughput("plain", cost, p, users), "or this says nothing"
    assert throughput(policy, cost, p, users) > 0.95 * max(lengths)


def test_bursts():
    """Up to some sixty requests at a time, then silence: each load has its own verdict."""
    traffic = OpenLoop(OnOff(9.0, 2.0, 2.0), MIX)
    plain = throughput("plain", CORNER, 0.3, 16, traffic, 800)
    assert throughput("auto", CORNER, 0.3, 16, traffic, 800) > 0.97 * plain


def test_a_prompt_in_the_batch_makes_no_draft_cheaper():
    """Eight decoding requests draft as much beside a prompt of 400 tokens as without it: price by the row."""
    cost = TableCost((1, 16, 1024), (0.010, 0.025, 1.033), draft=DraftCost(0.0005))  # 1 ms a row, and 9 ms
    wants = []
    for prompts in (0, 1):
        policy = PrefixScheduler(GAMMA, cost)
        eight, flags = np.arange(8 + prompts), np.arange(8 + prompts) < 8
        state = ScheduleState(
            eight,
            np.where(flags, GAMMA, 0),
            np.full(8 + prompts, 50),
            np.where(flags, 1, 400),
            flags,  # the prompt goes on in the next step
        )
        assert float(decoding_curve(state, cost, 3)[3]) == pytest.approx(float(cost.step_seconds(8, 11, 400)))
        for _ in range(10):
            want = policy.draft_lengths(state)
            survival = np.tile(0.7 ** np.arange(1.0, GAMMA + 1), (8 + prompts, 1))
            policy.observe(state, survival, want, want, np.minimum(want, 1))
        wants.append(policy.draft_lengths(state)[:8].tolist())
    assert wants[0] == wants[1]


def test_trials_in_vain_cost_less_than_their_share():
    """Trials that lose half a round for each round drafted: 1% in the long run, little more from the start on."""
    gate, lost, rounds = DraftGate(AimConfig()), 0.0, 40_000
    early = None
    for at in range(rounds):
        drafts = gate.passes(0.8)
        gate.observe(drafts, drafts, 0.5)
        lost += 0.5 * drafts
        early = lost if at == 4000 else early
    assert early < 0.02 * 4000
    assert lost - early < 0.01 * (rounds - 4000)


def test_the_longest_wait_for_a_trial_is_known():
    gate, off, longest = DraftGate(AimConfig()), 0, 0
    for _ in range(20_000):
        drafts = gate.passes(0.8)
        gate.observe(drafts, drafts, 1.5)
        off = 0 if drafts else off + 1
        longest = max(longest, off)
    assert longest <= max(1024, 8 * 1.5 / 0.01)
