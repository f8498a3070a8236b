"""The figures of a training set as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["markdown"]


def markdown(facts: dict[str, Any]) -> str:
    """Tables of what `dataset_report.describe` found, warnings first."""
    parts = [*_warnings(facts), _overview(facts), _lengths(facts)]
    parts += [_groups(facts[f"{name}s"], name) for name in ("domain", "source", "temperature")]
    return "\n\n".join([*parts, _coverage(facts["coverage"])])


def _warnings(facts: dict[str, Any]) -> Iterable[str]:
    if facts["evaluation_prompts"]:
        yield (
            f"WARNING: {facts['evaluation_prompts']} of the built-in evaluation prompts are in it: "
            "leave them out, or benchmarks measure memory."
        )
    if facts["duplicates"]:
        yield f"WARNING: {facts['duplicates']} answers occur twice for the same prompt."


def _overview(facts: dict[str, Any]) -> str:
    rows = [
        ("answers", str(facts["answers"])),
        ("prompts", str(facts["prompts"])),
        ("answer tokens", str(facts["answer_tokens"])),
        ("prompt tokens", str(facts["prompt_tokens"])),
        ("repeated 4-grams", _percent(facts["repetition_share"])),
        ("answers that loop", _percent(facts["looping"])),
    ]
    return _table(("all", ""), rows)


def _lengths(facts: dict[str, Any]) -> str:
    points = ("mean", "min", "p5", "median", "p95", "max")
    rows = [
        (name, *(f"{facts[f'{name}_length'][point]:.0f}" for point in points))
        for name in ("answer", "prompt")
    ]
    return _table(("tokens", *points), rows)


def _groups(groups: dict[str, dict[str, float]], name: str) -> str:
    rows = [
        (
            key,
            str(group["answers"]),
            str(group["prompts"]),
            str(group["answer_tokens"]),
            f"{group['mean_length']:.0f}",
            _percent(group["cut"]),
            _percent(group["repetition_share"]),
            _percent(group["looping"]),
        )
        for key, group in groups.items()
    ]
    columns = ("answers", "prompts", "tokens", "mean length", "cut", "repeated 4-grams", "loop")
    return _table((name, *columns), rows)


def _coverage(coverage: dict[str, Any]) -> str:
    rows = [(size, _percent(share)) for size, share in coverage["sizes"].items()]
    if "drafter" in coverage:
        drafter = coverage["drafter"]
        rows.append((f"{drafter['size']} of {drafter['path']}", _percent(drafter["coverage"])))
    note = (
        f"{coverage['distinct_tokens']} different tokens. Vocabularies chosen on 90% of the prompts, measured on the "
        f"other answers ({coverage['held_out_tokens']} tokens); a drafter's on all answers."
    )
    return _table(("draft vocabulary", "answer tokens inside"), rows) + f"\n\n{note}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
