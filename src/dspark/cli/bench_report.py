"""What the benchmarks of `dspark bench` share: lists of numbers, a bar, the report file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["add_json_option", "check_json_path", "progress", "ranged", "row_counts", "write_report"]

ROWS = "1,2,4,6,8,16,64"


def row_counts(text: str) -> tuple[int, ...]:
    """For argparse: 1,2,4 -> (1, 2, 4), each once."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,6") from None


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="PATH", help="write every figure there; - is stdout")


def check_json_path(path: str | None) -> None:
    """Before measuring: the report has somewhere to go.

    Raises:
        DSparkError: there is no such directory.
    """
    from dspark.core import DSparkError

    if path not in (None, "-") and not Path(path).parent.is_dir():
        raise DSparkError(f"no directory {str(Path(path).parent)!r} for the report: create it first")


@contextmanager
def progress(repeats: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr; the function it gives is called behind each repeat."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("repeats", total=repeats)
        yield lambda: bar.advance(task)


def write_report(
    args: argparse.Namespace, kind: str, facts: dict[str, Any], show: Callable[[dict[str, Any]], None]
) -> None:
    """The JSON report where `--json` asked for it; `show` prints it unless that is stdout."""
    from dspark.cli.machine import machine, versions
    from dspark.cli.terminal import plain_json, write_json

    hidden = ("run", "verb", "bench", "json", "model")
    report = {
        "format": f"dspark-{kind}",
        "format_version": 1,
        "versions": versions(),
        "machine": machine(),
        "model": args.model,
        "settings": {key: value for key, value in vars(args).items() if key not in hidden},
        **facts,
    }
    if args.json == "-":
        return write_json(report, indent=1)
    if args.json is not None:
        text = json.dumps(plain_json(report), indent=1, allow_nan=False)
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return show(report)


def ranged(spread: dict[str, float], digits: int = 1) -> str:
    """Median and range for a table."""
    low, middle, high = (f"{spread[key]:.{digits}f}" for key in ("min", "median", "max"))
    return f"{middle} ({low}..{high})"
