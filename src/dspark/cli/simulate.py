"""`dspark simulate`: serve simulated users with the engine's own policies, and see what they get. Needs no model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.simulate.setup import Setup

__all__ = ["add_parser"]

DEFAULT_POLICIES = "plain,fixed,threshold,prefix,lagged"


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
        "--concurrency", type=_ints, metavar="LIST", help="users of a closed loop (1,4,16,64 by default)"
    )
    load.add_argument(
        "--rate", type=_floats, metavar="LIST", help="requests per second that come when they come"
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
        "--speed", type=_floats, default="1", metavar="LIST", help="with --trace: times faster (1)"
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


def _ints(text: str) -> tuple[int, ...]:
    return tuple(_numbers(text, int))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(_numbers(text, float))


def _numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,4") from None


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
        return _hindsight(args, setup)
    if args.validate is not None:
        return _validate(args, setup)
    return _sweep(args, setup) if swept else _capacity(args, setup)


def _sweep(args: argparse.Namespace, setup: Setup) -> int:
    from dspark.simulate.figures import write_figures
    from dspark.simulate.report import frontier_markdown, sweep_csv, sweep_markdown
    from dspark.simulate.sweep import sweep

    total = len(setup.loads) * len(setup.policies) * len(setup.seeds)
    with _progress(total) as advance:
        cells = sweep(setup.scenario, setup.loads, setup.policies, setup.seeds, advance)
    results: dict[str, Any] = {"cells": [cell.as_dict(args.confidence) for cell in cells]}
    parts = [sweep_markdown(cells, setup.load_name, args.confidence)]
    if args.csv is not None:
        Path(args.csv).write_text(sweep_csv(cells, args.confidence), encoding="utf-8")
    if len(setup.loads) > 1 and setup.closed:
        parts.append(frontier_markdown(cells))
    if args.figures is not None:
        results["figures"] = [
            str(p) for p in write_figures(cells, args.figures, setup.load_name, args.confidence)
        ]
    _report(args, setup, results, parts)
    return 0


def _capacity(args: argparse.Namespace, setup: Setup) -> int:
    from dspark.simulate.capacity import ServiceTarget, find_capacity
    from dspark.simulate.report import capacity_markdown

    target = ServiceTarget(args.capacity, args.ttft, args.share, args.confidence)
    found = []
    with _progress(None) as advance:
        for name, make in setup.policies.items():
            found.append(
                find_capacity(
                    setup.scenario,
                    name,
                    make,
                    target,
                    setup.seeds,
                    start=setup.loads[0],
                    most=args.most,
                    whole=setup.closed,
                    progress=advance,
                )
            )
    parts = [capacity_markdown(found, target, setup.load_name, len(setup.seeds))]
    _report(args, setup, {"capacities": [c.as_dict() for c in found]}, parts)
    return 0


def _validate(args: argparse.Namespace, setup: Setup) -> int:
    """Prices always; the whole run where one load was named for it."""
    from dataclasses import replace

    from dspark.simulate.recording import read_steps
    from dspark.simulate.report import validation_markdown
    from dspark.simulate.validation import cross_validate, fit_cost, validate_run

    records = read_steps(args.validate)
    prices = cross_validate(records)
    runs = {}
    if args.concurrency is not None and len(args.concurrency) == 1:
        scenario = replace(setup.scenario(setup.loads[0]), cost=fit_cost(records))
        with _progress(len(setup.policies)) as advance:
            for name, make in setup.policies.items():
                runs[name] = validate_run(
                    records, scenario, make, setup.seeds, args.tolerance, args.confidence
                )
                advance()
    within = abs(prices.error) <= args.tolerance and all(run.within for run in runs.values())
    results = {
        "within": within,
        "prices": prices.as_dict(),
        "runs": {name: found.as_dict() for name, found in runs.items()},
    }
    _report(args, setup, results, [validation_markdown(prices, runs, args.tolerance)])
    return 0 if within else 1


def _hindsight(args: argparse.Namespace, setup: Setup) -> int:
    from dspark.core import DSparkError
    from dspark.simulate.hindsight import replay_file
    from dspark.simulate.policies import policy_factory
    from dspark.simulate.report import hindsight_markdown

    if not setup.closed or not Path(args.acceptance).is_file():
        raise DSparkError(
            "--hindsight needs --acceptance PATH with recorded rounds, and users (--concurrency)"
        )
    names = ("prefix,lagged,auto" if args.policies == DEFAULT_POLICIES else args.policies).split(",")
    found = replay_file(
        args.acceptance,
        {name: policy_factory(name, setup.acceptance.gamma, setup.beliefs.cost) for name in names},
        setup.machine.cost,
        users=[int(load) for load in setup.loads],
        rounds=args.rounds,
        seed=args.seed,
        overhead_s=1e-3 * args.overhead_ms,
        greedy=args.greedy,
    )
    results = {"hindsight": {name: comparison.as_dict() for name, comparison in found.items()}}
    parts = [
        hindsight_markdown(comparison, f"{name[0].upper()}{name[1:]}") for name, comparison in found.items()
    ]
    _report(args, setup, results, parts)
    return 0


def _report(args: argparse.Namespace, setup: Setup, results: dict[str, Any], parts: list[str]) -> None:
    """JSON, or the report on stdout; the report where --markdown says."""
    from dspark.cli.terminal import Output, write_json

    text = "\n".join([*parts, setup.describe()])
    if args.markdown is not None:
        Path(args.markdown).write_text(text, encoding="utf-8")
    if args.json:
        from dspark import __version__

        hidden = ("run", "verb", "json")
        settings = {key: value for key, value in vars(args).items() if key not in hidden}
        about = {"format": "dspark-simulation", "format_version": 1, "version": __version__}
        write_json({**about, "settings": settings, "model": setup.facts(), **results}, indent=1)
    else:
        Output().print(text.rstrip("\n"))


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[], object]]:
    """A bar on stderr; the function it gives is called behind each run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("simulated runs", total=total)
        yield lambda: bar.advance(task)
