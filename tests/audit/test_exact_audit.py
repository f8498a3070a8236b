"""The exact audit: Appendix A, sound pairs over random worlds, and faults that must be caught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_policies import APPENDIX_A_SECONDS, RISING, STAIRS, LoopScheduler, make_live

from dspark.acceptance import ratio_rule
from dspark.audit import World, appendix_a, audit, overlap, random_world
from dspark.audit.builtin import APPENDIX_A_COST
from dspark.audit.exact import TOLERANCE, Exploration, ratio_outcomes
from dspark.core import DSparkError
from dspark.schedule.cost import TableCost
from dspark.schedule.policies import (
    Dependence,
    FixedLength,
    GlobalScheduler,
    LaggedScheduler,
    Policy,
    PrefixScheduler,
    ScheduleState,
    Threshold,
)

A, B = 0, 1


def shipped(gamma: int, prices: tuple[float, ...]) -> list[Policy]:
    cost = TableCost(tuple(range(1, len(prices))), prices[1:])
    return [
        FixedLength(gamma),
        Threshold(gamma, 0.5),
        Threshold(gamma, 0.6, on="confidence"),
        PrefixScheduler(gamma, cost),
        PrefixScheduler(gamma, cost, sizes=(2, 4, 6)),
        PrefixScheduler(gamma, cost, min_gain=0.1),
        LaggedScheduler(gamma, cost),
        LaggedScheduler(gamma, cost, ranks="previous"),
    ]


def one_request(p: list[float], q: list[float], gamma: int = 1, **changes) -> World:
    """Tables without memory, and the perfect confidence."""
    p_target, p_draft = np.array([p] * len(p)), np.array([[q] * len(q)] * gamma)
    return World(p_target, p_draft, overlap(p_target, p_draft), **changes)


# --- Appendix A -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [make_live(), GlobalScheduler(2, APPENDIX_A_COST)], ids=["loop", "shipped"])
def test_appendix_a_live(live):
    result = audit(appendix_a(), live)
    np.testing.assert_allclose(result.first_token, [0.85, 0.15], atol=1e-15)
    assert result.biased
    witness = result.witness
    assert (witness.cause, witness.requests, witness.rounds, witness.gamma) == ("schedule", (0,), 1, 2)
    np.testing.assert_allclose(witness.deviation.got, [0.85, 0.15])
    np.testing.assert_allclose(witness.deviation.expected, [0.7, 0.3])
    fork = witness.fork
    assert (fork.request, fork.slot) == (0, 1)
    assert (fork.verified.block[0][0], fork.dropped.block[0][0]) == (A, B)
    assert (fork.verified.lengths, fork.dropped.lengths) == ((2,), (0,))
    np.testing.assert_allclose([fork.verified.survival[0], fork.dropped.survival[0]], [[0.8, 0.72], [0.8, 0]])


@pytest.mark.parametrize("policy", shipped(2, APPENDIX_A_SECONDS), ids=lambda p: type(p).__name__)
def test_appendix_a_sound(policy):
    result = audit(appendix_a(), policy)
    np.testing.assert_allclose(result.first_token, [0.7, 0.3], atol=1e-15)
    assert not result.biased
    assert result.witness is None


def test_live_is_harmless_where_nothing_random_is_revealed():
    world = appendix_a(2)
    live = make_live()
    assert audit(world, live).biased
    greedy = replace(world, p_target=np.array([[1.0, 0.0], [0.0, 1.0]]))
    one_hot = replace(world, p_draft=np.array([[[1.0, 0.0], [0.0, 1.0]]] * 2))
    shared = replace(world, rule="shared-noise", seeds=(3, 4))
    for harmless in (greedy, one_hot, shared, replace(shared, seeds=(3, 3))):
        result = audit(harmless, live)
        assert result.schedules > 1, "the policy looked, and decided differently"
        assert result.max_tv < TOLERANCE


# --- sound pairs ----------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6), ties=st.booleans(), prices=st.sampled_from([RISING, STAIRS]), data=st.data()
)
def test_sound_pairs_two_requests_three_rounds(seed, ties, prices, data):
    """Two requests with equal seeds (fresh draws all the same), three rounds; outputs independent and exact."""
    policy = data.draw(st.sampled_from(shipped(2, prices)))
    result = audit(random_world(seed, 2, 2, 2, ties), policy)
    assert result.max_tv < TOLERANCE


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
    vocab_size=st.integers(2, 4),
    prices=st.sampled_from([RISING, STAIRS]),
)
def test_sound_pairs_with_filters(seed, ties, vocab_size, prices):
    """Target and drafter keep their own top tokens; rows of zeros on either side, longer blocks."""
    world = random_world(seed, vocab_size, 2, 1, ties)
    world = replace(
        world, p_target=keep_top(world.p_target, 2), p_draft=keep_top(world.p_draft, vocab_size - 1)
    )
    for policy in (*shipped(2, prices)[3:5], LoopScheduler(prices, lag=1), LoopScheduler(prices, lag=2)):
        assert audit(world, policy).max_tv < TOLERANCE


def keep_top(table: np.ndarray, k: int) -> np.ndarray:
    kept = np.where(table >= np.sort(table)[..., -k : table.shape[-1] - k + 1], table, 0)
    return kept / kept.sum(-1, keepdims=True)


def test_the_audit_reaches_different_schedules():
    """A test of the tests above: the sound policies are not all idle."""
    world = random_world(0)
    schedules = [audit(world, p, rounds=2).schedules for p in shipped(2, RISING)[3:]]
    assert min(schedules) >= 2


# --- faults ---------------------------------------------------------------------------------------------------


def test_a_tie_broken_the_wrong_way_is_caught():
    """c_2 = 1 behind A ties slots 1 and 2: with the later one first, request 1's B is dropped for it."""

    def confidence(tokens: tuple[int, ...], k: int) -> float:
        return 0.8 if k == 1 else (1.0 if tokens[1] == A else 0.25)

    world = replace(appendix_a(2), confidence=confidence)
    prices = (0.0, 1.0, 1.0, 1.1, 9.0, 9.0, 9.0)  # one draft pays
    right = LoopScheduler(prices, early_stop=True, dependence=Dependence.CAUSAL)
    assert audit(world, right).max_tv < TOLERANCE
    result = audit(world, replace(right, later_first=True))
    assert max(result.tv) > 0.01
    assert result.witness.cause == "schedule"
    assert len(result.witness.requests) == 2, "one request alone hides it"


