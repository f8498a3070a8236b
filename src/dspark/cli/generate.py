"""`dspark generate`: one prompt, one answer; with `--compare` plainly and speculatively side by side."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from dspark.cli.options import (
    add_model_options,
    add_sampling_options,
    add_schedule_options,
    check_schedule_options,
    check_sound_config,
    load_llm,
    sampling_params,
    schedule_config,
    speculative_config,
)
from dspark.cli.startup import nothing_collected

if TYPE_CHECKING:
    from dspark.cli.decoding import Decoded, Prompt
    from dspark.core import SamplingParams
    from dspark.llm import LLM

__all__ = ["add_parser"]

REPEATS = 2  # of each side in --compare, unless --repeats says otherwise


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser("generate", help="answer one prompt", description=__doc__)
    parser.add_argument("prompt", help="a user message; - reads it from stdin")
    add_model_options(parser, method="dspark+lookup")
    add_schedule_options(parser)
    add_sampling_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--raw", action="store_true", help="continue the prompt itself, without the chat template"
    )
    parser.add_argument(
        "--compare", action="store_true", help="decode plainly too; at T = 0 exit 1 if ids differ"
    )
    parser.add_argument(
        "--repeats", type=int, metavar="N", help=f"runs of each side in --compare ({REPEATS})"
    )
    parser.add_argument(
        "--show-drafts", action="store_true", help="colour tokens by origin (FORCE_COLOR=1 in pipes)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer the prompt. Everything that can be wrong is checked before the model is loaded."""
    with nothing_collected():
        params = sampling_params(args)
        config = speculative_config(args.method, args.drafter, args.num_speculative_tokens)
        check_schedule_options(args)
        config |= schedule_config(args, args.method)
        check_sound_config(config, [params.temperature])
        _check(args)
        prompt = _prompt(args)
        llm = load_llm(args, config, max_num_seqs=1)
    return _compare(args, llm, prompt, params) if args.compare else _generate(args, llm, prompt, params)


def _check(args: argparse.Namespace) -> None:
    from dspark.core import DSparkError

    if args.raw and args.system is not None:
        raise DSparkError(
            "--system needs the chat template: leave --raw out, or put the text into the prompt"
        )
    if args.compare and args.method == "none":
        raise DSparkError("--compare compares with plain decoding: choose another --method than none")
    if args.compare and args.max_tokens == 0:
        raise DSparkError("--compare needs tokens to compare: set --max-tokens to 1 or more")
    if args.repeats is not None and not args.compare:
        raise DSparkError("--repeats is for --compare: give that too, or leave it out")
    if args.repeats is not None and args.repeats < 1:
        raise DSparkError(f"--repeats must be 1 or more, got {args.repeats}")


def _prompt(args: argparse.Namespace) -> Prompt:
    """The raw text, or messages for the chat template."""
    from dspark.core import DSparkError

    try:
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        text.encode()  # bytes of the command line that are no UTF-8 arrive as surrogates
    except UnicodeError:
        raise DSparkError("the prompt is not valid UTF-8: convert it first") from None
    if not text:
        raise DSparkError("the prompt is empty: give some text")
    if args.raw:
        return str(text)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def _generate(args: argparse.Namespace, llm: LLM, prompt: Prompt, params: SamplingParams) -> int:
    from dspark.cli.decoding import decode

    if args.json:
        from dspark.cli.terminal import write_json

        write_json({"model": args.model, "method": args.method, **decode(llm, prompt, params).as_dict()})
        return 0
    if args.show_drafts:
        from dspark.cli.terminal import OriginPainter, Output, legend, paint

        out = Output()
        out.print(legend())
        painter = OriginPainter(llm.tokenizer)
        decoded = decode(llm, prompt, params, lambda event: out.print(paint(painter.segments(event)), end=""))
    else:
        decoded = decode(llm, prompt, params, lambda event: _show(event.text))
    _show("\n")
    print(decoded.summary(), file=sys.stderr)
    return 0


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _compare(args: argparse.Namespace, llm: LLM, prompt: Prompt, params: SamplingParams) -> int:
    from dspark.cli.decoding import Comparison, decode
    from dspark.cli.terminal import write_json

    plain = _with(args, speculative=False)
    for warm_up in (_with(args, speculative=False, max_tokens=8), _with(args, max_tokens=8)):
        decode(llm, prompt, warm_up)
    pairs = [
        (decode(llm, prompt, plain), decode(llm, prompt, params)) for _ in range(args.repeats or REPEATS)
    ]
    compared = Comparison(pairs, greedy=params.greedy)
    if args.json:
        write_json({"model": args.model, "method": args.method, **compared.as_dict()})
    else:
        _show_comparison(args, llm, compared)
    return 1 if compared.identical is False else 0


def _with(args: argparse.Namespace, **changes: Any) -> SamplingParams:
    return sampling_params(args, **changes)


def _show_comparison(args: argparse.Namespace, llm: LLM, compared: Any) -> None:
    from rich.panel import Panel
    from rich.table import Table

    from dspark.cli.terminal import OriginPainter, Output, legend, paint

    def panel(title: str, decoded: Decoded) -> Panel:
        painter = OriginPainter(llm.tokenizer)
        segments = [piece for event in decoded.events for piece in painter.segments(event)]
        text = paint(segments) if args.show_drafts else decoded.output.text
        return Panel(text, title=title, subtitle=decoded.rate())

    out = Output()
    if args.show_drafts:
        out.print(legend())
    table = Table.grid(expand=True)
    table.add_column(ratio=1)
    table.add_column(ratio=1)
    plain, speculative = compared.pairs[0]
    table.add_row(panel("plain", plain), panel(args.method, speculative))
    out.print(table)
    out.print(compared.summary())
