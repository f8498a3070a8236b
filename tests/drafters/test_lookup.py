"""Prompt lookup in front of a trained drafter: who drafts, what it says of its drafts, and that it changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.acceptance import ratio_rule
from dspark.core import DSparkError, Request, SamplingParams
from dspark.drafters.base import ProposeBatch
from dspark.drafters.lookup import LookupFirst
from dspark.drafters.registry import build_drafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.kv import KVPool
from dspark.sampling import SamplingRows
from dspark.schedule.auto import AutoScheduler
from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.policies import FixedLength, LaggedScheduler, PrefixScheduler, ScheduleState
from dspark.testing import run_engine, tiny_decoder, tiny_drafter

REPEATS = [5, 6, 7, 8, 9, 5, 6, 7]  # the last three stood there before: 8, 9, 5, ... follow
FRESH = [1, 2, 3, 4, 10, 11]


@pytest.fixture(scope="module")
def target():
    return tiny_decoder(dtype=torch.float32)


def request(tokens, uid=0, temperature=0.0):
    params = SamplingParams(temperature=temperature)
    r = Request(uid, f"r{uid}", list(tokens), params, seed=3, max_total=200)
    r.cached = len(tokens) - 1
    return r


def propose(drafter, requests, lengths):
    pool = KVPool(drafter.kv_specs, 8 * len(requests))
    for memory in (*pool.k, *pool.v):
        memory.zero_()  # nothing was observed: the context would be whatever lay there
    drafter.attach(pool, 0)
    tables = np.arange(8 * len(requests)).reshape(len(requests), 8)
    rows = SamplingRows.of(requests)
    return drafter.propose(ProposeBatch(requests, np.array(lengths), rows, tables, [None] * len(requests)))


def lookup(target, **options):
    return LookupFirst(tiny_drafter(target), **({"model_tokens": 3, "lookup_tokens": 6} | options))


def test_copies_where_tokens_repeat_and_drafts_elsewhere(target):
    draft = propose(lookup(target), [request(REPEATS), request(FRESH, 1)], [7, 7])
    alone = propose(tiny_drafter(target), [request(FRESH, 1)], [3])
    assert draft.lengths.tolist() == [4, 3], "three matched tokens copy four; the model drafts its own three"
    assert draft.tokens[0, :4].tolist() == [8, 9, 5, 6]
    assert draft.tokens[1, :3].tolist() == alone.tokens[0].tolist()
    assert draft.confidence.shape == draft.tokens.shape
    torch.testing.assert_close(draft.confidence[1, :3], alone.confidence[0])


@pytest.mark.parametrize(("lengths", "expected"), [([2, 0], [2, 0]), ([0, 2], [0, 2]), ([0, 0], [0, 0])])
def test_never_more_than_asked_for(target, lengths, expected):
    assert (
        propose(lookup(target), [request(REPEATS), request(FRESH, 1)], lengths).lengths.tolist() == expected
    )


def test_copies_alone_are_one_hot_without_probabilities(target):
    draft = propose(lookup(target), [request(REPEATS, temperature=1.0)], [7])
    assert draft.probs is None
    assert draft.one_hot is None


def test_sampled_rows_say_which_of_them_are_copies(target):
    draft = propose(
        lookup(target),
        [request(REPEATS, 0, 1.0), request(FRESH, 1, 1.0), request(REPEATS, 2, 1.0)],
        [7, 7, 0],
    )
    assert draft.one_hot.tolist() == [True, False, False]
    assert draft.probs.shape[:2] == draft.tokens.shape
    assert draft.probs[1, :3].sum(-1).allclose(torch.ones(3))


def test_confidence_learns_how_copies_fare(target):
    drafter, r = lookup(target), request(REPEATS)
    before = propose(drafter, [r], [7]).confidence[0, 0]
    r.token_ids += [8, 9, 5, 6]  # as copied
    r.cached = len(r.token_ids) - 1
    better = propose(drafter, [r], [7]).confidence[0, 0]
    r.token_ids += [20]  # not what followed
    r.cached = len(r.token_ids) - 1
    propose(drafter, [r], [7])
    assert before == 0
    assert better > before
    assert drafter._rates[False].rejected == 2


def test_a_mixed_batch_accepts_each_row_by_its_own_kind():
    """Copies are certain proposals: accepted with p_t(x), replaced from p_t without x. Drawn ones by the ratio."""
    torch.manual_seed(0)
    count, p_t = 40_000, torch.tensor([0.5, 0.3, 0.2])
    q = torch.tensor([0.2, 0.2, 0.6])
    drawn = torch.multinomial(q, count, replacement=True)
    tokens = torch.cat((torch.full((count,), 2), drawn))[:, None]
    one_hot = torch.arange(2 * count) < count
    verdict = ratio_rule(
        tokens,
        torch.ones(2 * count, dtype=torch.int64),
        q.expand(2 * count, 1, 3),
        None,
        p_t.expand(4 * count, 3),
        torch.arange(2 * count) * 2,
        torch.rand(2 * count, 1),
        torch.rand(2 * count),
        one_hot,
    )
    first = torch.where(verdict.num_accepted > 0, tokens[:, 0], verdict.next_token)
    for part in (first[:count], first[count:]):
        share = torch.bincount(part, minlength=3) / count
        torch.testing.assert_close(share, p_t, atol=0.012, rtol=0)
    accepted = verdict.num_accepted.view(2, -1).float().mean(1)
    torch.testing.assert_close(accepted, torch.tensor([0.2, 0.6]), atol=0.012, rtol=0)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_greedy_text_is_that_of_plain_decoding(target, concurrency):
    prompts = [REPEATS, FRESH, [7, 7, 7, 7], list(range(20, 40)) * 2]
    few = {5: 50.0, 6: 50.0, 7: 50.0}  # of which a random model makes a text that repeats
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias=few)

    def texts(drafter, policy):
        engine = Engine(target, drafter, policy, config=EngineConfig(max_num_seqs=concurrency))
        return run_engine(engine, prompts, params)

    plain = texts(None, FixedLength(0))
    drafted = texts(lookup(target), FixedLength(6))
    assert [o.token_ids for o in plain] == [o.token_ids for o in drafted]
    assert sum(o.metrics.accepted for o in drafted) > 10, (
        "copies must have been accepted for this to say anything"
    )


def test_free_copies_do_not_wait_for_the_policy(target):
    """The policy has the model draft nothing; copies are made, verified and accepted all the same."""

    class Nothing(FixedLength):
        def draft_lengths(self, state):
            frees.append(state.free)
            return np.zeros_like(state.room)

    frees, few = [], {5: 50.0, 6: 50.0, 7: 50.0}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias=few)
    drafter = lookup(target)
    drafter.drafter.propose = failing_with_lengths(drafter.drafter.propose)
    (output,) = run_engine(Engine(target, drafter, Nothing(6)), [REPEATS], params)
    assert output.metrics.accepted > 5
    assert all((free <= 6).all() for free in frees)


def failing_with_lengths(propose):
    def checked(batch):
        assert not batch.lengths.any(), "the model was asked"
        return propose(batch)

    return checked


def test_free_copies_are_those_proposed(target):
    drafter = lookup(target)
    requests = [request(REPEATS), request(FRESH, 1)]
    assert drafter.free(requests, np.array([7, 7])).tolist() == [4, 0]
    assert propose(drafter, requests, [0, 0]).lengths.tolist() == [4, 0]
    assert drafter.free(requests, np.array([2, 7])).tolist() == [2, 0]
    assert propose(drafter, requests, [7, 2]).lengths.tolist() == [2, 2], "the room decides, not the policy"


@pytest.mark.parametrize("policy", [PrefixScheduler, LaggedScheduler, AutoScheduler])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_priced_policies_with_copies_keep_the_text(target, policy, temperature):
    """Shared noise: one text a seed, whatever drafts. A model too dear to draft, and a cheap one."""
    few = {5: 50.0, 6: 50.0, 7: 50.0}
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, logit_bias=few, seed=4)
    config = EngineConfig(max_num_seqs=2, acceptance="shared_noise")
    prompts = [REPEATS, FRESH, [7, 7, 7, 7]]
    plain = run_engine(Engine(target, config=config), prompts, params)
    for price in (0.01, 50.0):
        cost = TableCost((1, 8, 64), (1.0, 1.2, 3.0), draft=DraftCost(price))
        outputs = run_engine(Engine(target, lookup(target), policy(6, cost), None, config), prompts, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        assert sum(o.metrics.accepted for o in outputs) > 10


def test_what_is_copied_is_no_verdict_on_the_model():
    """Copies are neither paid for, nor do they count for the acceptance of the model's drafts."""
    cost = TableCost((1, 8, 64), (1.0, 1.2, 3.0), draft=DraftCost(1.0))
    policy = PrefixScheduler(6, cost)
    state = ScheduleState(np.arange(2), np.array([6, 6]), np.array([9, 9]), free=np.array([4, 0]))
    want = policy.draft_lengths(state)
    assert want[0] == 0
    assert want[1] > 0
    drafted = np.array([4, want[1]])
    before = policy.aim.history.survival(np.array([0]))
    policy.observe(state, None, drafted, drafted, np.array([4, 0]))
    after = policy.aim.history.survival(np.array([0, 1]))
    assert (after[0] < before[0]).all(), "the model's draft failed; the copy's success is its own"
    alone = replace(state, free=np.array([4, 4]))
    for _ in range(100):
        assert not policy.draft_lengths(alone).any()
        policy.observe(alone, None, np.array([4, 4]), np.array([4, 4]), np.array([0, 0]))
    assert policy.aim.gate(2).on, "rounds of copies alone say nothing"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompt_lookup_num_tokens": -1}, "0 or more"),
        ({"prompt_lookup_min": 3}, "set that too"),
        ({"prompt_lookup_num_tokens": 4, "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "must lie between"),
    ],
)
def test_bad_keys_are_refused(keys, message):
    from dspark.target.load import load_target

    decoder = load_target("smollm2-135m").decoder
    with pytest.raises(DSparkError, match=message):
        build_drafter({"method": "dspark", **keys}, decoder)


def test_the_keys_of_a_configuration():
    from dspark.target.load import load_target

    decoder = load_target("smollm2-135m").decoder
    keys = {
        "method": "dspark",
        "num_speculative_tokens": 2,
        "prompt_lookup_num_tokens": 5,
        "prompt_lookup_min": 3,
    }
    drafter, policy = build_drafter(keys, decoder)
    assert isinstance(drafter, LookupFirst)
    assert (policy.length, drafter.model_tokens, drafter.lookup_tokens) == (5, 2, 5)
    drafter, policy = build_drafter({"method": "dspark", "prompt_lookup_num_tokens": 0}, decoder)
    assert not isinstance(drafter, LookupFirst)
