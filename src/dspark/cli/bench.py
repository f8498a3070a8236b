"""`dspark bench`: its benchmarks, and `dspark bench throughput`: decoding methods on the same prompts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dspark.cli import bench_kernels, bench_round
from dspark.cli.bench_report import add_json_option, check_json_path, write_report
from dspark.cli.lists import floats, integers
from dspark.cli.options import (
    add_model_options,
    add_schedule_options,
    check_sound_config,
    load_llm,
    schedule_config,
    speculative_config,
)
from dspark.drafters.methods import LOOKUP, NAMES, TRAINED
from dspark.schedule.names import POLICIES

if TYPE_CHECKING:
    from rich.table import Table

    from dspark.llm import LLM

__all__ = ["add_parser"]


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser("bench", help="measure", description="Measurements that can be repeated.")
    benches = parser.add_subparsers(title="benchmarks", dest="bench", metavar="BENCHMARK", required=True)
    throughput = benches.add_parser(
        "throughput",
        help="tokens/s of several methods",
        description="Decoding methods against each other on the same prompts.",
    )
    throughput.add_argument(
        "--methods",
        type=_methods,
        default="none,ngram,dspark",
        metavar="LIST",
        help="%(default)s; ratios refer to none; dspark:auto is dspark under the policy auto",
    )
    throughput.add_argument(
        "--concurrency", type=integers, default="1,4,16", metavar="LIST", help="%(default)s"
    )
    throughput.add_argument("--temperature", type=floats, default="0,1", metavar="LIST", help="%(default)s")
    throughput.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="of each answer (%(default)s)"
    )
    throughput.add_argument(
        "--prompts",
        default="24",
        metavar="N|PATH",
        help="the first N built-in prompts (%(default)s of 72), or a .jsonl as for evaluate; of turns the first",
    )
    throughput.add_argument("--repeats", type=int, default=3, metavar="N", help="%(default)s")
    throughput.add_argument("--seed", type=int, default=0, help="of sampling (%(default)s)")
    add_json_option(throughput)
    add_model_options(throughput, with_method=False)
    add_schedule_options(throughput)
    throughput.set_defaults(run=run)
    bench_kernels.add_parser(benches)
    bench_round.add_parser(benches)


def _methods(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        method, colon, policy = name.partition(":")
        if method not in NAMES:
            raise argparse.ArgumentTypeError(f"unknown method {method!r} (choose from {', '.join(NAMES)})")
        if colon and (policy not in POLICIES or method == "none"):
            raise argparse.ArgumentTypeError(
                f"unknown policy in {name!r} (choose from {', '.join(POLICIES)}; none has no policy)"
            )
    return names


def run(args: argparse.Namespace) -> int:
    """Check the settings, make one LLM a method, measure, report."""
    from dspark.cli.progress import progress_bar
    from dspark.evaluate.conversations import load_conversations
    from dspark.evaluate.throughput import ThroughputSettings, check_prompts, plan_runs, run_throughput

    settings = ThroughputSettings(
        concurrency=args.concurrency,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        repeats=args.repeats,
        seed=args.seed,
    )
    _check(args)
    conversations = load_conversations(args.prompts)
    check_prompts(len(conversations), settings)
    configs = {method: _config(args, method) for method in args.methods}
    for config in configs.values():
        check_sound_config(config, args.temperature)
    # One LLM a method, with room for the widest cell; narrower cells keep fewer requests in flight. All use one set
    # of weights: with a set each, a method would find the caches full of those of the method before it.
    llms: dict[str, LLM] = {}
    first: LLM | None = None
    for method, config in configs.items():
        llms[method] = load_llm(args, config, max_num_seqs=max(args.concurrency), weights_of=first)
        first = first or llms[method]
    tokenizer = next(iter(llms.values())).tokenizer
    prompts = [tokenizer.apply_chat_template(asked.messages) for asked in conversations]
    engines = {method: llm.engine for method, llm in llms.items()}
    with progress_bar("runs", len(list(plan_runs(args.methods, settings)))) as advance:
        results = run_throughput(engines, prompts, settings, lambda run: advance())
    measured = {"num_prompts": len(prompts), "prompt_tokens": sum(map(len, prompts))}
    write_report(args, "throughput", results, _show, measured)
    return 0


def _check(args: argparse.Namespace) -> None:
    from dspark.core import DSparkError

    trained = {m.partition(":")[0].removesuffix(LOOKUP) for m in args.methods} & set(TRAINED)
    if args.drafter is not None and len(trained) != 1:
        raise DSparkError(f"--drafter needs exactly one of {' and '.join(TRAINED)} among --methods")
    check_json_path(args.json)


def _config(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """The method's share of the options: none drafts nothing, and only trained drafters have a file."""
    method, _, policy = name.partition(":")
    drafter = args.drafter if method.removesuffix(LOOKUP) in TRAINED else None
    config = speculative_config(method, drafter, None if method == "none" else args.num_speculative_tokens)
    return config | schedule_config(args, method, policy or None)


def _show(report: dict[str, Any]) -> None:
    from dspark.cli.terminal import Output

    Output().print(_table(report["summary"]))


def _table(summary: list[dict[str, Any]]) -> Table:
    """Medians, with the range over repeats where it matters. Fits a terminal of 80 columns."""
    from dspark.cli.terminal import figure, plain_table

    def median(spread: dict[str, float] | None) -> str:
        return figure(None if spread is None else spread["median"])

    def ranged(spread: dict[str, float] | None, digits: int) -> str:
        if spread is None:
            return "-"
        low, middle, high = (figure(spread[key], digits) for key in ("min", "median", "max"))
        return f"{middle} ({low}..{high})"

    caption = "median (min..max) over repeats, prompt processing included; len., n.l.: accepted length of"
    caption += " all and of non-looping outputs; rep.: share of repeated 4-grams; = none: same ids at T = 0"
    table = plain_table(caption)
    for column in ("T", "c", "method"):
        table.add_column(column)
    for column in ("tokens/s", "x none", "len.", "n.l.", "rep.", "= none"):
        table.add_column(column, justify="right")
    for cell in summary:
        table.add_row(
            f"{cell['temperature']:g}",
            str(cell["concurrency"]),
            cell["method"],
            ranged(cell["output_tokens_per_s"], 1),
            ranged(cell["ratio_to_none"], 2),
            median(cell["accepted_length"]),
            median(cell["accepted_length_non_looping"]),
            median(cell["repetition_share"]),
            (cell["identical"] or "-").replace(" of ", "/"),
        )
    return table
