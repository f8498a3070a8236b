"""`dspark audit`: is speculative decoding lossless? Exactly, by enumerating every outcome of a scheduling policy on a
tiny model; with --engine by tests on a real model: drafters, policies, draft lengths and batch mixes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.lists import integers
from dspark.cli.options import DEFAULT_MODEL, load_llm, speculative_config
from dspark.drafters.methods import METHODS
from dspark.schedule.names import POLICIES

if TYPE_CHECKING:
    from dspark.audit.builtin import Case
    from dspark.audit.engine_audit import EngineAuditSettings
    from dspark.audit.engine_subjects import Subject
    from dspark.audit.verdict import AuditResult
    from dspark.drafters.base import Drafter
    from dspark.schedule.policies import Policy
    from dspark.target.base import Target

__all__ = ["add_parser"]

# Defaults by destination: the parser's are None, so that an option of the other audit is refused, not ignored.
_EXACT = {"rounds": 3, "requests": 2, "gamma": 2}
_ENGINE: dict[str, Any] = {
    "model": DEFAULT_MODEL, "device": "cpu", "dtype": "float32", "activation_dtype": "auto", "threads": None,
    "drafters": "ngram,dspark", "draft_lengths": None, "prompts": 4, "tokens": 32, "samples": 500,
    "temperature": 1.0, "concurrency": 16, "seed": 0, "false_alarm": 1e-3,
}  # fmt: skip


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser(
        "audit",
        help="is speculative decoding lossless?",
        description=__doc__,
        epilog="distance: largest total variation between output and target over all worlds. Exit code 1: "
        "a policy whose declared dependence promises exact output is biased; with --engine, output differs from plain "
        "decoding's, or its distribution does.",
    )
    parser.add_argument(
        "--policy",
        metavar="MODULE:FACTORY",
        help="your own policy: a callable that returns one; with --engine also the name of one that ships",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--engine", action="store_true", help="test real engines instead of enumerating")
    exact = parser.add_argument_group("without --engine")
    for name, text in (("rounds", ""), ("requests", "in one batch "), ("gamma", "draft slots ")):
        exact.add_argument(f"--{name}", type=int, metavar="N", help=f"{text}({_EXACT[name]})")
    _add_engine_options(parser.add_argument_group("with --engine"))
    parser.set_defaults(run=run)


def _add_engine_options(group: Any) -> None:
    def option(name: str, kind: Callable[[str], Any], metavar: str, text: str) -> None:
        default = _ENGINE[name.replace("-", "_")]
        shown = "" if default is None else f" ({default})"
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text + shown)

    option("model", str, "MODEL", "known name, Hugging Face directory or .gguf file")
    option(
        "drafters", str, "LIST", "names, checkpoint directories, and your own as module:factory of a target"
    )
    option("draft-lengths", integers, "LIST", "drafts a round; default: 1 and each drafter's block")
    option("prompts", int, "N", "first N of the built-in prompts")
    option("tokens", int, "N", "of each answer that must equal plain decoding's")
    option("samples", int, "N", "answers to each prompt whose distribution is compared; 0 leaves that out")
    option("temperature", float, "T", "of sampled answers")
    option("concurrency", int, "N", "requests in a batch")
    option("seed", int, "N", "of sampling")
    option("false-alarm", float, "P", "chance of any false alarm in all tests together")
    option("device", str, "DEVICE", "cpu, cuda")
    option("dtype", str, "DTYPE", "of the weights and the KV cache")
    option("activation-dtype", str, "DTYPE", "inputs of products with quantised weights: auto, float32, int8")
    option("threads", int, "N", "CPU threads")


def run(args: argparse.Namespace) -> int:
    """The audit that was asked for; options of the other one are refused."""
    from dspark.core import DSparkError

    mine, other = (_ENGINE, _EXACT) if args.engine else (_EXACT, _ENGINE)
    for name in other:
        if getattr(args, name) is not None:
            raise DSparkError(
                f"--{name.replace('_', '-')} belongs to the audit {'without' if args.engine else 'with'} --engine"
            )
    for name, default in mine.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return _run_engine(args) if args.engine else _run_exact(args)


def _run_engine(args: argparse.Namespace) -> int:
    """Load the target once and every drafter over it, audit, report."""
    from dspark.audit.engine_audit import EngineAuditSettings, audit_engine
    from dspark.audit.engine_report import describe
    from dspark.cli.terminal import Output, write_json
    from dspark.core import DSparkError
    from dspark.data import load_prompts

    names = ("tokens", "samples", "temperature", "concurrency", "seed", "false_alarm")
    settings = EngineAuditSettings(**{name: getattr(args, name) for name in names})
    if args.prompts < 1:
        raise DSparkError(f"--prompts must be 1 or more, got {args.prompts}")
    if args.policy is not None and args.policy not in POLICIES and ":" not in args.policy:
        raise DSparkError(
            f"--policy: {args.policy!r} is neither one that ships ({', '.join(POLICIES)}) nor module:factory"
        )
    llm = load_llm(args, {"method": "none"}, max_num_seqs=1)
    target = llm.engine.target
    prompts = [llm.encode(prompt.messages) for prompt in load_prompts(limit=args.prompts)]
    subjects = _subjects(args, target, settings)
    with _progress() as progress:
        report = audit_engine(target, subjects, prompts, settings, progress)
    if args.json:
        write_json({"model": args.model, **report.as_dict()}, indent=1)
    else:
        out = Output()
        for line in describe(report):
            out.print(line)
    return int(not report.sound)


def _subjects(args: argparse.Namespace, target: Target, settings: EngineAuditSettings) -> list[Subject]:
    from dspark.audit.engine_subjects import policy_factories, subject

    chosen = POLICIES if args.policy is None else (args.policy,)
    policies = policy_factories(chosen, settings.concurrency)
    names = dict.fromkeys(part.strip() for part in args.drafters.split(","))
    return [subject(n, _drafter(n, target), target, policies, args.draft_lengths) for n in names]


def _drafter(text: str, target: Target) -> Drafter:
    """By the name of a method, from a checkpoint directory, or a user's own by import path."""
    from dspark.audit.engine_subjects import load_drafter
    from dspark.core import DSparkError
    from dspark.drafters.checkpoint import read_drafter_config
    from dspark.drafters.registry import build_drafter

    path = Path(text).expanduser()
    if text in METHODS and text != "none":
        config = speculative_config(text)
    elif text and path.is_dir():
        config = speculative_config(read_drafter_config(path).method, str(path))
    elif ":" in text:
        return load_drafter(text, target)
    else:
        raise DSparkError(
            f"--drafters: {text!r} is neither a method ({', '.join(METHODS[1:])}), a checkpoint directory, "
            "nor module:factory"
        )
    drafter, _ = build_drafter(config, target)
    assert drafter is not None, "only plain decoding has no drafter"
    return drafter


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A line on stderr; the function it gives is called behind each run."""
    from dspark.cli.progress import StatusLine

    state = "audit"
    with StatusLine(lambda: state) as line:

        def tick(done: int, total: int, what: str) -> None:
            nonlocal state
            state = f"audit: {done} of {total} runs; {what}"
            line.tick()

        yield tick


def _run_exact(args: argparse.Namespace) -> int:
    """Audit every policy on every world; the worst world counts. LIVE ones also where they are harmless."""
    from dspark.audit import audit
    from dspark.audit.builtin import cases, claims_exact, settings
    from dspark.cli.terminal import write_json
    from dspark.core import DSparkError
    from dspark.schedule.policies import Dependence

    for name, most in (("rounds", 4), ("requests", 3), ("gamma", 4)):
        if not 1 <= getattr(args, name) <= most:
            raise DSparkError(f"--{name} must be between 1 and {most}: all outcomes are enumerated")
    rows = []
    worlds = cases(args.requests, args.gamma)
    for name in _names(args.policy):
        for setting in settings():
            policies = [_policy(args, name, case) for case in worlds]
            looks = policies[0].dependence is Dependence.LIVE or getattr(
                policies[0], "looks_where_tolerated", False
            )
            if not looks and not setting.always:
                continue  # the weakest setting says it all
            results = [
                audit(setting.apply(case.world), policy, args.rounds)
                for case, policy in zip(worlds, policies, strict=True)
            ]
            worst = max(range(len(worlds)), key=lambda i: results[i].max_tv)
            claim = claims_exact(policies[worst], setting)
            schedules = max(result.schedules for result in results)
            rows.append(_Row(name, setting.name, worlds[worst].name, results[worst], claim, schedules))
    failed = any(row.result.biased and row.claims_exact for row in rows)
    if args.json:
        write_json({"sound": not failed, "audits": [row.as_dict() for row in rows]}, indent=1)
    else:
        _print(rows)
    return int(failed)


@dataclass(frozen=True, eq=False)
class _Row:
    """One policy in one setting, on the world that it did worst in."""

    name: str
    setting: str
    world: str
    result: AuditResult
    claims_exact: bool
    schedules: int  # most different schedules on any world

    def as_dict(self) -> dict[str, Any]:
        own = {"policy": self.name, "setting": self.setting, "world": self.world}
        claim = {"claims_exact": self.claims_exact, "schedules": self.schedules}
        return {**self.result.as_dict(), **own, **claim}

    @property
    def verdict(self) -> str:
        if self.result.biased:
            return "BIASED" if self.claims_exact else "biased, as declared"
        tested = self.schedules > 1 or not self.result.dependence  # STATIC: nothing to decide
        return "exact" if tested else "exact (one schedule only)"


def _names(policy: str | None) -> list[str]:
    from dspark.audit.builtin import APPENDIX_A_COST, built_in_policies

    return [policy] if policy is not None else list(built_in_policies(1, APPENDIX_A_COST))


def _policy(args: argparse.Namespace, name: str, case: Case) -> Policy:
    from dspark.audit.builtin import built_in_policies
    from dspark.schedule.custom import load_policy

    if args.policy:
        return load_policy(name, ", or add --engine to name one that ships")
    return built_in_policies(args.gamma, case.cost)[name]


def _print(rows: list[_Row]) -> None:
    from dspark.audit.report import explain
    from dspark.cli.terminal import Output

    out = Output()
    table = [("policy", "declares", "judged by", "distance", "schedules", "verdict")]
    for row in rows:
        distance, declared = f"{row.result.max_tv:.1e}", row.result.dependence.name
        table.append((row.name, declared, row.setting, distance, str(row.schedules), row.verdict))
    widths = [max(len(cells[i]) for cells in table) for i in range(len(table[0]))]
    for cells in table:
        out.print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    for row in rows:
        if row.result.witness is not None:
            out.print(f"\n{row.name}, {row.setting}, world {row.world}:")
            for line in explain(row.result.witness):
                out.print(f"  {line}")
