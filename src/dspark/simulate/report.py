"""Results as Markdown, CSV and plain dictionaries."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dspark.simulate.capacity import Capacity, ServiceTarget
from dspark.simulate.hindsight import RAW, Comparison
from dspark.simulate.intervals import Interval
from dspark.simulate.metrics import METRICS
from dspark.simulate.sweep import Cell, paired_ratio, speed_at_throughput, throughput_at_speed
from dspark.simulate.validation import Prediction, RunValidation, Scatter

__all__ = ["capacity_markdown", "frontier_markdown", "sweep_csv", "sweep_markdown", "validation_markdown"]

COLUMNS = (
    ("tokens/s", "tokens_per_s", 0),
    ("tokens/s/user", "user_tokens_per_s", 1),
    ("accepted len.", "accepted_length", 2),
    ("drafted", "drafted_per_round", 2),
    ("budget", "budget_per_round", 2),
    ("step ms", "step_ms", 1),
    ("ttft p50 s", "ttft_s_p50", 2),
    ("ttft p99 s", "ttft_s_p99", 2),
    ("itl p50 ms", "inter_token_ms_p50", 1),
    ("itl p99 ms", "inter_token_ms_p99", 1),
)


def sweep_markdown(cells: Sequence[Cell], load: str, confidence: float) -> str:
    """One row a cell; the first policy of each load is what `x` compares with (tokens/s, seed by seed)."""
    head = [load, "policy", *(name for name, _, _ in COLUMNS), "x first"]
    rows = []
    for cell in cells:
        base = next(other for other in cells if other.load == cell.load)
        values = [_with_margin(cell.interval(metric, confidence), digits) for _, metric, digits in COLUMNS]
        ratio = _with_margin(paired_ratio(cell, base, "tokens_per_s", confidence), 2)
        rows.append([f"{cell.load:g}", cell.policy, *values, ratio])
    note = (
        f"Means over {len(cells[0].runs)} seeds ± half of a {confidence:.0%} interval. drafted, budget: drafts made "
        "and verified a round of a decoding request; itl: time between deliveries, shared among the tokens delivered."
    )
    return f"{_table(head, rows)}\n\n{note}\n"


def frontier_markdown(cells: Sequence[Cell]) -> str:
    """Each policy at the speeds, and at the throughputs, that the first policy shows."""
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    if len(policies) < 2:
        return ""
    first, *others = policies
    base = [cell for cell in cells if cell.policy == first]
    head = [f"{first}: tokens/s/user", f"{first}: tokens/s"]
    for policy in others:
        head += [f"{policy}: tokens/s at that speed", f"{policy}: tokens/s/user at that throughput"]
    rows = []
    for cell in base:
        speed, total = cell.mean("user_tokens_per_s"), cell.mean("tokens_per_s")
        row = [f"{speed:.1f}", f"{total:.0f}"]
        for policy in others:
            row += [
                _against(throughput_at_speed(cells, policy, speed), total, 0),
                _against(speed_at_throughput(cells, policy, total), speed, 1),
            ]
        rows.append(row)
    return f"{_table(head, rows)}\n\nLinear between loads; -: outside the simulated loads.\n"


def capacity_markdown(capacities: Sequence[Capacity], target: ServiceTarget, load: str, seeds: int) -> str:
    """One row a policy."""
    rows = []
    for c in capacities:
        judged = {probe.load: probe.answer for probe in c.probes}
        fails = "-" if c.fails_at is None else f"{c.fails_at:g} ({judged[c.fails_at]})"
        found = "unknown" if c.undecided and not c.load else f"{c.load:g}"
        rows.append([c.policy, found, fails, str(len(c.probes))])
    wait = "" if target.ttft_s is None else f" and the first within {target.ttft_s:g} s"
    note = (
        f"Target: {target.share:.0%} of requests get {target.tokens_per_s:g} tokens/s{wait}, with "
        f"{target.confidence:.0%} confidence over {seeds} seeds. "
        "The next load probed misses it (no), or leaves it open (undecided)."
    )
    open_ones = ", ".join(c.policy for c in capacities if c.undecided)
    if open_ones:
        note += f"\n\nNOTE: not settled for {open_ones}: raise --duration or --seeds to find out."
    return f"{_table(['policy', load, 'next probed', 'probes'], rows)}\n\n{note}\n"


def validation_markdown(
    found: Mapping[str, tuple[Prediction, Mapping[str, RunValidation]]],
    tolerance: float,
    scatter: Scatter | None,
) -> str:
    """By prices, `fitted` to the records first: their own error, then one row a policy simulated at them."""
    rows, notes = [], []
    for origin, (prices, runs) in found.items():
        what = "prices, held-out halves" if origin == "fitted" else f"prices of {origin}"
        figures = [f"{prices.measured_tokens_per_s:.1f}", f"{prices.predicted_tokens_per_s:.1f}"]
        rows.append([what, *figures, *_verdict(prices.error, abs(prices.error) <= tolerance)])
        at = "fitted prices" if origin == "fitted" else origin
        for name, run in runs.items():
            figures = [f"{run.measured_tokens_per_s:.1f}", _with_margin(run.simulated_tokens_per_s, 1)]
            rows.append([f"simulated at {at}, {name}", *figures, *_verdict(run.error, run.within)])
        notes.append(
            f"{what}: single steps are off by {prices.step_error_median:.1%} (median) and "
            f"{prices.step_error_p90:.1%} (90th percentile)."
        )
    [steps] = {prices.steps for prices, _ in found.values()}
    head = ["", "measured tokens/s", "predicted tokens/s", "error", f"within {tolerance:.0%}"]
    if scatter is not None:
        notes.append(
            f"Steps that hold the same take {scatter.mean_over_median:.2f} times their median on average "
            f"({scatter.share:.0%} of the time): prices that are medians promise that much too much speed."
        )
    return f"{_table(head, rows)}\n\n{steps} steps. {' '.join(notes)}\n"


def _verdict(error: float, within: bool) -> list[str]:
    return [f"{error:+.1%}", "yes" if within else "NO"]


def hindsight_markdown(comparison: Comparison, title: str) -> str:
    """One row a load: the best arms in hindsight, and each policy beside them."""
    names = tuple(comparison.loads[0].policies)
    rows = []
    for load in comparison.loads:
        row = [str(load.users), f"{load.arms['plain']:.0f}"]
        for best in (load.best_of("fixed"), load.best_of("threshold")):
            row.append(f"{load.arms[best]:.0f} ({best})")
        row += [f"{load.policies[name]:.0f} ({-load.distance(name):+.1%})" for name in names]
        rows.append(row)
    over_all = ["all", "1.000"]
    for kind in ("fixed", "threshold"):
        best = max(comparison.arms(kind), key=comparison.over_all)
        over_all.append(f"{comparison.over_all(best):.3f} ({best})")
    rows.append(over_all + [f"{comparison.over_all(name):.3f}" for name in names])
    head = ["users", "plain, tokens/s", "best fixed", "best threshold", *names]
    verdicts = [
        f"{name}: at worst {comparison.worst(name):.1%} behind the best of a load, and over all loads "
        + ("faster than every fixed length" if comparison.beats_every_fixed(name) else "NOT the fastest")
        for name in names
    ]
    note = "In brackets: against the best of both at that load. all: geometric means over plain decoding."
    verified = _verified_markdown(comparison, names[-1].removesuffix(RAW))
    return f"{title}\n\n{_table(head, rows)}\n\n{note}\n\n- " + "\n- ".join(verdicts) + f"\n\n{verified}\n"


def _verified_markdown(comparison: Comparison, name: str) -> str:
    domains = tuple(comparison.loads[0].verified[name])
    rows = [
        [str(load.users), *(f"{load.verified[name].get(domain, 0.0):.2f}" for domain in domains)]
        for load in comparison.loads
    ]
    return f"Drafts that {name} has verified, a request and round:\n\n" + _table(["users", *domains], rows)


def sweep_csv(cells: Sequence[Cell], confidence: float) -> str:
    """Every metric of every cell: mean, low, high; and the number of seeds."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    ends = [f"{metric}{part}" for metric in METRICS for part in ("", "_low", "_high")]
    writer.writerow(["policy", "load", "seeds", *ends])
    for cell in cells:
        row: list[Any] = [cell.policy, f"{cell.load:g}", len(cell.runs)]
        for metric in METRICS:
            found = cell.interval(metric, confidence)
            row += ["" if not math.isfinite(v) else f"{v:.6g}" for v in (found.mean, found.low, found.high)]
        writer.writerow(row)
    return file.getvalue()


def _against(value: float | None, base: float, digits: int) -> str:
    return "-" if value is None or not base else f"{value:.{digits}f} ({value / base - 1:+.0%})"


def _with_margin(found: Interval, digits: int) -> str:
    if math.isnan(found.mean):
        return "-"
    margin = f" ± {found.half_width:.{digits}f}" if math.isfinite(found.half_width) else ""
    return f"{found.mean:.{digits}f}{margin}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
