"""`dspark audit`: is a scheduling policy lossless? Exact, by enumerating every outcome on a tiny model."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.audit.builtin import Case
    from dspark.audit.verdict import AuditResult
    from dspark.schedule.policies import Policy

__all__ = ["add_parser"]


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser(
        "audit",
        help="is a policy lossless?",
        description=__doc__,
        epilog="distance: largest total variation between output and target over all worlds. Exit code 1: "
        "a policy whose declared dependence promises exact output is biased.",
    )
    parser.add_argument(
        "--policy", metavar="MODULE:FACTORY", help="your own policy: a callable that returns one"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="%(default)s")
    parser.add_argument("--requests", type=int, default=2, metavar="N", help="in one batch (%(default)s)")
    parser.add_argument("--gamma", type=int, default=2, metavar="N", help="draft slots (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
            if policies[0].dependence is not Dependence.LIVE and not setting.always:
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
    from dspark.audit.builtin import built_in_policies, load_policy

    return load_policy(name) if args.policy else built_in_policies(args.gamma, case.cost)[name]


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
