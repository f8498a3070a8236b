"""Accepted length of both acceptance rules in the engine, against the closed forms, at several temperatures.

Target and drafter are tables with equal rows, so every slot is accepted with the same probability a, whatever came
before, and a round of g drafts commits 1 + a + ... + a^g tokens on average.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.acceptance import ratio_acceptance, shared_noise_acceptance
from dspark.core import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.testing import ScriptedDrafter, TableTarget, run_engine

V, DRAFTS, REQUESTS, TOKENS = 12, 4, 16, 120
_LOGITS = torch.from_numpy(np.random.default_rng(5).normal(0, 1.0, (2, V)))
P = (1.5 * _LOGITS[0]).softmax(-1)
Q = (1.5 * _LOGITS[0] + 0.8 * _LOGITS[1]).softmax(-1)  # a drafter that knows most of it
CLOSED = {"ratio": ratio_acceptance, "shared_noise": shared_noise_acceptance}


def expected(rule: str, temperature: float) -> float:
    """Accepted length, from one slot's acceptance at this temperature."""
    p, q = ((x.log() / temperature).softmax(-1) for x in (P, Q))
    return float(sum(CLOSED[rule](p, q) ** k for k in range(DRAFTS + 1)))


def measured(rule: str, temperature: float) -> tuple[float, float]:
    """Tokens a round in the engine, and the standard error of this mean over requests. Ends of answers count."""
    engine = Engine(
        TableTarget(P.expand(V, V)),
        ScriptedDrafter.from_table(Q.expand(V, V), DRAFTS),
        config=EngineConfig(max_num_seqs=REQUESTS, acceptance=rule, kv_cache_tokens=512 * REQUESTS),
    )
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS) for seed in range(REQUESTS)
    ]
    lengths = [o.metrics.accepted_length for o in run_engine(engine, [[1]] * REQUESTS, params)]
    return float(np.mean(lengths)), float(np.std(lengths, ddof=1) / REQUESTS**0.5)


@pytest.mark.parametrize("temperature", [0.5, 1.5])
@pytest.mark.parametrize("rule", CLOSED)
def test_accepted_length_is_the_closed_form_s(rule: str, temperature: float) -> None:
    length, error = measured(rule, temperature)
    assert abs(length - expected(rule, temperature)) < 4 * error + 0.06  # the last round is cut short


@pytest.mark.parametrize("temperature", [0.3, 0.5, 1.0, 1.5])
def test_shared_noise_accepts_less_but_not_by_more_than_the_bound(temperature: float) -> None:
    p, q = ((x.log() / temperature).softmax(-1) for x in (P, Q))
    overlap = float(ratio_acceptance(p, q))
    bound = sum((overlap / (2 - overlap)) ** k for k in range(DRAFTS + 1))
    assert bound < expected("shared_noise", temperature) < expected("ratio", temperature)
