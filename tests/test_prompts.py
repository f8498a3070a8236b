"""The built-in prompt set: what it promises to benchmarks, and how it is selected."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError
from itertools import combinations

import pytest

from dspark.core import DSparkError
from dspark.data import DOMAINS, Prompt, load_prompts

# Over 320 tokens of SmolLM2's tokenizer at 4.6 characters a token, its ratio on the wordiest prompt here.
LONG_CHARACTERS = 1500


def _text(prompt: Prompt) -> str:
    return "\n".join(message["content"] for message in prompt.messages)


def _characters(prompt: Prompt) -> int:
    return sum(len(message["content"]) for message in prompt.messages)


def _shingles(prompt: Prompt, words: int = 8) -> set[tuple[str, ...]]:
    split = _text(prompt).lower().split()
    return {tuple(split[i : i + words]) for i in range(len(split) - words + 1)}


def test_each_domain_has_at_least_24_prompts() -> None:
    counts = Counter(prompt.domain for prompt in load_prompts())
    assert set(counts) == set(DOMAINS)
    assert min(counts.values()) >= 24


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_third_of_each_domain_is_long(domain: str) -> None:
    sizes = [_characters(prompt) for prompt in load_prompts(domain)]
    assert 3 * sum(size >= LONG_CHARACTERS for size in sizes) >= len(sizes)


def test_ids_are_unique_and_name_their_domain() -> None:
    prompts = load_prompts()
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert all(prompt.id.startswith(f"{prompt.domain}-") for prompt in prompts)


@pytest.mark.parametrize("prompt", load_prompts(), ids=lambda prompt: prompt.id)
def test_conversations_alternate_and_end_with_the_user(prompt: Prompt) -> None:
    assert all(set(message) == {"role", "content"} for message in prompt.messages)
    assert all(message["content"] == message["content"].strip() != "" for message in prompt.messages)
    roles = [message["role"] for message in prompt.messages]
    turns = roles[1:] if roles[0] == "system" else roles
    assert turns == ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]
    assert turns[-1] == "user"


@pytest.mark.parametrize("domain", DOMAINS)
def test_each_domain_has_multi_turn_and_system_prompts(domain: str) -> None:
    role_sets = [{message["role"] for message in prompt.messages} for prompt in load_prompts(domain)]
    assert any("assistant" in roles for roles in role_sets)
    assert any("system" in roles for roles in role_sets)


def test_no_two_prompts_share_eight_words_in_a_row() -> None:
    shingles = {prompt.id: _shingles(prompt) for prompt in load_prompts()}
    shared = {(a, b) for a, b in combinations(shingles, 2) if shingles[a] & shingles[b]}
    assert not shared


def test_a_domain_selects_its_prompts_only() -> None:
    assert {prompt.domain for prompt in load_prompts("math")} == {"math"}
    assert {prompt.domain for prompt in load_prompts(["code", "chat"])} == {"code", "chat"}


def test_limit_keeps_a_balanced_prefix() -> None:
    everything = load_prompts()
    for limit in (0, 3, 12, 72):
        kept = load_prompts(limit=limit)
        assert kept == everything[:limit]
        assert all(sum(p.domain == domain for p in kept) == limit // 3 for domain in DOMAINS)
    assert load_prompts(limit=10_000) == everything


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_short_prefix_already_holds_long_prompts(domain: str) -> None:
    sizes = [_characters(prompt) for prompt in load_prompts(domain, limit=6)]
    assert 2 <= sum(size >= LONG_CHARACTERS for size in sizes) <= 4


@pytest.mark.parametrize("domains", ["poetry", ["chat", "poetry"], ("poetry",)])
def test_unknown_domain_names_the_choices(domains: str | list[str]) -> None:
    with pytest.raises(DSparkError, match="unknown prompt domain 'poetry'; choose from chat, math, code"):
        load_prompts(domains)


def test_negative_limit_is_refused() -> None:
    with pytest.raises(DSparkError, match="limit is -1"):
        load_prompts(limit=-1)


def test_callers_get_their_own_frozen_prompts() -> None:
    first = load_prompts(limit=1)[0]
    first.messages.append({"role": "assistant", "content": "changed"})
    assert load_prompts(limit=1)[0].messages != first.messages
    with pytest.raises(FrozenInstanceError):
        first.domain = "code"  # type: ignore[misc]
