"""Prices of a step: named machines with where their numbers come from, and cost files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import DSparkError
from dspark.schedule.cost import AdditiveCost, ContextCost, DraftCost, TableCost
from dspark.schedule.cost_formats import from_sglang, from_tensorrt_llm

__all__ = ["MACHINES", "Machine", "machine", "read_cost"]


@dataclass(frozen=True)
class Machine:
    """Prices with their origin. `assumption`: nobody measured them as a whole."""

    name: str
    cost: TableCost | AdditiveCost
    source: str
    assumption: bool


def _roofline() -> TableCost:
    """27e9 weights of one byte at 4.8 TB/s and 70%: 8 ms whatever the batch; 54 GFLOP a token at 0.9 PFLOP/s: 60 us.

    The two overlap, so the larger one counts, with a soft corner. 1 ms of a step is neither. Passes of up to 544
    tokens are padded to captured sizes.
    """
    sizes = [
        1,
        2,
        4,
        *range(8, 64, 8),
        *range(64, 256, 16),
        *range(256, 545, 32),
    ]  # larger passes run as they are
    seconds = [1e-3 + ((8e-3) ** 4 + (60e-6 * size) ** 4) ** 0.25 for size in sizes]
    # 5 draft layers of 64 cost 8% of a pass; the sequential loop stays near 1% of a round (paper: 0.2 to 1.3%).
    draft = DraftCost(base=0.08 * 8e-3 + 0.01 * 9e-3, per_draft=0.08 * 60e-6)
    # 64 layers, 8 KV heads of 128, one byte: 131 kB a position, read once a step.
    return TableCost(
        tuple(sizes), tuple(seconds), executed=True, draft=draft, context=ContextCost(per_position=39e-9)
    )


MACHINES: Mapping[str, Machine] = {
    m.name: m
    for m in (
        Machine(
            "gpu-27b",
            _roofline(),
            "roofline of a dense 27B model in 8 bit on one 4.8 TB/s accelerator. From the paper and public reports: "
            "the model class (dense, 14B to 27B), 5 draft layers, the cost of the sequential loop, captured sizes; "
            "weights read at 70% of the bandwidth, 0.9 PFLOP/s and 1 ms of overhead are assumed",
            True,
        ),
        Machine(
            "cpu-135m",
            TableCost(
                (1, 4, 8, 16, 64, 256),
                (0.0219, 0.0238, 0.0290, 0.0444, 0.132, 0.493),
                draft=DraftCost(base=0.006),
                context=ContextCost(per_pair=9e-6),
            ),
            "SmolLM2-135M-Instruct on one core, docs/log.md: low-bit products as measured, 10 ms around them, 6 ms a "
            "draft, 9 us of attention a (row, position) pair; the sum was never measured as one step",
            True,
        ),
    )
}


def machine(name: str) -> Machine:
    """A named machine, or the prices of a JSON file at that path.

    Raises:
        DSparkError: neither.
    """
    if name in MACHINES:
        return MACHINES[name]
    if not Path(name).is_file():
        raise DSparkError(
            f"no machine {name!r}: choose {', '.join(MACHINES)}, or give the path of a cost file"
        )
    return Machine(Path(name).name, read_cost(name), f"cost file {Path(name).name}", False)


def read_cost(path: str | Path) -> TableCost | AdditiveCost:
    """Prices from JSON: a profile of `dspark profile`, SGLang's or TensorRT-LLM's (without draft and context), or

        {"tokens": [...], "seconds": [...], "executed": false,
         "draft": {"base": s, "per_request": s, "per_draft": s},
         "context": {"per_position": s, "per_pair": s, "profiled_at": positions}}

    of which the last three may be left out. `dspark.profile.load_cost_table`, which imports torch, reads all but this
    last form.

    Raises:
        DSparkError: not readable, another form, or prices that cannot be used.
    """
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DSparkError(f"cannot read the cost file {path}: {error}") from None
    if not isinstance(table, dict):
        raise DSparkError(f"{path}: expected a JSON object")
    if table.get("format") == "dspark-cost-profile":
        return _own(_profiled(table, path), str(path))
    if "token_counts" in table:
        return from_tensorrt_llm(table)
    if "bias_seconds" in table or "sample_batch_tokens" in table:
        return from_sglang(table)
    missing = [key for key in ("tokens", "seconds") if key not in table]
    if missing:
        raise DSparkError(f"{path}: key {missing[0]!r} is missing; a cost file has tokens and seconds")
    return _own(table, str(path))


def _profiled(table: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The prices that a profile states beside its samples."""
    cost = table.get("cost")
    if not isinstance(cost, dict) or "tokens" not in cost:
        raise DSparkError(f"{path}: this profile states no prices; measure again with dspark profile")
    return {key: value for key, value in cost.items() if key != "warning"}


def _own(table: dict[str, Any], path: str) -> TableCost | AdditiveCost:
    known = {"tokens", "seconds", "executed", "draft", "context", "source", "requests", "alpha"}
    unknown = table.keys() - known
    if unknown:
        raise DSparkError(f"{path}: unknown key {sorted(unknown)[0]!r}")
    try:
        tokens, seconds = tuple(map(int, table["tokens"])), tuple(map(float, table["seconds"]))
        draft, context = DraftCost(**table.get("draft", {})), ContextCost(**table.get("context", {}))
        if "requests" in table:
            requests, alpha = tuple(map(int, table["requests"])), tuple(map(float, table["alpha"]))
            return AdditiveCost(0.0, requests, alpha, tokens, seconds, draft, context)
        return TableCost(tokens, seconds, bool(table.get("executed", False)), draft, context)
    except (TypeError, ValueError, KeyError) as error:
        raise DSparkError(f"{path}: {error}") from None
