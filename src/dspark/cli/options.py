"""Options that several verbs share, and what is built from them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.messages import say
from dspark.cli.startup import nothing_collected
from dspark.drafters.methods import LOOKUP, NAMES, TRAINED
from dspark.schedule.names import ACCEPTANCE_RULES, POLICIES, PRICED

if TYPE_CHECKING:
    from dspark.cli.progress import ShareLine
    from dspark.core import SamplingParams
    from dspark.llm import LLM

__all__ = [
    "add_model_options",
    "add_sampling_options",
    "add_schedule_options",
    "check_schedule_options",
    "check_sound_config",
    "load_llm",
    "sampling_params",
    "schedule_config",
    "speculative_config",
]

DEFAULT_MODEL = "smollm2-135m"
LOOKUP_TOKENS = 7  # most that "+lookup" copies a round


def add_model_options(
    parser: argparse.ArgumentParser,
    with_method: bool = True,
    method: str = "dspark",
    with_drafter: bool = True,
) -> None:
    """--model, --num-speculative-tokens, --device, --threads, the dtypes; --method and --drafter where there is one."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="known name, Hugging Face directory or .gguf file (%(default)s)",
    )
    if with_method:
        group.add_argument(
            "--method",
            choices=NAMES,
            default=method,
            metavar="METHOD",
            help=f"who drafts: {', '.join(NAMES)}; +lookup copies where the text repeats (%(default)s)",
        )
    if with_drafter:
        group.add_argument(
            "--drafter", metavar="PATH", help="drafter checkpoint; without it the one shipped for the model"
        )
    group.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="N",
        help="drafts a round at most; default: the drafter's block",
    )
    group.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    group.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads; on a busy machine no more than cores are free"
    )
    group.add_argument("--dtype", default="float32", help="of the weights and the KV cache (%(default)s)")
    group.add_argument(
        "--activation-dtype",
        default="auto",
        metavar="DTYPE",
        help="inputs of products with quantised weights: float32, int8, or auto: int8 where it is fast (%(default)s)",
    )


def add_schedule_options(parser: argparse.ArgumentParser, policy: str = "fixed") -> None:
    """--policy (by default `policy`) and what belongs to it, --acceptance."""
    group = parser.add_argument_group("scheduling")
    group.add_argument(
        "--policy",
        type=_policy,
        default=policy,
        metavar="NAME",
        help=f"{', '.join(POLICIES)}, or module:factory: how much is drafted and verified. fixed drafts as much as it "
        "may, also where that is slower than plain decoding; auto picks a sound search, and may draft nothing "
        "(%(default)s)",
    )
    group.add_argument(
        "--threshold", type=float, metavar="A", help="survival below which the policy threshold stops"
    )
    group.add_argument(
        "--cost-table",
        metavar="PATH",
        help="prices, from dspark profile or another engine; default: measured here once",
    )
    group.add_argument(
        "--calibration",
        metavar="PATH",
        help="what confidences are worth, from dspark calibrate; default: what lies beside the drafter; off: nothing",
    )
    group.add_argument(
        "--acceptance",
        choices=ACCEPTANCE_RULES,
        default="ratio",
        help="ratio accepts more; shared_noise gives one text a seed, whatever drafts (%(default)s)",
    )


def _policy(name: str) -> str:
    if name not in POLICIES and ":" not in name:
        raise argparse.ArgumentTypeError(
            f"unknown policy {name!r} (choose from {', '.join(POLICIES)}, or module:factory)"
        )
    return name


def check_schedule_options(args: argparse.Namespace, policy: str = "fixed") -> None:
    """Refuse what `add_schedule_options` offers, its default `policy` apart, where nobody drafts."""
    from dspark.core import DSparkError

    options = {"policy": policy, "threshold": None, "cost_table": None, "calibration": None}
    given = [name for name, default in options.items() if getattr(args, name) != default]
    if args.method == "none" and given:
        name = given[0].replace("_", "-")
        raise DSparkError(f"--{name} is of no use with --method none: leave it out, or choose a method")


