"""Features on disk: bit for bit those computed on the fly, across runs and kills."""

import pytest
import torch

from dspark.core import DSparkError
from dspark.testing import tiny_decoder
from dspark.train.data import Sequence
from dspark.train.feature_store import FeatureStore
from dspark.train.features import FeatureSource

SEQUENCES = [Sequence(list(range(start, start + 9)), 3) for start in range(4)]
TAPS = (0, 1)


@pytest.fixture
def target():
    return tiny_decoder(dtype=torch.bfloat16)


def same(a, b):
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("taps", "last_hidden", "log_normalizer"))


def test_features_from_disk_are_those_computed(target, tmp_path, monkeypatch):
    computed = FeatureSource(target, TAPS)(SEQUENCES)
    first = FeatureSource(target, TAPS, "disk", tmp_path)
    assert len(first.missing(SEQUENCES)) == 4
    assert all(map(same, first(SEQUENCES), computed))
    assert all(map(same, first(SEQUENCES), computed)), "those that wait for their shard are found"
    first.flush()
    again = FeatureSource(target, TAPS, "disk", tmp_path)
    monkeypatch.setattr(again, "compute", None)  # nothing is computed twice
    assert all(map(same, again(SEQUENCES), computed))


def test_a_store_grows_by_shards(target, tmp_path):
    for part in (SEQUENCES[:1], SEQUENCES[:3], SEQUENCES):
        source = FeatureSource(target, TAPS, "disk", tmp_path)
        source(part)
        source.flush()
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert not FeatureSource(target, TAPS, "disk", tmp_path).missing(SEQUENCES)


def test_the_same_tokens_with_another_answer_are_another_entry(target, tmp_path):
    source = FeatureSource(target, TAPS, "disk", tmp_path)
    source(SEQUENCES)
    assert source.missing([Sequence(SEQUENCES[0].token_ids, 4)])


def test_features_of_another_target_are_refused(target, tmp_path):
    source = FeatureSource(target, TAPS, "disk", tmp_path)
    source(SEQUENCES)
    source.flush()
    with pytest.raises(DSparkError, match="name another feature_dir"):
        FeatureSource(target, (0,), "disk", tmp_path)


def test_damage_is_named(tmp_path):
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(DSparkError, match="not a feature index"):
        FeatureStore(tmp_path, {})
