"""An evaluation on disk: report.md to read, summary.csv and positions.csv to plot, evaluation.json with everything."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.evaluate.summary import DEFINITIONS

__all__ = ["describe_divergence", "markdown", "positions_csv", "summary_csv", "write_report"]

Entry = Mapping[str, Any]
Column = tuple[str, Callable[[Entry], str]]


def write_report(directory: Path, report: Mapping[str, Any], figures: Sequence[str] = ()) -> None:
    """Write all four files; each replaces its predecessor whole.

    Args:
        report: "summary" of `summarise`, "divergences" of `first_divergences`, "settings", "machine", "versions",
            "model", "complete"; plain JSON values.
        figures: file names in `directory` that the report shows.
    """
    _write(directory / "evaluation.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    _write(directory / "summary.csv", summary_csv(report["summary"]))
    _write(directory / "positions.csv", positions_csv(report["summary"]))
    _write(directory / "report.md", markdown(report, figures))


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(value: float | None, interval: Sequence[float] | None, digits: int = 2) -> str:
    if value is None or interval is None:
        return _number(value, digits)
    return f"{value:.{digits}f} ({interval[0]:.{digits}f}..{interval[1]:.{digits}f})"


def _identical(entry: Entry) -> str:
    return "-" if entry["identical"] is None else f"{entry['identical']} of {entry['compared']}"


def _collision(entry: Entry) -> str:
    c = entry["collisions"]
    return "-" if c["rate"] is None else f"{100 * c['rate']:.2f}% ({c['collisions']} of {c['pairs']})"


_COLUMNS: tuple[Column, ...] = (
    ("domain", lambda e: e["domain"]),
    ("drafter", lambda e: e["drafter"]),
    ("gamma", lambda e: str(e["gamma"] or "-")),
    ("accepted length", lambda e: _interval(e["accepted_length"], e["accepted_length_interval"])),
    ("non-looping", lambda e: _number(e["accepted_length_non_looping"])),
    ("accepted / drafted", lambda e: _number(e["accepted_per_drafted"], 3)),
    ("committed / verified", lambda e: _number(e["committed_per_verified"], 3)),
    ("collision rate", _collision),
    ("draft ms", lambda e: _number(e["draft_ms"], 1)),
    ("tokens/s", lambda e: _number(e["tokens_per_s"], 1)),
    ("plain", lambda e: _number(e["plain_tokens_per_s"], 1)),
    ("speed-up", lambda e: _number(e["speedup"] and e["speedup"]["median"])),
    ("repetition", lambda e: _number(e["repetition_share"])),
    ("looping", lambda e: f"{e['looping_answers']} of {e['answers']}"),
    ("as plain", _identical),
)


def markdown(report: Mapping[str, Any], figures: Sequence[str] = ()) -> str:
    """The report for people."""
    machine, versions = report["machine"], report["versions"]
    lines = ["# Evaluation", ""]
    if not report["complete"]:
        lines += ["**Incomplete**: the run was interrupted; run the same command again to go on.", ""]
    lines += [
        f"Target {report['model']}. {machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads; "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "",
        "Settings: " + ", ".join(f"{key} {value}" for key, value in report["settings"].items()),
        "",
    ]
    for prompts, temperature in dict.fromkeys((e["prompts"], e["temperature"]) for e in report["summary"]):
        these = [e for e in report["summary"] if (e["prompts"], e["temperature"]) == (prompts, temperature)]
        lines += [f"## {prompts}, temperature {temperature:g}", "", *_table(these), ""]
        lines += _position_tables([e for e in these if e["positions"]])
    lines += _divergences(report["divergences"])
    lines += [f"![{name}]({name})\n" for name in figures]
    lines += ["## Definitions", "", *(f"- **{name}**: {text}." for name, text in DEFINITIONS.items())]
    return "\n".join(lines) + "\n"


def _table(entries: Sequence[Entry]) -> list[str]:
    head = [name for name, _ in _COLUMNS]
    return _rows(head, [[text(entry) for _, text in _COLUMNS] for entry in entries])


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", "---", *("---:" for _ in head[2:])]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def _position_tables(entries: Sequence[Entry]) -> list[str]:
    """Conditional acceptance (with n), survival and soft acceptance by slot."""
    if not entries:
        return []
    width = max(len(e["positions"]) for e in entries)
    lines = []
    kinds: tuple[tuple[str, Callable[[Entry], str]], ...] = (
        (
            "Conditional acceptance (95% interval; n reached)",
            lambda p: f"{_interval(p['conditional'], p['conditional_interval'])} n={p['reached']}",
        ),
        ("Prefix survival", lambda p: _number(p["survival"], 3)),
        ("Soft acceptance", lambda p: _number(p["soft"], 3)),
    )
    for title, text in kinds:
        rows = []
        for e in entries:
            cells = [text(p) for p in e["positions"]]
            rows.append([e["domain"], e["drafter"], *cells, *["-"] * (width - len(cells))])
        head = ["domain", "drafter", *(str(k + 1) for k in range(width))]
        lines += [f"{title}:", "", *_rows(head, rows), ""]
    return lines


def _divergences(divergences: Sequence[Entry]) -> list[str]:
    if not divergences:
        return []
    lines = ["## Greedy answers that differ from plain decoding", ""]
    return [*lines, *(f"- {describe_divergence(d)}" for d in divergences), ""]


def describe_divergence(d: Entry) -> str:
    """One line."""
    return (
        f"{d['drafter']} on {d['prompts']}, prompt {d['conversation']}, turn {d['turn'] + 1}: "
        f"token {d['drafted']} instead of {d['plain']} at position {d['position']}"
    )


_SUMMARY = (
    "prompts", "temperature", "domain", "drafter", "gamma", "prompts_asked", "answers", "output_tokens", "rounds",
    "committed", "drafted", "verified", "accepted", "accepted_length", "accepted_length_non_looping",
    "looping_answers", "repetition_share", "accepted_per_drafted", "committed_per_verified", "draft_ms",
    "tokens_per_s", "plain_tokens_per_s", "identical", "compared",
)  # fmt: skip
_HEAD = ("prompts", "temperature", "domain", "drafter")
_POSITION = ("position", "reached", "accepted", "conditional", "survival", "soft")


def summary_csv(summary: Sequence[Entry]) -> str:
    """One row an entry; intervals as _low and _high, empty where there is no figure."""
    rows = []
    for e in summary:
        speedup, collisions = e["speedup"] or {}, e["collisions"]
        low, high = e["accepted_length_interval"] or (None, None)
        extra = {"accepted_length_low": low, "accepted_length_high": high}
        extra |= {f"speedup_{name}": speedup.get(name) for name in ("median", "min", "max")}
        extra |= {
            f"collision_{name}": collisions[name] for name in ("pairs", "suspects", "collisions", "rate")
        }
        rows.append({**{name: e[name] for name in _SUMMARY}, **extra})
    return _csv(rows)


def positions_csv(summary: Sequence[Entry]) -> str:
    """One row an entry and slot."""
    rows = []
    for e in summary:
        for p in e["positions"]:
            low, high = p["conditional_interval"]
            values = {name: p[name] for name in _POSITION}
            rows.append(
                {**{n: e[n] for n in _HEAD}, **values, "conditional_low": low, "conditional_high": high}
            )
    return _csv(rows)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()