def schedule_config(args: argparse.Namespace, method: str, policy: str | None = None) -> dict[str, Any]:
    """The keys of `add_schedule_options` for `speculative_config`, less the defaults.

    Plain decoding has no policy, but a rule.

    Args:
        policy: instead of --policy.
    """
    keys: dict[str, Any] = {"acceptance": args.acceptance} if args.acceptance != "ratio" else {}
    if method == "none":
        return keys
    policy = policy or args.policy
    if policy != "fixed":
        keys["policy"] = policy
    if policy in ("threshold", args.policy):
        keys["threshold"] = args.threshold
    if policy in PRICED or policy == args.policy:
        keys["cost_table"] = args.cost_table
    if policy != "fixed" or policy == args.policy:
        keys["calibration"] = args.calibration
    return {key: value for key, value in keys.items() if value is not None}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The SamplingParams that the command line offers. Greedy unless told otherwise."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)s)"
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="P")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P")
    group.add_argument(
        "--seed",
        type=int,
        help="repeats a run with the same settings, whatever drafts if --acceptance is shared_noise; "
        "default: a fresh one",
    )
    group.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="longest answer (%(default)s)"
    )
    group.add_argument(
        "--stop", action="append", default=[], metavar="STR", help="end the answer here (repeatable)"
    )


def sampling_params(args: argparse.Namespace, **changes: Any) -> SamplingParams:
    """SamplingParams of `add_sampling_options`; `changes` override single fields.

    Raises:
        DSparkError: a value is out of range.
    """
    from dspark.core import SamplingParams

    fields: dict[str, Any] = {
        name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")
    }
    return SamplingParams(**{**fields, "stop": tuple(args.stop), **changes})


def speculative_config(
    method: str, drafter: str | None = None, num_speculative_tokens: int | None = None
) -> dict[str, Any]:
    """The `speculative_config` of a method, or of one with "+lookup" behind it.

    Raises:
        DSparkError: an option that the method has no use for, or a drafter that is not there.
    """
    from dspark.core import DSparkError

    name, method = method, method.removesuffix(LOOKUP)
    if drafter is not None:
        if method not in TRAINED:
            raise DSparkError(
                f"--drafter is for the methods {' and '.join(TRAINED)}, not for {method}: leave it out"
            )
        if not Path(drafter).expanduser().exists():
            raise DSparkError(f"no drafter at {drafter!r}: give the path of a drafter checkpoint")
    if num_speculative_tokens is not None:
        if method == "none":
            raise DSparkError("--num-speculative-tokens has no meaning with the method none: leave it out")
        if num_speculative_tokens < 1:
            raise DSparkError(f"--num-speculative-tokens must be 1 or more, got {num_speculative_tokens}")
    config: dict[str, Any] = {
        "method": method,
        "model": drafter,
        "num_speculative_tokens": num_speculative_tokens,
    }
    if name != method:
        config["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
    return {key: value for key, value in config.items() if value is not None}


def set_threads(count: int) -> None:
    """Use `count` CPU threads. A core that other programs hold makes every parallel step wait for it."""
    import torch

    from dspark.core import DSparkError

    if count < 1:
        raise DSparkError(f"--threads must be 1 or more, got {count}")
    torch.set_num_threads(count)


def check_sound_config(config: dict[str, Any], temperatures: Sequence[float]) -> None:
    """Refuse a speculative_config that would bias requests at one of these temperatures.

    The engine does so too, but only when the model is loaded and prices are measured.
    """
    with nothing_collected():
        from dspark.schedule.settings import check_sound_settings, split_config

    for temperature in temperatures:
        check_sound_settings(split_config(config)[1], temperature == 0, config["method"] not in TRAINED)


def load_llm(args: argparse.Namespace, config: dict[str, Any], **options: Any) -> LLM:
    """The LLM that --model, --device and --dtype name, drafting as `config` says.

    Raises:
        DSparkError: no such device, or whatever the LLM refuses.
    """
    with nothing_collected():
        from dspark.llm import LLM

        if args.threads is not None:
            set_threads(args.threads)
        with _LateShareLine("profile") as line:
            return LLM(
                args.model,
                speculative_config=config,
                device=args.device,
                dtype=args.dtype,
                activation_dtype=args.activation_dtype,
                report=say,
                progress=line.show,
                **options,
            )


class _LateShareLine(ExitStack):
    """A `ShareLine` from the first share on: what draws it takes time to import, and mostly nothing is to be shown."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self._line: ShareLine | None = None

    def show(self, share: float) -> None:
        if self._line is None:
            from dspark.cli.progress import ShareLine

            self._line = self.enter_context(ShareLine(self._title))
        self._line.show(share)
