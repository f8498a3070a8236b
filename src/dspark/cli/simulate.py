"""`dspark simulate`: serve simulated users with the engine's own policies, and see what they get. Needs no model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dspark.cli.lists import floats, integers
from dspark.cli.simulate_runs import (
    DEFAULT_POLICIES,
    run_capacity,
    run_hindsight,
    run_sweep,
    run_validate,
)

__all__ = ["add_parser"]


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser(
        "simulate",
        help="throughput, latency and capacity without a machine",
        description=__doc__,
        epilog="Exit code 1: --validate found the simulation further off than --tolerance.",
    )
    parser.add_argument(
        "--policies",
        default=DEFAULT_POLICIES,
        metavar="LIST",
        help="%(default)s; also fixed:3, threshold:0.3, prefix-raw, lagged-previous, global, auto",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--capacity", type=float, metavar="SPEED", help="how many users get so many tokens/s each?"
    )
    what.add_argument(
        "--validate", metavar="PATH", help="hold the simulation to step records of a real engine (.jsonl)"
    )
    what.add_argument(
        "--hindsight",
        action="store_true",
        help="how near do policies come to the best length or threshold for recorded rounds (--acceptance PATH)?",
    )
    _add_traffic_options(parser)
    _add_engine_options(parser)
    _add_run_options(parser)
    _add_output_options(parser)
    parser.set_defaults(run=run)


def _add_traffic_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic")
    load = group.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency", type=integers, metavar="LIST", help="users of a closed loop (1,4,16,64 by default)"
    )
    load.add_argument(
        "--rate", type=floats, metavar="LIST", help="requests per second that come when they come"
    )
    load.add_argument(
        "--trace",
        metavar="PATH",
        help="recorded arrivals: a CSV of TIMESTAMP, ContextTokens, GeneratedTokens",
    )
    group.add_argument(
        "--arrivals",
        default="poisson",
        metavar="KIND",
        help="with --rate: poisson, gamma:CV, or on-off:ON:OFF in seconds (%(default)s)",
    )
    group.add_argument(
        "--speed", type=floats, default="1", metavar="LIST", help="with --trace: times faster (1)"
    )
    group.add_argument(
        "--think",
        type=float,
        default=0.0,
        metavar="S",
        help="mean pause of a user of a closed loop (%(default)s)",
    )
    group.add_argument(
        "--mix", metavar="LIST", help="domains, chat=0.6,code=0.4; default: all, equally often"
    )
    group.add_argument(
        "--prompt-tokens", default="lognormal:500:1", metavar="DIST", help="200, geometric:200 or %(default)s"
    )
    group.add_argument(
        "--output-tokens", default="geometric:200", metavar="DIST", help="likewise (%(default)s)"
    )
    group.add_argument("--greedy", action="store_true", help="temperature 0: policies may look at the block")


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--machine",
        default="gpu-27b",
        metavar="NAME|PATH",
        help="gpu-27b, cpu-135m or a cost file (%(default)s)",
    )
    group.add_argument(
        "--policy-costs", metavar="NAME|PATH", help="prices that policies believe in; default: the machine's"
    )
    group.add_argument(
        "--acceptance",
        default="qwen3-4b",
        metavar="NAME|PATH",
        help="qwen3-4b, smollm2-135m or recorded rounds (%(default)s)",
    )
    group.add_argument("--gamma", type=int, metavar="N", help="drafts of a block; default: as measured")
    group.add_argument(
        "--confidence-noise", type=float, default=0.0, metavar="SD", help="of logits (%(default)s)"
    )
    group.add_argument(
        "--confidence-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="above 1: overconfident (%(default)s)",
    )
    group.add_argument("--no-confidence", action="store_true", help="a drafter without a confidence head")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="default: 256, or the users if more")
    group.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N", help="%(default)s")
    group.add_argument("--kv-cache-tokens", type=int, metavar="N", help="default: memory never runs out")
    group.add_argument("--max-model-len", type=int, default=32768, metavar="N", help="%(default)s")
    group.add_argument(
        "--overhead-ms", type=float, default=0.0, metavar="MS", help="added to every step (%(default)s)"
    )


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("runs")
    group.add_argument(
        "--duration", type=float, default=60.0, metavar="S", help="simulated and measured (%(default)s)"
    )
    group.add_argument(
        "--warmup", type=float, default=20.0, metavar="S", help="before it, not measured (%(default)s)"
    )
    group.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each cell (%(default)s)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="the first of them (%(default)s)")
    group.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="of intervals (%(default)s)"
    )
    group.add_argument(
        "--ttft", type=float, metavar="S", help="with --capacity: and the first token within so long"
    )
    group.add_argument(
        "--share", type=float, default=0.9, metavar="P", help="of requests that must get it (%(default)s)"
    )
    group.add_argument(
        "--most", type=float, default=4096, metavar="N", help="with --capacity: look no further (%(default)s)"
    )
    group.add_argument(
        "--rounds",
        type=int,
        default=12_000,
        metavar="N",
        help="with --hindsight: rounds replayed at each load (%(default)s)",
    )
    group.add_argument(
        "--tolerance", type=float, default=0.1, metavar="X", help="with --validate: relative (%(default)s)"
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    group.add_argument("--csv", metavar="PATH", help="write every metric of every cell there")
    group.add_argument("--markdown", metavar="PATH", help="write the report there")
    group.add_argument("--figures", metavar="DIR", help="draw the frontier and the budget (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Check everything first, simulate, report."""
    from dspark.core import DSparkError
    from dspark.simulate.figures import require_matplotlib
    from dspark.simulate.setup import Setup

    setup = Setup.of(args)
    if args.figures is not None:
        require_matplotlib()
    swept = args.capacity is None and args.validate is None and not args.hindsight
    if not swept and (args.csv is not None or args.figures is not None):
        raise DSparkError("--csv and --figures show a sweep: leave them out here")
    for path in (args.csv, args.markdown):
        if path is not None and not Path(path).parent.is_dir():
            raise DSparkError(f"no directory {str(Path(path).parent)!r} for the report: create it first")
    if args.hindsight:
        return run_hindsight(args, setup)
    if args.validate is not None:
        return run_validate(args, setup)
    return run_sweep(args, setup) if swept else run_capacity(args, setup)
