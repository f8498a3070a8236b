"""Addressed randomness: every uniform is a pure function of where it is used.

A draw's address is (seed, request uid, round, slot, purpose). Nothing is streamed, so a draw depends neither
on the batch nor on how many draws were made before it, and no address is used twice: a position drafted again
next round belongs to another round, two requests with one seed have different uids. That freshness is what
keeps the ratio rule exact under schedules that look at earlier rounds.

The mixer is SplitMix64's finaliser (Steele, Lea, Flood 2014) on two's-complement int64, hence bit-identical
on every device.
"""

from __future__ import annotations

import secrets
from enum import IntEnum

import numba
import numpy as np
import torch

__all__ = ["Purpose", "fresh_seed", "uniform", "uniform_at"]


class Purpose(IntEnum):
    """What a draw decides. Draws of one slot for different purposes are independent."""

    DRAFT = 0
    ACCEPT = 1
    RESAMPLE = 2


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _signed(0x94D049BB133111EB)
_PURPOSES = 4  # room for the purposes of one slot
_UNIT = 2.0**-53


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: int64 shifts are arithmetic, which would make the mixer lossy."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 64 bits in which every input bit flips each output bit with probability 1/2."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def _absorb(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    return _mix((state ^ word) + _GAMMA)


def uniform(
    seed: torch.Tensor, uid: torch.Tensor, round: torch.Tensor, slot: torch.Tensor, purpose: Purpose
) -> torch.Tensor:
    """The draw at each address, float64 in [0, 1), a multiple of 2^-53.

    Args:
        seed, uid, round, slot: int64 tensors that broadcast to the result's shape. Ask for all slots of a
            round at once ([R, 1] against [gamma]): the first three words are then mixed once a request.
        purpose: what the draw is for.
    """
    if seed.device.type == "cpu":
        words = (x.numpy() for x in (seed, uid, round, slot))
        return torch.as_tensor(uniform_at(*words, int(purpose)))
    state = _absorb(_mix(seed + _GAMMA), uid)
    state = _absorb(state, round)
    state = _absorb(state, slot * _PURPOSES + int(purpose))
    return _shift_right(state, 11).to(torch.float64) * _UNIT


@numba.vectorize(cache=True)
def _mixed(x):  # type: ignore[no-untyped-def]
    """`_mix`, of one word."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.vectorize(cache=True)
def uniform_at(seed, uid, round, slot, purpose):  # type: ignore[no-untyped-def]
    """`uniform` at one address, for compiled loops, or at arrays of them.

    Dozens of small tensor operations take longer than all else of a sampled round.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    state = _mixed(np.uint64(seed) + gamma)
    for word in (uid, round, slot * _PURPOSES + purpose):
        state = _mixed((state ^ np.uint64(word)) + gamma)
    return np.float64(state >> np.uint64(11)) * _UNIT


def fresh_seed() -> int:
    """An unpredictable seed in [0, 2^63) for a request that gave none."""
    return secrets.randbits(63)
