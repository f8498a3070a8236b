"""`dspark profile`: what a pass, a draft and a long context cost here; tables of other engines in and out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.destination import check_file
from dspark.cli.messages import say
from dspark.cli.options import add_model_options, set_threads, speculative_config

if TYPE_CHECKING:
    from dspark.drafters.base import Drafter
    from dspark.profile import Profile
    from dspark.target.base import Target

__all__ = ["add_parser"]

FORMATS = ("dspark", "sglang", "tensorrt-llm")
SECONDS, MAX_ROWS = 15.0, 64


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser(
        "profile",
        help="what a step costs here",
        description=__doc__,
        epilog="The profile is kept in the cache directory, where policies that need prices find it: that of "
        "temperature 0; those of others are for --cost-table.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--max-num-seqs", type=int, default=16, metavar="N", help="requests in one step at most (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help=f"about how long to measure ({SECONDS:g})")
    parser.add_argument("--max-rows", type=int, metavar="N", help=f"largest pass that is timed ({MAX_ROWS})")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="of what is timed: sampled drafts and their judgement take longer (0)",
    )
    parser.add_argument(
        "--export",
        metavar="PATH",
        help="write the table there: what --import reads, the kept profile if one fits, else what is measured",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="with --export: measure anew, as without it and with --seconds"
    )
    parser.add_argument("--format", choices=FORMATS, help=f"of --export ({FORMATS[0]})")
    parser.add_argument(
        "--import",
        dest="table",
        metavar="PATH",
        help="measure nothing: read a table of any of these formats, show its prices, and --export them",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure (or read) and show."""
    from dspark.cli.terminal import write_json
    from dspark.profile import CostTable, load_cost_table, write_cost_table
    from dspark.profile.store import describe

    _check(args)
    if args.table is not None:
        table = load_cost_table(Path(args.table))
        facts = describe(table.cost)
        for remark in table.remarks():
            say(f"{args.table}: {remark}")
    else:
        profile = _measured(args)
        table = CostTable(profile.cost(), profile)
        facts = profile.as_dict()
    if args.export is not None:
        form = args.format or FORMATS[0]
        lost = write_cost_table(table, Path(args.export), form)
        if lost:
            say(f"the format {form} has no place for {', '.join(lost)}")
    if table.cost.warning is not None:
        say(f"warning: {table.cost.warning}")
    if args.json:
        write_json(facts, indent=1)
    else:
        _print(facts if args.table is not None else facts["cost"], facts.get("noise"))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what would be of no use, before anything is measured."""
    from dspark.core import DSparkError

    if args.format is not None and args.export is None:
        raise DSparkError("--format says how --export writes: name a file there, or leave it out")
    if args.table is not None:
        for name in ("seconds", "max_rows", "temperature", "fresh"):
            value = getattr(args, name)
            if value is not None and value is not False:
                raise DSparkError(f"--import measures nothing: leave --{name.replace('_', '-')} out")
    if args.export is not None:
        check_file(Path(args.export).expanduser())


def _measured(args: argparse.Namespace) -> Profile:
    """What the machine costs with this model: the kept profile for --export where one fits, else measured."""
    from dspark.cli.progress import ShareLine
    from dspark.core import DSparkError
    from dspark.profile import ProfileSettings, ensure_profile

    if args.max_num_seqs < 1 or not (args.seconds is None or args.seconds >= 0):
        raise DSparkError("--max-num-seqs must be 1 or more, and --seconds 0 or more")
    settings = ProfileSettings(
        seconds=SECONDS if args.seconds is None else args.seconds,
        max_rows=MAX_ROWS if args.max_rows is None else args.max_rows,
        temperature=args.temperature or 0.0,
    )
    target, drafter, gamma = _loaded(args)
    with ShareLine("profile") as line:
        profile = ensure_profile(
            target,
            drafter,
            gamma,
            args.max_num_seqs,
            say,
            settings,
            again=args.export is None or args.fresh or args.seconds is not None,
            strict=True,
            progress=line.show,
        )
    if not line.share:
        say("this is the profile kept for this machine, model and temperature; --fresh measures anew")
    return profile


def _loaded(args: argparse.Namespace) -> tuple[Target, Drafter | None, int]:
    """Target, drafter, and the most drafts a round."""
    import torch

    from dspark.core import DSparkError
    from dspark.drafters.registry import build_drafter
    from dspark.kernels.compilation import compile_kernels
    from dspark.target.load import load_target
    from dspark.target.zoo import resolve

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
    if args.dtype not in dtypes:
        raise DSparkError(f"dtype {args.dtype!r} is not supported; choose from {', '.join(dtypes)}")
    config = speculative_config(args.method, args.drafter, args.num_speculative_tokens)
    if args.threads is not None:
        set_threads(args.threads)
    directory = resolve(args.model, say)  # a model that is not there is refused before kernels are compiled
    if args.device == "cpu" and args.dtype == "float32":
        compile_kernels(say)
    loaded = load_target(directory, dtypes[args.dtype], args.device, say, args.activation_dtype)
    drafter, block = build_drafter(config, loaded.decoder)
    return loaded.decoder, drafter, block.length


def _print(cost: dict[str, Any], noise: float | None) -> None:
    from dspark.cli.terminal import Output, plain_table

    table = plain_table()
    for column in ("rows", "ms a pass", "ms a row"):
        table.add_column(column, justify="right")
    for rows, seconds in zip(cost["tokens"], cost["seconds"], strict=True):
        table.add_row(str(rows), f"{1e3 * seconds:.1f}", f"{1e3 * seconds / rows:.2f}")
    draft, context = cost["draft"], cost["context"]
    out = Output()
    out.print(table)
    if "alpha" in cost:
        alpha, requests = cost["alpha"], cost["requests"]
        each = (alpha[-1] - alpha[0]) / (requests[-1] - requests[0])
        out.print(f"a further request: {1e3 * each:.2f} ms")
    out.print(
        f"a draft: {1e3 * draft['base']:.1f} ms, and {1e3 * draft['per_request']:.2f} ms a request, "
        f"{1e3 * draft['per_draft']:.2f} ms a token; a pass behind it takes {1e3 * draft['displacement']:.2f} ms more"
    )
    out.print(
        f"1000 cached positions beyond {context['profiled_at']:g} a request: {1e6 * context['per_position']:.2f} ms a "
        f"pass, {1e6 * context['per_pair']:.2f} ms a row"
    )
    if noise is not None:
        out.print(f"noise of one measurement: {100 * noise:.1f} %")
