"""`dspark simulate`: serve simulated users with the engine's own policies, and see what they get. Needs no model."""

from __future__ import annotations

import argparse
from typing import Any

from dspark.cli.destination import check_directory, check_file
from dspark.cli.simulate_options import add_options, settle
from dspark.cli.simulate_runs import run_capacity, run_hindsight, run_sweep, run_validate

__all__ = ["add_parser"]


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser(
        "simulate",
        help="throughput, latency and capacity without a machine",
        description=__doc__,
        epilog="Exit code 1: --validate found the simulation further off than --tolerance.",
    )
    add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything first, simulate, report."""
    from dspark.simulate.figures import require_matplotlib
    from dspark.simulate.setup import Setup

    measured = args.validate is not None and args.machine is not None
    settle(args)
    setup = Setup.of(args)
    if args.figures is not None:
        require_matplotlib()
        check_directory(args.figures)
    for path in (args.csv, args.markdown):
        if path is not None:
            check_file(path)
    if args.hindsight:
        return run_hindsight(args, setup)
    if args.validate is not None:
        return run_validate(args, setup, setup.machine if measured else None)
    return run_sweep(args, setup) if args.capacity is None else run_capacity(args, setup)
