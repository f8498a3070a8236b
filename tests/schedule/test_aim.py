"""How much is drafted: the history of acceptance, switching off where it does not pay, and coming back."""

import numpy as np
import pytest

from dspark.core import DSparkError
from dspark.schedule.aim import AimConfig, Realised
from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.feedback import LiveCost
from dspark.schedule.history import AcceptanceHistory, RequestTable
from dspark.schedule.policies import GlobalScheduler, LaggedScheduler, PrefixScheduler, ScheduleState
from dspark.schedule.search import rank

# A pass over 8 rows costs 1.7 of one row; a draft costs 0.4 of one.
COST = TableCost((1, 8, 64), (1.0, 1.7, 10.0), draft=DraftCost(0.35, 0.01, 0.006))


def state_of(uids, room=9):
    uids = np.atleast_1d(uids)
    return ScheduleState(uids, np.full(len(uids), room), np.full(len(uids), 50))


def simulate(policy, conditional, rounds, num_requests=1, confident=True, seed=0, drift=1.0):
    """Rounds against drafts whose slots are accepted with probability c, drawn around `conditional` each round.

    Confidences are c ** `drift`: below 1 they promise too much. Returns drafted lengths [rounds, R], and tokens
    per second over those of plain decoding.
    """
    rng, cost = np.random.default_rng(seed), policy.cost
    state, R = state_of(np.arange(num_requests)), num_requests
    drafts, tokens, seconds = [], 0.0, 0.0
    for _ in range(rounds):
        want = policy.draft_lengths(state)
        base = np.asarray(conditional(rng, R)) if callable(conditional) else np.asarray(conditional)
        c = np.broadcast_to(base, (R, policy.gamma))
        survival = (c**drift).cumprod(axis=1) if confident and want.any() else None
        lengths = policy.verify_lengths(state, survival, want)
        wins = (rng.random(c.shape) < c).cumprod(axis=1).sum(axis=1)
        accepted = np.minimum(wins, lengths)
        policy.observe(state, survival, want, lengths, accepted)
        drafts.append(want)
        tokens += R + accepted.sum()
        seconds += float(cost.step_seconds(R, R + lengths.sum(), 0))
        seconds += float(cost.draft_seconds(np.count_nonzero(want), want.sum()))
    return np.array(drafts), tokens / seconds * float(cost.step_seconds(R, R, 0)) / R


@pytest.mark.parametrize("confident", [True, False])
@pytest.mark.parametrize("scheduler", [PrefixScheduler, GlobalScheduler, LaggedScheduler])
def test_drafting_goes_off_where_it_does_not_pay(scheduler, confident):
    drafts, speed = simulate(scheduler(7, COST), 0.1, 2000, confident=confident)
    on = drafts[:, 0] > 0
    assert on[:8].all(), "it is tried first"
    assert on.mean() < 0.05
    assert np.diff(np.flatnonzero(on)).max() > 500, "less and less often"
    assert on[500:].any(), "but again and again"
    assert speed > 0.97


@pytest.mark.parametrize("confident", [True, False])
@pytest.mark.parametrize("scheduler", [PrefixScheduler, GlobalScheduler, LaggedScheduler])
def test_drafting_stays_on_where_it_pays(scheduler, confident):
    drafts, speed = simulate(scheduler(7, COST), 0.85, 600, confident=confident)
    assert (drafts[:, 0] > 0).mean() > 0.95
    everything = 4.6 / (1.7 + 0.4)
    assert speed > 0.85 * everything


@pytest.mark.parametrize("confident", [True, False])
def test_drafting_comes_back_when_the_text_turns(confident):
    policy = PrefixScheduler(7, COST)
    simulate(policy, 0.05, 900, confident=confident)
    assert not policy.aim.gate().on
    drafts, _ = simulate(policy, 0.9, 1500, confident=confident, seed=1)
    assert (drafts[-200:, 0] > 0).all()


