"""Target features of training sequences: computed on the fly, or once and then kept in memory or on disk."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dspark.target.decoder import Decoder
from dspark.train.data import Sequence
from dspark.train.feature_store import FeatureStore

__all__ = ["FeatureSource", "Features"]


@dataclass(frozen=True)
class Features:
    """What training needs of the target for one sequence of S tokens (section 5.1: hidden states, not logits)."""

    taps: Tensor  # [S, m * H]
    last_hidden: Tensor  # [S, H] after the final norm: input of the LM head
    log_normalizer: Tensor  # [S] float32: logsumexp of the full-vocabulary logits

    def to(self, device: torch.device | str) -> Features:
        return Features(self.taps.to(device), self.last_hidden.to(device), self.log_normalizer.to(device))


class FeatureSource:
    """Runs the frozen target over sequences, and remembers what it found where that is wanted.

    Args:
        target: the target, in the precision features are wanted in (bfloat16 is several times faster where
            the processor has matrix units for it).
        keep: "compute" them every time, keep them in "memory", or on "disk" (`bytes_per_token` each).
        directory: where, for "disk".
        writer: the number of this process among those that write there.
    """

    def __init__(
        self,
        target: Decoder,
        taps: tuple[int, ...],
        keep: str = "compute",
        directory: Path | None = None,
        writer: int = 0,
    ) -> None:
        self.target, self.taps, self.keep = target, taps, keep
        self._kept: dict[int, Features] = {}
        self._store: FeatureStore | None = None
        if keep == "disk":
            assert directory is not None
            dtype = str(target.dtype).removeprefix("torch.")
            origin = {"target": target.identity, "taps": list(taps), "dtype": dtype}
            self._store = FeatureStore(directory, origin, writer)

    @property
    def bytes_per_token(self) -> int:
        size = torch.finfo(self.target.dtype).bits // 8
        return (len(self.taps) + 1) * self.target.hidden_size * size + 4

    def missing(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Those whose features have to be computed still."""
        return [s for s in sequences if self._store is None or s not in self._store]

    def __call__(self, sequences: Seq[Sequence]) -> list[Features]:
        """On the target's device; what is kept lies in main memory."""
        return [self._find(sequence) for sequence in sequences]

    def flush(self) -> None:
        """Write what is not yet on disk."""
        if self._store is not None:
            self._store.flush()

    def _find(self, sequence: Sequence) -> Features:
        if self._store is not None:
            names = ("taps", "last_hidden", "log_normalizer")
            if (stored := self._store.get(sequence, names)) is not None:
                return Features(*stored).to(self.target.device)
            features = self.compute(sequence)
            kept = features.to("cpu")
            self._store.put(sequence, {name: getattr(kept, name) for name in names})
            return features
        if (found := self._kept.get(id(sequence))) is not None:
            return found.to(self.target.device)
        features = self.compute(sequence)
        if self.keep == "memory":
            self._kept[id(sequence)] = features.to("cpu")
        return features

    @torch.no_grad()
    def compute(self, sequence: Sequence) -> Features:
        """One sequence at a time: a few hundred rows fill the matrix units, and nothing is padded."""
        ids = torch.tensor([sequence.token_ids], device=self.target.device)
        taps, last = self.target.hidden_states(ids, self.taps)
        start = sequence.answer_start  # only answer positions are ever labels
        norm = torch.zeros(ids.shape[1], device=last.device)
        norm[start:] = self.target.lm_head(last[0, start:]).float().logsumexp(-1)
        return Features(taps[0], last[0], norm)
