"""Distributions from logits: filters and penalties against slow references, sampling at its edges."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core import DSparkError, Request, SamplingParams
from dspark.randomness import Purpose, uniform
from dspark.sampling import (
    SamplingRows,
    log_probabilities,
    probabilities,
    sample,
    top_logprobs,
)
from dspark.shaping import LogitsShaper

NEVER = float("-inf")


def request(prompt: Sequence[int] = (0,), output: Sequence[int] = (), uid: int = 0, seed: int = 5, **params):
    return Request(
        uid=uid,
        request_id=str(uid),
        prompt_token_ids=list(prompt),
        params=SamplingParams(**params),
        seed=seed,
        max_total=10_000,
        token_ids=[*prompt, *output],
    )


def rows_of(*params: dict) -> SamplingRows:
    return SamplingRows.of([request(uid=i, **p) for i, p in enumerate(params)])


def slow_probabilities(logits: Sequence[float], p: SamplingParams) -> list[float]:
    """One row in plain Python: temperature, min-p, top-k, top-p; ties with the last one kept are kept."""
    V = len(logits)
    if p.temperature == 0:
        return [float(v == max(range(V), key=lambda w: logits[w])) for v in range(V)]
    t = float(np.float32(p.temperature))
    top = max(logits)
    weight = [math.exp((x - top) / t) for x in logits]  # relative to the most likely token
    kept = {v for v in range(V) if weight[v] >= p.min_p}
    if p.top_k > 0:
        kth = sorted((weight[v] for v in kept), reverse=True)[: p.top_k][-1]
        kept = {v for v in kept if weight[v] >= kth}
    if p.top_p < 1:
        total, mass = sum(weight[v] for v in kept), 0.0
        for v in sorted(kept, key=lambda v: -weight[v]):
            last, mass = weight[v], mass + weight[v]
            if mass >= p.top_p * total:
                break
        kept = {v for v in kept if weight[v] >= last}
    total = sum(weight[v] for v in kept)
    return [weight[v] / total if v in kept else 0.0 for v in range(V)]


FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 0},
    {"temperature": 0, "top_k": 2, "top_p": 0.1},
    {"top_k": 3},
    {"top_k": -1},
    {"top_k": 10_000},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.3, "top_p": 0.95, "min_p": 0.01},
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_filters_equal_the_slow_reference_in_one_mixed_batch(dtype):
    logits = torch.randn(len(FILTERS), 37, generator=torch.Generator().manual_seed(1), dtype=dtype) * 2
    p = probabilities(logits, rows_of(*FILTERS))
    assert p.dtype == dtype
    for row, x, params in zip(p, logits, FILTERS, strict=True):
        expected = torch.tensor(slow_probabilities(x.tolist(), SamplingParams(**params)), dtype=dtype)
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-9)
        assert ((row > 0) == (expected > 0)).all()


@pytest.mark.parametrize("params", FILTERS)
def test_a_row_does_not_depend_on_its_batch(params):
    """Host flags choose shortcuts (no filter, top-p within top-k, all greedy): results must not change."""
    logits = torch.randn(len(FILTERS), 50, generator=torch.Generator().manual_seed(2))
    mixed = probabilities(logits, rows_of(*FILTERS))[FILTERS.index(params)]
    alone = probabilities(logits[[FILTERS.index(params)]], rows_of(params))[0]
    assert torch.equal(mixed, alone)


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
def test_top_p_over_a_large_vocabulary(scale):
    """The nucleus is wider than the first candidates when logits are flat, narrower when they are steep."""
    logits = torch.randn(2, 9000, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * scale
    p = probabilities(logits, rows_of({"top_p": 0.9}, {"top_p": 0.31}))
    for row, x, top_p in zip(p, logits, (0.9, 0.31), strict=True):
        expected = slow_probabilities(x.tolist(), SamplingParams(top_p=top_p))
        torch.testing.assert_close(row, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_narrow_nucleus_next_to_a_row_without_top_p():
    """The few candidates that settle the first row must not cut the second."""
    logits = torch.linspace(0, 1, 2000).repeat(2, 1)
    logits[:, 7] = 20.0
    p = probabilities(logits, rows_of({"top_p": 0.5}, {}))
    assert (p > 0).sum(-1).tolist() == [1, 2000]


def test_order_is_min_p_then_top_k_then_top_p():
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    # top-p .75 of all keeps 3; behind min-p .5 (.4 and .3, with .2 just kept at .5 * .4 = .2 not) it keeps 2.
    assert (probabilities(p.log(), rows_of({"top_p": 0.75}))[0] > 0).sum() == 3
    assert (probabilities(p.log(), rows_of({"top_p": 0.75, "min_p": 0.6}))[0] > 0).sum() == 2
    # top-p .55 of the two left by top-k 2 (4/7 = .571) keeps one; of all four it would keep two.
    assert (probabilities(p.log(), rows_of({"top_p": 0.55}))[0] > 0).sum() == 2
    assert (probabilities(p.log(), rows_of({"top_p": 0.55, "top_k": 2}))[0] > 0).sum() == 1


logit_rows = st.lists(st.integers(-6, 6).map(float), min_size=2, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    logits=logit_rows,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.333, 0.5777, 0.9123, 1.0]),
    min_p=st.sampled_from([0.0, 0.021, 0.3, 1.0]),
)
def test_properties_of_a_filtered_row(logits, temperature, top_k, top_p, min_p):
    """Integer logits tie often. Rows sum to 1, keep the argmax, order and ties of the logits."""
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    x = torch.tensor([logits], dtype=torch.float64)
    p = probabilities(x, rows_of(params))[0]
    assert p.sum().item() == pytest.approx(1, abs=1e-12)
    assert p[x[0].argmax()] == p.max()
    expected = slow_probabilities(logits, SamplingParams(**params))
    torch.testing.assert_close(p, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    if temperature > 0:
        floor = x[0][p > 0].min()
        assert ((p > 0) == (x[0] >= floor)).all()  # a threshold on the value: ties share their fate
        if top_k:
            above = int((x[0] > floor).sum())
            assert above < top_k  # without the ties at the threshold, fewer than k are kept


def test_greedy_is_one_hot_at_the_first_maximum():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    assert probabilities(logits, rows_of({"temperature": 0}, {"temperature": 0})).tolist() == [
        [0, 1, 0],
        [1, 0, 0],
    ]
    assert probabilities(logits, rows_of({"temperature": 0}, {}))[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("params", FILTERS)
def test_a_row_without_any_token_becomes_one_hot_at_0(params):
    logits = torch.full((1, 6), NEVER)
    assert probabilities(logits, rows_of(params))[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert torch.isfinite(log_probabilities(logits, rows_of(params))[0, 0])


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e6, 1e300])
def test_extreme_temperatures_stay_finite(temperature):
    logits = torch.tensor([[5.0, 1e4, -1e4, NEVER]])
    p = probabilities(logits, rows_of({"temperature": temperature}))[0]
    assert torch.isfinite(p).all()
    assert p.sum().item() == pytest.approx(1)
    assert p[3] == 0
    assert p[1] == p.max()


def test_masked_tokens_stay_impossible_under_every_filter():
    logits = torch.tensor([[0.0, NEVER, 1.0, NEVER]]).repeat(len(FILTERS), 1)
    p = probabilities(logits, rows_of(*FILTERS))
    assert (p[:, [1, 3]] == 0).all()


def test_probabilities_leave_the_logits_alone():
    logits = torch.randn(len(FILTERS), 20)
    before = logits.clone()
    probabilities(logits, rows_of(*FILTERS))
    log_probabilities(logits, rows_of(*FILTERS))
    assert torch.equal(logits, before)


def test_low_precision_logits_give_float32():
    logits = torch.randn(2, 9).bfloat16()
    assert probabilities(logits, rows_of({}, {"temperature": 0})).dtype == torch.float32
    assert probabilities(logits, rows_of({"temperature": 0}, {"temperature": 0})).dtype == torch.float32


def test_rows_repeat_and_select_carry_parameters_and_flags():
    rows = rows_of({"temperature": 0}, {"top_k": 4, "top_p": 0.5}, {"min_p": 0.2})
    assert (rows.all_greedy, rows.any_greedy, rows.any_filter, rows.max_top_k) == (False, True, True, 4)
    repeated = rows.repeat(np.array([2, 0, 3]))
    assert repeated.uid.tolist() == [0, 0, 2, 2, 2]
    assert repeated.max_top_k == 0
    assert not repeated.any_top_p
    assert repeated.any_min_p
    assert rows.select([0]).all_greedy
    assert not rows.select([0]).any_filter
    assert rows.select([1]).top_p_within_top_k
    assert rows.select([]).all_greedy
    assert len(rows.select([2, 1])) == 2
    assert probabilities(torch.zeros(0, 4), rows.select([])).shape == (0, 4)


def test_rows_address_draws_by_seed_uid_and_round():
    first, second = request(uid=3, seed=9), request(uid=4, seed=9)
    second.round = 7
    u = SamplingRows.of([first, second]).uniform(torch.arange(3), Purpose.DRAFT)
    for row, r in zip(u, (first, second), strict=True):
        words = [torch.tensor(w) for w in (r.seed, r.uid, r.round)]
        assert torch.equal(row, uniform(*words, torch.arange(3), Purpose.DRAFT))


# --- sample


def test_sample_inverts_the_cdf():
    p = torch.tensor([0.2, 0.0, 0.5, 0.3]).repeat(5, 1)
    u = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71], dtype=torch.float64)
    assert sample(p, u).tolist() == [0, 0, 2, 2, 3]
    assert torch.equal(sample(p * 7, u), sample(p, u))  # the total need not be 1


@pytest.mark.parametrize("u", [0.0, 1.0 - 2**-53, 1.0])
def test_sample_never_picks_probability_zero(u):
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.3, 0.7], [0.1, 0.9, 0.0], [1e-30, 0.0, 0.0], [0.0, 3.3, 0.0]])
    tokens = sample(p, torch.full((5,), u, dtype=torch.float64))
    assert (p.gather(1, tokens[:, None]) > 0).all()


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-20, 0.1, 1 / 3, 1.0, 7.0]), min_size=1, max_size=8),
    u=st.floats(0, 1),
)
def test_sample_support(weights, u):
    if not any(weights):
        weights[0] = 1.0
    token = sample(torch.tensor([weights]), torch.tensor([u], dtype=torch.float64)).item()
    assert weights[token] > 0


def test_sample_frequencies():
    n, p = 200_000, torch.tensor([0.05, 0.0, 0.6, 0.1, 0.25])
    ids, zero = torch.arange(n), torch.tensor(0)
    tokens = sample(p.expand(n, -1), uniform(zero, ids, zero, zero, Purpose.DRAFT))
    seen = torch.bincount(tokens, minlength=5) / n
    sigma = (p * (1 - p) / n).sqrt()
    assert ((seen - p).abs() <= 4.5 * sigma).all()


# --- reported log-probabilities


def test_log_probabilities_follow_filters_unless_raw():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 2, dtype=torch.float64)
    rows = rows_of({"temperature": 0.5, "top_k": 2}, {"temperature": 0})
    got = log_probabilities(logits, rows)
    assert got[0].exp().tolist() == pytest.approx(
        slow_probabilities(logits[0].tolist(), request(temperature=0.5, top_k=2).params)
    )
    assert torch.equal(got[0] == NEVER, torch.tensor([False, False, True, True]))
    torch.testing.assert_close(got[1], logits[1].log_softmax(-1))  # greedy: temperature 1
    torch.testing.assert_close(log_probabilities(logits, rows, raw=True), logits.log_softmax(-1))


def test_top_logprobs_lists_the_possible_most_likely_first():
    log_p = torch.tensor([[0.1, 0.6, 0.3], [0.0, 1.0, 0.0]]).log()
    first, second = top_logprobs(log_p, [0, 1], 2)
    assert first.token_id == 0
    assert first.logprob == pytest.approx(math.log(0.1))
    assert list(first.top) == [1, 2]
    assert first.top[2] == pytest.approx(math.log(0.3))
    assert second.top == {1: 0.0}
    assert top_logprobs(log_p, [0, 1], 0)[0].top == {}


# --- LogitsShaper


def slow_shape(logits, r: Request, drafts: Sequence[int], eos: Sequence[int]) -> list[float]:
    """One row behind the committed tokens and `drafts`, in plain Python."""
    p, out = r.params, [*r.output_token_ids, *drafts]
    shaped = []
    for v, x in enumerate(logits):
        x += (p.logit_bias or {}).get(v, 0.0)
        if v in out or v in r.prompt_token_ids:
            x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
        x -= p.frequency_penalty * out.count(v) + p.presence_penalty * (v in out)
        ends = {*p.stop_token_ids, *(() if p.ignore_eos else eos)}
        shaped.append(NEVER if len(out) < p.min_tokens and v in ends else x)
    return shaped


SHAPERS = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.8},
    {"frequency_penalty": -0.4},
    {"logit_bias": {2: 5.0, 7: -100.0}},
    {"min_tokens": 5},
    {"min_tokens": 6, "ignore_eos": True, "stop_token_ids": (4,)},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {1: -2.0},
        "min_tokens": 7,
        "stop_token_ids": (3, 500),
    },
]
VOCAB, EOS = 10, (9, 8)


@pytest.mark.parametrize("params", SHAPERS)
@pytest.mark.parametrize("commits", [[], [[3]], [[2, 2, 5], [1]]])
def test_shape_equals_the_slow_reference(params, commits):
    r = request(prompt=(1, 6, 6), output=(2, 4), **params)
    shaper = LogitsShaper.for_request(r, VOCAB, EOS)
    assert shaper is not None
    for tokens in commits:
        shaper.commit(tokens)
        r.token_ids.extend(tokens)
    drafts = [5, 5, 2]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    expected = [slow_shape(x, r, drafts[:j], EOS) for j, x in enumerate(logits.tolist())]
    for j in range(4):
        draft_row = shaper.shape_draft(logits[j].clone(), None, drafts[:j])
        torch.testing.assert_close(draft_row, torch.tensor(expected[j], dtype=torch.float64))
        vocab = torch.tensor([9, 2, 5, 4])
        pruned = shaper.shape_draft(logits[j][vocab].clone(), vocab, drafts[:j])
        torch.testing.assert_close(pruned, draft_row[vocab])
    shaped = shaper.shape(logits, drafts)
    assert shaped is logits
    torch.testing.assert_close(shaped, torch.tensor(expected, dtype=torch.float64))


def test_shaping_drafts_leaves_no_trace():
    r = request(prompt=(1,), output=(2,), presence_penalty=1.0, min_tokens=3)
    shaper = LogitsShaper.for_request(r, VOCAB, EOS)
    assert shaper is not None
    logits = torch.zeros(1, VOCAB)
    before = shaper.shape(logits.clone()).clone()
    shaper.shape(torch.zeros(4, VOCAB), [3, 4, 5])
    shaper.shape_draft(torch.zeros(VOCAB), None, [6, 7])
    assert torch.equal(shaper.shape(logits.clone()), before)


def test_a_resumed_request_is_shaped_like_an_uninterrupted_one():
    params = {"frequency_penalty": 0.7, "repetition_penalty": 1.5, "min_tokens": 4}
    running = LogitsShaper.for_request(request(prompt=(1, 2), **params), VOCAB, EOS)
    resumed = LogitsShaper.for_request(request(prompt=(1, 2), output=(5, 5, 3), **params), VOCAB, EOS)
    assert running is not None
    assert resumed is not None
    running.commit([5, 5])
    running.commit([3])
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    assert torch.equal(running.shape(logits.clone(), [4]), resumed.shape(logits.clone(), [4]))


def test_no_shaper_where_nothing_would_change():
    assert (
        LogitsShaper.for_request(request(temperature=0.5, top_k=3, stop_token_ids=(1,)), VOCAB, EOS) is None
    )
    assert LogitsShaper.for_request(request(output=(1, 2), min_tokens=2), VOCAB, EOS) is None


def test_bias_beyond_the_vocabulary_is_refused():
    with pytest.raises(DSparkError, match="logit_bias names token 10"):
        LogitsShaper.for_request(request(logit_bias={10: 1.0}), VOCAB, EOS)


class Alternate:
    """A toy constraint: an even token must follow an odd one and the reverse; starts with even."""

    def __init__(self) -> None:
        self.history: list[int] = []

    def mask(self) -> torch.Tensor:
        want = 1 - self.history[-1] % 2 if self.history else 0
        return torch.arange(VOCAB) % 2 == want

    def advance(self, token_id: int) -> None:
        assert token_id % 2 == (1 - self.history[-1] % 2 if self.history else 0), (
            "advanced by a forbidden token"
        )
        self.history.append(token_id)

    def rollback(self, n: int) -> None:
        del self.history[len(self.history) - n :]


def allowed(logits: torch.Tensor) -> list[int]:
    return torch.nonzero(logits > NEVER)[:, 0].tolist()


def test_constraint_acts_per_slot_on_both_sides():
    constraint = Alternate()
    shaper = LogitsShaper.for_request(request(), VOCAB, EOS, constraint=constraint)
    assert shaper is not None
    even, odd = list(range(0, VOCAB, 2)), list(range(1, VOCAB, 2))
    shaped = shaper.shape(torch.zeros(4, VOCAB), [2, 3, 4])
    assert [allowed(row) for row in shaped] == [even, odd, even, odd]
    vocab = torch.tensor([5, 4, 7])
    assert allowed(shaper.shape_draft(torch.zeros(3), vocab, [])) == [1]
    assert allowed(shaper.shape_draft(torch.zeros(3), vocab, [2])) == [0, 2]
    assert constraint.history == []
    shaper.commit([2, 3, 8])
    assert constraint.history == [2, 3, 8]
    assert allowed(shaper.shape(torch.zeros(1, VOCAB))[0]) == odd


def test_constraint_gives_a_forbidden_draft_probability_zero():
    constraint = Alternate()
    shaper = LogitsShaper.for_request(request(), VOCAB, EOS, constraint=constraint)
    assert shaper is not None
    drafts = [2, 4, 5]  # 4 may not follow 2
    p = probabilities(shaper.shape(torch.zeros(4, VOCAB), drafts), rows_of({}).repeat([4]))
    assert p[0, 2] > 0
    assert p[1, 4] == 0
    assert constraint.history == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"logit_bias": {3: 1e39}},
        {"logit_bias": {3: -2e5}},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e9},
    ],
)
def test_what_float32_cannot_hold_is_refused(wrong):
    with pytest.raises(DSparkError, match=next(iter(wrong))):
        SamplingParams(**wrong)
