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
        missing = [s for s in sequences if id(s) not in self._kept]
        found = {id(s): f for s, f in zip(missing, self.compute(missing), strict=True)} if missing else {}
        if self.keep:
            self._kept |= found
        return [self._kept.get(id(s)) or found[id(s)] for s in sequences]

    @torch.no_grad()
    def compute(self, sequences: Seq[Sequence]) -> list[Features]:
        size = max(len(s.token_ids) for s in sequences)
        ids = torch.zeros(len(sequences), size, dtype=torch.int64)
        for i, s in enumerate(sequences):
            ids[i, : len(s.token_ids)] = torch.tensor(s.token_ids)
        taps, last = self.target.hidden_states(ids.to(self.target.device), self.taps)
        out = []
        for i, s in enumerate(sequences):
            hidden = last[i, : len(s.token_ids)].clone()
            start = s.answer_start  # only answer positions are ever labels
            norm = torch.zeros(len(s.token_ids), device=hidden.device)
            norm[start:] = self.target.lm_head(hidden[start:]).float().logsumexp(-1)
            out.append(Features(taps[i, : len(s.token_ids)].clone(), hidden, norm))
        return out
