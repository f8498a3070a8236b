"""What `dspark evaluate` says at its end: a table or JSON, and the files of the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from dspark.evaluate.cells import Cell, CellStore

__all__ = ["report"]


def report(args: argparse.Namespace, store: CellStore, cells: Sequence[Cell], complete: bool) -> int:
    """Write the files, print a table or JSON; the exit code."""
    from dspark.cli.machine import machine, versions
    from dspark.cli.terminal import Output, plain_json, write_json
    from dspark.evaluate.figures import draw_figures
    from dspark.evaluate.reporting import describe_divergence, write_report
    from dspark.evaluate.summary import DEFINITIONS, first_divergences, summarise

    settings = {
        key: value for key, value in vars(args).items() if key not in ("run", "verb", "json", "model")
    }
    divergences = first_divergences(cells)
    facts = plain_json(
        {
            "format": "dspark-evaluation",
            "format_version": 1,
            "complete": complete,
            "model": args.model,
            "versions": versions(),
            "machine": machine(),
            "settings": settings,
            "definitions": DEFINITIONS,
            "divergences": divergences,
            "summary": summarise(cells),
        }
    )
    figures = draw_figures(store.directory, facts["summary"]) if args.figures else []
    write_report(store.directory, facts, figures)
    if args.json:
        write_json(facts, indent=1)
    else:
        out = Output()
        out.print(_table(facts["summary"]))
        out.print(f"{store.directory}: report.md, summary.csv, positions.csv, evaluation.json")
    if divergences:
        print(f"NOT identical to plain decoding: {describe_divergence(divergences[0])}", file=sys.stderr)
    return int(bool(divergences))


def _table(summary: Sequence[dict[str, Any]]) -> Table:
    """The figures over all domains; the report has the rest. Fits a terminal of 80 columns."""
    from dspark.cli.terminal import figure, plain_table
    from dspark.evaluate.summary import OVERALL

    caption = "len.: accepted length, bonus included (95% over prompts); n.l.: of non-looping\n"
    caption += "outputs; coll.: cross-mode collisions, %; draft: ms a round; tok/s and its\n"
    caption += "ratio to none: prompt processing included"
    table = plain_table(caption)
    for column in ("prompts", "T", "drafter"):
        table.add_column(column, overflow="fold")
    for column in ("len.", "n.l.", "coll.", "draft", "tok/s", "x none"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in summary:
        if entry["domain"] != OVERALL:
            continue
        low, high = entry["accepted_length_interval"] or (None, None)
        length = figure(entry["accepted_length"]) + (f" ({low:.2f}..{high:.2f})" if low is not None else "")
        rate = entry["collisions"]["rate"]
        table.add_row(
            entry["prompts"],
            f"{entry['temperature']:g}",
            entry["drafter"],
            length,
            figure(entry["accepted_length_non_looping"]),
            figure(None if rate is None else 100 * rate),
            figure(entry["draft_ms"], 1),
            figure(entry["tokens_per_s"], 1),
            figure(entry["speedup"] and entry["speedup"]["median"]),
        )
    return table
