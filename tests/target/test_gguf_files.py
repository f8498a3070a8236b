"""GGUF conversion on a tiny file written here: values, row order, tokenizer, refusals, atomicity."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from dspark.core import DSparkError
from dspark.target.gguf import convert_gguf
from dspark.target.hf import read_config, read_weights, weights_identity
from dspark.target.tokenizer import Tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "Ġ Ġ"]
UNMERGED = "xyz"  # a word that no merge leads to
TOKENS = [
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
    UNMERGED,
    "<tool>",
]
TYPES = [3] * 3 + [1] * (256 + len(MERGES) + 1) + [4]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def to_gguf_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order, one row at a time: pair i of a head becomes rows 2i and 2i + 1."""
    out, d = np.empty_like(rows), rows.shape[0] // heads
    for h in range(heads):
        for i in range(d // 2):
            for half in range(2):
                out[h * d + 2 * i + half] = rows[h * d + half * (d // 2) + i]
    return out


def tensors(arch: str = "llama", tied: bool = True) -> dict[str, np.ndarray]:
    """Weights in Hugging Face row order under GGUF names."""
    rng = np.random.default_rng(0)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        parts = {
            "attn_norm": (HIDDEN,),
            "attn_q": (q, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, q),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in parts.items()}
        if arch == "qwen2":
            shapes |= {f"blk.{i}.attn_{n}.bias": (rows,) for n, rows in (("q", q), ("k", kv), ("v", kv))}
        if arch == "qwen3":
            shapes |= {f"blk.{i}.attn_{n}_norm.weight": (HEAD_DIM,) for n in "qk"}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    arch: str = "llama",
    pre: str = "smollm",
    tied: bool = True,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    **metadata: object,
) -> dict[str, np.ndarray]:
    """A complete small model; returns its weights in Hugging Face row order under GGUF names.

    `kinds` quantises tensors by name; `metadata` adds keys, with `__` for a dot.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
    for key, value in metadata.items():
        adders[type(value)](key.replace("__", "."), value)
    weights = tensors(arch, tied)
    for name, array in (weights | (extra or {})).items():
        stored = array
        if arch == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            stored = to_gguf_rows(array, HEADS if "attn_q" in name else KV_HEADS)
        if kind := (kinds or {}).get(name):
            writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def converted(tmp_path: Path, **options: object) -> tuple[Path, dict[str, np.ndarray]]:
    weights = write_gguf(tmp_path / "tiny.gguf", **options)  # type: ignore[arg-type]
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    return tmp_path / "tiny", weights


def test_config_and_weights_in_rotate_half_order(tmp_path: Path) -> None:
    directory, weights = converted(tmp_path)
    config = read_config(directory)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (2, 64, 4, 2)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (16, 96, len(TOKENS))
    assert (config.rms_norm_eps, config.rope_theta, config.max_context) == (1e-5, 12345.0, 512)
    assert (config.tie_embeddings, config.eos_token_ids, config.bos_token_id) == (True, (2,), 1)
    read = read_weights(directory)
    assert "lm_head.weight" not in read
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.1.self_attn.k_proj.weight": "blk.1.attn_k.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.1.self_attn.o_proj.weight": "blk.1.attn_output.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
        "model.layers.1.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
        "model.layers.1.mlp.up_proj.weight": "blk.1.ffn_up.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }
    for ours, theirs in pairs.items():
        np.testing.assert_array_equal(read[ours].numpy(), weights[theirs], err_msg=ours)
    assert len(read) == len(weights)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_keep_their_order(tmp_path: Path, arch: str) -> None:
    directory, weights = converted(tmp_path, arch=arch, pre="qwen2", tied=False)
    read = read_weights(directory)
    assert read_config(directory).model_type == arch
    np.testing.assert_array_equal(
        read["model.layers.0.self_attn.q_proj.weight"].numpy(), weights["blk.0.attn_q.weight"]
    )
    np.testing.assert_array_equal(read["lm_head.weight"].numpy(), weights["output.weight"])
    name, theirs = {
        "qwen2": ("model.layers.1.self_attn.k_proj.bias", "blk.1.attn_k.bias"),
        "qwen3": ("model.layers.1.self_attn.k_norm.weight", "blk.1.attn_k_norm.weight"),
    }[arch]
    np.testing.assert_array_equal(read[name].numpy(), weights[theirs])


def test_quantised_tensors_equal_the_format_read_by_hand(tmp_path: Path) -> None:
    kinds = {
        "blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q4_1,
        "token_embd.weight": gguf.GGMLQuantizationType.Q8_0,
        "blk.1.ffn_up.weight": gguf.GGMLQuantizationType.F16,
    }
    directory, weights = converted(tmp_path, kinds=kinds)
    read = read_weights(directory)
    blocks = gguf.quantize(weights["blk.0.ffn_up.weight"], gguf.GGMLQuantizationType.Q4_1).reshape(-1, 20)
    scale, low = blocks[:, :4].copy().view(np.float16).astype(np.float32).T  # value = scale * nibble + low
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    expected = (scale[:, None] * nibbles + low[:, None]).reshape(INNER, HIDDEN)
    np.testing.assert_array_equal(read["model.layers.0.mlp.up_proj.weight"].numpy(), expected)
    rows = gguf.quantize(weights["token_embd.weight"], gguf.GGMLQuantizationType.Q8_0).reshape(-1, 34)
    expected = rows[:, :2].copy().view(np.float16).astype(np.float32) * rows[:, 2:].view(np.int8)
    embedding = read["model.embed_tokens.weight"].numpy()
    np.testing.assert_array_equal(embedding, expected.reshape(len(TOKENS), HIDDEN))
    half = weights["blk.1.ffn_up.weight"].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(read["model.layers.1.mlp.up_proj.weight"].numpy(), half)


def test_the_file_is_plain_safetensors_with_aligned_data(tmp_path: Path) -> None:
    directory, _ = converted(tmp_path)
    path = directory / "model.safetensors"
    ours, theirs = read_weights(directory), load_file(path)
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert (int.from_bytes(path.read_bytes()[:8], "little") + 8) % 64 == 0


def test_tokenizer_comes_from_the_metadata(tmp_path: Path) -> None:
    directory, _ = converted(tmp_path)
    tokenizer = Tokenizer(directory)
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.encode("<|im_start|>the the<tool>") == [1, *ids("t", "he", "Ġthe", "<tool>")]
    assert tokenizer.decode([1, *ids("he", "<tool>"), 2]) == "he<tool>"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert text == "<|im_start|>user\nx<|im_end|>\n"
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"


def ids(*tokens: str) -> list[int]:
    return [TOKENS.index(token) for token in tokens]


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "12 1", ["1", "2", "Ġ", "1"]),
        ("smollm", "a  1", ["a", "ĠĠ", "1"]),
        ("gpt-2", "12 1", ["12", "Ġ", "1"]),
        ("gpt-2", "a  1", ["a", "Ġ", "Ġ", "1"]),
        ("qwen2", "12  1", ["1", "2", "Ġ", "Ġ", "1"]),
        ("llama-bpe", "1212", ["12", "1", "2"]),
        ("llama-bpe", "xyz", ["xyz"]),
        ("smollm", "xyz", ["x", "y", "z"]),
        ("qwen2", "xyz", ["x", "y", "z"]),
    ],
)
def test_pre_tokenizers_split_digits_and_spaces_as_named(
    tmp_path: Path, pre: str, text: str, tokens: list[str]
) -> None:
    directory, _ = converted(tmp_path, pre=pre)
    assert Tokenizer(directory).encode(text) == ids(*tokens)


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    directory, _ = converted(tmp_path, pre="qwen2")
    tokenizer = Tokenizer(directory)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_begin_and_end_tokens_where_the_metadata_ask_for_them(tmp_path: Path) -> None:
    options = {"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__add_eos_token": True}
    directory, _ = converted(tmp_path, **options)
    tokenizer = Tokenizer(directory)
    assert tokenizer.encode("he", add_special_tokens=True) == [1, *ids("he"), 2]
    assert tokenizer.encode("he") == ids("he")


def test_every_end_id_of_the_metadata_is_kept(tmp_path: Path) -> None:
    directory, _ = converted(tmp_path, tokenizer__ggml__eot_token_id=0)
    assert read_config(directory).eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"arch": "gemma"}, "general.architecture"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama__expert_count": 8}, "llama.expert_count"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count"),
        ({"split__count": 2}, "split.count"),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, "rope_freqs"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "blk.0.attn_q.bias"),
        ({"extra": {"output_norm.weight": np.ones(63, np.float32)}}, "model.norm.weight"),
        ({"arch": "qwen2", "extra": {"blk.9.attn_q.weight": np.ones(64, np.float32)}}, "blk.9.attn_q"),
    ],
)
def test_refuses_by_name_and_leaves_nothing(tmp_path: Path, options: dict[str, object], named: str) -> None:
    with pytest.raises(DSparkError) as refusal:
        converted(tmp_path, **options)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"not a model at all, but long enough to be one", "is no GGUF file"),
        (b"PK", "is no GGUF file"),
        (b"GGUF\0\0\0\3" + bytes(64), "little-endian files of versions 2 and 3"),
        (b"GGUF\1\0\0\0" + bytes(64), "little-endian files of versions 2 and 3"),
        (b"GGUF\3\0\0\0" + b"\xff" * 64, r"is damaged or truncated \(it has 72 bytes\): fetch it again"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(DSparkError, match=rf"bad\.gguf.*{what}"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")


def test_a_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_block_count(1)
    writer.add_token_list(["a", "bc"])
    writer.add_token_types([1, 1])
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = (tmp_path / "small.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        with pytest.raises(DSparkError) as refusal:
            convert_gguf(cut, tmp_path / "out")
        assert str(refusal.value) == f"{cut} is damaged or truncated (it has {size} bytes): fetch it again"


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    calls = []

    def interrupted(*args: object) -> np.ndarray:
        calls.append(args)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return dequantize(*args)

    dequantize = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_does_not_overwrite_and_lets_a_faster_process_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = converted(tmp_path)
    identity = weights_identity(directory)
    with pytest.raises(DSparkError, match="not empty"):
        convert_gguf(tmp_path / "tiny.gguf", directory)
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(()))  # as if it had appeared after the check
    convert_gguf(tmp_path / "tiny.gguf", directory)
    assert weights_identity(directory) == identity


def test_transformers_reads_the_result(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    directory, _ = converted(tmp_path)
    config = transformers.AutoConfig.from_pretrained(directory)
    assert type(config).__name__ == "LlamaConfig"
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2
    fast = transformers.AutoTokenizer.from_pretrained(directory)
    assert fast.encode("<|im_start|>the 12", add_special_tokens=False) == [1, *ids("t", "he", "Ġ", "1", "2")]
