"""`dspark calibrate`: make the drafter's confidences probabilities (sequential temperature scaling)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.calibrate_rounds import chosen_rounds, rounds_path
from dspark.cli.destination import check_file
from dspark.cli.lists import floats
from dspark.cli.messages import say
from dspark.cli.options import add_model_options

if TYPE_CHECKING:
    from dspark.calibrate import Calibration, Evaluation

__all__ = ["add_parser"]


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser(
        "calibrate",
        help="make confidences probabilities",
        description=__doc__,
        epilog="Exit code 1: the calibration is no improvement on held-out rounds; nothing was saved then.",
    )
    parser.add_argument("--out", default="calibration.json", metavar="PATH", help="%(default)s")
    parser.add_argument("--format", default="dspark", metavar="NAME", help="dspark, sglang or tensorrt-llm")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", metavar="PATH", help="hold this calibration to the rounds instead of fitting one"
    )
    mode.add_argument(
        "--convert", metavar="PATH", help="write this calibration to --out in --format, no more"
    )
    parser.add_argument(
        "--drop-offsets",
        action="store_true",
        help="with --convert: write the temperatures alone, for other engines; better fit again without --offsets",
    )
    _add_rounds_options(parser)
    _add_fit_options(parser)
    parser.add_argument(
        "--diagram", metavar="PATH.svg", help="write reliability diagrams, whatever the outcome"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    add_model_options(parser, with_method=False)
    parser.set_defaults(run=run)


def _add_rounds_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rounds")
    group.add_argument(
        "--rounds", metavar="PATH", help="kept here, and continued if it exists; default: beside --out"
    )
    group.add_argument(
        "--no-collect", action="store_true", help="take the rounds as they are; no model is loaded"
    )
    group.add_argument(
        "--prompts",
        default="72",
        metavar="N|PATH",
        help="the first N built-in prompts (%(default)s), or a .jsonl of messages or turns, with a domain if you like",
    )
    group.add_argument(
        "--temperatures",
        type=floats,
        metavar="LIST",
        help="those you serve at; 0,1 unless the rounds say otherwise",
    )
    group.add_argument(
        "--samples", type=int, default=1, metavar="N", help="answers a prompt above 0 (%(default)s)"
    )
    group.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="of each answer (%(default)s)"
    )
    group.add_argument(
        "--concurrency", type=int, default=8, metavar="N", help="answers at a time (%(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, help="of sampling and of the split (%(default)s)")


def _add_fit_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fit")
    group.add_argument(
        "--held-out", type=float, default=0.5, metavar="SHARE", help="of each domain's prompts (%(default)s)"
    )
    group.add_argument(
        "--labels",
        default="expected",
        choices=("expected", "realised"),
        help="fit to the probability of acceptance, or to outcomes (%(default)s)",
    )
    group.add_argument(
        "--offsets",
        action="store_true",
        help="fit an offset beside each temperature, for a head that is too sure (or not sure enough) throughout; "
        "only --format dspark holds them",
    )
    group.add_argument(
        "--bins", type=int, default=15, metavar="N", help="of the calibration error (%(default)s)"
    )
    group.add_argument(
        "--binning", default="mass", choices=("mass", "width"), help="equal mass or equal width (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Collect what is missing, fit on some prompts, judge on the others, save an improvement."""
    from dspark.calibrate import (
        Bins,
        evaluate,
        fit,
        load_calibration,
        offsets_hint,
        save_calibration,
        with_results,
    )

    _check(args)
    if args.convert is not None:
        _convert(args)
        return 0
    bins = Bins(args.bins, args.binning)
    given = None if args.check is None else load_calibration(Path(args.check))
    rounds = chosen_rounds(args)
    to_fit, held_out = rounds.split(args.held_out, args.seed)
    calibration = fit(to_fit, bins, args.labels, args.offsets) if given is None else given
    if given is not None:
        calibration.check_fits(
            rounds.source.drafter_identity, rounds.source.target_identity, rounds.source.gamma
        )
    evaluation = evaluate(held_out, calibration, bins, args.seed)
    refusal = evaluation.refusal
    saved = refusal is None and given is None
    if saved:
        complete = _with_provenance(args, with_results(calibration, evaluation))
        save_calibration(Path(args.out), complete, args.format)
    hint = None if calibration.offsets or given is not None else offsets_hint(to_fit, evaluation)
    _report(args, evaluation, saved, hint)
    return int(refusal is not None)


