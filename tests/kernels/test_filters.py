"""Compiled filters against PyTorch in float64: the same tokens kept, and what is kept adds up to 1."""

import numpy as np
import pytest
import torch

from dspark.core import Request, SamplingParams
from dspark.kernels import distributions
from dspark.sampling import SamplingRows, log_probabilities, probabilities

INF, NAN = float("inf"), float("nan")
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 2.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.99999},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_k": 700},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 0.1, "min_p": 0.05},
    {"temperature": 3.0, "min_p": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 1e-3},
    {"temperature": 1.5, "top_k": 300, "top_p": 0.8, "min_p": 1e-4},
]
SIZES = [
    16,
    32,
    272,
    4112,
    49152,
]  # one vector; less and more than a group of vectors; more than top-k bounds


def rows_of(*params: dict) -> SamplingRows:
    return SamplingRows.of([Request(i, "", [1], SamplingParams(**p), 3, 99) for i, p in enumerate(params)])


def random(size: int, seed: int = 0) -> torch.Tensor:
    """[len(PARAMS), size]"""
    return torch.randn(len(PARAMS), size, generator=torch.Generator().manual_seed(seed))


def same(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The compiled distribution, after a comparison with PyTorch's of the same numbers in float64."""
    assert distributions.fits(logits)
    assert not distributions.fits(logits.double())
    p, expected = probabilities(logits, rows), probabilities(logits.double(), rows)
    clear = (expected == 0) | (expected > 1e-36)  # a float32 is 0 soon below
    assert torch.equal((p > 0)[clear], (expected > 0)[clear])
    torch.testing.assert_close(p.double(), expected, rtol=2e-5, atol=1e-37)
    torch.testing.assert_close(p.sum(-1, dtype=torch.float64), torch.ones(len(p)).double(), rtol=0, atol=1e-6)
    return p


SHAPES = {
    "random": lambda x: 4 * x,
    "flat": lambda x: 0.01 * x,
    "equal": lambda x: 0 * x,  # 0 and -0
    "tied": lambda x: (3 * x).round(),
    "peaked": lambda x: x + 30 * torch.nn.functional.one_hot(torch.tensor(7), x.shape[1]),
    "masked": lambda x: x.masked_fill(x < 1.5, -INF).index_fill_(1, torch.tensor(3), 0.0),
    "one token": lambda x: torch.full_like(x, -INF).index_fill_(1, torch.tensor(11), -2.5),
    "nothing": lambda x: torch.full_like(x, -INF),
    "far": lambda x: 1e30 * x,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_tokens_kept_are_those_that_pytorch_keeps(shape, size):
    """One batch of rows that all differ in their parameters."""
    logits = SHAPES[shape](random(size))
    before = logits.clone()
    same(logits, rows_of(*PARAMS))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("seed", range(30))
def test_random_parameters(seed):
    numbers = np.random.default_rng(seed)
    params = [
        {
            "temperature": float(numbers.choice([0.1, 0.8, 1.0, 3.0])),
            "top_k": int(numbers.choice([0, numbers.integers(1, 2000)])),
            "top_p": float(numbers.choice([1.0, numbers.uniform(0.01, 0.999)])),
            "min_p": float(numbers.choice([0.0, 10 ** numbers.uniform(-6, 0)])),
        }
        for _ in PARAMS
    ]
    decimals = int(numbers.integers(0, 3))  # few, so that logits tie
    same((float(numbers.uniform(0.1, 6)) * random(1040, seed)).round(decimals=decimals), rows_of(*params))


def test_ties_with_the_last_token_kept_are_kept():
    logits = torch.full((3, 512), -1.0)
    logits[:, 500], logits[:, [3, 90, 401]] = 2.0, 1.0
    kept = same(logits, rows_of({"top_k": 2}, {"top_p": 0.05}, {"min_p": 0.3})) > 0
    tied = [3, 90, 401, 500]
    assert [row.nonzero()[:, 0].tolist() for row in kept] == [tied, tied, tied]


def test_broken_rows_stay_broken_and_harm_no_other():
    logits = random(1040)
    logits[2::3, 100], logits[1::3, 1039] = NAN, INF
    p = probabilities(logits, rows_of(*PARAMS))
    greedy = torch.arange(len(PARAMS)) == 0
    broken = ~logits.isfinite().all(-1) & ~greedy
    assert p[broken & torch.from_numpy(rows_of(*PARAMS).filtered)].isnan().all()
    assert p[broken].isnan().any(-1).all()
    whole = (~broken).nonzero()[:, 0]
    same(logits[whole], rows_of(*PARAMS).select(whole.numpy()))
    assert torch.equal(p[whole], probabilities(logits[whole], rows_of(*PARAMS).select(whole.numpy())))


def test_a_row_s_bits_do_not_depend_on_its_batch():
    logits = 2 * random(4112)
    together = probabilities(logits, rows_of(*PARAMS))
    for r, params in enumerate(PARAMS):
        assert torch.equal(together[r], probabilities(logits[r : r + 1].clone(), rows_of(params))[0])


def test_reported_log_probabilities_are_of_the_tokens_kept():
    logits, rows = 3 * random(1040), rows_of(*PARAMS)
    p, log_p = probabilities(logits, rows), log_probabilities(logits, rows)
    filtered = torch.from_numpy(rows.filtered)
    assert torch.equal(log_p[filtered] > -INF, p[filtered] > 0)
    assert (log_p[~filtered] > -INF).all()
    torch.testing.assert_close(log_p.exp()[~torch.from_numpy(rows.greedy)], p[1:], rtol=2e-5, atol=1e-9)
