"""The shared-noise rule over three tokens, enumerated: exact under policies that look, and as often right as the
formula says."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.acceptance import shared_noise_acceptance
from dspark.audit import World, audit, random_world
from dspark.audit.builtin import APPENDIX_A_COST
from dspark.audit.gumbel import after_draw
from dspark.schedule.auto import AutoScheduler
from dspark.schedule.cost import TableCost
from dspark.schedule.policies import GlobalScheduler

COST = TableCost(tuple(range(1, 8)), (1.0, 1.3, 1.5, 2.2, 2.6, 3.1, 4.0))


def test_one_draw_has_its_own_probabilities():
    row = np.array([0.2, 0.0, 0.8])
    drawn = {token: p for token, _, p in after_draw(row, ())}
    assert drawn == pytest.approx({0: 0.2, 2: 0.8}, abs=1e-14)
    ((again, _, p),) = after_draw(row, ((tuple(row), 2),))
    assert (again, p) == (2, pytest.approx(1.0))


@pytest.mark.parametrize("seed", range(5))
def test_draft_and_target_agree_as_often_as_the_formula_says(seed):
    p, q = np.random.default_rng(seed).dirichlet(np.ones(3), 2)
    agree = sum(
        a * b
        for draft, known, a in after_draw(q, ())
        for token, _, b in after_draw(p, known)
        if token == draft
    )
    expected = shared_noise_acceptance(torch.from_numpy(p), torch.from_numpy(q))
    assert agree == pytest.approx(float(expected), abs=1e-12)
    marginal = np.zeros(3)
    for _, known, a in after_draw(q, ()):
        for token, _, b in after_draw(p, known):
            marginal[token] += a * b
    np.testing.assert_allclose(marginal, p, atol=1e-12)


@pytest.mark.parametrize("policy", [GlobalScheduler, AutoScheduler])
def test_policies_that_look_are_exact(policy):
    """Appendix A with a third token: under the ratio rule the global search biases it."""

    def confidence(tokens, k):
        return 0.8 if k == 1 else 0.9 * (tokens[1] == 0)

    p_target = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.7, 0.2]])
    world = World(p_target, np.full((2, 3, 3), 1 / 3), confidence)
    assert audit(world, GlobalScheduler(2, APPENDIX_A_COST), rounds=1).biased
    result = audit(replace(world, rule="shared-noise"), policy(2, APPENDIX_A_COST), rounds=2)
    assert result.max_tv < 1e-12
    assert result.schedules > 1, "the policy had a choice"


def test_requests_with_one_seed_are_exact_each():
    world = replace(random_world(3, 3, 1, 2), rule="shared-noise")
    assert audit(world, GlobalScheduler(1, COST), rounds=2).max_tv < 1e-12
