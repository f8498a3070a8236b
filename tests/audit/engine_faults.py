"""Drafters and policies with planted faults: what the engine audit must catch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dspark.core import Draft
from dspark.drafters.base import ProposeBatch
from dspark.schedule.policies import Dependence, FixedLength, ScheduleState
from dspark.testing import ScriptedDrafter

V = 3


def close_table(size: int = V) -> torch.Tensor:
    """[size, size] a draft table that is right now and then."""
    generator = torch.Generator().manual_seed(3)
    return (2 * torch.randn(size, size, generator=generator, dtype=torch.float64)).softmax(-1)


class WrongTemperature(ScriptedDrafter):
    """Samples from p_d, hands in p_d as it would be at half the temperature."""

    def propose(self, batch: ProposeBatch) -> Draft:
        draft = super().propose(batch)
        assert draft.probs is not None
        squared = draft.probs**2
        return replace(draft, probs=squared / squared.sum(-1, keepdim=True))


class SelfAware(ScriptedDrafter):
    """Appendix A's confidences: 0.8 for the first draft, then certain behind token 0 and hopeless behind others."""

    def propose(self, batch: ProposeBatch) -> Draft:
        draft = super().propose(batch)
        second = torch.where(draft.tokens[:, :1] == 0, 5.0, -50.0).double()
        first = torch.full_like(second, float(np.log(4)))
        return replace(draft, confidence=torch.cat((first, second), 1)[:, : draft.gamma])


@dataclass(frozen=True)
class Liar:
    """Verifies a block if its *second* draft looks good, so x_1 decides whether x_1 is verified."""

    dependence: Dependence = Dependence.CAUSAL
    uses_survival: bool = True

    def draft_lengths(self, state: ScheduleState) -> np.ndarray:
        return np.minimum(state.room, 2)

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        if survival is None:  # nothing was drafted
            return drafted
        return np.where((drafted < 2) | (survival[:, -1] > 0.5), drafted, 0)


class TooLong(FixedLength):
    """Wants to verify more than was drafted."""

    def verify_lengths(
        self, state: ScheduleState, survival: np.ndarray | None, drafted: np.ndarray
    ) -> np.ndarray:
        return drafted + 1


def make_liar() -> Liar:
    return Liar()


def make_honest_liar() -> Liar:
    return Liar(Dependence.LIVE)


def make_too_long() -> TooLong:
    return TooLong(2)


def make_wrong_temperature(target: Any) -> ScriptedDrafter:
    return WrongTemperature.from_table(close_table(target.vocab_size), 2)


def make_right_temperature(target: Any) -> ScriptedDrafter:
    return ScriptedDrafter.from_table(close_table(target.vocab_size), 2)
