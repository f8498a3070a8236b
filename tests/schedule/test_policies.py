"""Fixed lengths, and survival from confidence logits."""

import numpy as np
import pytest
import torch

from dspark.core import Draft, DSparkError, SamplingParams
from dspark.engine.engine import Engine
from dspark.schedule.policies import Dependence, FixedLength, ScheduleState
from dspark.schedule.survival import survival
from dspark.testing import ScriptedDrafter, TableTarget


def test_fixed_length_respects_the_room():
    state = ScheduleState(np.arange(3), np.array([0, 2, 9]), np.zeros(3))
    policy = FixedLength(4)
    assert policy.draft_lengths(state).tolist() == [0, 2, 4]
    drafted = np.array([0, 1, 4])
    assert policy.verify_lengths(state, None, drafted).tolist() == [0, 1, 4]
    assert policy.dependence is Dependence.STATIC
    with pytest.raises(DSparkError, match="0 or more"):
        FixedLength(-1)


def test_survival_is_the_running_product():
    confidence = torch.tensor([[0.9, 0.5], [0.8, 0.25]]).logit()
    draft = Draft(torch.zeros(2, 2, dtype=torch.int64), np.array([2, 2]), confidence=confidence)
    np.testing.assert_allclose(survival(draft), [[0.9, 0.45], [0.8, 0.2]], atol=1e-6)
    assert survival(Draft.empty(2)) is None


def test_calibration_is_for_the_model_s_confidences_not_for_those_of_copies():
    confidence = torch.tensor([[0.9, 0.5], [0.8, 0.25]]).logit()
    draft = Draft(torch.zeros(2, 2, dtype=torch.int64), np.array([2, 2]), confidence=confidence)

    def calibrate(logits):
        return np.full_like(logits, 0.1)

    first_copied, both_copied = np.array([2, 0]), np.array([1, 2])
    np.testing.assert_allclose(
        survival(draft, calibrate, first_copied), [[0.9, 0.45], [0.1, 0.01]], atol=1e-6
    )
    np.testing.assert_allclose(survival(draft, calibrate, both_copied), survival(draft))
    np.testing.assert_allclose(survival(draft, calibrate), [[0.1, 0.01]] * 2)


def test_a_live_policy_is_refused_where_it_would_bias_the_output():
    live = FixedLength(2, dependence=Dependence.LIVE)
    target = TableTarget.random(5, seed=0)
    q = torch.full((5, 5), 0.2)
    sampled, fixed = ScriptedDrafter.from_table(q, 2), ScriptedDrafter.fixed([1, 2])
    hot, cold = SamplingParams(temperature=1.0, max_tokens=4), SamplingParams(temperature=0, max_tokens=4)
    engine = Engine(target, sampled, live)
    with pytest.raises(DSparkError, match="LIVE"):
        engine.add([1], hot)
    assert not engine.has_unfinished
    engine.add([1], cold)
    engine.add([1], SamplingParams(temperature=1.0, max_tokens=4, speculative=False))
    Engine(target, fixed, live).add([1], hot)
    for dependence in (Dependence.STATIC, Dependence.CAUSAL, Dependence.LAGGED):
        Engine(target, sampled, FixedLength(2, dependence=dependence)).add([1], hot)
