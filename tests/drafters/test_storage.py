"""Checkpoints in blocks: what serving would round, rounded beforehand, and nothing else about the drafter changes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.core import DSparkError
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.block import BlockDrafter
from dspark.drafters.checkpoint import load_drafter_model, read_drafter_config, save_drafter_model
from dspark.drafters.models import serve
from dspark.drafters.quantise import low_bits
from dspark.drafters.storage import CONTEXT, context_weight
from dspark.kernels import lowbit
from dspark.kernels.lowbit import LowBitEmbedding, LowBitLinear, QuantizedWeight
from dspark.target.decoder import Decoder
from dspark.testing import tiny_decoder, tiny_drafter
from dspark.testing.chain import tiny_chain_model

compiled = pytest.mark.skipif(not lowbit.supports(), reason="this machine has no low-bit kernels")


@pytest.fixture(params=["llama", "qwen2"])
def target(request: pytest.FixtureRequest) -> Decoder:
    """Drafters of the second have biases."""
    return tiny_decoder(kind=request.param, dtype=torch.float32)


def unserved(target: Decoder, head: Any = "vanilla") -> BlockDrafterModel:
    """Random weights in floats, the target's embedding and head in their places; of a rank that fills a block."""
    served = tiny_drafter(target, head=head, draft_vocab_size=40).model
    torch.manual_seed(7)
    model = BlockDrafterModel(dataclasses.replace(served.config, markov_rank=32))
    model.vocab = served.vocab
    model.lm_head.weight.data.copy_(target.output_weight[model.vocab])
    model.embed.weight.data.copy_(target.embed.weight)
    return model


def packed(drafter: BlockDrafter) -> dict[str, torch.Tensor]:
    """Everything that the served drafter computes with."""
    found = {"context": drafter._context_kv.packed}  # type: ignore[attr-defined]
    if drafter.model.config.attention_bias:
        found["context.bias"] = drafter._context_kv.bias  # type: ignore[attr-defined]
    for name, module in drafter.model.named_modules():
        if isinstance(module, LowBitLinear):
            found[name] = module.packed
            if module.bias is not None:
                found[f"{name}.bias"] = module.bias
    for name in ("context_projection", "context_projection.bias"):
        found.pop(name, None)
    return found | dict(drafter.model.state_dict())


@compiled
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_the_served_drafter_is_the_one_rounded_at_load(target: Decoder, tmp_path: Path, head: str) -> None:
    save_drafter_model(unserved(target, head), tmp_path / "rows", {})
    plain = load_drafter_model(tmp_path / "rows", target)
    save_drafter_model(plain, tmp_path / "blocks", {}, storage="blocks")
    at_load = serve(load_drafter_model(tmp_path / "rows", target, served=True), quantised=True)
    stored = serve(load_drafter_model(tmp_path / "blocks", target, served=True), quantised=True)
    assert isinstance(at_load, BlockDrafter)
    assert isinstance(stored, BlockDrafter)
    ours, theirs = packed(stored), packed(at_load)
    assert ours.keys() == theirs.keys()
    assert {"fc", "layers.0.qkv_proj", "head.w2", "lm_head", "context", "norm.weight"} <= ours.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_loaded_for_training_it_is_near_what_was_saved(target: Decoder, tmp_path: Path) -> None:
    model = unserved(target)
    save_drafter_model(model, tmp_path, {"steps": 3}, storage="blocks")
    loaded = load_drafter_model(tmp_path, target)
    assert isinstance(loaded, BlockDrafterModel)
    assert loaded.config == model.config
    bits, wanted = low_bits(model), model.state_dict()
    assert bits["layers.1.down_proj"] == 4
    assert bits["fc"] == bits["head.w2"] == 8
    for name, value in loaded.state_dict().items():
        exact = value.ndim != 2 or name in ("embed.weight", "lm_head.weight")
        steps = 6 if bits.get(name.removesuffix(".weight")) == 4 else 200
        tolerance = 0 if exact else float(wanted[name].abs().max()) / steps
        torch.testing.assert_close(value, wanted[name], atol=tolerance, rtol=0)
    # Rows that make keys and values come from the context's 8 bits, not from 4.
    error = (context_weight(loaded) - context_weight(model)).abs().max()
    assert error <= context_weight(model).abs().max() / 200
    served = serve(loaded, quantised=True)
    assert served.max_draft == 7


