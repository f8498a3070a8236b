"""What runs of several peers say together: texts compared, medians, ratios, a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peers import spread


def compare(
    reference: list[list[int]] | None, ids: list[list[int]], ends: Sequence[int]
) -> dict[str, int | float | None]:
    """How many outputs equal the reference up to its end of text, and the mean share of it that they share."""
    if reference is None:
        return {"identical": None, "common": None}
    identical, common = 0, 0.0
    for mine, theirs in zip(ids, reference, strict=True):
        end = next((i for i, token in enumerate(theirs) if token in ends), len(theirs))
        same = next((i for i in range(end) if mine[i] != theirs[i]), end)
        identical += same == end
        common += same / end if end else 1.0
    return {"identical": identical, "common": common / len(ids)}


def summarise(runs: list[dict[str, Any]], peers: Sequence[str]) -> list[dict[str, Any]]:
    """Median and range per peer and concurrency; ratios to every other peer are taken within a repeat."""
    rates = {(run["peer"], run["concurrency"], run["repeat"]): run["tokens_per_s"] for run in runs}
    summary = []
    for concurrency in dict.fromkeys(run["concurrency"] for run in runs):
        for peer in peers:
            mine = [run for run in runs if (run["peer"], run["concurrency"]) == (peer, concurrency)]
            ratios = {
                other: spread(
                    [run["tokens_per_s"] / rates[other, concurrency, run["repeat"]] for run in mine]
                )
                for other in peers
                if other != peer
            }
            cell = {"peer": peer, "concurrency": concurrency, "ratio_to": ratios}
            for name in ("tokens_per_s", "tokens_per_cpu_s", "decode_tokens_per_s"):
                values = [run[name] for run in mine if run[name] is not None]
                cell[name] = spread(values) if values else None
            cell["accepted_length"] = mine[0]["accepted_length"]
            known = [run for run in mine if run["identical"] is not None]
            cell["identical"] = min((run["identical"] for run in known), default=None)
            cell["common"] = min((run["common"] for run in known), default=None)
            cell["peak_rss_mb"] = max(run["peak_rss_mb"] for run in mine)
            summary.append(cell)
    return summary


def print_table(summary: list[dict[str, Any]], base: str, num_prompts: int) -> None:
    print(f"{'conc.':>5}  {'peer':<16}{'tokens/s (min..max)':<24}{'x ' + base:<20}{'decoding':>8}", end="")
    print(f"{'/CPU s':>8}{'acc. len.':>11}{'same text':>12}{'peak MB':>9}")
    for cell in summary:
        rate, ratio, decoding = cell["tokens_per_s"], cell["ratio_to"].get(base), cell["decode_tokens_per_s"]
        rates = f"{rate['median']:.1f} ({rate['min']:.1f}..{rate['max']:.1f})"
        ratios = "-" if ratio is None else f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"
        decoded = "-" if decoding is None else f"{decoding['median']:.1f}"
        cpu = f"{cell['tokens_per_cpu_s']['median']:.1f}"
        length = "-" if cell["accepted_length"] is None else f"{cell['accepted_length']:.2f}"
        same = "-" if cell["identical"] is None else f"{cell['identical']} of {num_prompts}"
        print(f"{cell['concurrency']:>5}  {cell['peer']:<16}{rates:<24}{ratios:<20}{decoded:>8}", end="")
        print(f"{cpu:>8}{length:>11}{same:>12}{cell['peak_rss_mb']:>9.0f}")
