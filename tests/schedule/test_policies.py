"""Fixed lengths, and survival from confidence logits."""

import numpy as np
import pytest
import torch

from dspark.core import Draft, DSparkError
from dspark.schedule.policies import Dependence, FixedLength, ScheduleState
from dspark.schedule.survival import survival


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
