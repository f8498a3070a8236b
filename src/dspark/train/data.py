"""Training data: answers that the target wrote, as token sequences with the answer marked."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dspark.core import DSparkError

__all__ = ["ChatTokenizer", "Sequence", "load_sequences", "read_records", "split"]


class ChatTokenizer(Protocol):
    """The part of a tokenizer that training needs."""

    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True)
class Sequence:
    """Prompt and answer tokens; `answer_start` is the position of the first answer token."""

    token_ids: list[int]
    answer_start: int
    domain: str = ""

    @property
    def num_anchors(self) -> int:
        """Positions that may anchor a block: they and their successor are answer tokens."""
        return max(0, len(self.token_ids) - 1 - self.answer_start)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a jsonl or jsonl.gz file."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise DSparkError(
                        f"{path}:{number} is not JSON ({error.msg}); one record a line"
                    ) from error
    except OSError as error:
        raise DSparkError(f"cannot read training data {path}: {error.strerror}") from error


def load_sequences(paths: Iterable[Path], tokenizer: ChatTokenizer, max_length: int = 1024) -> list[Sequence]:
    """Tokenise `{"messages": [...]}` records whose last message is the assistant's; longer ones are cut.

    The prompt is rendered exactly as in serving. `token_ids`, where a record has them, are the answer as it was
    generated (text can tokenise otherwise). An answer that ended by itself gets its end token.
    """
    sequences = []
    for path in paths:
        for number, record in enumerate(read_records(Path(path)), 1):
            messages = record.get("messages")
            if not messages or messages[-1].get("role") != "assistant":
                raise DSparkError(f'{path}:{number} needs "messages" that end with an assistant message')
            prompt = tokenizer.apply_chat_template(messages[:-1])
            answer = list(record.get("token_ids") or tokenizer.encode(messages[-1]["content"]))
            ended = bool(answer) and answer[-1] in tokenizer.eos_token_ids
            if record.get("finish_reason", "stop") == "stop" and not ended:
                answer.append(tokenizer.eos_token_ids[0])
            sequence = Sequence((prompt + answer)[:max_length], len(prompt), record.get("domain", ""))
            if sequence.num_anchors > 0:
                sequences.append(sequence)
    return sequences


def split(sequences: list[Sequence], held_out: float, seed: int) -> tuple[list[Sequence], list[Sequence]]:
    """Split into training and held-out sequences, by prompt.

    A prompt's side depends on it and the seed alone: answers to one prompt stay together, and more data moves
    nothing across.
    """

    def place(sequence: Sequence) -> float:
        text = f"{seed}:{','.join(map(str, sequence.token_ids[: sequence.answer_start]))}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64

    ranked = sorted(sequences, key=place)
    count = max(1, sum(place(s) < held_out for s in ranked))
    return ranked[count:], ranked[:count]
