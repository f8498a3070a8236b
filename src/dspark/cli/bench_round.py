"""`dspark bench round`: where a round's time goes, and what more rows cost."""

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
from dspark.cli.options import add_model_options, set_threads, speculative_config

__all__ = ["add_parser"]

PARTS = ("products", "attention", "small")  # small: embedding, norms, rotary, SwiGLU, rounding


def add_parser(benches: Any) -> None:
    """Add the benchmark to the `add_subparsers` object of `dspark bench`."""
    parser = benches.add_parser(
        "round",
        help="where a round's time goes",
        description=__doc__,
        epilog="Rounds are an engine's own, on built-in prompts. The compiled pass is then run again with kinds of "
        "steps left out; see docs/performance.md.",
    )
    parser.add_argument("--rows", type=integers, default=ROWS, metavar="LIST", help="of a pass (%(default)s)")
    parser.add_argument(
        "--context", type=int, default=256, metavar="N", help="tokens of each request (%(default)s)"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="%(default)s, behind one to warm up"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each repeat (%(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of sampling (%(default)s)")
    add_json_option(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check, load, measure, report."""
    from dspark.cli.progress import progress_bar
    from dspark.core import DSparkError
    from dspark.data import load_prompts
    from dspark.drafters.registry import build_drafter
    from dspark.kernels.compilation import compile_kernels
    from dspark.measure import RoundSettings, measure_rounds
    from dspark.target.load import load_target
    from dspark.target.zoo import resolve

    if args.device != "cpu" or args.dtype != "float32":
        raise DSparkError("bench round measures float32 on a CPU: leave --device and --dtype out")
    if args.method == "ngram":
        raise DSparkError(
            "ngram drafts only what it finds, so a pass has no fixed number of rows: use none or dspark"
        )
    config = speculative_config(args.method, args.drafter, args.num_speculative_tokens)
    fields = ("rows", "context", "repeats", "rounds", "temperature", "seed")
    chosen = {name: getattr(args, name) for name in fields}
    RoundSettings(**chosen)  # refuses before anything is loaded
    check_json_path(args.json)
    if args.threads is not None:
        set_threads(args.threads)
    directory = resolve(args.model, say)  # a model that is not there is refused before kernels are compiled
    compile_kernels(say)
    loaded = load_target(directory, report=say, activation_dtype=args.activation_dtype)
    drafter, block = build_drafter(config, loaded.decoder)
    drafts = args.num_speculative_tokens or (drafter.max_draft if drafter is not None else block.length)
    settings = RoundSettings(**chosen, drafts=drafts)
    texts = [loaded.tokenizer.apply_chat_template(prompt.messages) for prompt in load_prompts()]
    with progress_bar("repeats", settings.repeats + 1) as advance:
        facts = measure_rounds(loaded.decoder, drafter, texts, settings, advance)
    write_report(args, "round", {"drafts": drafts, **facts}, _show)
    return 0


def _show(report: dict[str, Any]) -> None:
    from dspark.cli.terminal import Output

    out, results = Output(), report["results"]
    out.print(_rounds(results))
    if all(r["parts"] is not None for r in results):
        out.print(_passes(results))
    else:
        out.print("this model has no compiled pass here: it has no low-bit products, or odd sizes")
    for ratio in report["ratios"]:
        if ratio["rows"] > 1:
            out.print(
                f"{ratio['rows']} rows cost as much as {ratio['pass']:.2f} passes of one row "
                f"({ratio['by_modules']:.2f} layer by layer), a round {ratio['round']:.2f}"
            )
    context = max(r["context"]["max"] for r in results)
    out.print(
        f"contexts up to {context:.0f} tokens, {report['machine']['threads']} threads, {report['clock']}"
    )


def _table(caption: str, columns: tuple[str, ...]) -> Any:
    from dspark.cli.terminal import plain_table

    table = plain_table(caption)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _rounds(results: list[dict[str, Any]]) -> Any:
    caption = "ms, medians over rounds (min..max of the whole); engine: admission, plans, commits, text"
    columns = ("rows", "req.", "round", "draft", "pack", "pass", "sample", "observe", "engine")
    table = _table(caption, columns)
    for r in results:
        parts = r["round"]
        names = ("draft", "packing", "pass", "sampling", "observe", "engine")
        figures = [f"{parts[name]['median']:.2f}" for name in names]
        table.add_row(
            str(r["rows"]),
            str(r["requests"]),
            ranged(parts["round"], 1 if parts["round"]["max"] < 100 else 0),
            *figures,
        )
    return table


def _passes(results: list[dict[str, Any]]) -> Any:
    caption = (
        "ms, medians: the pass again, and what it takes less without a kind of steps (small: norms, rotary, "
    )
    caption += "SwiGLU); rest: of the layers; around: plan, Python; modules: the pass layer by layer"
    columns = ("rows", "pass", *PARTS, "rest", "head", "around", "modules")
    table = _table(caption, columns)
    for r in results:
        parts = r["parts"]
        own = [parts[name]["in_place"] for name in PARTS] + [parts[n] for n in ("rest", "lm_head", "around")]
        figures = [f"{figure['median']:.2f}" for figure in own]
        total = f"{r['pass']['median']:.1f}"
        table.add_row(str(r["rows"]), total, *figures, f"{r['by_modules']['median']:.1f}")
    return table
