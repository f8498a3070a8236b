"""GGUF files of the Llama and Qwen families, turned once into a Hugging Face directory that loads quickly.

    convert_gguf(Path("model.gguf"), Path("model"))

Weights are dequantised to float32. llama.cpp stores the rows of a Llama's q and k projections with the two
halves of a rotary pair side by side; they come back in the order that rotate-half needs. Whatever the file
asks for that is not implemented raises `DSparkError`.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dspark.core import DSparkError
from dspark.target.hf import read_config, weight_shapes

__all__ = ["convert_gguf"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF specification
ALIGNMENT = 64  # bytes: a cache line, so that mapped rows start on one

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Metadata:
    """Key-value section of a GGUF file; errors name the key and the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError, OSError) as error:
            raise DSparkError(f"{path} is damaged or no GGUF file ({error}): download it again") from None
        self.arch = self.get("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise self.refuse("general.architecture", self.arch, f"use one of {', '.join(ARCHITECTURES)}")

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.fields.get(key.format(arch=getattr(self, "arch", "")))
        return default if field is None else field.contents()

    def need(self, key: str, kind: type) -> Any:
        value = self.get(key)
        if not isinstance(value, kind):
            name = key.format(arch=self.arch)
            raise DSparkError(f"{self.path}: {name} must be one {kind.__name__}, got {value!r:.60}")
        return value

    def refuse(self, key: str, value: object, supported: str) -> DSparkError:
        return DSparkError(
            f"{self.path}: {key.format(arch=self.arch)} = {value!r} is not supported; {supported}"
        )


def convert_gguf(gguf_path: Path, directory: Path) -> None:
    """Write `directory` with config, float32 weights, tokenizer and chat template of `gguf_path`.

    Built beside `directory` and renamed into place: it appears complete or not at all. Another process that
    finishes the same conversion first wins quietly.

    Raises:
        DSparkError: not a GGUF file, an unsupported model, `directory` has contents, or the disk is full.
    """
    if directory.exists() and any(directory.iterdir()):
        raise DSparkError(f"{directory} exists and is not empty: name a new directory")
    metadata = _Metadata(gguf_path)
    config = _config(metadata)
    tokenizer = _tokenizer(metadata)
    if tokenizer.get_vocab_size() > config["vocab_size"]:
        raise DSparkError(f"{gguf_path}: there are more tokenizer.ggml.tokens than rows in token_embd")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as scratch:
            build = Path(scratch) / "model"
            build.mkdir()
            _write_json(build / "config.json", config)
            _write_json(build / "generation_config.json", _generation_config(metadata))
            (build / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
            _write_json(build / "tokenizer_config.json", _tokenizer_config(metadata))
            _write_weights(metadata, build)
            _move(build, directory)
    except OSError as error:
        raise DSparkError(f"cannot write {directory} ({error}): free some space or choose another") from None


def _move(build: Path, directory: Path) -> None:
    try:
        os.rename(build, directory)
    except OSError:
        if not (directory / "config.json").exists():
            raise


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(metadata: _Metadata) -> dict[str, Any]:
    """config.json of the model, in the words of transformers."""
    _refuse_unsupported(metadata)
    hidden = metadata.need("{arch}.embedding_length", int)
    heads = metadata.need("{arch}.attention.head_count", int)
    head_dim = metadata.get("{arch}.attention.key_length", hidden // heads)
    for key in ("{arch}.attention.value_length", "{arch}.rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise metadata.refuse(key, metadata.get(key), f"it must equal the head dimension {head_dim}")
    names = {tensor.name: tensor for tensor in metadata.reader.tensors}
    if "token_embd.weight" not in names:
        raise DSparkError(f"{metadata.path}: tensor token_embd.weight is missing")
    return {
        "architectures": [ARCHITECTURES[metadata.arch]],
        "model_type": metadata.arch,
        "vocab_size": int(names["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": metadata.need("{arch}.feed_forward_length", int),
        "num_hidden_layers": metadata.need("{arch}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(metadata.need("{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(metadata.get("{arch}.rope.freq_base", 10000.0)),
        "max_position_embeddings": metadata.need("{arch}.context_length", int),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _refuse_unsupported(metadata: _Metadata) -> None:
    if metadata.get("{arch}.rope.scaling.type", "none") != "none":
        key = "{arch}.rope.scaling.type"
        raise metadata.refuse(key, metadata.get(key), "only unscaled rotary embeddings are")
    if any(tensor.name.startswith("rope_freqs") for tensor in metadata.reader.tensors):
        raise DSparkError(f"{metadata.path}: tensor rope_freqs (Llama 3.1 rotary scaling) is not supported")
    for key in ("{arch}.expert_count", "{arch}.attention.sliding_window", "{arch}.rope.scale_linear"):
        if metadata.get(key):
            raise metadata.refuse(key, metadata.get(key), "only dense full attention is")
    if metadata.get("split.count", 1) > 1:
        raise metadata.refuse(
            "split.count", metadata.get("split.count"), "merge the parts with gguf-split first"
        )


def _shortest(value: float) -> float:
    """The decimal that was meant: metadata hold float32, 1e-05 comes back as 9.999999747e-06."""
    return float(str(np.float32(value)))


def _generation_config(metadata: _Metadata) -> dict[str, Any]:
    """Every id that the metadata say ends a generation: of the text, of a turn, of a message."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    eos = list(dict.fromkeys(i for i in found if i is not None))
    if not eos:
        raise DSparkError(f"{metadata.path}: tokenizer.ggml.eos_token_id is missing")
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _write_weights(metadata: _Metadata, build: Path) -> None:
    """Stream float32 tensors into build/model.safetensors: one tensor in memory at a time."""
    config = read_config(build)
    expected = weight_shapes(config)
    tensors = {_hf_name(tensor.name): tensor for tensor in metadata.reader.tensors}
    for name in [*expected, *tensors]:
        if name not in tensors:
            raise DSparkError(f"{metadata.path}: tensor {name} (its Hugging Face name) is missing")
        if name not in expected:
            raise DSparkError(f"{metadata.path}: tensor {tensors[name].name} is not known in {metadata.arch}")
        shape = tuple(reversed(tensors[name].shape.tolist()))  # GGUF lists the fastest axis first
        if shape != expected[name]:
            raise DSparkError(
                f"{metadata.path}: tensor {name} has shape {shape}, metadata need {expected[name]}"
            )

    permuted = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def arrays() -> Iterator[np.ndarray]:
        for name in expected:
            heads = permuted.get(name.split(".")[-2]) if metadata.arch == "llama" else None
            array = _dequantize(tensors[name], metadata.path)
            yield _rotate_half_rows(array, heads) if heads else array

    _write_safetensors(build / "model.safetensors", expected, arrays())


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; other names come back unchanged."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{LAYER_TENSORS[part]}.{kind}" if part in LAYER_TENSORS else name
    part, _, kind = name.rpartition(".")
    return f"{TENSORS[part]}.{kind}" if part in TENSORS else name


def _dequantize(tensor: gguf.ReaderTensor, path: Path) -> np.ndarray:
    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise DSparkError(f"{path}: tensor {tensor.name} has type {kind}, which cannot be read") from None


def _rotate_half_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (0, d/2, 1, d/2 + 1, ...) to (0, 1, ..., d - 1). `rows`: [heads * d, in]."""
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])  # [heads, d / 2, 2, in]
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], arrays: Iterator[np.ndarray]
) -> None:
    """A float32 safetensors file: length of the header (u64), header (JSON), then the arrays in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(np.ascontiguousarray(array, dtype="<f4").data)


def _pre_tokenizer(metadata: _Metadata) -> pre_tokenizers.PreTokenizer:
    """How text is split before merging; GGUF names the scheme instead of spelling it out."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    digits = {"qwen2": "1", "llama-bpe": "3"}
    scheme = metadata.get("tokenizer.ggml.pre")
    if scheme in digits:
        split = pre_tokenizers.Split(Regex(words.replace("DIGITS", digits[scheme])), behavior="isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's own pattern
    if scheme == "gpt-2":
        return byte_level
    if scheme == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    raise metadata.refuse("tokenizer.ggml.pre", scheme, "use smollm, qwen2, llama-bpe or gpt-2")


def _tokenizer(metadata: _Metadata) -> Tokenizer:
    """Byte-level BPE from the tokens, merges and token types of the metadata."""
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        model = metadata.get("tokenizer.ggml.model")
        raise metadata.refuse("tokenizer.ggml.model", model, "only byte-level BPE (gpt2) is")
    scheme = metadata.get("tokenizer.ggml.pre")
    pre_tokenizer = _pre_tokenizer(metadata)
    tokens = metadata.need("tokenizer.ggml.tokens", list)
    types = metadata.need("tokenizer.ggml.token_type", list)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.need("tokenizer.ggml.merges", list)]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens) or len(types) != len(tokens):
        raise DSparkError(f"{metadata.path}: tokenizer.ggml.tokens repeats or does not match token_type")
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=scheme == "llama-bpe")
    except Exception as error:  # the library raises bare Exception for merges outside the vocabulary
        raise DSparkError(f"{metadata.path}: tokenizer.ggml.merges cannot be used ({error})") from None
    tokenizer = Tokenizer(bpe)
    if scheme == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, tokens)
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        chosen = [token for token, type_ in zip(tokens, types, strict=True) if type_ == kind]
        added = [AddedToken(token, special=special, normalized=False) for token in chosen]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer


def _post_processor(metadata: _Metadata, tokens: list[str]) -> processors.PostProcessor:
    """Puts the begin and end tokens around a text where the metadata ask for them."""
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.pre") == "llama-bpe")
    wanted = {"bos": add_bos, "eos": metadata.get("tokenizer.ggml.add_eos_token", False)}
    ids = {kind: metadata.need(f"tokenizer.ggml.{kind}_token_id", int) for kind, on in wanted.items() if on}
    around = {kind: f"{tokens[token_id]}:0" for kind, token_id in ids.items()}
    template = [around.get("bos", ""), "$A:0", around.get("eos", "")]
    return processors.TemplateProcessing(
        single=[piece for piece in template if piece],
        special_tokens=[(tokens[token_id], token_id) for token_id in ids.values()],
    )


def _tokenizer_config(metadata: _Metadata) -> dict[str, Any]:
    tokens = metadata.need("tokenizer.ggml.tokens", list)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise DSparkError(f"{metadata.path}: {key}_token_id = {token_id} is outside the vocabulary")
        config[f"{name}_token"] = None if token_id is None else tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    return config if template is None else {**config, "chat_template": template}