@pytest.mark.parametrize("confident", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_modest_gain_is_not_given_up_by_chance(confident, seed):
    """Half of the first drafts are accepted: worth 12% with two or three drafts. Estimates over a few rounds scatter
    across the line; what is off teaches nothing, so going off by chance would last."""
    drafts, speed = simulate(PrefixScheduler(7, COST), 0.5, 800, confident=confident, seed=seed)
    assert (drafts[:, 0] > 0).mean() > 0.75
    assert speed > 1.06


@pytest.mark.parametrize("seed", range(3))
def test_a_modest_loss_stays_small(seed):
    """At .4 the best draft loses 3%: going on for a while in doubt must not cost more than that, trials apart."""
    assert simulate(PrefixScheduler(7, COST), 0.4, 1000, seed=seed)[1] > 0.965


def test_a_few_rounds_that_went_alike_prove_nothing():
    """Three rounds in a row without an accepted draft do not scatter, and yet say little."""
    alike, many = Realised(memory=0.995), Realised(memory=0.995)
    for rounds, realised in ((3, alike), (300, many)):
        for _ in range(rounds):
            realised.add(1.0, 1.5)
    assert alike.gain == pytest.approx(many.gain) == pytest.approx(1 / 1.5)
    assert alike.at_best(1.0) > 1
    assert many.at_best(1.0) < 0.75


def test_no_more_is_drafted_than_is_verified_now_and_then():
    """Confidences stop every block at the second slot; drafting all seven would cost 4% of a round for nothing."""
    policy = PrefixScheduler(7, TableCost((1, 8), (1.0, 2.4), draft=DraftCost(0.1, 0.0, 0.01)))
    drafts, _ = simulate(policy, [0.75, 0.75, 0, 0, 0, 0, 0], 300)
    assert drafts[-100:].max() <= 4


def test_trials_are_not_made_where_no_draft_could_pay():
    """Forty requests fill the machine: a pass costs by the row, so even certain drafts bring nothing."""
    cost = TableCost((1, 8, 64), (1.0, 8.0, 64.0), draft=DraftCost(0.1))
    drafts, speed = simulate(PrefixScheduler(7, cost), 0.9, 60, num_requests=40)
    assert not drafts.any()
    assert speed == pytest.approx(1.0)


def test_loads_are_judged_apart():
    """Drafting pays for one request and not for thirty-two; alternating, neither spoils the other's verdict."""
    cost = TableCost((1, 8, 32, 256), (1.0, 1.3, 2.0, 30.0), draft=DraftCost(0.2, 0.01, 0.002))
    policy = PrefixScheduler(7, cost)
    for i in range(20):
        alone, _ = simulate(policy, 0.8, 30, seed=i)
        crowd, speed = simulate(policy, 0.5, 30, num_requests=32, seed=i)
    assert (alone[:, 0] > 0).all()
    assert crowd.mean() < 0.2
    assert speed > 0.97


def test_realised_gain_and_its_error():
    realised = Realised(memory=0.999999)
    rng = np.random.default_rng(0)
    tokens, worth = rng.poisson(2.0, 4000) + 1.0, rng.uniform(1.5, 2.5, 4000)
    for t, w in zip(tokens, worth, strict=True):
        realised.add(t, w)
    assert realised.gain == pytest.approx(tokens.sum() / worth.sum(), rel=1e-3)
    resampled = rng.integers(4000, size=(300, 4000))
    spread = (tokens[resampled].sum(1) / worth[resampled].sum(1)).std()
    assert realised.error == pytest.approx(spread, rel=0.15)
    assert Realised(0.9).gain == Realised(0.9).error == 0.0


def test_overconfident_heads_are_found_out():
    """Confidences near .9 where .2 is accepted: verifying by them loses, so drafting stops."""
    drafts, speed = simulate(PrefixScheduler(7, COST), 0.2, 2000, drift=0.07)
    assert (drafts > 0).mean() < 0.05
    assert speed > 0.95


def test_good_moments_are_worth_waiting_for():
    """A quarter of the blocks is sure, the others hopeless. The mean block pays at no length (tau 2.5 at 3.1 times
    the price), but those that look good do, and what drafted rounds bring is seen."""
    cost = TableCost((1, 8), (1.0, 3.0), draft=DraftCost(0.1))

    def moments(rng, R):
        return np.where(rng.random((R, 1)) < 0.25, 0.97, 0.02) * np.ones((R, 7))

    policy = PrefixScheduler(7, cost)
    simulate(policy, moments, 300)
    drafts, speed = simulate(policy, moments, 700, seed=1)
    assert (drafts[:, 0] > 0).mean() > 0.6
    assert speed > 1.25


def test_a_busy_batch_drafts_only_for_those_who_gain():
    """Without confidences, at a load where rows cost time: the good requests draft, the poor ones do not."""
    good = np.arange(16) < 4

    def mixed(rng, R):
        return np.where(good[:, None], 0.95, 0.1) * np.ones((R, 7))

    cost = TableCost((1, 16, 64), (1.0, 1.5, 4.5), draft=DraftCost(0.08, 0.001, 0.001))
    policy = PrefixScheduler(7, cost)
    simulate(policy, mixed, 200, num_requests=16, confident=False)
    drafts, speed = simulate(policy, mixed, 200, num_requests=16, confident=False, seed=1)
    assert drafts[:, good].mean() > 2
    assert drafts[:, ~good].mean() < 0.3
    assert speed > 1.04


def test_prefilling_rounds_are_no_verdict():
    policy = PrefixScheduler(7, COST, aim=AimConfig(trial_rounds=2, retry_after=3))
    for _ in range(10):
        state = state_of([0], room=0)
        assert policy.draft_lengths(state).tolist() == [0]
        policy.observe(state, None, np.array([0]), np.array([0]), np.array([0]))
    assert policy.draft_lengths(state_of([0])).tolist() == [7]


def test_a_drafter_with_nothing_to_say_is_not_switched_off():
    policy = PrefixScheduler(7, COST)
    for _ in range(200):
        want = policy.draft_lengths(state_of([0]))
        assert want.tolist() == [7]
        policy.observe(state_of([0]), None, np.array([0]), np.array([0]), np.array([0]))


def test_retries_in_vain_become_rare():
    aim = AimConfig(trial_rounds=8, retry_after=16, retry_at_most=64, exploration=0.5)
    on = simulate(PrefixScheduler(7, COST, aim=aim), 0.0, 2400)[0][:, 0] > 0
    starts = np.flatnonzero(on & ~np.roll(on, 1))
    assert np.diff(starts).tolist()[:3] == sorted(np.diff(starts).tolist()[:3])
    assert set(np.diff(starts)[6:]) == {8 + 3 * 64}, (
        "8 rounds of trial, which nothing speaks for: three times the wait"
    )


def test_outcomes_give_conditional_acceptance():
    history = AcceptanceHistory(3, prior=0.5, weight=1e-9, decay=0.999999)
    uids, all_three = np.array([4, 9]), np.array([3, 3])
    for accepted in ([0, 3], [1, 3], [2, 3], [3, 3]):
        history.observe(uids, None, all_three, all_three, np.array(accepted))
    # Request 4: slot 1 passed 3 of 4, slot 2 passed 2 of 3, slot 3 passed 1 of 2.
    np.testing.assert_allclose(history.survival(uids), [[3 / 4, 1 / 2, 1 / 4], [1, 1, 1]], atol=1e-4)
    np.testing.assert_allclose(history.conditional(), [7 / 8, 6 / 7, 5 / 6], atol=1e-4)


def test_slots_that_were_not_scheduled_count_by_their_confidence():
    history = AcceptanceHistory(2, weight=1e-6, decay=0.9)
    for _ in range(3):
        survival, drafted = np.array([[0.8, 0.2]]), np.array([2])
        history.observe(np.array([1]), survival, drafted, np.array([0]), np.array([0]))
    np.testing.assert_allclose(history.survival(np.array([1])), [[0.8, 0.2]], atol=1e-4)
    history.observe(np.array([1]), survival, drafted, np.array([2]), np.array([0]))
    assert history.survival(np.array([1])).max() < 1e-3, "nothing of what was promised came"


@pytest.mark.parametrize("confident", [True, False])
def test_the_history_of_requests_that_come_and_go(confident):
    """Against the plain formula: every round in which anything was drafted fades everybody's counts."""
    history, rng, gamma = AcceptanceHistory(3, prior=0.5, weight=2.0, decay=0.9), np.random.default_rng(1), 3
    counts, everyone = {}, np.zeros((2, gamma))
    for _ in range(60):
        uids = np.sort(rng.choice(8, rng.integers(1, 5), replace=False))
        drafted = rng.integers(0, gamma + 1, len(uids))
        scheduled = rng.integers(0, drafted + 1)
        accepted = rng.integers(0, scheduled + 1)
        alive = rank(rng.random((len(uids), gamma)).cumprod(axis=1), drafted).alive
        history.observe(uids, alive if confident else None, drafted, scheduled, accepted)
        if drafted.any():
            counts, everyone = {uid: 0.9 * c for uid, c in counts.items()}, 0.9 * everyone
        for r, uid in enumerate(uids.tolist()):
            new = np.zeros((2, gamma))
            for k in range(drafted[r] if confident else scheduled[r]):
                reached = (alive[r, k - 1] if k else 1.0) if confident else accepted[r] >= k
                new[:, k] += reached, alive[r, k] if confident else accepted[r] > k
            counts[uid] = counts.get(uid, 0) + new
            everyone += new
    mean, conditional = 0.5, []
    for reached, passed in everyone.T:
        mean = (passed + 2 * mean) / (reached + 2)
        conditional.append(mean)
    np.testing.assert_allclose(history.conditional(), conditional)
    for uid, (reached, passed) in counts.items():
        expected = history.trust * ((passed + 2 * np.array(conditional)) / (reached + 2)).cumprod()
        np.testing.assert_allclose(history.survival(np.array([uid])), np.minimum([expected], 1))


def test_copies_are_no_part_of_the_history():
    """The first request has a copy in every round: its confidences and outcomes say nothing of the model's drafts."""
    policy, uids, room = LaggedScheduler(2, COST, sample=1), np.arange(2), np.full(2, 2)
    survival, unseen = np.array([[0.9, 0.9], [0.3, 0.1]]), AcceptanceHistory(2)
    for _ in range(6):
        state = ScheduleState(uids, room, np.full(2, 50), free=np.array([2, 0]))
        drafted = np.array([2, 2])
        scheduled = policy.verify_lengths(state, survival, drafted)
        policy.observe(state, survival, drafted, scheduled, np.minimum(scheduled, [2, 0]))
        alive = rank(survival[1:], drafted[1:]).alive
        unseen.observe(uids[1:], alive, drafted[1:], scheduled[1:], np.zeros(1, dtype=np.int64))
    np.testing.assert_allclose(policy.aim.history.survival(uids), unseen.survival(uids))


def test_new_requests_expect_the_mean():
    history = AcceptanceHistory(2, prior=0.6)
    np.testing.assert_allclose(history.survival(np.array([3])), [[0.6, 0.36]])
    for _ in range(200):
        history.observe(np.array([3]), None, np.array([1]), np.array([1]), np.array([1]))
    old, new = history.survival(np.array([3, 5]))
    assert 0.9 < new[0] < old[0] < 1
    assert new[1] == pytest.approx(new[0] ** 2, rel=1e-2), (
        "an unseen slot is taken to be like the one before it"
    )


def test_rows_belong_to_their_uid():
    table = RequestTable(np.array([-1.0]))
    for uid in (5, 2, 9, 2):
        at = use(table, [uid])
        table.values[at] = uid
    assert rows_of(table, [9, 3, 2, 5]) == [9, -1, 2, 5]
    for _ in range(1030):
        use(table, [2])
    use(table, [7])
    assert rows_of(table, [5, 2, 7]) == [-1, 2, -1]


def use(table, uids):
    at = table.begin_round(np.array(uids, dtype=np.int64))
    table.seen[at] = table.round
    return at


def rows_of(table, uids):
    at = table.find(np.array(uids, dtype=np.int64))
    return table.rows[at].ravel().tolist()


class LoopTable:
    """`RequestTable` as a dictionary."""

    def __init__(self, keep):
        self.keep, self.round, self.rows = keep, 0, {}

    def known(self, uid):
        return uid in self.rows and self.rows[uid][1] >= self.round - self.keep

    def add(self, uids, amounts):
        values = self.peek(uids)
        self.round += 1
        for uid, value, amount in zip(uids, values, amounts, strict=True):
            self.rows[uid] = (value + amount, self.round)

    def peek(self, uids):
        return [self.rows[uid][0] if self.known(uid) else 0.5 for uid in uids]


@pytest.mark.parametrize("orderly", [True, False])
def test_rows_of_requests_that_come_and_go(monkeypatch, orderly):
    """Against a dictionary: requests come in order of uid or not, go, are preempted and come back, soon or too late."""
    monkeypatch.setattr("dspark.schedule.history._KEEP", 12)
    table, reference, rng = RequestTable(np.array([0.5])), LoopTable(12), np.random.default_rng(0)
    running, away, names = [], [], iter(range(10_000) if orderly else rng.permutation(10_000).tolist())
    for _ in range(400):
        running = [uid for uid in running if rng.random() > 0.1]
        running += [next(names) for _ in range(rng.integers(0, 4))]
        if away and rng.random() < 0.3:
            running.insert(0, away.pop(0))
        if len(running) > 8 and rng.random() < 0.3:
            away.append(running.pop())
        amounts = rng.random(len(running))
        assert rows_of(table, running) == reference.peek(running)
        if running:
            at = use(table, running)
            table.values[at, 0] += amounts
            reference.add(running, amounts.tolist())
            assert rows_of(table, running) == reference.peek(running)
    assert len(table.values) < 200, "rows of those who are gone are dropped"


def test_settings_that_would_stay_off_for_ever_are_refused():
    for bad in (
        {"trial_rounds": 0},
        {"retry_after": 0},
        {"retry_after": 9, "retry_at_most": 8},
        {"hysteresis": -1},
        {"hope": 1.0},
        {"memory": 0.0},
        {"doubt": -1.0},
        {"pause_after": 0},
        {"pause_rounds": -1},
    ):
        with pytest.raises(DSparkError):
            AimConfig(**bad)
    for bad in ({"prior": 1.0}, {"prior": 0.0}, {"weight": 0.0}, {"decay": 1.0}):
        with pytest.raises(DSparkError):
            PrefixScheduler(3, COST, aim=AimConfig(**bad))


def test_a_trial_waits_for_a_round_without_prompts_but_not_for_ever():
    """What a draft costs does not show beside a prompt's rows."""
    prompt = ScheduleState(
        np.array([0, 1]), np.array([0, 9]), np.array([0, 50]), np.array([64, 1]), np.array([False, True])
    )
    policy = PrefixScheduler(7, COST)
    nothing = np.zeros(2, dtype=np.int64)
    for _ in range(20):
        assert policy.draft_lengths(prompt).tolist() == [0, 0]
        policy.observe(prompt, None, nothing, nothing, nothing)
    assert policy.draft_lengths(state_of([0, 1])).min() > 0
    policy = PrefixScheduler(7, COST)
    for _ in range(64):
        policy.draft_lengths(prompt)
        policy.observe(prompt, None, nothing, nothing, nothing)
    assert policy.draft_lengths(prompt)[1] > 0


def test_prompts_are_not_followed_for_a_trial_that_is_not_to_be():
    """Where known acceptance speaks against drafting, that is decided with the first prompts, not behind them."""
    prompts = ScheduleState(
        np.array([0, 1]), np.array([0, 0]), np.array([0, 50]), np.array([64, 9]), np.array([False, True])
    )
    nothing = np.zeros(2, dtype=np.int64)
    for known, rests in ((0.05, True), (0.9, False)):
        policy = PrefixScheduler(7, CHEAP, aim=AimConfig(acceptance=(known,) * 7))
        for _ in range(2):
            assert policy.draft_lengths(prompts).tolist() == [0, 0]
            later = policy.rests(2)
            policy.observe(prompts, None, nothing, nothing, nothing)
        assert (later > 0) == rests


# Of rows that cost little up to 16, and much beyond.
CHEAP = TableCost((1, 16, 64), (1.0, 1.2, 6.0), draft=DraftCost(0.35, 0.01, 0.006))


def test_many_requests_settle_a_trial_in_fewer_rounds():
    """Eight requests tell as much in a round as one in eight."""
    alone, _ = simulate(PrefixScheduler(7, CHEAP), 0.05, 60)
    eight, _ = simulate(PrefixScheduler(7, CHEAP), 0.05, 60, num_requests=8)
    assert (alone.max(axis=1) > 0).sum() >= 8
    assert 2 <= (eight.max(axis=1) > 0).sum() <= 5


def test_what_one_load_taught_spares_another_its_trial():
    """What would have to be accepted for a gain among 8 requests is far from what one request showed."""
    policy = PrefixScheduler(7, CHEAP)
    simulate(policy, 0.05, 400)
    assert policy.aim._rounds >= 24
    drafts, _ = simulate(policy, 0.05, 64, num_requests=8)
    assert not drafts.any()
    drafts, _ = simulate(policy, 0.05, 400, num_requests=8)
    assert drafts.any(), "after three times the wait it is tried all the same"
    fresh, _ = simulate(PrefixScheduler(7, CHEAP), 0.05, 64, num_requests=8)
    assert fresh.any()


def test_a_rest_is_told_only_where_drafting_pays_nowhere_lately():
    """A drafter that stops following can draft no more for the requests it left, at whatever load."""
    policy = PrefixScheduler(7, CHEAP)
    for _ in range(12):  # eight requests: drafting does not pay
        simulate(policy, 0.02, 40, num_requests=8)
    assert policy.rests(8) > 0
    simulate(policy, 0.9, 60)  # one: it does
    assert policy.rests(1) == 0
    simulate(policy, 0.02, 10, num_requests=8)
    assert policy.rests(8) == 0
    simulate(policy, 0.02, 400, num_requests=8)  # no longer met
    assert policy.rests(8) > 0


def test_where_no_draft_could_pay_nobody_follows():
    steep = TableCost((1, 8, 64), (10.0, 80.0, 640.0), draft=DraftCost(2.0, 0.1, 0.1))
    policy = PrefixScheduler(7, steep)
    state, rests = state_of(np.arange(40)), []
    nothing = np.zeros(40, dtype=np.int64)
    for _ in range(2000):
        assert not policy.draft_lengths(state).any()
        rests.append(policy.rests(40))
        policy.observe(state, None, nothing, nothing, nothing)
    assert np.mean(np.array(rests) > 0) > 0.9, "a trial that could not pay at best makes the wait longer, too"


def test_drafting_that_pays_pauses_where_prices_are_learned():
    """Behind the first trial, and then behind every `pause_after` drafted rounds; where nobody listens, never."""
    config = AimConfig(pause_after=20, pause_rounds=3)
    drafts, _ = simulate(PrefixScheduler(7, LiveCost(COST), aim=config), 0.65, 80)
    pauses = np.flatnonzero(drafts[:, 0] == 0)
    assert pauses.tolist() == [8, 9, 10, 31, 32, 33, 54, 55, 56, 77, 78, 79]
    drafts, _ = simulate(PrefixScheduler(7, LiveCost(COST), aim=config), 0.9, 80)
    pauses = np.flatnonzero(drafts[:, 0] == 0)
    assert pauses.tolist() == [8, 9, 10], "drafting that pays several times over has nothing to hear"
    for policy in (
        PrefixScheduler(7, COST, aim=config),
        PrefixScheduler(7, LiveCost(COST), aim=AimConfig(pause_rounds=0)),
    ):
        drafts, _ = simulate(policy, 0.65, 80)
        assert (drafts[:, 0] > 0).all()


def test_a_load_that_is_seldom_met_is_not_followed_for_at_others():
    """Drafting pays for two requests, and not for eight, which come in nineteen rounds of twenty or in one of two."""
    for rounds, followed in ((19, False), (1, True)):
        policy = PrefixScheduler(7, CHEAP)
        for _ in range(2400 // (rounds + 1)):
            simulate(policy, 0.9, 1, num_requests=2)
            simulate(policy, 0.05, rounds, num_requests=8)
        assert policy.aim.gate(2).on
        assert not policy.aim.gate(8).on
        policy.draft_lengths(state_of(np.arange(8)))
        assert (policy.rests(8) == 0) == followed


def test_a_draft_that_takes_longer_than_its_price_counts_as_lost():
    waits = []
    for late in (0.0, 5.0):
        policy = PrefixScheduler(7, LiveCost(CHEAP), aim=AimConfig(retry_at_most=4096))
        state = state_of([0])
        for _ in range(8):
            want = policy.draft_lengths(state)
            policy.observe(state, None, want, want, want - want)
            price = CHEAP.draft_price(1, int(want.sum()))
            policy.timed(state, want, want, price + late * (len(waits) > 0), 1.0)
        waits.append(policy.aim.gate(1)._patience)
    assert waits[1] > waits[0]


def test_a_pause_is_followed_but_a_rest_is_not():
    policy = PrefixScheduler(7, LiveCost(COST), aim=AimConfig(pause_after=20, pause_rounds=40))
    simulate(policy, 0.9, 9)
    assert policy.aim.gate(1).pausing
    assert policy.rests(1) == 0


def test_while_drafting_is_off_some_rounds_are_listened_to():
    policy = PrefixScheduler(7, LiveCost(COST), aim=AimConfig(pause_rounds=4, retry_after=1024))
    simulate(policy, 0.05, 60)
    gate, heard = policy.aim.gate(1), []
    assert not gate.on
    for _ in range(32):
        simulate(policy, 0.05, 1)
        heard.append(not gate.deaf)
    assert sum(heard) == 4


def test_known_acceptance_spares_a_trial_that_it_speaks_against():
    for known, tried in ((0.05, False), (0.9, True)):
        policy = PrefixScheduler(7, CHEAP, aim=AimConfig(acceptance=(known,) * 7))
        drafts, _ = simulate(policy, 0.9, 1000)
        assert drafts.any() == tried
    drafts, _ = simulate(PrefixScheduler(7, CHEAP, aim=AimConfig(acceptance=(0.05,) * 7)), 0.9, 4000)
    assert drafts.any(), "it is tried in the end all the same"
    with pytest.raises(DSparkError, match="known of 2 slots, drafts have 7"):
        PrefixScheduler(7, CHEAP, aim=AimConfig(acceptance=(0.5, 0.5)))


def test_a_first_trial_that_known_acceptance_speaks_against_waits_until_it_is_cheap():
    """Drafts at 0.25 bring 0.87 of plain decoding, those half way to hope 1.08: tried, but not at once."""
    cost = TableCost((1, 16, 64), (1.0, 1.2, 6.0), draft=DraftCost(0.5, 0.01, 0.006))
    known, unknown = (
        PrefixScheduler(7, cost, aim=AimConfig(acceptance=acceptance)) for acceptance in ((0.25,) * 7, ())
    )
    first = [int(np.flatnonzero(simulate(p, 0.25, 600)[0].any(axis=1))[0]) for p in (known, unknown)]
    assert first[1] == 0
    # Three times the 8 rounds of a trial lose about 0.15 each: 1% of some 350 rounds.
    assert 200 < first[0] < 500
    drafts, gain = simulate(PrefixScheduler(7, cost, aim=AimConfig(acceptance=(0.25,) * 7)), 0.9, 2000)
    assert drafts[-1].any(), "drafts that are better than they were are found out"
    assert gain > 1.3


def test_known_acceptance_is_what_history_starts_from():
    history = AcceptanceHistory(2, prior=0.6, known=(0.8, 0.5, 0.1))
    assert history.conditional() == pytest.approx([0.8, 0.5])
    history = AcceptanceHistory(2, prior=0.6)
    assert history.conditional() == pytest.approx([0.6, 0.6])


def test_asking_changes_nothing():
    """What a round teaches is filed once, however often its lengths were asked for."""
    policies = [PrefixScheduler(7, COST), PrefixScheduler(7, COST)]
    prompt = ScheduleState(
        np.array([0, 1]), np.array([0, 9]), np.array([0, 50]), np.array([64, 1]), np.array([False, True])
    )
    nothing = np.zeros(2, dtype=np.int64)
    for state in [prompt] * 70 + [state_of([0, 1])] * 10:
        asked = [
            [policy.draft_lengths(state).tolist() for _ in range(n)] for n, policy in enumerate(policies, 1)
        ]
        assert asked[1] == [asked[0][0]] * 2
        for policy, lengths in zip(policies, asked, strict=True):
            drafted = np.array(lengths[0])
            policy.observe(state, None, drafted, drafted, nothing)
