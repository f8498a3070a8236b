"""Checkpoints: what is written loads again, and everything wrong with one is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.core import DSparkError
from dspark.drafters.checkpoint import load_drafter_model, read_drafter_config, save_drafter_model
from dspark.drafters.registry import build_drafter
from dspark.testing import tiny_decoder, tiny_drafter
from dspark.testing.chain import tiny_chain_model


@pytest.fixture
def target():
    return tiny_decoder(dtype=torch.float32)


@pytest.fixture
def checkpoint(target, tmp_path):
    save_drafter_model(tiny_drafter(target, draft_vocab_size=40).model, tmp_path / "d", {"steps": 3})
    return tmp_path / "d"


def edit(checkpoint, **changes):
    path = checkpoint / "config.json"
    raw = json.loads(path.read_text())
    for key, value in changes.items():
        raw.pop(key) if value is None else raw.update({key: value})
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("storage", ["int8", "float16"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_round_trip(target, tmp_path, head, storage):
    # Packed linear layers are not part of a state dict: save a model that was never served.
    served = tiny_drafter(target, head=head, draft_vocab_size=40).model
    model = type(served)(served.config)
    model.vocab = served.vocab
    model.lm_head.weight.data.copy_(target.output_weight[model.vocab])
    model.embed.weight.data.copy_(target.embed.weight)
    save_drafter_model(model, tmp_path, {"steps": 3}, storage=storage)
    loaded = load_drafter_model(tmp_path, target)
    assert loaded.config == model.config
    for name, value in model.state_dict().items():
        tolerance = (
            float(value.abs().max()) / 200
            if value.ndim == 2 and name not in ("embed.weight", "lm_head.weight")
            else 0
        )
        torch.testing.assert_close(loaded.state_dict()[name], value, atol=tolerance, rtol=0)
    assert json.loads((tmp_path / "config.json").read_text())["provenance"] == {"steps": 3}


def test_each_missing_key_is_named(target, tmp_path):
    model = fresh(target)
    save_drafter_model(model, tmp_path, {})
    weights = load_file(tmp_path / "model.safetensors")
    for name in weights:
        save_file({k: v for k, v in weights.items() if k != name}, tmp_path / "model.safetensors")
        with pytest.raises(DSparkError, match=name.replace(".", r"\.")):
            load_drafter_model(tmp_path, target)


def fresh(target, **changes):
    served = tiny_drafter(target, draft_vocab_size=40, **changes).model
    model = type(served)(served.config)
    model.vocab = served.vocab
    return model


def test_unexpected_and_misshapen_keys_are_named(target, tmp_path):
    save_drafter_model(fresh(target), tmp_path, {})
    weights = load_file(tmp_path / "model.safetensors")
    save_file({**weights, "layers.9.o_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(DSparkError, match=r"unexpected key 'layers\.9"):
        load_drafter_model(tmp_path, target)
    save_file({**weights, "norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(DSparkError, match=r"'norm\.weight' has shape \(3,\)"):
        load_drafter_model(tmp_path, target)
    save_file({**weights, "vocab": torch.zeros(40, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(DSparkError, match="distinct target ids"):
        load_drafter_model(tmp_path, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": None}, "lacks the key 'mask_token_id'"),
        ({"block_size": None}, "lacks the key 'block_size'"),
        ({"dspark_format": 99}, "dspark_format"),
        ({"slot_convention": "mask_first"}, "slot_convention"),
        ({"mask_token_id": 640}, "mask_token_id 640"),
        ({"taps": [0, 77]}, "taps layers"),
        ({"vocab_size": 65}, "vocab_size 65"),
        ({"hidden_size": 48}, "hidden_size 48"),
        ({"target_identity": "other"}, "trained for other weights"),
        ({"markov_head_type": "lstm"}, "markov_head_type"),
        ({"method": "eagle"}, "method must be"),
    ],
)
def test_bad_configurations_are_named(target, checkpoint, changes, message):
    edit(checkpoint, **changes)
    with pytest.raises(DSparkError, match=message):
        load_drafter_model(checkpoint, target)


def test_missing_and_broken_files(target, checkpoint, tmp_path):
    with pytest.raises(DSparkError, match=r"config\.json does not exist"):
        read_drafter_config(tmp_path)
    (checkpoint / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(DSparkError, match=r"model\.safetensors is damaged, truncated or no safetensors file"):
        load_drafter_model(checkpoint, target)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(DSparkError, match=r"model\.safetensors does not exist"):
        load_drafter_model(checkpoint, target)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(DSparkError, match=r"config\.json is not valid JSON .*: copy or save it again"):
        load_drafter_model(checkpoint, target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "medusa"}, "'medusa' is not known"),
        ({"method": "ngram", "model": "x"}, "'model' is not supported for method ngram"),
        ({"method": "dspark", "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "dspark", "model": "/does/not/exist"}, "is not a directory"),
        ({"method": "dspark"}, "no dspark drafter is shipped for this model"),
    ],
)
def test_bad_speculative_configurations(target, config, message):
    with pytest.raises(DSparkError, match=message):
        build_drafter(config, target)


def test_a_block_wider_than_trained_is_refused(target, tmp_path):
    save_drafter_model(fresh(target), tmp_path, {})
    config = {"method": "dspark", "model": str(tmp_path), "num_speculative_tokens": 8}
    with pytest.raises(DSparkError, match="exceeds the block of 7"):
        build_drafter(config, target)
    drafter, policy = build_drafter(config | {"num_speculative_tokens": 3}, target)
    assert drafter.max_draft == 7
    assert policy.length == 3
    with pytest.raises(DSparkError, match="is a dspark drafter"):
        build_drafter(config | {"method": "dflash"}, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 2.5}, "num_layers must be int"),
        ({"num_heads": 0}, "num_heads must be 1 or more"),
        ({"rope_theta": "big"}, "rope_theta must be float"),
        ({"taps": 3}, "taps must be"),
        ({"draft_vocab_size": -1}, "draft_vocab_size"),
        ({"num_speculative_tokens": 8}, r"must lie in 1\.\.7"),
        ({"block_width": 7}, "unknown key 'block_width'"),
    ],
)
def test_values_of_the_wrong_type_or_range_are_named(target, checkpoint, changes, message):
    edit(checkpoint, **changes)
    with pytest.raises(DSparkError, match=message):
        load_drafter_model(checkpoint, target)


def test_a_shorter_trained_context_goes_on_to_the_targets(target, tmp_path):
    save_drafter_model(fresh(target), tmp_path, {})
    edit(tmp_path, max_context=16)
    model = load_drafter_model(tmp_path, target)
    assert len(model.rotary.cos) == target.max_context


@pytest.mark.parametrize(
    "config",
    [
        "dspark",
        {"method": "ngram", "prompt_lookup_max": "x"},
        {"method": "ngram", "prompt_lookup_min": 0},
        {"model": 5},
    ],
)
def test_speculative_configurations_of_the_wrong_type(target, config):
    with pytest.raises(DSparkError):
        build_drafter(config, target)


@pytest.mark.parametrize("storage", ["int8", "float16"])
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_round_trip_of_autoregressive_drafters(target, tmp_path, method, storage):
    model = tiny_chain_model(target, method, draft_vocab_size=40, confidence_head=storage == "int8")
    save_drafter_model(model, tmp_path, {}, storage=storage)
    assert json.loads((tmp_path / "config.json").read_text())["slot_convention"] == "feature_before_token"
    loaded = load_drafter_model(tmp_path, target)
    assert loaded.config == model.config
    for name, value in model.state_dict().items():
        exact = value.ndim != 2 or name in ("embed.weight", "lm_head.weight")
        tolerance = 0 if exact else float(value.abs().max()) / 200
        torch.testing.assert_close(loaded.state_dict()[name], value, atol=tolerance, rtol=0)
    drafter, policy = build_drafter(
        {"method": method, "model": str(tmp_path), "num_speculative_tokens": 3}, target
    )
    assert (drafter.name, drafter.max_draft, policy.length) == (method, 7, 3)
    assert len(drafter.kv_specs) == 1
    weights = load_file(tmp_path / "model.safetensors")
    for name in weights:
        save_file({k: v for k, v in weights.items() if k != name}, tmp_path / "model.safetensors")
        with pytest.raises(DSparkError, match=name.replace(".", r"\.")):
            load_drafter_model(tmp_path, target)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("eagle3", {"slot_convention": "anchor_first"}, 'slot_convention must be "feature_before_token"'),
        ("eagle3", {"method": "dspark"}, 'slot_convention must be "anchor_first"'),
        ("eagle3", {"method": "mtp"}, "taps must name one layer"),
        ("mtp", {"method": "eagle3"}, "lacks the key 'fc"),
        ("eagle3", {"num_layers": 2}, "num_layers must be 1, got 2"),
        ("mtp", {"taps": [3]}, "taps layers"),
        ("eagle3", {"taps": [0, 1]}, r"'fc.weight' has shape \(32, 96\)"),
        ("eagle3", {"confidence_head": True}, "lacks the key 'confidence"),
        ("mtp", {"markov_rank": 8}, "mtp drafters have no sequential head"),
        ("mtp", {"target_identity": "other"}, "trained for other weights"),
    ],
)
def test_bad_configurations_of_autoregressive_drafters(target, tmp_path, method, changes, message):
    save_drafter_model(tiny_chain_model(target, method), tmp_path, {})
    edit(tmp_path, **changes)
    with pytest.raises(DSparkError, match=message):
        load_drafter_model(tmp_path, target)
