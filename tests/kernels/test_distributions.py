"""Softmax and draws in one go, against PyTorch; what is broken stays broken, what is forbidden is never drawn."""

import numpy as np
import pytest
import torch

from dspark import randomness
from dspark.core import Request, SamplingParams
from dspark.kernels import distributions
from dspark.randomness import Purpose, uniform
from dspark.sampling import SamplingRows, probabilities, sample

INF = float("inf")


def logits_of(n, size, seed=0):
    return torch.randn(n, size, generator=torch.Generator().manual_seed(seed)) * 5


def unfiltered(temperature):
    """[n, 4] parameters of rows at these temperatures."""
    return np.array([(t, 0.0, 1.0, 0.0) for t in temperature])


@pytest.mark.parametrize("size", [16, 512, 520 * 16, 49152])
@pytest.mark.parametrize("temperature", [1e-30, 0.3, 1.0, 40.0, 1e30])
def test_softmax_is_softmax(size, temperature):
    logits = logits_of(3, size)
    logits[1, 1 : size // 2] = -INF
    logits[2] += 1e4
    p = distributions.probabilities(logits, unfiltered([temperature] * 3))
    top = logits.double() - logits.double().amax(-1, keepdim=True)
    expected = torch.softmax(top / temperature, -1)
    torch.testing.assert_close(p.double(), expected, rtol=2e-5, atol=1e-30)
    torch.testing.assert_close(
        p.sum(-1, dtype=torch.float64), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-6
    )
    assert (p[1, 1 : size // 2] == 0).all()


def test_a_row_does_not_depend_on_the_others():
    logits = logits_of(5, 1024)
    together = distributions.probabilities(logits, unfiltered(np.linspace(0.5, 1.5, 5)))
    for r in range(5):
        alone = distributions.probabilities(logits[r : r + 1].clone(), unfiltered([0.5 + 0.25 * r]))
        assert torch.equal(alone[0], together[r])


def test_a_greedy_row_is_one_hot_and_harms_no_other():
    logits = logits_of(4, 1024)
    logits[1, [700, 30]] = 99.0
    logits[2] = -INF
    p = distributions.probabilities(logits, unfiltered([0.7, 0.0, 0.0, 1.3]))
    for r, at in ((1, 30), (2, 0)):
        assert p[r].nonzero().tolist() == [[at]]
        assert p[r, at] == 1
    assert torch.equal(p[[0, 3]], distributions.probabilities(logits[[0, 3]], unfiltered([0.7, 1.3])))
    u = torch.tensor([0.0, 0.0, 0.5, 1.0], dtype=torch.float64)
    assert distributions.draw(p, u).tolist()[1:3] == [30, 0]


def test_broken_rows_stay_broken_and_harm_no_other():
    logits = logits_of(5, 64)
    logits[0, 9], logits[1, 9], logits[2], logits[3] = float("nan"), INF, -INF, float("nan")
    p = distributions.probabilities(logits, unfiltered([1.0] * 5))
    assert p[0].isnan().all()
    assert p[1].isnan().any()
    assert p[2].tolist() == [1.0] + [0.0] * 63
    assert p[3].isnan().all()
    torch.testing.assert_close(p[4], torch.softmax(logits[4], -1))


@pytest.mark.parametrize("size", [16, 512, 1040, 49152])
def test_draws_follow_the_cumulative_mass(size):
    p = torch.softmax(logits_of(1, size), -1)
    u = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cdf = p[0].cumsum(0, dtype=torch.float64)
    expected = torch.searchsorted(cdf, u * cdf[-1], right=True)
    drawn = distributions.draw(p.expand(500, -1).contiguous(), u)
    near = (cdf[None, :] - (u * cdf[-1])[:, None]).abs().amin(-1) < 1e-12  # sums differ in their last bits
    assert torch.equal(drawn[~near], expected[~near])
    assert near.sum() < 5


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_what_has_no_probability_is_never_drawn(u):
    p = torch.zeros(4, 1040)
    p[0, 700], p[1, 0], p[2, 1039] = 0.2, 3.0, 1e-38
    p[3, [3, 600, 1030]] = 0.1
    drawn = distributions.draw(p, torch.full((4,), u, dtype=torch.float64)).tolist()
    assert drawn[:3] == [700, 0, 1039]
    assert drawn[3] == (3 if u == 0.0 else 600 if u == 0.5 else 1030)


def test_who_uses_them_and_who_does_not():
    """Other sizes and dtypes go through PyTorch, with the same result."""

    def rows(**params):
        return SamplingRows.of([Request(0, "0", [1], SamplingParams(**params), 3, 9)])

    logits = logits_of(1, 1040)
    fast = probabilities(logits, rows(temperature=0.7))
    assert torch.equal(fast, distributions.probabilities(logits, unfiltered([0.7])))
    odd = torch.cat((logits, torch.full((1, 1), -INF)), 1)
    torch.testing.assert_close(probabilities(odd, rows(temperature=0.7))[:, :-1], fast, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(
        probabilities(logits.double(), rows(temperature=0.7)).float(), fast, rtol=1e-5, atol=1e-9
    )
    torch.testing.assert_close(
        probabilities(logits, rows(temperature=0.7, top_k=1040)), fast, rtol=1e-5, atol=1e-9
    )
    assert probabilities(logits, rows(temperature=0)).count_nonzero() == 1
    u = torch.tensor([0.31], dtype=torch.float64)
    assert sample(fast, u).tolist() == sample(torch.cat((fast, fast[:, :1] * 0), 1), u).tolist()


def test_uniforms_are_the_tensor_formula_bit_by_bit():
    """A CPU draws them in one compiled loop, other devices in tensor operations."""
    seed = torch.tensor([[0], [1], [2**63 - 1], [-(2**63)], [-7]])
    uid, rounds, slots = (
        torch.arange(5)[:, None],
        torch.tensor([[0], [9], [2**40], [3], [-1]]),
        torch.arange(6),
    )
    for purpose in Purpose:
        state = randomness._absorb(randomness._mix(seed + randomness._GAMMA), uid)
        state = randomness._absorb(state, rounds)
        state = randomness._absorb(state, slots * 4 + int(purpose))
        expected = randomness._shift_right(state, 11).to(torch.float64) * 2.0**-53
        assert torch.equal(uniform(seed, uid, rounds, slots, purpose), expected)