def test_rows_that_came_from_a_checkpoint_go_back_bit_for_bit(tmp_path: Path) -> None:
    target = tiny_decoder(
        dtype=torch.float32, vocab_size=3000
    )  # one scale in some hundred comes back as its neighbour
    save_drafter_model(unserved(target), tmp_path / "a", {})
    once = load_drafter_model(tmp_path / "a", target)
    save_drafter_model(once, tmp_path / "b", {})
    again = load_drafter_model(tmp_path / "b", target)
    for name, value in once.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@compiled
def test_a_head_in_blocks_is_shared_as_it_is(tmp_path: Path) -> None:
    target = tiny_decoder(dtype=torch.float32)
    save_drafter_model(unserved(target), tmp_path, {}, storage="blocks")
    rows = target.output_weight
    target.lm_head = LowBitLinear(QuantizedWeight.from_float(rows), integer=lowbit.supports_integers())  # type: ignore[assignment]
    target._output_weight = None
    model = load_drafter_model(tmp_path, target, served=True)
    assert isinstance(model.lm_head, LowBitLinear)
    assert torch.equal(model.lm_head.rows(torch.arange(40)).dequantize(), target.output_weight[model.vocab])


@compiled
def test_a_checkpoints_own_embedding_goes_before_the_targets(tmp_path: Path) -> None:
    target = tiny_decoder(dtype=torch.float32)
    model = unserved(target)
    save_drafter_model(model, tmp_path, {}, storage="blocks")
    path = tmp_path / "model.safetensors"
    table = LowBitLinear(QuantizedWeight.from_float(target.embed.weight))
    target.embed = LowBitEmbedding(table)
    ids = torch.arange(5)
    shared = load_drafter_model(tmp_path, target, served=True)
    assert torch.equal(shared.embed(ids), target.embed(ids))
    save_file({**load_file(path), "embed.weight": model.embed.weight.detach() + 1}, path)
    own = load_drafter_model(tmp_path, target, served=True)
    assert torch.equal(own.embed(ids), model.embed.weight[ids] + 1)


def test_each_missing_or_misshapen_part_is_named(target: Decoder, tmp_path: Path) -> None:
    save_drafter_model(unserved(target), tmp_path, {}, storage="blocks")
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    assert {f"{CONTEXT}.codes", "layers.0.o_proj.weight.minimum", "head.w1.weight.scale"} <= weights.keys()
    for name in weights:
        save_file({k: v for k, v in weights.items() if k != name}, path)
        with pytest.raises(DSparkError, match=name.replace(".", r"\.")):
            load_drafter_model(tmp_path, target)
    save_file({**weights, "fc.weight.scale": weights["fc.weight.scale"][:, :1].contiguous()}, path)
    with pytest.raises(DSparkError, match=r"'fc\.weight\.scale' is .*config\.json asks for"):
        load_drafter_model(tmp_path, target, served=True)
    save_file({**weights, "layers.7.fc.codes": weights["fc.weight.codes"].clone()}, path)
    with pytest.raises(DSparkError, match=r"layers\.7\.fc\.codes"):
        load_drafter_model(tmp_path, target, served=True)


def test_the_configuration_states_the_storage(target: Decoder, tmp_path: Path) -> None:
    save_drafter_model(unserved(target), tmp_path, {}, storage="blocks")
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text())
    assert raw["storage"] == "blocks"
    config.write_text(json.dumps(raw | {"storage": "int3"}))
    with pytest.raises(DSparkError, match="storage must be one of blocks, int8, float16, got 'int3'"):
        read_drafter_config(tmp_path)
    config.write_text(json.dumps(raw | {"storage": "int8"}))
    with pytest.raises(DSparkError, match=r"lacks the key '|unexpected key '"):
        load_drafter_model(tmp_path, target)


def test_storages_that_do_not_fit_are_refused(target: Decoder, tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="eagle3 drafters are not stored in blocks"):
        save_drafter_model(tiny_chain_model(target, "eagle3"), tmp_path, {}, storage="blocks")
    with pytest.raises(DSparkError, match="storage 'int4' is not supported"):
        save_drafter_model(unserved(target), tmp_path, {}, storage="int4")


def test_a_target_without_these_kernels_gets_floats(tmp_path: Path) -> None:
    save_drafter_model(unserved(tiny_decoder(dtype=torch.float32)), tmp_path, {}, storage="blocks")
    wide = tiny_decoder(dtype=torch.float64)
    model = load_drafter_model(tmp_path, wide, served=True)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float64, torch.int64}
    assert serve(model, quantised=True).max_draft == 7
