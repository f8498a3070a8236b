"""Text to token ids and back, chat templates included, from a Hugging Face directory.

    tokenizer = Tokenizer(directory)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])

Built on the `tokenizers` library and a sandboxed jinja2; equal to what transformers does with the same files.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from dspark.core import DSparkError
from dspark.target.hf import read_eos_token_ids, read_json

__all__ = ["Tokenizer"]

Messages = Sequence[Mapping[str, Any]]


class Tokenizer:
    """Tokenizer of the model in `directory` (tokenizer.json, tokenizer_config.json, chat_template.jinja).

    `special_tokens` maps bos_token, eos_token, ... to their text. `eos_token_ids` end a generation.

    Raises:
        DSparkError: tokenizer.json is missing or unreadable.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / "tokenizer.json"
        if not path.exists():
            raise DSparkError(f"{path} does not exist: save the model's fast tokenizer there")
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DSparkError(
                f"{path} is damaged, truncated or no tokenizer ({error}): fetch it again"
            ) from None
        self.backend.no_truncation()
        self.backend.no_padding()
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        self.special_tokens = _special_tokens(config)
        self.chat_template = _chat_template(directory, config)
        self._bytes_of_token: dict[int, bytes] = {}  # of those met so far
        self.eos_token_ids = read_eos_token_ids(directory) or self._eos_from_token()

    def _eos_from_token(self) -> tuple[int, ...]:
        token_id = self.token_id(self.special_tokens.get("eos_token", ""))
        return () if token_id is None else (token_id,)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included; the model's embedding may have more rows."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Ids of `text`. Special tokens in it are parsed; `add_special_tokens` puts the model's around it.

        Raises:
            DSparkError: half a character (a lone surrogate), as bytes that are no UTF-8 leave behind.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DSparkError(
                f"the text is not valid Unicode at character {error.start}: convert it first"
            ) from None
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (a space may show as U+0120), None if there is none."""
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def token_id(self, token: str) -> int | None:
        """Id of a token spelled as in the vocabulary."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` skips."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether a text's bytes are its tokens' bytes, one after the other."""
        return isinstance(self.backend.decoder, tokenizers.decoders.ByteLevel)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that token `token_id` of a byte-level vocabulary stands for; b"" for an unknown id."""
        known = self._bytes_of_token.get(token_id)
        if known is None:
            known = self._bytes_of_token[token_id] = self._spelled(token_id)
        return known

    def _spelled(self, token_id: int) -> bytes:
        if not self.is_byte_level:
            raise DSparkError(f"{self.directory}: only byte-level tokens have bytes of their own")
        token = self.token(token_id)
        if token is None:
            return b""
        if all(char in self._byte_of_char for char in token):
            return bytes(self._byte_of_char[char] for char in token)
        return token.encode("utf-8")  # an added token, kept as text

    @cached_property
    def _byte_of_char(self) -> dict[str, int]:
        """GPT-2's alphabet: printable Latin-1 bytes show as themselves, the others from U+0100 on."""
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}

    @overload
    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tokenize: Literal[True] = True,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        tokenize: Literal[False],
        **variables: Any,
    ) -> str: ...

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True, tokenize: bool = True, **variables: Any
    ) -> list[int] | str:
        """The conversation as the model was trained to see it: ids, or text where `tokenize` is False.

        Args:
            messages: `{"role": str, "content": str}`, in order; further keys reach the template.
            add_generation_prompt: end with the opening of the assistant's answer.
            variables: further names for the template, e.g. `enable_thinking`.

        Raises:
            DSparkError: no chat template, a malformed message, or the template refuses the conversation.
        """
        _check_messages(messages)
        values = {"tools": None, "documents": None, **self.special_tokens, **variables}
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise DSparkError(
                f"the chat template of {self.directory} refuses these messages: {error}"
            ) from None
        return self.encode(text) if tokenize else text

    @cached_property
    def _template(self) -> jinja2.Template:
        if self.chat_template is None:
            where = f"{self.directory}/tokenizer_config.json nor chat_template.jinja"
            raise DSparkError(f"neither {where} has a chat template: send the prompt as plain text instead")
        try:
            return _environment().from_string(self.chat_template)
        except jinja2.TemplateError as error:
            raise DSparkError(f"the chat template of {self.directory} cannot be read: {error}") from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... of tokenizer_config.json; each may be a string or a described AddedToken."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's (one template, or a list with one named default)."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise DSparkError(
            f"{directory}/tokenizer_config.json: chat_template must be a string or named strings"
        )
    return template


def _check_messages(messages: Messages) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise DSparkError("messages must be a non-empty list of {role, content} objects")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DSparkError(f"messages[{i}] must be an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise DSparkError(f"messages[{i}].{key} must be a string, got {message.get(key)!r:.60}")


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks text to train on; here it just prints."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """What chat templates are written for; sandboxed, because they come with downloaded models."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # NOTE: jinja2's own filter escapes <, > and & for HTML, which models never saw in training.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
