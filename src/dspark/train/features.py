"""Target features of training sequences, computed on the fly or kept in memory after the first epoch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.target.decoder import Decoder
from dspark.train.data import Sequence

__all__ = ["FeatureSource", "Features"]


@dataclass(frozen=True)
class Features:
    """What training needs of the target for one sequence of S tokens (section 5.1: hidden states, not logits)."""

    taps: Tensor  # [S, m * H]
    last_hidden: Tensor  # [S, H] after the final norm: input of the LM head
    log_normalizer: Tensor  # [S] float32: logsumexp of the full-vocabulary logits


class FeatureSource:
    """Runs the frozen target over sequences.

    Args:
        target: the target, in the precision features are wanted in (bfloat16 is several times faster where
            the processor has matrix units for it).
        keep: remember features in memory: about `bytes_per_token` each.
    """

    def __init__(self, target: Decoder, taps: tuple[int, ...], keep: bool) -> None:
        self.target, self.taps, self.keep = target, taps, keep
        self._kept: dict[int, Features] = {}

    @property
    def bytes_per_token(self) -> int:
        size = torch.finfo(self.target.dtype).bits // 8
        return (len(self.taps) + 1) * self.target.hidden_size * size + 4

    def __call__(self, sequences: Seq[Sequence]) -> list[Features]:
        found = []
        for sequence in sequences:
            features = self._kept.get(id(sequence)) or self.compute(sequence)
            if self.keep:
                self._kept[id(sequence)] = features
            found.append(features)
        return found

    @torch.no_grad()
    def compute(self, sequence: Sequence) -> Features:
        """One sequence at a time: a few hundred rows fill the matrix units, and nothing is padded."""
        ids = torch.tensor([sequence.token_ids], device=self.target.device)
        taps, last = self.target.hidden_states(ids, self.taps)
        start = sequence.answer_start  # only answer positions are ever labels
        norm = torch.zeros(ids.shape[1], device=last.device)
        norm[start:] = self.target.lm_head(last[0, start:]).float().logsumexp(-1)
        return Features(taps[0], last[0], norm)
