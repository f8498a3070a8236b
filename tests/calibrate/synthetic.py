"""Rounds whose perfect temperatures are known."""

from __future__ import annotations

import numpy as np

from dspark.calibrate import Answer, Rounds, Source

SOURCE = Source("table", "t" * 16, "made-up", "d" * 16, 3, "ratio", "float64")
ANSWERS = tuple(Answer(f"prompt-{i}", ("chat", "math")[i % 2], t) for t in (0.0, 1.0) for i in range(20))


def synthetic_rounds(temperatures=(2.0, 0.5, 4.0), n=6000, seed=0, ragged=False) -> Rounds:
    """Slot k is accepted with sigmoid(logit_k / T_k), where the logits of a block hang together.

    Blocks differ by a common term, so that survival of a late slot goes with the confidence of early ones.
    """
    rng = np.random.default_rng(seed)
    gamma = len(temperatures)
    honest = rng.normal(0.8, 1.0, (n, 1)) + rng.normal(0, 0.7, (n, gamma))  # log odds of acceptance
    acceptance = 1 / (1 + np.exp(-honest))
    lengths = rng.integers(1, gamma + 1, n) if ragged else np.full(n, gamma)
    outside = np.arange(gamma) >= lengths[:, None]
    taken = (rng.random((n, gamma)) < acceptance) & ~outside
    return Rounds(
        logits=np.where(outside, np.nan, honest * np.asarray(temperatures)),
        acceptance=np.where(outside, np.nan, acceptance),
        lengths=lengths,
        accepted=taken.cumprod(axis=1).sum(axis=1),
        answer=rng.integers(0, len(ANSWERS), n),
        answers=ANSWERS,
        source=Source(**{**SOURCE.__dict__, "gamma": gamma}),
    )