def _convert(args: argparse.Namespace) -> None:
    from dspark.calibrate import load_calibration, save_calibration

    calibration = load_calibration(Path(args.convert))
    if args.drop_offsets:
        if calibration.offsets:
            dropped = ", ".join(f"{b:.2f}" for b in calibration.offsets)
            say(
                f"dropped: offsets {dropped}, and the errors that were measured with them; confidences are off by as "
                "much, as the temperatures were fitted beside offsets: better fit again without --offsets on the kept "
                "rounds (--no-collect --rounds PATH, which needs no model)"
            )
        else:
            say(f"{args.convert} has no offsets to drop")
        calibration = calibration.without_offsets()
    save_calibration(Path(args.out), calibration, args.format)


def _check(args: argparse.Namespace) -> None:
    """Refuse before hours of work what could not be written after it."""
    from dspark.calibrate.formats import FORMATS
    from dspark.core import DSparkError

    if args.format not in FORMATS:
        raise DSparkError(f"--format {args.format!r} is not known; choose from {', '.join(FORMATS)}")
    if args.convert is not None:
        for name in ("diagram", "rounds", "no_collect", "offsets", "json"):
            if getattr(args, name):
                raise DSparkError(
                    f"--convert writes a calibration as it is, without use for --{name.replace('_', '-')}: leave it out"
                )
    elif args.drop_offsets:
        raise DSparkError("--drop-offsets belongs to --convert; to fit without offsets, leave out --offsets")
    if args.offsets and args.format != "dspark":
        raise DSparkError(
            f"--format {args.format} cannot hold offsets: leave out --offsets, or save in the format dspark"
        )
    if args.diagram is not None and not args.diagram.endswith(".svg"):
        raise DSparkError(f"--diagram writes an .svg file, not {args.diagram!r}")
    if args.check is None:
        check_file(args.out)
    if args.convert is None and not args.no_collect:
        check_file(rounds_path(args))
    if args.diagram is not None:
        check_file(args.diagram)
    if not 0 < args.held_out < 1:
        raise DSparkError(f"--held-out must lie between 0 and 1, got {args.held_out}")


def _with_provenance(args: argparse.Namespace, calibration: Calibration) -> Calibration:
    from dataclasses import replace
    from datetime import UTC, datetime

    from dspark.cli.machine import versions

    named = tuple(f"{name} {version}" for name, version in versions().items() if version is not None)
    dataset = f"{args.prompts} built-in prompts" if args.prompts.isdecimal() else Path(args.prompts).name
    if args.no_collect:
        dataset = rounds_path(args).name
    return replace(
        calibration, dataset=dataset, versions=named, created=f"{datetime.now(UTC):%Y-%m-%dT%H:%MZ}"
    )


def _report(args: argparse.Namespace, evaluation: Evaluation, saved: bool, hint: str | None) -> None:
    from dspark.calibrate.diagram import reliability_svg
    from dspark.calibrate.tables import group_table, slot_table
    from dspark.cli.terminal import Output, write_json

    if args.diagram is not None:
        Path(args.diagram).write_text(reliability_svg(evaluation.all), "utf-8")
    if args.json:
        files = {"saved": args.out if saved else None, "rounds_file": str(rounds_path(args))}
        write_json({**evaluation.as_dict(), "hint": hint, **files}, indent=1)
    else:
        out = Output()
        out.print(slot_table(evaluation))
        out.print(group_table(evaluation))
    for warning in evaluation.warnings:
        say(f"warning: {warning}")
    if evaluation.refusal is not None:
        kept = "" if args.check else "; nothing was saved"
        say(f"refused: {evaluation.refusal}{kept}")
    elif saved and not args.json:
        Output().print(f"saved: {args.out}")
    if hint is not None:
        say(f"hint: {hint}")
