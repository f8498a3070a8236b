"""From speculative_config to a policy: names, refusals, and prices asked for only where they are needed."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.core import Draft, DSparkError, SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.schedule.auto import AutoScheduler
from dspark.schedule.cost import TableCost
from dspark.schedule.feedback import LiveCost
from dspark.schedule.names import POLICIES
from dspark.schedule.policies import FixedLength, GlobalScheduler, LaggedScheduler, PrefixScheduler, Threshold
from dspark.schedule.settings import ScheduleSettings, build_policy, compile_schedulers, split_config
from dspark.schedule.survival import survival
from dspark.testing import ScriptedDrafter, TableTarget, run_engine

COST = TableCost((1, 8), (1.0, 1.7))
KINDS = {
    "fixed": FixedLength, "threshold": Threshold, "prefix": PrefixScheduler,
    "global": GlobalScheduler, "lagged": LaggedScheduler, "auto": AutoScheduler,
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_policies_by_name(name):
    asked, said = [], []

    def prices():
        asked.append(1)
        return COST

    compile_schedulers()  # which is said once
    threshold = 0.4 if name == "threshold" else None
    config = {"method": "dspark", "num_speculative_tokens": 5, "policy": name, "threshold": threshold}
    rest, settings = split_config(config)
    assert rest == {"method": "dspark", "num_speculative_tokens": 5}
    policy = build_policy(settings, 5, prices, said.append)
    assert type(policy) is KINDS[name]
    assert bool(asked) == settings.priced == (name not in ("fixed", "threshold"))
    if settings.priced:
        assert isinstance(policy.cost, LiveCost)
    assert isinstance(build_policy(settings, 0, prices, said.append), FixedLength), "nothing to schedule"
    assert not said


def test_the_default_is_unchanged():
    assert split_config(None) == (None, ScheduleSettings())
    rest, settings = split_config({"method": "ngram"})
    assert rest == {"method": "ngram"}
    assert (settings.policy, settings.acceptance) == ("fixed", "ratio")


def test_suspicious_prices_are_said_aloud():
    compile_schedulers()
    flat, said = TableCost((1, 64), (1.0, 1.0)), []
    build_policy(ScheduleSettings(policy="prefix"), 4, lambda: flat, said.append)
    assert "flat" in said[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"policy": "best"}, "choose from fixed"),
        ({"acceptance": "typical"}, "choose from ratio"),
        ({"policy": "threshold"}, "needs a threshold"),
        ({"policy": "auto", "threshold": 0.5}, "no other policy"),
        ({"policy": "threshold", "threshold": "x"}, "number"),
        ({"policy": "threshold", "threshold": 0.5, "cost_table": "a.json"}, "no use for a cost_table"),
        ({"policy": "auto", "cost_table": 5}, "path"),
        ({"calibration": "a.json"}, "reads no confidences"),
        ({"policy": "auto", "calibration": 5}, "path"),
        ({"method": "none", "policy": "auto"}, "nothing to do"),
    ],
)
def test_what_makes_no_sense_is_refused(config, message):
    with pytest.raises(DSparkError, match=message):
        split_config(config)


def test_global_with_sampled_drafts_is_refused_under_the_ratio_rule_only():
    table = np.full((3, 3), 1 / 3)
    params = SamplingParams(temperature=1.0, max_tokens=4, seed=0)
    policy = build_policy(ScheduleSettings(policy="global"), 2, lambda: COST, print)

    def engine(rule):
        drafter = ScriptedDrafter.from_table(torch.from_numpy(table), 2, confidence=1.0)
        config = EngineConfig(acceptance=rule, kv_cache_tokens=64)
        return Engine(TableTarget(table), drafter, policy, None, config)

    with pytest.raises(DSparkError, match="auto, prefix or lagged, the acceptance shared_noise"):
        engine("ratio").add([1], params)
    assert len(run_engine(engine("shared_noise"), [[1]], params)[0].token_ids) == 4


def test_a_calibration_turns_logits_into_probabilities():
    logits = torch.tensor([[0.0, 2.0, -1.0]])
    draft = Draft(torch.zeros(1, 3, dtype=torch.int64), np.array([3]), confidence=logits)
    np.testing.assert_allclose(survival(draft), torch.sigmoid(logits.double()).cumprod(-1))
    halved = survival(draft, lambda x: np.full(x.shape, 0.5))
    np.testing.assert_allclose(halved, [[0.5, 0.25, 0.125]])
    for bad in (lambda x: x, lambda x: x[:, :2] * 0):
        with pytest.raises(DSparkError, match="block length"):
            survival(draft, bad)
    assert split_config({"policy": "auto", "calibration": Path("c.json")})[1].calibration == Path("c.json")


def test_the_engine_uses_the_calibration():
    table = np.full((3, 3), 1 / 3)

    def scheduled(calibrate):
        drafter = ScriptedDrafter.from_table(torch.from_numpy(table), 2, confidence=3.0)
        config = EngineConfig(kv_cache_tokens=64)
        engine = Engine(TableTarget(table), drafter, Threshold(2, 0.5), None, config, calibrate=calibrate)
        (output,) = run_engine(engine, [[1]], SamplingParams(max_tokens=8, seed=1))
        return output.metrics.scheduled

    assert scheduled(None) > 0
    assert scheduled(lambda x: np.full(x.shape, 0.3)) == 0
