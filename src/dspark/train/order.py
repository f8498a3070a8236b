"""Which sequences a step of training draws: a function of the seed and the step alone."""

from __future__ import annotations

import hashlib
from array import array
from functools import cached_property

import torch

from dspark.train.data import Sequence

__all__ = ["SequenceOrder"]


class SequenceOrder:
    """All sequences in one random order after another, `per_step` a step.

    `steps_before`: steps of runs on the same sequences that this one goes on from.
    """

    def __init__(self, sequences: list[Sequence], seed: int, per_step: int) -> None:
        self.sequences, self.seed, self.per_step = sequences, seed, per_step
        self.steps_before = 0

    def drawn(self, step: int) -> list[Sequence]:
        """The sequences of a step of this run."""
        first = (self.steps_before + step) * self.per_step
        chosen = []
        for i in range(first, first + self.per_step):
            epoch, place = divmod(i, len(self.sequences))
            chosen.append(self.sequences[self._epoch(epoch)[place]])
        return chosen

    def generator(self, step: int) -> torch.Generator:
        """For what else is random in a step."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + self.steps_before + step)

    @cached_property
    def digest(self) -> str:
        """16 hex digits of what decides which sequences a step draws: equal where all of it is."""
        digest = hashlib.sha256(f"{self.seed} {self.per_step}".encode())
        for sequence in self.sequences:
            digest.update(array("q", [len(sequence.token_ids), sequence.answer_start, *sequence.token_ids]))
        return digest.hexdigest()[:16]

    def _epoch(self, number: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 7919 + number)
        order: list[int] = torch.randperm(len(self.sequences), generator=generator).tolist()
        return order
