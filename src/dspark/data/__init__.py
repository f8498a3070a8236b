"""The built-in evaluation prompts: 72 held-out requests, 24 each of chat, math and code.

They were written for this package, so that a benchmark runs without a download, and must never be trained
on. More than a third of each domain is long (over 320 tokens of SmolLM2's tokenizer). The file interleaves
the domains, and long prompts with short ones, so that any first `limit` of them is a fair mix.

Example:
    >>> from dspark.data import load_prompts
    >>> [prompt.id for prompt in load_prompts(limit=3)]
    ['chat-01', 'math-01', 'code-01']
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from dspark.core import DSparkError

__all__ = ["DOMAINS", "Prompt", "load_prompts"]

DOMAINS: tuple[str, ...] = ("chat", "math", "code")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One conversation that waits for the assistant.

    `messages` holds {"role", "content"} as chat templates take them: an optional system message, then user
    and assistant in turn, ending with the user.
    """

    id: str
    domain: str
    messages: list[dict[str, str]]


def load_prompts(domains: str | Iterable[str] | None = None, limit: int | None = None) -> list[Prompt]:
    """Read the built-in prompts, in a fixed order in which the domains take turns.

    Args:
        domains: one domain or several of `DOMAINS`; None is all of them.
        limit: keep the first `limit` of the selected prompts, over all domains together; None keeps all.

    Returns:
        Fresh `Prompt` objects; changing their messages does not change what the next call returns.

    Raises:
        DSparkError: an unknown domain, or a limit below 0.
    """
    wanted = _checked_domains(domains)
    if limit is not None and limit < 0:
        raise DSparkError(f"limit is {limit}; give the number of prompts to keep, or None for all")
    text = files(__name__).joinpath("prompts.jsonl").read_text(encoding="utf-8")
    # NOTE: not str.splitlines(), which also breaks at U+2028 and the like inside a JSON string.
    prompts = [Prompt(**json.loads(line)) for line in text.split("\n") if line]
    return [prompt for prompt in prompts if prompt.domain in wanted][:limit]


def _checked_domains(domains: str | Iterable[str] | None) -> tuple[str, ...]:
    if domains is None:
        return DOMAINS
    wanted = (domains,) if isinstance(domains, str) else tuple(domains)
    for domain in wanted:
        if domain not in DOMAINS:
            raise DSparkError(f"unknown prompt domain {domain!r}; choose from {', '.join(DOMAINS)}")
    return wanted
