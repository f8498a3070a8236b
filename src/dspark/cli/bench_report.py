"""What the benchmarks of `dspark bench` share: the report file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dspark.cli.destination import check_file

__all__ = ["add_json_option", "check_json_path", "ranged", "write_report"]

ROWS = "1,2,4,6,8,16,64"


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="PATH", help="write every figure there; - is stdout")


def check_json_path(path: str | None) -> None:
    """Before measuring: the report has somewhere to go.

    Raises:
        DSparkError: it cannot be written there.
    """
    if path not in (None, "-"):
        check_file(path)


def write_report(
    args: argparse.Namespace,
    kind: str,
    facts: Mapping[str, Any],
    show: Callable[[dict[str, Any]], None],
    measured: Mapping[str, Any] | None = None,
) -> None:
    """The JSON report where `--json` asked for it; `show` prints it unless that is stdout.

    Args:
        measured: what belongs to the settings, but is no option.
    """
    from dspark.cli.machine import machine, versions
    from dspark.cli.terminal import plain_json, write_json

    hidden = ("run", "verb", "bench", "json", "model")
    options = {key: value for key, value in vars(args).items() if key not in hidden}
    report = {
        "format": f"dspark-{kind}",
        "format_version": 1,
        "versions": versions(),
        "machine": machine(),
        "model": args.model,
        "settings": {**options, **(measured or {})},
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
