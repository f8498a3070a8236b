"""The simulated engine takes the very steps that the real one takes."""

import numpy as np
import pytest
import torch

from dspark.core import SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.schedule.cost import DraftCost, TableCost
from dspark.schedule.policies import FixedLength, LaggedScheduler, PrefixScheduler
from dspark.simulate.recording import StepRecorder, record_steps
from dspark.simulate.server import Limits
from dspark.simulate.simulation import Scenario, run
from dspark.testing import ScriptedDrafter, TableTarget
from dspark.testing.scripted import _argmax

GAMMA = 4


class Rests(FixedLength):
    """Drafts for a round, then rests for three, twelve rounds before the next trial as far as it tells."""

    def __init__(self):
        super().__init__(GAMMA)
        object.__setattr__(self, "rounds", [])

    def draft_lengths(self, state):
        self.rounds.append(state.num_requests)
        return super().draft_lengths(state) if len(self.rounds) % 4 == 1 else np.zeros_like(state.room)

    def rests(self, num_requests):
        return 0 if len(self.rounds) % 4 == 1 else 12


COST = TableCost((1, 4, 8, 16, 64), (1.0, 1.05, 1.4, 3.0, 13.0), draft=DraftCost(0.02, 0.0, 0.002))
POLICIES = {
    "plain": lambda: FixedLength(0),
    "fixed": lambda: FixedLength(GAMMA),
    "prefix": lambda: PrefixScheduler(GAMMA, COST),
    "lagged": lambda: LaggedScheduler(GAMMA, COST),
    "resting": Rests,
}
COMPARED = ("requests", "query_tokens", "context", "drafted_requests", "drafted", "scheduled", "tokens")
CASES = {
    "roomy": ({"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_tokens": 4096}, 5),
    "chunks": ({"max_num_seqs": 8, "max_num_batched_tokens": 7, "kv_cache_tokens": 4096}, 6),
    "few seats": ({"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_tokens": 4096}, 6),
    "short of blocks": (
        {"max_num_seqs": 8, "max_num_batched_tokens": 16, "kv_cache_tokens": 96, "block_size": 4},
        9,
    ),
}


def half_right(target):
    """A drafter that is right for even requests and wrong for odd ones."""

    def script(batch, drafts):
        odd = torch.tensor([request.uid % 2 for request in batch.requests])
        return (_argmax(target, batch, drafts) + odd) % target.vocab_size

    drafter = ScriptedDrafter(None, script, GAMMA, confidence=1.0)
    drafter.taps = (0,)  # with something to follow, the engine asks a policy whether it rests
    return drafter


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_holds_what_the_engines_step_holds(case, policy, listed, told):
    sizes, count = CASES[case]
    rng = np.random.default_rng(count)
    prompt, output = rng.integers(1, 30, count).tolist(), rng.integers(1, 40, count).tolist()
    target = TableTarget.random(11, seed=3)
    recorder = StepRecorder(POLICIES[policy]())
    engine = Engine(target, half_right(target), recorder, None, EngineConfig(**sizes))
    for p, o in zip(prompt, output, strict=True):
        engine.add([1] * p, SamplingParams(temperature=0.0, max_tokens=o))
    recorded = record_steps(engine, recorder, clock=iter(range(100_000)).__next__)

    acceptance = told(GAMMA, lambda row: GAMMA * (row % 2 == 0), 1 / (1 + np.exp(-1.0)))
    traffic = listed([0.0] * count, prompt, output)
    limits = Limits(**sizes, known_end=True)
    scenario = Scenario(
        traffic=traffic, acceptance=acceptance, cost=COST, limits=limits, warmup_s=0, duration_s=1e6
    )
    log = run(scenario, POLICIES[policy](), seed=0)
    for name in COMPARED:
        np.testing.assert_array_equal(log.step(name), getattr(recorded, name), err_msg=name)
    assert (log.preemptions > 0) == (case == "short of blocks")
    assert not np.isnan(log.request("finish")).any()
