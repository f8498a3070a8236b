"""Every policy through the engine: greedy text is plain decoding's, sampled text keeps its distribution.

The drafter's confidence depends on what it drafted, as a confidence head's does: whoever looks at the token that it
decides about, or reuses what an old block revealed, biases the output here (Appendix A).
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.core import Draft, DSparkError, SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.policies import (
    FixedLength,
    GlobalScheduler,
    LaggedScheduler,
    PrefixScheduler,
    Threshold,
)
from dspark.testing import ScriptedDrafter, TableTarget, run_engine

TABLE = np.array([[0.7, 0.3], [0.4, 0.6]])
HALF = torch.full((2, 2), 0.5, dtype=torch.float64)
# A hundred requests at once: a slot pays where its survival is above a third or so.
COST = TableCost((1, 100, 200, 400), (1.0, 1.2, 1.6, 3.0), draft=DraftCost(0.05, 0.0, 0.0001))
POLICIES = {
    "threshold": lambda: Threshold(3, 0.5),
    "prefix": lambda: PrefixScheduler(3, COST),
    "prefix, guarded and filled": lambda: PrefixScheduler(3, COST, min_gain=0.1, sizes=(150, 180, 210)),
    "lagged": lambda: LaggedScheduler(3, COST),
    "lagged, old ranks": lambda: LaggedScheduler(3, COST, ranks="previous"),
}


class TellingDrafter(ScriptedDrafter):
    """Slot k + 1 looks good behind a drafted 0 and hopeless behind a 1."""

    def propose(self, batch):
        draft = super().propose(batch)
        if not draft.gamma:
            return draft
        c = torch.full(draft.tokens.shape, 0.8, dtype=torch.float64)
        c[:, 1:] = torch.where(draft.tokens[:, :-1] == 0, 0.95, 0.01)
        return replace(draft, confidence=c.logit())


def run(policy, params, count, drafter=None):
    config = EngineConfig(max_num_seqs=100, max_num_batched_tokens=500, kv_cache_tokens=32 * 100)
    drafter = drafter or TellingDrafter.from_table(HALF, 3)
    return run_engine(Engine(TableTarget(TABLE), drafter, policy, None, config), [[1]] * count, params)


@pytest.mark.parametrize("name", POLICIES)
def test_sampled_text_keeps_its_distribution(name):
    count = 800
    outputs = run(POLICIES[name](), SamplingParams(temperature=1.0, max_tokens=7, seed=5), count)
    exact = TableTarget(TABLE).joint_distribution(1, 3)
    for counts, p in (
        (histogram(outputs, slice(0, 3)), exact),  # the first block
        (histogram(outputs, slice(3, 6)), two_blocks_on(exact)),  # later ones, seen by the history
    ):
        sigma = np.sqrt(count * p * (1 - p))
        assert (np.abs(counts - count * p) < 5 * sigma).all()
    scheduled = sum(o.metrics.scheduled for o in outputs)
    assert 0 < scheduled < sum(o.metrics.drafted for o in outputs)


def histogram(outputs, tokens):
    counts = np.zeros((2, 2, 2))
    for output in outputs:
        counts[tuple(output.token_ids[tokens])] += 1
    return counts


def two_blocks_on(joint):
    """Distribution of tokens 4 to 6, given that of 1 to 3."""
    third = joint.sum(axis=(0, 1))
    target = TableTarget(TABLE)
    return third[0] * target.joint_distribution(0, 3) + third[1] * target.joint_distribution(1, 3)


@pytest.mark.parametrize("name", [*POLICIES, "global"])
def test_greedy_text_is_that_of_plain_decoding(name):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    policy = GlobalScheduler(3, COST) if name == "global" else POLICIES[name]()
    plain = run(FixedLength(0), params, 3)
    assert [o.token_ids for o in run(policy, params, 3)] == [o.token_ids for o in plain]


def test_the_global_search_is_refused_where_it_would_bias():
    with pytest.raises(DSparkError, match="LIVE"):
        run(GlobalScheduler(3, COST), SamplingParams(temperature=1.0, max_tokens=4), 1)


def test_drafters_without_confidences_are_scheduled_by_their_record():
    drafter = ScriptedDrafter.from_table(torch.from_numpy(TABLE), 3)
    outputs = run(PrefixScheduler(3, COST), SamplingParams(max_tokens=20, seed=1), 20, drafter)
    assert sum(o.metrics.accepted for o in outputs) == sum(o.metrics.scheduled for o in outputs) > 100
    assert Draft.empty(1).confidence is None
