"""Addressed uniforms: a pure function of the address, uniform, independent between neighbouring addresses."""

import numpy as np
import pytest
import torch

from dspark.randomness import Purpose, fresh_seed, uniform

N = 1 << 16


def draws(seed=0, uid=0, round=0, slot=0, purpose=Purpose.DRAFT):
    """One coordinate may be a tensor; the others are constants."""
    words = [torch.as_tensor(w, dtype=torch.int64) for w in (seed, uid, round, slot)]
    return uniform(*words, purpose).numpy()


def mix(x: int) -> int:
    """SplitMix64's finaliser in Python integers, the reference for the wrapped int64 arithmetic."""
    m = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & m
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & m
    return x ^ (x >> 31)


def reference(seed: int, uid: int, round: int, slot: int, purpose: int) -> float:
    gamma, m = 0x9E3779B97F4A7C15, 2**64 - 1
    state = mix((seed + gamma) & m)
    for word in (uid, round, slot * 4 + purpose):
        state = mix(((state ^ word) + gamma) & m)
    return (state >> 11) * 2.0**-53


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("address", [(0, 0, 0, 0), (1, 2, 3, 4), (2**63 - 1, 10**6, 10**9, 63)])
def test_equals_unbounded_integer_arithmetic(address, purpose):
    assert draws(*address, purpose) == reference(*address, int(purpose))


def test_range_dtype_and_broadcast_shape():
    ids = torch.arange(5)[:, None]
    u = uniform(ids, ids + 1, ids + 2, torch.arange(7), Purpose.ACCEPT)
    assert u.shape == (5, 7)
    assert u.dtype == torch.float64
    assert bool(((u >= 0) & (u < 1)).all())
    one = uniform(torch.tensor(3), torch.tensor(4), torch.tensor(5), torch.tensor(6), Purpose.ACCEPT)
    assert u[3, 6] == one


@pytest.mark.parametrize("coordinate", ["seed", "uid", "round", "slot"])
@pytest.mark.parametrize("base", [0, 2**40])
def test_uniform_along_each_coordinate(coordinate, base):
    u = draws(**{coordinate: torch.arange(N) + base})
    counts = np.histogram(u, bins=256, range=(0, 1))[0]
    chi2 = ((counts - N / 256) ** 2 / (N / 256)).sum()
    assert abs(chi2 - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("coordinate", ["seed", "uid", "round", "slot"])
@pytest.mark.parametrize("lag", [1, 2, 3, 64])
def test_neighbours_are_independent(coordinate, lag):
    ids = torch.arange(N)
    a, b = draws(**{coordinate: ids}), draws(**{coordinate: ids + lag})
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(N)
    cells = np.histogram2d(a, b, bins=16, range=[(0, 1), (0, 1)])[0]
    chi2 = ((cells - N / 256) ** 2 / (N / 256)).sum()
    assert abs(chi2 - 255) < 6 * np.sqrt(2 * 255)


def test_purposes_are_independent():
    ids = torch.arange(N)
    u = np.stack([draws(round=ids, purpose=p) for p in Purpose])
    off_diagonal = np.corrcoef(u)[np.triu_indices(len(Purpose), 1)]
    assert np.abs(off_diagonal).max() < 5 / np.sqrt(N)


def test_equal_seeds_with_different_uids_are_independent():
    rounds = torch.arange(N)
    for uid in (1, 2, 1000):
        a, b = draws(seed=7, uid=0, round=rounds), draws(seed=7, uid=uid, round=rounds)
        assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(N)


def test_coordinates_do_not_collide():
    """Small words in different places must not cancel: (seed, uid) = (0, 1) is not (1, 0)."""
    grid = torch.cartesian_prod(*[torch.arange(12)] * 4)
    u = torch.cat([uniform(*grid.unbind(1), purpose) for purpose in Purpose])
    assert len(torch.unique(u)) == len(u)


def test_fresh_seeds_are_valid_and_differ():
    seeds = {fresh_seed() for _ in range(64)}
    assert len(seeds) == 64
    assert all(0 <= s < 2**63 for s in seeds)