def test_a_budget_from_the_current_round_is_caught():
    world = random_world(1)
    assert audit(world, LoopScheduler(STAIRS, lag=1)).max_tv < TOLERANCE
    world = appendix_a(2)
    for lag in (1, 2):
        assert audit(world, LoopScheduler(APPENDIX_A_SECONDS, lag=lag)).max_tv < TOLERANCE
    result = audit(world, LoopScheduler(APPENDIX_A_SECONDS, lag=0))
    assert result.biased
    assert result.witness.cause == "schedule"


def test_noise_reused_between_rounds_is_caught():
    """Draws keyed by position: last round's c_3 tells whether this round's x_1 is A. The law becomes .85, .15."""

    def confidence(tokens: tuple[int, ...], k: int) -> float:
        return (0.8, 0.9, float(tokens[2] == A) if k == 3 else 0.0)[k - 1]

    world = replace(appendix_a(1, gamma=3), confidence=confidence)
    lagged = LoopScheduler((0.0, 1.0, 2.0, 3.0, 3.0), lag=1)
    assert audit(world, lagged).max_tv < TOLERANCE
    result = audit(replace(world, noise="position"), lagged)
    second = result.laws[0].sum(axis=(0, 2))
    np.testing.assert_allclose(result.first_token, [0.7, 0.3], atol=1e-15)
    np.testing.assert_allclose(second, [0.85, 0.15], atol=1e-15)
    witness = result.witness
    assert (witness.cause, witness.rounds) == ("reused noise", 2)
    np.testing.assert_allclose(witness.deviation.got, [0.85, 0.15])
    assert {witness.fork.verified.block[0][0], witness.fork.dropped.block[0][0]} == {A, B}
    assert audit(replace(world, noise="position"), FixedLength(3)).max_tv < TOLERANCE


