"""How good a confidence signal is: discrimination (AUC) and calibration (ECE) of the prefix survival it promises."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from dspark.simulate.acceptance import Acceptance
from dspark.simulate.rounds import RecordedRounds

__all__ = ["SignalQuality", "measure_quality"]


@dataclass(frozen=True)
class SignalQuality:
    """Of one acceptance model. None where there is no confidence, or (AUC) no two outcomes to tell apart."""

    accepted_length: float  # full verification, bonus included
    conditional: list[float | None]  # [gamma] accepted at k / reached k
    auc: (
        float | None
    )  # that a slot which survived was promised more than one that did not, over reached slots
    ece: float | None  # mean |promised survival - realised| over bins and slots

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def measure_quality(
    acceptance: Acceptance, domain: str, seed: int = 0, requests: int = 400, rounds: int = 50, bins: int = 15
) -> SignalQuality:
    """Draft `rounds` blocks of each of `requests` requests of one domain, all verified in full. Of recorded rounds, all
    of that domain are taken as they are."""
    if isinstance(acceptance, RecordedRounds):
        blocks = [acceptance.recorded(domain)]
    else:
        state = acceptance.start((domain,), np.zeros(requests, dtype=np.int64), np.random.SeedSequence(seed))
        blocks = [state.block(np.arange(requests), True) for _ in range(rounds)]
    run = np.concatenate([block.run for block in blocks])
    slots = np.arange(acceptance.gamma)
    reached, passed = run[:, None] >= slots, run[:, None] > slots  # [N, gamma]
    conditional = [
        p / r if r else None for p, r in zip(passed.sum(0).tolist(), reached.sum(0).tolist(), strict=True)
    ]
    length = 1 + float(run.mean())
    survivals = [block.survival for block in blocks if block.survival is not None]
    if not survivals:
        return SignalQuality(length, conditional, None, None)
    promised = np.concatenate(survivals)
    before = np.concatenate((np.ones((len(promised), 1)), promised[:, :-1]), axis=1)
    confidence = np.divide(promised, before, out=np.zeros_like(promised), where=before > 0)
    errors = [_ece(promised[:, k], passed[:, k], bins) for k in range(acceptance.gamma)]
    return SignalQuality(
        length, conditional, _auc(confidence[reached], passed[reached]), float(np.mean(errors))
    )


def _auc(score: np.ndarray, positive: np.ndarray) -> float | None:
    """Rank statistic of Mann and Whitney; ties count half."""
    count = int(positive.sum())
    if not 0 < count < len(score):
        return None
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # mean rank of each tie, from 1
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(score) - count)))


def _ece(promised: np.ndarray, passed: np.ndarray, bins: int) -> float:
    index = np.minimum((promised * bins).astype(np.int64), bins - 1)
    gap = np.bincount(index, promised - passed, bins)
    return float(np.abs(gap).sum() / len(promised))
