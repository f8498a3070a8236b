"""What `dspark simulate` does: a sweep over loads, capacities, and checks against a real engine or hindsight."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.schedule.cost import CostModel
    from dspark.simulate.machines import Machine
    from dspark.simulate.recording import StepRecords
    from dspark.simulate.setup import Setup
    from dspark.simulate.validation import Prediction, RunValidation

__all__ = ["run_capacity", "run_hindsight", "run_sweep", "run_validate"]


def run_sweep(args: argparse.Namespace, setup: Setup) -> int:
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


def run_capacity(args: argparse.Namespace, setup: Setup) -> int:
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


def run_validate(args: argparse.Namespace, setup: Setup, beforehand: Machine | None) -> int:
    """Prices always; the whole run where one load was named for it.

    At prices fitted to the records themselves, and at those of a machine that was measured `beforehand`, if any.
    """
    from dspark.simulate.recording import read_steps
    from dspark.simulate.report import validation_markdown
    from dspark.simulate.validation import cross_validate, fit_cost, predict, scatter

    records = read_steps(args.validate)
    priced: dict[str, tuple[Prediction, CostModel]] = {"fitted": (cross_validate(records), fit_cost(records))}
    if beforehand is not None:
        priced[beforehand.name] = (predict(records, beforehand.cost), beforehand.cost)
    runs: dict[str, dict[str, RunValidation]] = {name: {} for name in priced}
    if args.concurrency is not None:
        with _progress(len(priced) * len(setup.policies)) as advance:
            for name, (_, cost) in priced.items():
                runs[name] = _simulated(args, setup, records, cost, advance)
    within = all(abs(prices.error) <= args.tolerance for prices, _ in priced.values())
    within = within and all(run.within for each in runs.values() for run in each.values())
    tables = {
        name: {
            "prices": prices.as_dict(),
            "runs": {policy: run.as_dict() for policy, run in runs[name].items()},
        }
        for name, (prices, _) in priced.items()
    }
    scattered = scatter(records)
    results: dict[str, Any] = {
        "within": within,
        "step_times": None if scattered is None else scattered.as_dict(),
        **tables["fitted"],
    }
    if beforehand is not None:
        results["beforehand"] = {"machine": beforehand.name, **tables[beforehand.name]}
    found = {name: (prices, runs[name]) for name, (prices, _) in priced.items()}
    _report(args, setup, results, [validation_markdown(found, args.tolerance, scattered)])
    return 0 if within else 1


def _simulated(
    args: argparse.Namespace,
    setup: Setup,
    records: StepRecords,
    cost: CostModel,
    advance: Callable[[], object],
) -> dict[str, RunValidation]:
    """Every policy's run at these prices, against the recorded one."""
    from dataclasses import replace

    from dspark.simulate.validation import validate_run

    scenario, found = replace(setup.scenario(setup.loads[0]), cost=cost), {}
    for name, make in setup.policies.items():
        found[name] = validate_run(records, scenario, make, setup.seeds, args.tolerance, args.confidence)
        advance()
    return found


def run_hindsight(args: argparse.Namespace, setup: Setup) -> int:
    from dspark.core import DSparkError
    from dspark.simulate.figures import write_hindsight_figures
    from dspark.simulate.hindsight import replay_file
    from dspark.simulate.report import hindsight_markdown

    if not Path(args.acceptance).is_file():
        raise DSparkError("--hindsight needs --acceptance PATH with recorded rounds")
    found = replay_file(
        args.acceptance,
        setup.policies,
        setup.machine.cost,
        users=[int(load) for load in setup.loads],
        rounds=args.rounds,
        seed=args.seed,
        overhead_s=1e-3 * args.overhead_ms,
        greedy=args.greedy,
        calibration=setup.calibration,
    )
    results: dict[str, Any] = {
        "hindsight": {name: comparison.as_dict() for name, comparison in found.items()}
    }
    if args.figures is not None:
        results["figures"] = [str(path) for path in write_hindsight_figures(found, args.figures)]
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
