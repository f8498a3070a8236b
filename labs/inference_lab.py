"""Three small experiments with DSpark's ideas, on the code that serves.

python labs/inference_lab.py spec        # how many drafts are worth verifying? (--t6 1.3: the exercise)
python labs/inference_lab.py rollback    # what a round does to cache and length
python labs/inference_lab.py bias        # why the schedule must not look at what it decides about

The prices of `spec` are made up to be instructive; no GPU was measured. `--json` prints numbers only.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.audit import appendix_a, audit
from dspark.audit.builtin import APPENDIX_A_COST
from dspark.audit.report import explain
from dspark.core import DSparkError, Request, SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.kv import BlockTable, KVPool, LayerKV
from dspark.schedule.cost import TableCost
from dspark.schedule.policies import GlobalScheduler, LaggedScheduler, Policy, PrefixScheduler, ScheduleState
from dspark.schedule.search import Curve, best_budget, decoding_curve, rank
from dspark.testing import ScriptedDrafter, TableTarget

CONFIDENCE = {"A": [0.9, 0.5], "B": [0.8, 0.25]}  # c_k: survival A .9, .45 and B .8, .2
SIZES = (2, 4, 6)  # captured graphs; a batch runs at the next one
MS = 1e-3


def spec(args: argparse.Namespace) -> dict[str, Any]:
    """Expected output over time for every budget, and the best one."""
    confidence = np.array(list(CONFIDENCE.values()))
    R, gamma = confidence.shape
    survival = confidence.cumprod(axis=1)
    state = ScheduleState(np.arange(R), np.full(R, gamma), np.zeros(R, dtype=np.int64))
    ranking = rank(survival, state.room)
    cost = TableCost(SIZES, tuple(t * MS for t in (args.t2, args.t4, args.t6)), executed=True)
    queries = R + np.arange(R * gamma + 1)
    extra = (args.sampler_ms + args.slope_ms * queries) * MS
    curve = Curve(ranking, state.outputs, decoding_curve(state, cost, len(ranking)) + extra)
    best = best_budget(curve)
    rows = [
        {
            "queries": int(q),
            "expected": float(tokens),
            "executed": min(size for size in SIZES if size >= q),
            "ms": float(seconds / MS),
            "tokens_per_ms": float(tokens / seconds * MS),
        }
        for q, tokens, seconds in zip(queries, curve.tokens, curve.seconds, strict=True)
    ]
    names = list(CONFIDENCE)
    order = [f"{names[r]}{j + 1}" for r, j in zip(*ranking.order, strict=True)]
    lengths = {name: int(n) + 1 for name, n in zip(names, ranking.lengths(best), strict=True)}
    return {
        "survival": {name: row.tolist() for name, row in zip(names, survival, strict=True)},
        "admission_order": order,
        "rows": rows,
        "chosen": rows[best]["queries"],
        "queries_per_request": lengths,
    }


def show_spec(result: dict[str, Any]) -> None:
    for name, row in result["survival"].items():
        print(f"survival {name}: {'  '.join(f'{a:.2f}' for a in row)}")
    print(f"admission order: {', '.join(result['admission_order'])}\n")
    print("queries  expected  executed     ms  tokens/ms")
    top = max(row["tokens_per_ms"] for row in result["rows"])
    for row in result["rows"]:
        bar = "#" * round(30 * row["tokens_per_ms"] / top)
        mark = " <- chosen" if row["queries"] == result["chosen"] else ""
        print(
            f"{row['queries']:>7}  {row['expected']:>8.2f}  {row['executed']:>8}  {row['ms']:>5.2f}"
            f"  {row['tokens_per_ms']:>9.3f}  {bar}{mark}"
        )
    each = " + ".join(str(n) for n in result["queries_per_request"].values())
    print(
        f"\nchosen: {result['chosen']} query tokens, {each} (one of each is the request's own, the rest drafts)"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """The curve as a picture."""
    try:
        import matplotlib
    except ImportError:
        raise DSparkError("--png needs matplotlib: run pip install matplotlib, or leave --png out") from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="query tokens", ylabel="expected tokens / ms", title="made-up prices")
    queries = [row["queries"] for row in result["rows"]]
    axes.plot(queries, [row["tokens_per_ms"] for row in result["rows"]], marker="o")
    axes.axvline(result["chosen"], linestyle=":", color="grey")
    axes.set_xticks(queries)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise DSparkError(f"cannot write {path}: {error}") from error


def rollback(args: argparse.Namespace) -> dict[str, Any]:
    """One round of a request with 100 cached positions: optimistic, then rolled back. The engine must agree."""
    drafts = 3
    pool = KVPool([LayerKV(1, 1)], num_blocks=128, block_size=args.block_size)
    table = BlockTable()
    request = Request(0, "lab", [0] * 100, SamplingParams(), seed=0, max_total=200)
    request.token_ids.append(0)
    request.cached = 100
    states: list[dict[str, Any]] = []

    def note(what: str) -> None:
        pool.check_integrity([table])
        states.append(
            {"what": what, "cache": request.cached, "length": request.committed, "blocks": len(table.blocks)}
        )

    assert pool.reserve(table, request.cached)
    note("before: all but the last token have KV entries")
    q = request.pending + drafts
    assert pool.reserve(table, request.cached + q)
    request.cached += q
    note(f"pass over q = {q} tokens, the pending one and {drafts} drafts: optimistic")
    request.cached -= drafts - args.accepted
    request.token_ids += [0] * (args.accepted + 1)
    note(f"{args.accepted} accepted + 1 sampled = {args.accepted + 1} committed: cache -= q - committed")
    pool.truncate(table, request.cached)
    note("blocks behind the cache return to the pool")
    return {"q": q, "accepted": args.accepted, "states": states, "engine": _engine(drafts, args.accepted)}


def _engine(drafts: int, accepted: int) -> list[dict[str, int]]:
    """Cache and length before and after the same round in a real engine."""
    target = TableTarget(np.eye(4)[[1, 1, 1, 1]])  # whatever came before, token 1 follows
    drafter = ScriptedDrafter.fixed([1] * accepted + [2] * (drafts - accepted))
    engine = Engine(target, drafter, config=EngineConfig(block_size=2))
    engine.add([0] * 100, SamplingParams(temperature=0, max_tokens=50))
    states = []
    for _ in range(2):
        engine.step()
        request = engine.scheduler.running[0].request
        states.append({"cache": request.cached, "length": request.committed})
    return states


def show_rollback(result: dict[str, Any]) -> None:
    print("cache  length  blocks")
    for state in result["states"]:
        print(f"{state['cache']:>5}  {state['length']:>6}  {state['blocks']:>6}  {state['what']}")
    before, after = result["engine"]
    print(
        f"\nthe engine, same round: cache {before['cache']} -> {after['cache']}, "
        f"length {before['length']} -> {after['length']}"
    )


def bias(args: argparse.Namespace) -> dict[str, Any]:
    """Appendix A under three schedulers, every outcome enumerated."""
    world = appendix_a()
    policies: dict[str, Policy] = {
        "global": GlobalScheduler(2, APPENDIX_A_COST),
        "prefix": PrefixScheduler(2, APPENDIX_A_COST),
        "lagged": LaggedScheduler(2, APPENDIX_A_COST),
    }
    results = {name: audit(world, policy) for name, policy in policies.items()}
    return {
        "target": world.p_target[0].tolist(),
        "policies": {name: result.as_dict() for name, result in results.items()},
        "why": {name: explain(r.witness) for name, r in results.items() if r.witness is not None},
    }


def show_bias(result: dict[str, Any]) -> None:
    print(f"the target says {_row(result['target'])}; drafts come from (0.5000 0.5000)\n")
    print("policy  declares  first token       distance")
    for name, r in result["policies"].items():
        tv = max([*r["tv"], r["joint_tv"]])
        print(f"{name:<6}  {r['dependence']:<8}  {_row(r['first_token'])}  {tv:.1e}")
    for name, lines in result["why"].items():
        print(f"\nwhy {name} is biased:")
        for line in lines:
            print(f"  {line}")


def _row(values: Sequence[float]) -> str:
    return "(" + " ".join(f"{v:.4f}" for v in values) + ")"


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a time above 0, got {text}")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a time of 0 or more, got {text}")
    return value


def _size(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    labs = parser.add_subparsers(dest="lab", required=True, metavar="LAB")
    budget = labs.add_parser("spec", help="how many drafts are worth verifying?")
    for size, default in zip(SIZES, (1.0, 1.2, 2.0), strict=True):
        budget.add_argument(
            f"--t{size}",
            type=_positive,
            default=default,
            metavar="MS",
            help=f"step time at size {size} (%(default)s)",
        )
    budget.add_argument(
        "--sampler-ms", type=_not_negative, default=0.0, metavar="MS", help="added to each step (%(default)s)"
    )
    budget.add_argument(
        "--slope-ms", type=_not_negative, default=0.0, metavar="MS", help="per query token (%(default)s)"
    )
    budget.add_argument("--png", type=Path, metavar="PATH", help="draw the curve, too (needs matplotlib)")
    roll = labs.add_parser("rollback", help="what a round does to cache and length")
    roll.add_argument(
        "--accepted", type=int, choices=range(4), default=1, help="drafts accepted of 3 (%(default)s)"
    )
    roll.add_argument(
        "--block-size", type=_size, default=2, metavar="N", help="positions in a KV block (%(default)s)"
    )
    labs.add_parser("bias", help="why the schedule must not look at what it decides about")
    for lab in labs.choices.values():
        lab.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a lab; 2 on bad input."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(1)
    labs = {"spec": (spec, show_spec), "rollback": (rollback, show_rollback), "bias": (bias, show_bias)}
    run, show = labs[args.lab]
    try:
        result = run(args)
        if getattr(args, "png", None) is not None:
            draw(result, args.png)
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
