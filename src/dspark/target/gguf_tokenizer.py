"""The tokenizer half of a GGUF file: byte-level BPE as tokenizer.json, and tokenizer_config.json.

GGUF stores tokens, their types and merges, but only names the scheme by which text is split before merging.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dspark.core import DSparkError
from dspark.target.gguf_metadata import Metadata

__all__ = ["build_tokenizer", "tokenizer_config"]

CONTROL, USER_DEFINED = 3, 4  # token types of the GGUF specification


def _pre_tokenizer(metadata: Metadata) -> pre_tokenizers.PreTokenizer:
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


def build_tokenizer(metadata: Metadata) -> Tokenizer:
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


def _post_processor(metadata: Metadata, tokens: list[str]) -> processors.PostProcessor:
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


def tokenizer_config(metadata: Metadata) -> dict[str, Any]:
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
