"""Cost tables as files: profiles of ours, SGLang's and TensorRT-LLM's tables, read, written, turned into each other."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.errors import DSparkError
from dspark.profile.store import Profile
from dspark.schedule.cost import AdditiveCost, TableCost
from dspark.schedule.cost_formats import (
    from_sglang,
    from_tensorrt_llm,
    minimum_predicted_gain,
    to_sglang,
    to_tensorrt_llm,
)

__all__ = ["TABLE_FORMATS", "CostTable", "load_cost_table", "read_cost_table", "write_cost_table"]

TABLE_FORMATS = ("dspark", "sglang", "tensorrt-llm")
_GAIN, _LIMIT = "minimum_predicted_gain", "max_batch_tokens"
_NOT_USED = {
    _GAIN: "the policies here draft for any gain beyond doubt",
    _LIMIT: "the engine's own limits hold",
}


@dataclass(frozen=True)
class CostTable:
    """What a file of prices held. `profile`: the measurement, if it was one of ours. `beside`: what another engine's
    table says beyond prices, which nothing here goes by."""

    cost: TableCost | AdditiveCost
    profile: Profile | None = None
    beside: Mapping[str, float] = field(default_factory=dict)

    def remarks(self) -> list[str]:
        """What whoever decides by these prices must know, a sentence each."""
        if self.profile is not None:
            flat = self.profile.flat
            return [] if flat is None else [f"{flat}; further rows count as nearly free"]
        remarks = [
            "the table does not say which machine and model it is for, and has no draft or context prices: drafting "
            "counts as free"
        ]
        return remarks + [
            f"{key} {value:g} is not used: {_NOT_USED[key]}" for key, value in self.beside.items()
        ]


def load_cost_table(path: Path) -> CostTable:
    """A profile of ours, or a table of SGLang or TensorRT-LLM, told apart by its keys.

    Raises:
        DSparkError: no such file, none of these formats, unusable prices.
    """
    try:
        data = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeError, json.JSONDecodeError) as error:
        raise DSparkError(f"cannot read a cost table from {str(path)!r}: {error}") from None
    if not isinstance(data, Mapping):
        raise DSparkError(f"{path} holds no cost table: expected a JSON object")
    if "format" in data:
        profile = Profile.from_dict(data)
        return CostTable(profile.cost(), profile)
    if "token_counts" in data:
        gain = {_GAIN: minimum_predicted_gain(data)} if _GAIN in data else {}
        return CostTable(from_tensorrt_llm(data), beside=gain)
    cost = from_sglang(data)
    return CostTable(cost, beside={_LIMIT: data[_LIMIT]} if isinstance(cost, TableCost) else {})


def read_cost_table(
    path: Path,
    belongs_to: Mapping[str, str] | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> TableCost | AdditiveCost:
    """Prices from a file, see `load_cost_table`, to decide by.

    A profile that belongs to another machine or model than `belongs_to` is refused; a table of another engine,
    which cannot tell, is reported, and so is what it says beyond prices. Prices that look wrong have a `warning`.

    Raises:
        DSparkError: as `load_cost_table`; a profile of something else.
    """
    table, wanted = load_cost_table(path), belongs_to or {}
    if table.profile is not None:
        found = table.profile.fingerprint
        for key in [k for k, v in wanted.items() if found.get(k) != v]:
            raise DSparkError(
                f"{path} was measured with another {key} ({found.get(key)}, here {wanted[key]}): run dspark profile "
                "here"
            )
    for remark in table.remarks():
        report(f"{path}: {remark}")
    return table.cost


def write_cost_table(source: Profile | CostTable, path: Path, form: str) -> list[str]:
    """Write prices as one of `TABLE_FORMATS`; returns what that format cannot hold.

    Raises:
        DSparkError: another format, "dspark" for what is no profile, a file that cannot be written.
    """
    if form not in TABLE_FORMATS:
        raise DSparkError(f"{form!r} is no format of cost tables; choose from {', '.join(TABLE_FORMATS)}")
    table = source if isinstance(source, CostTable) else CostTable(source.cost(), source)
    data = _as_format(table, form)
    try:
        path.expanduser().write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise DSparkError(f"cannot write {str(path)!r}: {error}") from None
    return [] if form == "dspark" else _lost(table, data)


def _as_format(table: CostTable, form: str) -> dict[str, Any]:
    if form == "dspark":
        if table.profile is None:
            raise DSparkError(
                "the format dspark holds what was measured, and on which machine, which another engine's table does "
                "not say: give that table to --cost-table as it is, or measure with dspark profile"
            )
        return table.profile.as_dict()
    if form == "sglang":
        limit = table.beside.get(_LIMIT)
        return to_sglang(table.cost, None if limit is None else int(limit))
    return to_tensorrt_llm(table.cost, *(v for k, v in table.beside.items() if k == _GAIN))


def _lost(table: CostTable, data: Mapping[str, Any]) -> list[str]:
    cost = table.cost
    lost = ["the price of drafting"] if any(vars(cost.draft).values()) else []
    if cost.context.per_position or cost.context.per_pair:
        lost.append("the price of a long context")
    if table.profile is not None:
        lost += ["the samples", "the fingerprint"]
    return lost + [f"{key} {value:g}" for key, value in table.beside.items() if key not in data]
