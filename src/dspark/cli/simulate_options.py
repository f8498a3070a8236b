"""Options of `dspark simulate`, and which of them a run has a use for."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from dspark.cli.lists import floats, integers

__all__ = ["add_options", "settle"]

_POLICIES = "plain,fixed,threshold,prefix,lagged"
_HINDSIGHT_POLICIES = "prefix,lagged,auto"

# Defaults by destination: the parser's are None, so that an option without a use is refused, not ignored.
_DEFAULTS: dict[str, Any] = {
    "policies": _POLICIES,
    "arrivals": "poisson", "speed": (1.0,), "think": 0.0,
    "prompt_tokens": "lognormal:500:1", "output_tokens": "geometric:200",
    "machine": "gpu-27b", "acceptance": "qwen3-4b", "confidence_noise": 0.0, "confidence_scale": 1.0,
    "max_num_batched_tokens": 2048, "max_model_len": 32768, "overhead_ms": 0.0,
    "duration": 60.0, "warmup": 20.0, "seeds": 3, "seed": 0, "confidence": 0.95,
    "share": 0.9, "most": 4096.0, "rounds": 12_000, "tolerance": 0.1,
}  # fmt: skip

# What only requests that are served have.
_SERVING = (
    "rate", "trace", "arrivals", "speed", "think", "mix", "prompt_tokens", "output_tokens",
    "max_num_seqs", "max_num_batched_tokens", "kv_cache_tokens", "max_model_len",
    "known_end", "duration", "warmup", "seeds", "confidence",
)  # fmt: skip
# What prices that are fitted to recorded steps do without.
_SIMULATED = (
    *_SERVING, "policies", "greedy", "policy_costs", "acceptance", "calibration", "gamma",
    "confidence_noise", "confidence_scale", "no_confidence", "overhead_ms", "seed",
)  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """All of them. `settle` fills in the defaults."""
    text = f"{_POLICIES} ({_HINDSIGHT_POLICIES} with --hindsight)"
    parser.add_argument(
        "--policies",
        metavar="LIST",
        help=f"{text}; also fixed:3, threshold:0.3, prefix-raw, lagged-previous, global, auto",
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
    _add_traffic_options(parser.add_argument_group("traffic"))
    _add_engine_options(parser.add_argument_group("engine"))
    _add_run_options(parser.add_argument_group("runs"))
    _add_output_options(parser.add_argument_group("output"))


def _option(group: Any, name: str, kind: Callable[[str], Any], metavar: str, text: str) -> None:
    default = _DEFAULTS.get(name.replace("-", "_"))
    shown = default[0] if isinstance(default, tuple) else default
    group.add_argument(
        f"--{name}", type=kind, metavar=metavar, help=text if shown is None else f"{text} ({shown})"
    )


def _add_traffic_options(group: Any) -> None:
    load = group.add_mutually_exclusive_group()
    _option(load, "concurrency", integers, "LIST", "users of a closed loop (1,4,16,64)")
    _option(load, "rate", floats, "LIST", "requests per second that come when they come")
    _option(load, "trace", str, "PATH", "arrivals: a CSV of TIMESTAMP, ContextTokens, GeneratedTokens")
    _option(group, "arrivals", str, "KIND", "with --rate: poisson, gamma:CV, or on-off:ON:OFF in seconds")
    _option(group, "speed", floats, "LIST", "with --trace: times faster")
    _option(group, "think", float, "S", "mean pause of a user of a closed loop")
    _option(group, "mix", str, "LIST", "domains, chat=0.6,code=0.4; default: all, equally often")
    _option(group, "prompt-tokens", str, "DIST", "200, geometric:200 or lognormal:200:1")
    _option(group, "output-tokens", str, "DIST", "likewise")
    group.add_argument("--greedy", action="store_true", help="temperature 0: policies may look at the block")


def _add_engine_options(group: Any) -> None:
    _option(
        group,
        "machine",
        str,
        "NAME|PATH",
        "gpu-27b, cpu-135m or a cost file; with --validate: prices that were measured before",
    )
    _option(
        group, "policy-costs", str, "NAME|PATH", "prices that policies believe in; default: the machine's"
    )
    _option(group, "acceptance", str, "NAME|PATH", "qwen3-4b, smollm2-135m or recorded rounds")
    _option(
        group,
        "calibration",
        str,
        "PATH",
        "applied to recorded logits; policies know its mean acceptance at the start, as the engine's do",
    )
    _option(group, "gamma", int, "N", "drafts of a block; default: as measured")
    _option(group, "confidence-noise", float, "SD", "of logits")
    _option(group, "confidence-scale", float, "X", "above 1: overconfident")
    group.add_argument("--no-confidence", action="store_true", help="a drafter without a confidence head")
    _option(group, "max-num-seqs", int, "N", "default: 256, or the users if more")
    _option(group, "max-num-batched-tokens", int, "N", "rows of a pass at most")
    _option(group, "kv-cache-tokens", int, "N", "default: memory never runs out")
    _option(group, "max-model-len", int, "N", "longest prompt and answer")
    group.add_argument(
        "--known-end", action="store_true", help="answers end by max_tokens: nothing is drafted past it"
    )
    _option(group, "overhead-ms", float, "MS", "added to every step")


def _add_run_options(group: Any) -> None:
    _option(group, "duration", float, "S", "simulated and measured")
    _option(group, "warmup", float, "S", "before it, not measured; with --validate: before the records (0)")
    _option(group, "seeds", int, "N", "runs of each cell")
    _option(group, "seed", int, "N", "the first of them")
    _option(group, "confidence", float, "P", "of intervals")
    _option(group, "ttft", float, "S", "with --capacity: and the first token within so long")
    _option(group, "share", float, "P", "with --capacity: of requests that must get it")
    _option(group, "most", float, "N", "with --capacity: look no further")
    _option(group, "rounds", int, "N", "with --hindsight: rounds replayed at each load")
    _option(group, "tolerance", float, "X", "with --validate: relative")


def _add_output_options(group: Any) -> None:
    group.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    _option(group, "csv", str, "PATH", "write every metric of every cell there")
    _option(group, "markdown", str, "PATH", "write the report there")
    _option(
        group, "figures", str, "DIR", "draw the frontier and the budget, or --hindsight (needs matplotlib)"
    )


def settle(args: argparse.Namespace) -> None:
    """Fill in the defaults, once nothing was given that the run would ignore.

    Raises:
        DSparkError: an option without a use; the message says what it goes with.
    """
    _refuse_unused(args)
    if args.hindsight and args.policies is None:
        args.policies = _HINDSIGHT_POLICIES
    if args.validate is not None and args.warmup is None:
        args.warmup = 0.0
    for name, default in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)


def _refuse_unused(args: argparse.Namespace) -> None:
    from dspark.core import DSparkError

    for names, useful, needed in _uses(args):
        for name in names:
            given = getattr(args, name)
            if not useful and given is not None and given is not False:
                raise DSparkError(f"--{name.replace('_', '-')} is of use only {needed}: leave it out here")
    loads = args.speed or args.rate or args.concurrency or ()
    if len(loads) > 1 and args.capacity is not None:
        raise DSparkError("--capacity finds the load: name one to start from, or none")
    if len(loads) > 1 and args.validate is not None:
        raise DSparkError("--validate simulates the one load that was recorded: name only that one")


def _uses(args: argparse.Namespace) -> list[tuple[tuple[str, ...], bool, str]]:
    """Options, whether this run has a use for them, and which one would have."""
    other = args.capacity is not None or args.validate is not None or args.hindsight
    recorded_prices = args.validate is not None and args.concurrency is None
    return [
        (_SERVING, not args.hindsight, "without --hindsight, which replays rounds and serves no requests"),
        (("duration",), args.validate is None, "without --validate, which simulates the recorded tokens"),
        (
            _SIMULATED,
            not recorded_prices,
            "if --validate also gets --concurrency, the users of the recorded run",
        ),
        (("csv",), not other, "for a sweep, without --capacity, --validate and --hindsight"),
        (("figures",), not other or args.hindsight, "for a sweep or --hindsight"),
        (("ttft", "share", "most"), args.capacity is not None, "with --capacity"),
        (("rounds",), args.hindsight, "with --hindsight"),
        (("tolerance",), args.validate is not None, "with --validate"),
        (("arrivals",), args.rate is not None, "with --rate"),
        (("speed",), args.trace is not None, "with --trace"),
        (("prompt_tokens", "output_tokens"), args.trace is None, "without --trace, which brings lengths"),
        (
            ("think",),
            args.rate is None and args.trace is None,
            "for a closed loop, without --rate or --trace",
        ),
        (("confidence_noise", "confidence_scale"), not args.no_confidence, "without --no-confidence"),
    ]
