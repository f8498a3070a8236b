"""`dspark data`: training data for drafters. The target writes it (`generate`); `inspect` shows what is in it."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.destination import check_file
from dspark.cli.lists import floats
from dspark.cli.messages import say
from dspark.cli.options import DEFAULT_MODEL, add_model_options, load_llm, speculative_config

if TYPE_CHECKING:
    from dspark.llm import LLM
    from dspark.train.answer_file import AnswerFile
    from dspark.train.generate import GenerateSettings, Tally
    from dspark.train.prompts import TrainingPrompt

__all__ = ["add_parser"]


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser("data", help="training data: generate, inspect", description=__doc__)
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    _add_generate(actions)
    _add_inspect(actions)


def _add_generate(actions: Any) -> None:
    parser = actions.add_parser(
        "generate",
        help="the target answers prompts",
        description="The target answers prompts; its answers are what a drafter learns. The same command resumes.",
        epilog="Set-aside answers go to OUTPUT.dropped, prompts of --self-prompts to OUTPUT.prompts.",
    )
    parser.add_argument(
        "prompts",
        nargs="*",
        type=Path,
        metavar="PROMPTS",
        help=".jsonl with prompt, messages or turns (the first is asked), or text with a prompt a line",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="a .jsonl; continued if there"
    )
    parser.add_argument(
        "--self-prompts", type=int, default=0, metavar="N", help="let the target write N prompts itself"
    )
    parser.add_argument(
        "--temperatures", type=floats, default="0,0.3,0.7,1.0", metavar="LIST", help="%(default)s"
    )
    parser.add_argument(
        "--answers-per-prompt", type=int, metavar="N", help="default: one at every temperature"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=320, metavar="N", help="of each answer (%(default)s)"
    )
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=1024, metavar="N", help="skip longer prompts (%(default)s)"
    )
    parser.add_argument(
        "--max-repetition",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="set answers aside of which more 4-grams are repeats; %(default)s keeps all",
    )
    parser.add_argument(
        "--limit", type=int, metavar="N", help="stop at N answers, those of former runs included"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the plan and of sampling (%(default)s)")
    parser.add_argument(
        "--max-num-seqs", type=int, default=32, metavar="N", help="in one batch (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_model_options(parser)
    parser.set_defaults(run=_generate, method="none")


def _add_inspect(actions: Any) -> None:
    parser = actions.add_parser(
        "inspect",
        help="what is in a training set",
        description="Lengths, loops, duplicates, vocabulary coverage.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILES", help="jsonl or jsonl.gz with answers")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="whose tokenizer and chat template to use (%(default)s)"
    )
    parser.add_argument(
        "--drafter", type=Path, metavar="DIR", help="also how much its draft vocabulary covers"
    )
    parser.add_argument(
        "--draft-vocab-sizes",
        type=_sizes,
        default="1024,2048,4096,8192,16384,32768",
        metavar="LIST",
        help="whose coverage to tell (%(default)s); those below the model's vocabulary",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=_inspect)


def _sizes(text: str) -> tuple[int, ...]:
    sizes = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 4096,8192")
    return tuple(dict.fromkeys(sizes))


def _generate(args: argparse.Namespace) -> int:
    """Read prompts, let the target write more, plan, answer. Everything is checked before the model is loaded."""
    from dspark.cli.terminal import write_json
    from dspark.core import DSparkError
    from dspark.train.answer_file import AnswerFile
    from dspark.train.generate import GenerateSettings, plan_jobs
    from dspark.train.prompts import distinct, read_prompts

    names = ("temperatures", "answers_per_prompt", "max_tokens", "max_prompt_tokens", "max_repetition")
    settings = GenerateSettings(**{n: getattr(args, n) for n in (*names, "limit", "seed")})
    if args.self_prompts < 0 or not (args.prompts or args.self_prompts):
        raise DSparkError("there are no prompts: name files, or give --self-prompts a number of 1 or more")
    for ending in ("", ".dropped", ".prompts"):
        check_file(args.output.with_name(args.output.name + ending), make_parents=True)
    skipped: Counter[str] = Counter()
    prompts = read_prompts(args.prompts)
    config = speculative_config(args.method, args.drafter, args.num_speculative_tokens)
    llm = _load(args, config, settings)
    file = AnswerFile(args.output, llm.engine.target.identity)
    if file.torn:
        say(f"{args.output}: the last line was torn; its answer is written again")
    try:
        prompts += _self_prompts(args, llm)
        jobs = plan_jobs(list(distinct(prompts, skipped)), settings)
        tally = _answer(llm, jobs, settings, file)
    except KeyboardInterrupt:
        say(f"stopped with {file.kept.total()} answers; the same command goes on")
        return 130
    finally:
        file.close()
    tally.skipped += skipped
    if args.json:
        write_json(_summary(args, file, tally), indent=1)
    else:
        _print_summary(args, file, tally)
    return 0


def _load(args: argparse.Namespace, config: dict[str, Any], settings: GenerateSettings) -> LLM:
    """An LLM with room for what the settings can fill, and no more: a long context would cost memory for nothing."""
    from dspark.target.hf import read_config
    from dspark.target.zoo import resolve

    context = read_config(resolve(args.model)).max_context
    if settings.max_prompt_tokens is not None:
        context = min(context, settings.max_prompt_tokens + settings.max_tokens)
    typical = args.max_num_seqs * min(context, settings.max_tokens + 256)
    return load_llm(
        args,
        config,
        max_num_seqs=args.max_num_seqs,
        max_model_len=context,
        kv_cache_tokens=max(context, typical, 1),
    )


def _self_prompts(args: argparse.Namespace, llm: LLM) -> list[TrainingPrompt]:
    from dspark.cli.progress import StatusLine
    from dspark.train.self_prompts import SelfPromptTally, write_prompts

    if not args.self_prompts:
        return []
    now = [SelfPromptTally(args.self_prompts, 0, Counter())]

    def render() -> str:
        return f"{now[0].written} of {now[0].wanted} prompts{_listed(now[0].refused, ', refused: ')}"

    def show(tally: SelfPromptTally) -> None:
        now[0] = tally
        line.tick()

    path = args.output.with_name(args.output.name + ".prompts")
    with StatusLine(render) as line:
        prompts = write_prompts(llm, args.self_prompts, path, args.seed, show)
    if len(prompts) < args.self_prompts:
        say(f"the target wrote only {render()}")
    return prompts


def _answer(llm: LLM, jobs: list[Any], settings: GenerateSettings, file: AnswerFile) -> Tally:
    from dspark.cli.progress import StatusLine, duration
    from dspark.train.generate import Tally, generate_answers

    now = [Tally(len(jobs))]

    def render() -> str:
        tally = now[0]
        eta = "" if tally.eta is None else f", {duration(tally.eta)} left"
        dropped = Counter({reason: counts.total() for reason, counts in file.dropped.items()})
        return (
            f"{tally.finished} of {tally.planned} answers{_listed(file.kept, ', kept: ')}"
            f"{_listed(dropped, ', set aside: ')}, {tally.tokens / tally.seconds:.0f} tokens/s{eta}"
        )

    def show(tally: Tally) -> None:
        now[0] = tally
        line.tick()

    with StatusLine(render) as line:
        return generate_answers(llm, jobs, settings, file, show)


def _listed(counts: Counter[str], lead: str) -> str:
    """chat 12, math 30; "" for nothing."""
    parts = [f"{name or 'no domain'} {count}" for name, count in sorted(counts.items()) if count]
    return lead + ", ".join(parts) if parts else ""


def _summary(args: argparse.Namespace, file: AnswerFile, tally: Tally) -> dict[str, Any]:
    return {
        "output": str(args.output),
        "model": args.model,
        "target": file.target,
        "answers": file.kept.total(),
        "answer_tokens": file.tokens,
        "domains": dict(sorted(file.kept.items())),
        "set_aside": {reason: dict(sorted(counts.items())) for reason, counts in file.dropped.items()},
        **tally.as_dict(),
    }


def _print_summary(args: argparse.Namespace, file: AnswerFile, tally: Tally) -> None:
    from dspark.cli.progress import duration

    print(f"{args.output}: {file.kept.total()} answers, {file.tokens} tokens{_listed(file.kept, ': ')}")
    for reason, counts in file.dropped.items():
        print(f"set aside, {reason}: {counts.total()}{_listed(counts, ': ')} (in {file.dropped_path})")
    print(
        _listed(Counter({k.replace("_", " "): v for k, v in tally.skipped.items()}), "skipped: ")
        or "skipped: none"
    )
    rate = tally.tokens / tally.seconds
    print(
        f"this run: {tally.answers} answers, {tally.tokens} tokens in {duration(tally.seconds)}, {rate:.0f} tokens/s"
    )


def _inspect(args: argparse.Namespace) -> int:
    from dspark.cli.data_table import markdown
    from dspark.cli.terminal import Output, write_json
    from dspark.train.dataset_report import describe

    facts = describe(
        args.model,
        args.files,
        args.draft_vocab_sizes,
        args.drafter,
        report=say,
    )
    if args.json:
        write_json(facts, indent=1)
    else:
        Output().print(markdown(facts))
    return 0
