"""Prompt sets of an evaluation: the built-in one, and files of conversations."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.core import DSparkError
from dspark.data import load_prompts

__all__ = ["BUILTIN", "Conversation", "PromptSet", "fingerprint", "load_conversations", "load_prompt_sets"]

BUILTIN = "builtin"
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Conversation:
    """What is asked: `messages` end with the user; `followups` are asked in turn, behind the model's own answers."""

    id: str
    domain: str
    messages: Messages
    followups: tuple[str, ...] = ()


def fingerprint(conversations: Sequence[Conversation]) -> str:
    """Of their contents, in order."""
    text = json.dumps([asdict(c) for c in conversations], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class PromptSet:
    name: str
    conversations: tuple[Conversation, ...]

    @property
    def domains(self) -> tuple[str, ...]:
        """In order of appearance."""
        return tuple(dict.fromkeys(c.domain for c in self.conversations))


def load_prompt_sets(sources: Sequence[str], limit: int | None = None) -> list[PromptSet]:
    """The sets that `sources` name, each cut to its first `limit` conversations.

    A source is "builtin" or a .jsonl file, whose set is called by the file's name. A line holds `{"turns": ["...",
    ...]}`, `{"messages": [...]}` ending with the user, or `{"prompt": "..."}`; "domain" (default: the file's name)
    and "id" (default: the line number) are optional.

    Raises:
        DSparkError: no such file, a line of another form, nothing in a set, or two sets of one name.
    """
    if limit is not None and limit < 1:
        raise DSparkError(f"the number of prompts must be 1 or more, got {limit}")
    sets = [_builtin(limit) if source == BUILTIN else _read(source, limit) for source in sources]
    twice = [name for name, count in Counter(s.name for s in sets).items() if count > 1]
    if twice:
        raise DSparkError(f"two prompt sets are called {twice[0]!r}: rename one of the files")
    return sets


def load_conversations(prompts: str) -> tuple[Conversation, ...]:
    """Of the first so many built-in prompts where `prompts` is a number, else of one source of `load_prompt_sets`.

    Raises:
        DSparkError: what `load_prompt_sets` refuses.
    """
    source, limit = (BUILTIN, int(prompts)) if prompts.isdecimal() else (prompts, None)
    (chosen,) = load_prompt_sets([source], limit)
    return chosen.conversations


def _builtin(limit: int | None) -> PromptSet:
    prompts = load_prompts(limit=limit)
    return PromptSet(BUILTIN, tuple(Conversation(p.id, p.domain, p.messages) for p in prompts))


def _read(source: str, limit: int | None) -> PromptSet:
    path = Path(source).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise DSparkError(f"cannot read prompts from {source!r}: {error}") from None
    # NOTE: not str.splitlines(), which also breaks at U+2028 and the like inside a JSON string.
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()][:limit]
    if not lines:
        raise DSparkError(f"there are no prompts in {source!r}")
    conversations = tuple(_conversation(line, path.stem, n, f"{source}, line {n}") for n, line in lines)
    twice = [i for i, count in Counter(c.id for c in conversations).items() if count > 1]
    if twice:
        raise DSparkError(f"{source}: two prompts have the id {twice[0]!r}; ids must differ")
    return PromptSet(path.stem, conversations)


def _conversation(line: str, name: str, number: int, where: str) -> Conversation:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise DSparkError(f"{where} is not JSON ({error})") from None
    found = _asked(entry)
    if found is None:
        raise DSparkError(
            f"{where}: expected an object with turns (texts), messages (role and content, the user's last) or prompt"
        )
    messages, followups = found
    return Conversation(
        str(entry.get("id", f"{name}-{number}")), str(entry.get("domain", name)), messages, followups
    )


def _asked(entry: Any) -> tuple[Messages, tuple[str, ...]] | None:
    match entry:
        case {"turns": [_, *_] as turns} if all(isinstance(turn, str) for turn in turns):
            return [{"role": "user", "content": turns[0]}], tuple(turns[1:])
        case {"messages": [*earlier, {"role": "user", "content": str()}] as messages} if all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in earlier
        ):
            return [{"role": m["role"], "content": m["content"]} for m in messages], ()
        case {"prompt": str(prompt)}:
            return [{"role": "user", "content": prompt}], ()
    return None
