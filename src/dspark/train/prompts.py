"""Prompts for generating training data, from files; without the evaluation prompts, and each once."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.core import DSparkError
from dspark.data import load_prompts
from dspark.train.data import conversation, read_lines, read_records

__all__ = ["TrainingPrompt", "built_in_keys", "distinct", "draw", "normal_text", "read_prompts"]


@dataclass(frozen=True)
class TrainingPrompt:
    """A conversation that waits for the assistant. `key` names its text, whatever its case and spacing."""

    messages: list[dict[str, Any]]
    domain: str = ""
    source: str = ""

    @property
    def key(self) -> str:
        return normal_text(self.messages)


def normal_text(messages: list[dict[str, Any]]) -> str:
    """Roles and texts in lower case with single spaces: equal for prompts that differ in nothing that matters."""
    parts = (f"{m['role']}: {' '.join(m['content'].lower().split())}" for m in messages)
    return "\n".join(parts)


def draw(*what: object) -> int:
    """A number in [0, 2^32) that depends on `what` alone, so that adding prompts changes nothing for the others."""
    text = json.dumps([str(part) for part in what])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def read_prompts(paths: Iterable[Path]) -> list[TrainingPrompt]:
    """Prompts of files, in order.

    Lines of .jsonl, .json and .jsonl.gz files are `{"prompt": ...}`, `{"turns": [...]}` (the first is asked),
    `{"messages": [...]}` or `{"conversations": [...]}` (answers at the end are left out); `domain` and `source` are
    kept. Every line of another file is a prompt.

    Raises:
        DSparkError: an unreadable file or line; the message names file and line.
    """
    prompts = []
    for path in paths:
        name = path.name.partition(".")[0]
        if path.suffixes[-1:] in ([".jsonl"], [".json"]) or path.suffixes[-2:] == [".jsonl", ".gz"]:
            for number, record in read_records(path):
                messages = _messages(record, f"{path}:{number}")
                domain, source = record.get("domain") or "", record.get("source") or name
                prompts.append(TrainingPrompt(messages, str(domain), str(source)))
        else:
            prompts += [TrainingPrompt(_user(line.strip()), "", name) for _, line in read_lines(path)]
    return prompts


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def _messages(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    match record:
        case {"prompt": str(text)} | {"turns": [str(text), *_]} if text.strip():
            return _user(text)
        case {"messages": _} | {"conversations": _}:
            messages = conversation(record, where)
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            if messages:
                return messages
    raise DSparkError(f'{where} has no prompt: give "prompt", "turns" or "messages"')


def built_in_keys() -> frozenset[str]:
    """Keys of the built-in evaluation prompts, which must never be trained on."""
    return frozenset(normal_text(prompt.messages) for prompt in load_prompts())


def distinct(prompts: Iterable[TrainingPrompt], skipped: Counter[str]) -> Iterator[TrainingPrompt]:
    """Each prompt once, without the evaluation prompts; `skipped` counts what was left out and why."""
    seen: set[str] = set()
    held_out = built_in_keys()
    for prompt in prompts:
        key = prompt.key
        if key in held_out:
            skipped["evaluation_prompt"] += 1
        elif key in seen:
            skipped["duplicate_prompt"] += 1
        else:
            seen.add(key)
            yield prompt