def test_noise_shared_by_requests_with_equal_seeds_is_caught():
    """Ranks by current survival: request 0's c_2 tells request 1's x_1, and takes its place in the budget."""

    def confidence(tokens: tuple[int, ...], k: int) -> float:
        return 0.8 if k == 1 else (1.0 if tokens[1] == A else 0.25)

    class TwoDrafts:
        dependence, uses_survival = Dependence.LAGGED, True

        def draft_lengths(self, state: ScheduleState) -> np.ndarray:
            return state.room

        def verify_lengths(self, state, survival, drafted):
            order = sorted(np.ndindex(*survival.shape), key=lambda c: (-survival[c], c[0], c[1]))[:2]
            return np.bincount([r for r, _ in order], minlength=len(survival))

    world = replace(appendix_a(2), confidence=confidence)
    assert audit(world, TwoDrafts()).max_tv < TOLERANCE
    result = audit(replace(world, noise="seed"), TwoDrafts())
    assert result.tv[1] > 0.01
    assert result.witness.cause in ("reused noise", "joint")
    apart = replace(world, noise="seed", seeds=(1, 2))
    assert audit(apart, TwoDrafts()).max_tv < TOLERANCE


def test_argmax_drafts_scored_with_a_softmax_are_caught():
    world = one_request([0.5, 0.3, 0.2], [0.0, 1.0, 0.0], p_ratio=np.array([[[0.3, 0.4, 0.3]] * 3]))
    result = audit(world, FixedLength(1))
    np.testing.assert_allclose(result.first_token, [0.25, 0.75, 0], atol=1e-15)
    assert result.witness.cause == "acceptance"
    assert audit(replace(world, p_ratio=None), FixedLength(1)).max_tv < TOLERANCE


def test_filtered_drafts_divided_by_the_unfiltered_are_caught():
    world = one_request([0.6, 0.4, 0.0], [0.5, 0.5, 0.0], p_ratio=np.array([[[0.4, 0.4, 0.2]] * 3]))
    result = audit(world, FixedLength(1))
    assert result.biased
    assert result.witness.cause == "acceptance"
    assert audit(replace(world, p_ratio=None), FixedLength(1)).max_tv < TOLERANCE


def test_a_confidence_that_reads_its_own_token_is_caught():
    def confidence(tokens: tuple[int, ...], k: int) -> float:
        return 0.9 if tokens[k] == A else 0.1

    world = replace(appendix_a(), confidence=confidence)
    assert audit(world, Threshold(2, 0.5)).biased
    assert not audit(appendix_a(), Threshold(2, 0.5)).biased


def test_requests_that_decide_about_each_other_in_a_circle():
    """Each law by itself is right; the two outputs are not independent."""

    class Circle:
        dependence, uses_survival = Dependence.LIVE, True

        def draft_lengths(self, state: ScheduleState) -> np.ndarray:
            return state.room

        def verify_lengths(self, state, survival, drafted):
            lengths = (survival[::-1, -1] > 0.5).astype(int)
            return lengths if len(lengths) == 2 else drafted

    world = replace(appendix_a(2), p_target=np.array([[0.7, 0.3], [0.7, 0.3]]))
    world = replace(world, p_draft=np.array([[[0.9, 0.1]] * 2] * 2))
    result = audit(world, Circle())
    assert max(result.tv) < TOLERANCE
    assert result.joint_tv > 1e-3
    assert result.witness.cause == "joint"


# --- formulas and machinery -----------------------------------------------------------------------------------


