"""A scheduling policy on the real engine, against every fixed draft length, over concurrency.

    python benchmarks/schedule_quality.py [--concurrency 1,2,4,8,16,32] [--lengths 1,2,4,7] [--policy auto]
        [--method dspark] [--temperature 0] [--prompts 8] [--max-tokens 48] [--repeats 4] [--discard 2]
        [--threads N] [--json PATH] [--figure PATH]

All arms take turns within a repeat. The best fixed length of each concurrency is chosen by the even repeats and
compared with the policy by the odd ones, so that luck in choosing does not count for it. Ratios are taken within a
repeat; median (min..max) over repeats. `--discard` repeats come first and do not count: a policy begins with trials.
`none` drafts nothing, and `none again` is another engine that does so: no policy can be nearer to plain decoding than
that. Decoding steps only, prompts' own passes left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch

from dspark import LLM
from dspark.cli.destination import check_file
from dspark.core import DSparkError
from dspark.data import load_prompts
from dspark.drafters.methods import LOOKUP
from dspark.engine.engine import Engine
from dspark.evaluate.throughput import ThroughputSettings, run_throughput

PLAIN = "none"  # run_throughput's name for it
AGAIN = "none again"  # a second engine that decodes plainly: what it differs by is the machine's doing
TABLE = "| requests | best fixed | policy/best | policy/plain | plain again/plain |\n|---|---|---|---|---|"


def speeds(runs: list[dict[str, Any]], arm: str, odd: bool | None = None) -> dict[int, float]:
    """Decoded tokens a second of an arm by repeat: of all repeats, or of the odd or even ones."""
    return {
        run["repeat"]: run["decode_tokens_per_s"]
        for run in runs
        if run["method"] == arm and odd in (None, bool(run["repeat"] % 2))
    }


def ratios(runs: list[dict[str, Any]], arm: str, other: str) -> dict[str, float]:
    """Spread over the odd repeats of one arm's speed over another's."""
    mine, theirs = speeds(runs, arm, odd=True), speeds(runs, other, odd=True)
    values = [mine[repeat] / theirs[repeat] for repeat in mine]
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def compare(runs: list[dict[str, Any]], fixed: list[str], policy: str) -> dict[str, Any]:
    """One concurrency: the best fixed arm (plain is one) by the even repeats, compared by the odd ones."""
    best = max([PLAIN, *fixed], key=lambda arm: statistics.median(speeds(runs, arm, odd=False).values()))
    return {
        "best": best,
        "tokens_per_s": {
            arm: statistics.median(speeds(runs, arm).values()) for arm in [PLAIN, AGAIN, *fixed, policy]
        },
        "policy_over_best": ratios(runs, policy, best),
        "over_plain": {arm: ratios(runs, arm, PLAIN) for arm in [PLAIN, AGAIN, *fixed, policy]},
    }


def over_the_range(cells: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Geometric mean over concurrencies of each arm's speed relative to plain decoding."""
    arms = next(iter(cells.values()))["tokens_per_s"]
    relative = {
        arm: [cell["tokens_per_s"][arm] / cell["tokens_per_s"][PLAIN] for cell in cells.values()]
        for arm in arms
    }
    return {arm: math.exp(statistics.fmean(map(math.log, values))) for arm, values in relative.items()}


def draw(cells: dict[int, dict[str, Any]], path: Path) -> None:
    """Speed relative to plain decoding by concurrency, a line an arm: median and range over the repeats compared."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    arms = list(next(iter(cells.values()))["over_plain"])
    for i, arm in enumerate(arms):
        spreads = [cell["over_plain"][arm] for cell in cells.values()]
        errors = [[s["median"] - s["min"] for s in spreads], [s["max"] - s["median"] for s in spreads]]
        at = [c * 2 ** (0.06 * (i - len(arms) / 2)) for c in cells]  # side by side, or ranges hide each other
        axes.errorbar(
            at,
            [s["median"] for s in spreads],
            errors,
            marker="o",
            markersize=4,
            capsize=2,
            linewidth=1 if arm.isdecimal() or arm == AGAIN else 2.2,
            label=f"{arm} drafts" if arm.isdecimal() else arm,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(cells), [str(c) for c in cells])
    axes.set_xlabel("requests at a time")
    axes.set_ylabel("tokens/s over plain decoding")
    axes.legend(frameon=False)
    figure.savefig(path)


def show(spread: dict[str, float]) -> str:
    return f"{spread['median']:.3f} ({spread['min']:.3f}..{spread['max']:.3f})"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--method", default="dspark")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--lengths", type=numbers, default=[1, 2, 4, 7])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--prompts", type=int, default=8, help="built-in ones; at least one a request in flight"
    )
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--discard", type=int, default=2, help="repeats in front that do not count")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error(
            "--repeats must be 2 or more: the best length is chosen by one half and judged by the other"
        )
    try:
        for path in (args.json, args.figure):
            if path is not None:
                check_file(path)
    except DSparkError as error:
        parser.error(str(error))
    return args


def build_engines(args: argparse.Namespace) -> dict[str, Engine]:
    """By arm. They share one set of weights, so that no arm finds the caches full of another's."""
    plain = LLM(args.model, max_num_seqs=max(args.concurrency))

    def engine(length: int, policy: str = "fixed") -> Engine:
        config: dict[str, Any] | None = None
        if length:
            method = args.method.removesuffix(LOOKUP)
            config = {"method": method, "num_speculative_tokens": length, "policy": policy}
            if args.method.endswith(LOOKUP):
                config["prompt_lookup_num_tokens"] = max(args.lengths)
        llm = LLM(args.model, speculative_config=config, max_num_seqs=max(args.concurrency), weights_of=plain)
        return llm.engine

    engines = {PLAIN: plain.engine, AGAIN: engine(0)} | {str(n): engine(n) for n in args.lengths}
    return engines | {args.policy: engine(max(args.lengths), args.policy)}


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    engines = build_engines(args)
    tokenizer = engines[PLAIN].tokenizer
    prompts = [tokenizer.apply_chat_template(p.messages) for p in load_prompts()]
    cells: dict[int, dict[str, Any]] = {}
    print(TABLE)
    for requests in args.concurrency:
        settings = ThroughputSettings(
            concurrency=(requests,),
            temperature=(args.temperature,),
            max_tokens=args.max_tokens,
            repeats=args.discard + args.repeats,
        )
        some = prompts[:: max(1, len(prompts) // max(args.prompts, requests))][: max(args.prompts, requests)]
        runs = [r for r in run_throughput(engines, some, settings)["runs"] if r["repeat"] >= args.discard]
        cells[requests] = cell = compare(runs, [str(n) for n in args.lengths], args.policy)
        over = cell["over_plain"]
        columns = [show(spread) for spread in (cell["policy_over_best"], over[args.policy], over[AGAIN])]
        print(f"| {requests} | {cell['best']} | " + " | ".join(columns) + " |", flush=True)
    means = over_the_range(cells)
    print("\nover the whole range, relative to plain: " + ", ".join(f"{a} {v:.3f}" for a, v in means.items()))
    if args.json is not None:
        settings_ = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        report = {"settings": settings_, "cells": cells, "over_the_range": means}
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.figure is not None:
        draw(cells, args.figure)


if __name__ == "__main__":
    main()
