"""Training data: answers that the target wrote, as token sequences with the answer marked."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dspark.errors import DSparkError

__all__ = [
    "ChatTokenizer",
    "Sequence",
    "conversation",
    "load_sequences",
    "read_lines",
    "read_records",
    "split",
    "to_sequence",
]

# ShareGPT's speakers.
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
}


class ChatTokenizer(Protocol):
    """The part of a tokenizer that training needs."""

    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True)
class Sequence:
    """Prompt and answer tokens; `answer_start` is the position of the first answer token.

    `group`: what `split` keeps together where no prompt says it; "" is the prompt's tokens.
    """

    token_ids: list[int]
    answer_start: int
    domain: str = ""
    group: str = ""

    @property
    def num_anchors(self) -> int:
        """Positions that may anchor a block: they and their successor are answer tokens."""
        return max(0, len(self.token_ids) - 1 - self.answer_start)


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line) of a text or gzip file; blank lines are left out.

    Raises:
        DSparkError: the file cannot be read.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DSparkError(f"{path} is damaged behind line {number}: copy it again ({error})") from error
    except UnicodeDecodeError as error:
        raise DSparkError(f"{path} is not UTF-8 behind line {number}: convert it first") from error
    except OSError as error:
        raise DSparkError(f"cannot read training data {path}: {error.strerror}") from error


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, record) of a jsonl or jsonl.gz file.

    Raises:
        DSparkError: the file cannot be read, or a line is not a JSON object; the message says which.
    """
    for number, line in read_lines(path):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DSparkError(f"{path}:{number} is not JSON ({error.msg}); one record a line") from error
        if not isinstance(record, dict):
            raise DSparkError(f"{path}:{number} is not a JSON object but {line.strip():.40}")
        if "\\ud" in line.lower() and not _is_unicode(record):
            raise DSparkError(f"{path}:{number} escapes half a character (a lone surrogate): repair it")
        yield number, record


def _is_unicode(record: dict[str, Any]) -> bool:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def conversation(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The messages of a record: `messages`, or `conversations` with role/content or from/value.

    Raises:
        DSparkError: neither is there, or a message lacks its role or its text. `where` (file:line) leads.
    """
    key = "messages" if "messages" in record else "conversations"
    turns = record.get(key)
    if not isinstance(turns, list) or not turns:
        raise DSparkError(f'{where} needs "messages", "conversations" or "text"; it has {", ".join(record)}')
    return [_message(turn, f"{where}: {key}[{i}]") for i, turn in enumerate(turns)]


def _message(turn: Any, where: str) -> dict[str, Any]:
    match turn:
        case {"role": str(), "content": str()}:
            return dict(turn)
        case {"from": str(speaker), "value": str(text)}:
            if speaker.lower() not in _ROLES:
                raise DSparkError(f"{where} is from {speaker!r}; known are {', '.join(_ROLES)}")
            return {"role": _ROLES[speaker.lower()], "content": text}
    raise DSparkError(f'{where} needs "role" and "content" (or "from" and "value"), both text')


def to_sequence(
    record: dict[str, Any], where: str, tokenizer: ChatTokenizer, max_length: int = 1024
) -> Sequence:
    """One record as tokens, cut to `max_length`.

    A conversation must end with the assistant's message; the prompt before it is rendered exactly as in serving.
    `token_ids`, where a record has them, are the answer as it was generated (text can tokenise otherwise). An
    answer that ended by itself gets its end token. Of a `{"text": ...}` record every token behind the first is
    trained on.

    Raises:
        DSparkError: another form; the message starts with `where` (file:line).
    """
    domain = str(record.get("domain") or "")
    text = record.get("text")
    if isinstance(text, str) and "messages" not in record and "conversations" not in record:
        group = hashlib.sha256(text.encode()).hexdigest()
        return Sequence(tokenizer.encode(text)[:max_length], 1, domain, group)
    messages = conversation(record, where)
    if messages[-1]["role"] != "assistant" or len(messages) == 1:
        raise DSparkError(f"{where} needs messages that end with an assistant message behind a prompt")
    try:
        prompt = tokenizer.apply_chat_template(messages[:-1])
    except DSparkError as error:
        raise DSparkError(f"{where}: {error}") from error
    answer = _answer_tokens(record, messages[-1]["content"], where, tokenizer)
    return Sequence((prompt + answer)[:max_length], len(prompt), domain)


def _answer_tokens(record: dict[str, Any], text: str, where: str, tokenizer: ChatTokenizer) -> list[int]:
    answer = record.get("token_ids") or tokenizer.encode(text)
    if not isinstance(answer, list) or not all(type(t) is int and t >= 0 for t in answer):
        raise DSparkError(f'{where}: "token_ids" must be a list of token ids')
    ended = bool(answer) and answer[-1] in tokenizer.eos_token_ids
    if record.get("finish_reason", "stop") == "stop" and not ended:
        return [*answer, tokenizer.eos_token_ids[0]]
    return list(answer)


def load_sequences(paths: Iterable[Path], tokenizer: ChatTokenizer, max_length: int = 1024) -> list[Sequence]:
    """Tokenise the records of jsonl or jsonl.gz files; see `to_sequence`. Those without an anchor are left out.

    Raises:
        DSparkError: an unreadable file or a malformed record; the message names file and line.
    """
    sequences = []
    for path in map(Path, paths):
        for number, record in read_records(path):
            sequence = to_sequence(record, f"{path}:{number}", tokenizer, max_length)
            if sequence.num_anchors > 0:
                sequences.append(sequence)
    return sequences


def split(sequences: list[Sequence], held_out: float, seed: int) -> tuple[list[Sequence], list[Sequence]]:
    """Split into training and held-out sequences, by prompt.

    A prompt's side depends on it and the seed alone: answers to one prompt stay together, and more data moves
    nothing across.
    """

    def place(sequence: Sequence) -> float:
        prompt = sequence.group or ",".join(map(str, sequence.token_ids[: sequence.answer_start]))
        return int.from_bytes(hashlib.sha256(f"{seed}:{prompt}".encode()).digest()[:8], "big") / 2**64

    ranked = sorted(sequences, key=place)
    count = max(1, sum(place(s) < held_out for s in ranked))
    return ranked[count:], ranked[:count]
