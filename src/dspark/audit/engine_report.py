"""An engine audit in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from dspark.audit.engine_audit import ArmResult, EngineAudit
from dspark.audit.engine_exact import Difference, ExactCell
from dspark.audit.engine_sampling import DistributionTest, TestKind

__all__ = ["describe"]

SHOWN = 10  # differences spelled out
_KINDS: tuple[tuple[TestKind, str], ...] = (("position", "one token"), ("pair", "two tokens in a row"))
UNTESTED = "untested: no draft was verified"


def describe(audit: EngineAudit) -> Iterator[str]:
    """Lines: what was compared, what was found, how sure that is."""
    yield "Output that must equal plain decoding's, token for token:"
    yield from _aligned(_exact_rows(audit.cells))
    yield from _differences(audit.differences)
    if not audit.arms:
        return
    yield f"\nDistribution at temperature {audit.settings.temperature:g} under the ratio rule:"
    yield from _aligned(_arm_rows(audit))
    for test in audit.biased:
        yield f"  {_names(test)}: the law of {_what(test)} is not plain decoding's, p = {test.adjusted:.1e}"
    for arm in audit.arms:
        reason = arm.sample.failure
        if reason is not None:
            yield f"  {arm.arm.drafter_name}, {arm.arm.policy_name}: broke off with {reason}"
    yield from _certainty(audit)


def _exact_rows(cells: Sequence[ExactCell]) -> Iterator[tuple[str, ...]]:
    yield ("judged by", "drafter", "policy", "runs", "verified", "accepted", "verdict")
    for key, group in groupby(cells, lambda c: (c.kind, c.drafter, c.policy)):
        runs = list(group)
        scheduled, accepted = sum(c.scheduled for c in runs), sum(c.accepted for c in runs)
        bad = sum(c.failed for c in runs)
        verdict = f"{bad} of {len(runs)} runs DIFFER" if bad else "equal"
        if not bad and not scheduled and key[1] != "none":
            verdict = UNTESTED
        yield (*key, str(len(runs)), str(scheduled), str(accepted), verdict)


def _differences(cells: Sequence[ExactCell]) -> Iterator[str]:
    lines = []
    for c in cells:
        where = f"  {c.kind}, {c.drafter}, {c.policy}, {c.gamma} drafts, {c.mix}"
        if c.error is not None:
            lines.append(f"{where}: broke off with {c.error}")
        lines += [f"{where}, {_difference(d)}" for d in c.differences]
    yield from lines[:SHOWN]
    if len(lines) > SHOWN:
        yield f"  and {len(lines) - SHOWN} more (--json has them all)"


def _difference(d: Difference) -> str:
    text = f"prompt {d.prompt}: output token {d.position} is {d.got}, plain decoding's is {d.expected}"
    if d.gap is None:
        return text
    text += f"; the target scores that {d.gap:.1e} nats higher"
    return f"{text}: a numerical tie, which rounding decides" if d.tie else text


def _arm_rows(audit: EngineAudit) -> Iterator[tuple[str, ...]]:
    yield ("drafter", "policy", "drafts", "verified", "accepted", "tests", "p (Holm)", "verdict")
    for a in audit.arms:
        counts = (str(a.sample.scheduled), str(a.sample.accepted), str(len(a.tests)))
        p = f"{a.p_value:.1e}" if a.tests else "-"
        names = (a.arm.drafter_name, a.arm.policy_name, str(a.arm.gamma))
        yield (*names, *counts, p, _verdict(a, audit.settings.false_alarm))


def _verdict(arm: ArmResult, level: float) -> str:
    if arm.sample.refused is not None:
        return "refused by the engine: LIVE"
    if arm.sample.failure is not None:
        return "BROKE OFF"
    if arm.p_value <= level:
        return "BIASED"
    return "no bias found" if arm.sample.scheduled else UNTESTED


def _certainty(audit: EngineAudit) -> Iterator[str]:
    count, level = len(audit.tests), audit.settings.false_alarm
    if not count:
        return
    yield (
        f"{count} chi-square tests, Holm's correction: the chance of any false alarm is at most {level:g}, as far as "
        "the chi-square approximation holds."
    )
    for kind, what in _KINDS:
        distance = audit.detectable_tv(kind)
        if distance is not None and distance < 1:
            yield (
                f"Found with 99%: any change of the law of {what} of total variation {distance:.3f} or more (mean over "
                f"prompts; up to {_pooled(audit, kind):.0%} of the tokens are in cells of rare ones, taken together)."
            )
        elif distance is not None:
            yield f"For the law of {what} no distance is found with certainty: draw more samples."


def _pooled(audit: EngineAudit, kind: TestKind) -> float:
    return max(t.chi_square.pooled for t in audit.tests if t.kind == kind)


def _names(test: DistributionTest) -> str:
    return f"{test.drafter}, {test.policy}, {test.gamma} drafts"


def _what(test: DistributionTest) -> str:
    if test.kind == "position":
        return f"token {test.token}"
    if test.kind == "pair":
        return f"tokens {test.token} and {test.token + 1} together"
    return f"token {test.token} of two requests side by side"


def _aligned(rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    table = list(rows)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        yield "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
