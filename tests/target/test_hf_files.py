"""Hugging Face directories: which configs are read, what is refused, strict weights, identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.core import DSparkError
from dspark.target.hf import read_config, read_eos_token_ids, read_weights, weight_shapes, weights_identity
from dspark.target.rotary import RopeScaling

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 7,
    "bos_token_id": 1,
}
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def write_config(directory: Path, **changes: Any) -> Path:
    """LLAMA with `changes`; a value of None drops the key."""
    config = {k: v for k, v in (LLAMA | changes).items() if v is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_model(directory: Path, **changes: Any) -> dict[str, torch.Tensor]:
    directory.mkdir(exist_ok=True)
    shapes = weight_shapes(read_config(write_config(directory, **changes)))
    generator = torch.Generator().manual_seed(0)
    # bfloat16 values, so that storage in either type holds the same numbers
    weights = {n: torch.randn(s, generator=generator).bfloat16().float() for n, s in shapes.items()}
    save_file(weights, directory / "model.safetensors")
    return weights


def write_shards(directory: Path, weights: dict[str, torch.Tensor], **changes: Any) -> None:
    directory.mkdir(exist_ok=True)
    write_config(directory, **changes)
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, chosen in parts.items():
        save_file({name: weights[name] for name in chosen}, directory / file)
    weight_map = {name: file for file, chosen in parts.items() for name in chosen}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_llama_fields(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path))
    assert (config.model_type, config.vocab_size, config.hidden_size) == ("llama", 32, 16)
    assert (config.intermediate_size, config.num_layers, config.num_heads, config.num_kv_heads) == (
        24,
        2,
        4,
        2,
    )
    assert (config.head_dim, config.rms_norm_eps, config.rope_theta, config.max_context) == (
        4,
        1e-5,
        5000.0,
        64,
    )
    assert (config.tie_embeddings, config.attention_bias, config.qk_norm) == (True, False, False)
    assert (config.windows, config.eos_token_ids, config.bos_token_id) == ((), (7,), 1)


def test_qwen_types_differ_where_the_models_do(tmp_path: Path) -> None:
    qwen2 = read_config(write_config(tmp_path, model_type="qwen2"))
    assert (qwen2.attention_bias, qwen2.qk_norm) == (True, False)
    qwen3 = read_config(write_config(tmp_path, model_type="qwen3", head_dim=8))
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 8)
    with pytest.raises(DSparkError, match="head_dim is missing"):
        read_config(write_config(tmp_path, model_type="qwen3"))


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}}, 7e5),
        ({"rope_scaling": {"type": "default"}}, 5000.0),
        ({"rope_theta": None}, 10000.0),
        ({"rope_theta": 300}, 300.0),
    ],
)
def test_rope_theta_in_every_dialect(tmp_path: Path, changes: dict[str, Any], theta: float) -> None:
    assert read_config(write_config(tmp_path, **changes)).rope_theta == theta


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_rope_scaling(tmp_path: Path) -> None:
    assert read_config(write_config(tmp_path)).rope_scaling is None
    for changes, scaling in (
        ({"rope_scaling": LLAMA3}, RopeScaling(8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, RopeScaling(8.0, 1.0, 4.0, 8192)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeScaling(2.0)),
    ):
        assert read_config(write_config(tmp_path, **changes)).rope_scaling == scaling
    for changes, message in (
        ({"factor": None}, "factor must be a number"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings is missing"),
        ({"low_freq_factor": 4.0}, "below high_freq_factor"),
    ):
        with pytest.raises(DSparkError, match=message):
            read_config(write_config(tmp_path, rope_scaling={**LLAMA3, **changes}))


def test_optional_keys_have_the_meaning_of_transformers(tmp_path: Path) -> None:
    changes = dict.fromkeys(("num_key_value_heads", "tie_word_embeddings", "eos_token_id", "hidden_act"))
    config = read_config(write_config(tmp_path, **changes))
    assert (config.num_kv_heads, config.tie_embeddings, config.eos_token_ids) == (4, False, ())


def test_generation_config_decides_what_ends_a_generation(tmp_path: Path) -> None:
    write_config(tmp_path, eos_token_id=[3, 4])
    assert read_eos_token_ids(tmp_path) == (3, 4)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 8], "bos_token_id": 2}')
    config = read_config(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id) == ((9, 8), 2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 6}')
    config = read_config(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id) == ((6,), 1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "no"}')
    with pytest.raises(DSparkError, match="eos_token_id"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, ()),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (None, 9)),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, ()),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (9, None),
        ),
        ({"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}, ()),
    ],
)
def test_sliding_windows(tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read_config(write_config(tmp_path, model_type="qwen2", **changes)).windows == windows


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 9}, (9, 9)),
        ({"sliding_window": 9, "use_sliding_window": False, "max_window_layers": 1}, (9, 9)),
        ({}, (4096, 4096)),
    ],
)
def test_mistral_has_one_window_for_all_layers(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    config = read_config(write_config(tmp_path, model_type="mistral", **changes))
    assert config.windows == windows
    assert (config.attention_bias, config.qk_norm, config.head_dim) == (False, False, 4)


def test_mistral_keys_that_decide(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(LLAMA | {"model_type": "mistral", "sliding_window": None})
    )
    assert read_config(tmp_path).windows == ()
    for key, value in (
        ("layer_types", ["full_attention", "full_attention"]),
        ("sliding_window", 0),
        ("num_key_value_heads", None),
    ):
        with pytest.raises(DSparkError, match=key):
            read_config(write_config(tmp_path, model_type="mistral", **{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gemma3"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("quantization_config", {"bits": 4}),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e4}}),
        ("partial_rotary_factor", 0.5),
        ("sliding_window", 16),
        ("layer_types", ["sliding_attention", "full_attention"]),
        ("layer_types", ["full_attention"]),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", "2"),
        ("num_hidden_layers", 0),
        ("rms_norm_eps", -1),
        ("tie_word_embeddings", "yes"),
        ("head_dim", 5),
    ],
)
def test_refuses_what_it_does_not_compute(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(DSparkError, match=key) as refusal:
        read_config(write_config(tmp_path, **{key: value}))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "key", ["vocab_size", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"]
)
def test_names_a_missing_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(DSparkError, match=key):
        read_config(write_config(tmp_path, **{key: None}))


@pytest.mark.parametrize("text", ["", "[1]", "{", "\udcff"])
def test_names_an_unreadable_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DSparkError, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(DSparkError, match="does not exist"):
        read_config(tmp_path / "nowhere")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_shapes_and_config_equal_transformers(tmp_path: Path, model_type: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    keep = {k: v for k, v in LLAMA.items() if k not in ("model_type", "rope_theta")}
    theirs = transformers.AutoConfig.for_model(
        model_type, **(keep | {"tie_word_embeddings": tied, "head_dim": 8, "use_sliding_window": True})
    )
    theirs.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    config = read_config(tmp_path)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        shapes.pop("lm_head.weight")
    assert weight_shapes(config) == shapes
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]


def test_reads_exactly_what_was_saved(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "one", tie_word_embeddings=False)
    write_shards(tmp_path / "two", weights, tie_word_embeddings=False)
    for directory in (tmp_path / "one", tmp_path / "two"):
        read = read_weights(directory)
        assert read.keys() == weights.keys()
        assert all(torch.equal(read[name], weights[name]) for name in weights)
    half = read_weights(tmp_path / "one", torch.bfloat16)
    assert all(half[n].dtype == torch.bfloat16 and torch.equal(half[n].float(), weights[n]) for n in weights)


def test_matching_types_are_mapped_and_never_written_back(tmp_path: Path) -> None:
    weights = write_model(tmp_path)
    read = read_weights(tmp_path)
    starts = [tensor.data_ptr() for tensor in read.values()]
    ends = [tensor.data_ptr() + tensor.nbytes for tensor in read.values()]
    assert max(ends) - min(starts) == sum(
        tensor.nbytes for tensor in read.values()
    )  # as they lie in the file
    read[NORM].zero_()
    assert torch.equal(read_weights(tmp_path)[NORM], weights[NORM])


def test_ignores_only_what_is_redundant(tmp_path: Path) -> None:
    weights = write_model(tmp_path)
    extra = {
        "lm_head.weight": torch.ones(32, 16),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file(weights | extra, tmp_path / "model.safetensors")
    assert read_weights(tmp_path).keys() == weights.keys()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({NORM: None}, f"tensor {NORM} is missing"),
        ({NORM: None, DOWN: None}, rf"tensor {DOWN} \(and 1 more\) is missing"),
        (
            {"model.layers.2.mlp.up_proj.weight": torch.ones(24, 16)},
            "layers.2.mlp.up_proj.weight is unexpected",
        ),
        ({DOWN: torch.ones(24, 16)}, rf"{DOWN} has shape \[24, 16\], config.json wants \[16, 24\]"),
        ({NORM: torch.ones(16, dtype=torch.int8)}, f"{NORM} is I8"),
    ],
)
def test_names_what_does_not_fit(
    tmp_path: Path, change: dict[str, torch.Tensor | None], complaint: str
) -> None:
    weights = write_model(tmp_path) | change
    save_file({n: t for n, t in weights.items() if t is not None}, tmp_path / "model.safetensors")
    with pytest.raises(DSparkError, match=complaint) as refusal:
        read_weights(tmp_path)
    assert "\n" not in str(refusal.value)


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    write_model(tmp_path)
    write_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(DSparkError, match=r"lm_head\.weight is missing"):
        read_weights(tmp_path)


def test_names_files_that_are_absent_damaged_or_elsewhere(tmp_path: Path) -> None:
    weights = write_model(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (b"", content[:100], content[:-8]):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(DSparkError, match=r"model\.safetensors is damaged, truncated or no"):
            read_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DSparkError, match="holds no weights"):
        read_weights(tmp_path)
    write_shards(tmp_path, weights)
    save_file(weights, tmp_path / "b.safetensors")
    with pytest.raises(DSparkError, match="stored twice"):
        read_weights(tmp_path)
    for shard in ("missing.safetensors", "../b.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: shard}}))
        with pytest.raises(DSparkError, match="weight_map names"):
            read_weights(tmp_path)


def test_identity_follows_the_weights_and_not_the_files(tmp_path: Path) -> None:
    weights = write_model(tmp_path / "one")
    identity = weights_identity(tmp_path / "one")
    assert len(identity) == 16
    write_shards(tmp_path / "two", weights, eos_token_id=9)
    assert weights_identity(tmp_path / "two") == identity
    half = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(half | {"lm_head.weight": half[EMBED].clone()}, tmp_path / "one" / "model.safetensors")
    assert weights_identity(tmp_path / "one") == identity


@pytest.mark.parametrize("name", [EMBED, NORM, DOWN])
def test_identity_sees_a_change_of_any_tensor(tmp_path: Path, name: str) -> None:
    weights = write_model(tmp_path)
    before = weights_identity(tmp_path)
    save_file(weights | {name: weights[name] * 1.001}, tmp_path / "model.safetensors")
    assert weights_identity(tmp_path) != before


def test_identity_sees_the_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    before = weights_identity(tmp_path)
    write_config(tmp_path, rope_theta=6000.0)
    assert weights_identity(tmp_path) != before
