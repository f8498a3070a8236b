"""`dspark bench kernels`: a model's matrix products in layer order, against what the machine can read and compute."""

from __future__ import annotations

import argparse
from typing import Any

from dspark.cli.bench_report import (
    ROWS,
    add_json_option,
    check_json_path,
    ranged,
    write_report,
)
from dspark.cli.lists import integers
from dspark.cli.messages import say
from dspark.cli.options import DEFAULT_MODEL, set_threads

__all__ = ["add_parser"]

WAYS = ("linear", "packed", "low-bit", "one call", "integers")


def add_parser(benches: Any) -> None:
    """Add the benchmark to the `add_subparsers` object of `dspark bench`."""
    parser = benches.add_parser(
        "kernels",
        help="matrix products against the machine's limits",
        description=__doc__,
        epilog="linear: torch on float32; packed: float32 laid out for oneDNN; low-bit: 4-bit and 8-bit blocks, one "
        "call a matrix; one call: the same blocks in one compiled call; integers: that with activations in 8 bits.",
    )
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="known name, Hugging Face directory or .gguf file (%(default)s)",
    )
    parser.add_argument(
        "--rows", type=integers, default=ROWS, metavar="LIST", help="multiplied at once (%(default)s)"
    )
    parser.add_argument(
        "--ways", type=_ways, default=",".join(WAYS), metavar="LIST", help="what to compare (%(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="of each measurement (%(default)s)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: PyTorch's")
    add_json_option(parser)
    parser.set_defaults(run=run)


def _ways(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in WAYS:
            raise argparse.ArgumentTypeError(f"unknown way {name!r} (choose from {', '.join(WAYS)})")
    return names


def run(args: argparse.Namespace) -> int:
    """Check, load, measure, report."""
    from dspark.cli.progress import progress_bar
    from dspark.kernels.compilation import compile_kernels
    from dspark.measure import KernelSettings, measure_kernels, model_weights

    settings = KernelSettings(rows=args.rows, ways=args.ways, repeats=args.repeats)
    check_json_path(args.json)
    if args.threads is not None:
        set_threads(args.threads)
    weights = model_weights(args.model, say)
    compile_kernels(say)
    with progress_bar("repeats", settings.repeats) as advance:
        facts = measure_kernels(weights, settings, advance)
    if facts["unsupported"]:
        say(f"left out, this processor cannot: {', '.join(facts['unsupported'])}")
    write_report(args, "kernels", facts, _show)
    return 0


def _show(report: dict[str, Any]) -> None:
    from dspark.cli.terminal import Output, plain_table

    caption = (
        "median (min..max) over repeats; % of: the fastest read of as many bytes, a large float32 product, "
    )
    caption += "and the nearer of the two limits"
    table = plain_table(caption)
    table.add_column("rows", justify="right")
    table.add_column("way")
    for column in ("ms", "GB/s", "GFLOP/s", "% read", "% comp.", "% limit"):
        table.add_column(column, justify="right")
    for r in report["results"]:
        shares = [f"{100 * r[f'share_of_{limit}']:.0f}" for limit in ("reading", "arithmetic", "limit")]
        rates = f"{r['gb_per_s']:.1f}", f"{r['gflop_per_s']:.0f}"
        table.add_row(str(r["rows"]), r["way"], ranged(r["ms"]), *rates, *shares)
    out, limits = Output(), report["limits"]
    out.print(table)
    for reading in limits["reading"]:
        out.print(
            f"reading {reading['bytes'] / 1e6:.0f} MB: {ranged(reading['gb_per_s'])} GB/s ({reading['reader']}); "
            f"copying, both directions counted: {ranged(reading['copy_gb_per_s'])} GB/s"
        )
    out.print(f"a large float32 product: {ranged(limits['gflop_per_s'], 0)} GFLOP/s")
    out.print(
        f"{report['weights'] / 1e6:.1f} M weights, {report['machine']['threads']} threads, {report['clock']}"
    )