def test_outcomes_agree_with_the_ratio_rule():
    trials, gamma, V = 200_000, 2, 3
    world = random_world(5, V, gamma, 1)
    drafts = (1, 2)
    rng = np.random.default_rng(0)
    path = [0, *drafts]
    p = torch.from_numpy(world.p_target[path])  # rows behind the anchor and each draft
    q = torch.from_numpy(np.stack([world.p_draft[k, path[k]] for k in range(gamma)]))
    verdict = ratio_rule(
        torch.tensor([drafts]).repeat(trials, 1),
        torch.full((trials,), gamma),
        q.repeat(trials, 1, 1),
        None,
        p.repeat(trials, 1),
        torch.arange(trials) * (gamma + 1),
        torch.from_numpy(rng.random((trials, gamma))),
        torch.from_numpy(rng.random(trials)),
    )
    seen = np.zeros((gamma + 1, V))
    np.add.at(seen, (verdict.num_accepted.numpy(), verdict.next_token.numpy()), 1 / trials)
    exact = np.zeros((gamma + 1, V))
    for tokens, probability in ratio_outcomes(world.p_target, world.p_draft, 0, drafts):
        assert tokens[:-1] == drafts[: len(tokens) - 1]
        exact[len(tokens) - 1, tokens[-1]] += probability
    assert exact.sum() == pytest.approx(1, abs=1e-12)
    sigma = np.sqrt(exact * (1 - exact) / trials)
    assert (abs(seen - exact) <= 5 * sigma + 1e-9).all()


def test_what_a_policy_observes_matches_its_rounds():
    class Witnessing:
        dependence, uses_survival = Dependence.STATIC, False

        def __init__(self) -> None:
            self.rounds: list[tuple[int, int, int]] = []

        def draft_lengths(self, state: ScheduleState) -> np.ndarray:
            committed = sum(accepted + 1 for *_, accepted in self.rounds)
            assert state.context_lens.tolist() == [committed]
            return np.minimum(state.room, 1 + len(self.rounds) % 2)

        def verify_lengths(self, state, survival, drafted):
            assert survival is None
            return drafted

        def observe(self, state, survival, drafted, scheduled, accepted) -> None:
            assert 0 <= accepted[0] <= scheduled[0] <= drafted[0]
            self.rounds.append((int(drafted[0]), int(scheduled[0]), int(accepted[0])))

    policy = Witnessing()
    assert audit(random_world(3, 2, 2, 1), policy).max_tv < TOLERANCE
    assert policy.rounds == [], "the policy itself is not used"


def test_a_policy_is_asked_with_the_state_of_its_branch():
    class ByContext(FixedLength):
        def draft_lengths(self, state: ScheduleState) -> np.ndarray:
            return state.context_lens % 3

    exploration = Exploration(random_world(3, 2, 2, 1), ByContext(2), rounds=3)
    exploration.run()
    assert {b.lengths[0] for b in exploration.branches} == {0, 1, 2}
    assert all(b.lengths[0] == b.view.committed[0] % 3 for b in exploration.branches)


@pytest.mark.parametrize(
    ("answer", "message"),
    [([3], r"returned \[3\].*0 to \[2\]"), ([0, 0], "one length a request"), (None, "returned None")],
)
def test_impossible_lengths_are_refused(answer, message):
    class Wrong(FixedLength):
        def verify_lengths(self, state, survival, drafted):
            return answer

    with pytest.raises(
        DSparkError, match=f"verify_lengths of Wrong {message}" if "returned" in message else message
    ):
        audit(appendix_a(), Wrong(2))


def test_bad_worlds_are_refused():
    with pytest.raises(DSparkError, match="sum 1"):
        replace(appendix_a(), p_target=np.array([[0.7, 0.7], [0.5, 0.5]]))
    with pytest.raises(DSparkError, match="shape"):
        replace(appendix_a(), p_draft=np.full((2, 2, 3), 1 / 3))
    with pytest.raises(DSparkError, match="anchors"):
        replace(appendix_a(), anchors=(2,))
    with pytest.raises(DSparkError, match="2 or 3 tokens"):
        replace(random_world(0, 4), rule="shared-noise")
    with pytest.raises(DSparkError, match="at least one round"):
        audit(appendix_a(), FixedLength(1), rounds=0)
    with pytest.raises(DSparkError, match="more rounds"):
        audit(appendix_a(), FixedLength(1), rounds=2, tokens=3)
