"""Cost tables of other engines, as the dictionaries their JSON files hold: SGLang and TensorRT-LLM.

Neither format has a place for draft or context costs: reading leaves them 0, writing leaves them out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dspark.errors import DSparkError
from dspark.schedule.cost import AdditiveCost, TableCost

__all__ = ["from_sglang", "from_tensorrt_llm", "minimum_predicted_gain", "to_sglang", "to_tensorrt_llm"]

_LARGEST = sys.float_info.max
_SGLANG_TABLE = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens")
_SGLANG_ADDITIVE = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
_TENSORRT = ("token_counts", "step_time_ms", "fixed_overhead_ms", "batch_sizes", "batch_overhead_ms")


def from_sglang(table: Mapping[str, Any]) -> TableCost | AdditiveCost:
    """SGLang's 1-D table or additive model; `max_batch_tokens` limits that engine's batches, not the prices.

    Raises:
        DSparkError: a key is missing or holds something else than numbers; the prices are not usable.
    """
    if "bias_seconds" in table:
        _require(table, _SGLANG_ADDITIVE, "SGLang additive cost model")
        return AdditiveCost(
            _number(table, "bias_seconds"),
            _integers(table, "bs_probes"),
            _numbers(table, "alpha_seconds"),
            _integers(table, "m_probes"),
            _numbers(table, "theta_seconds"),
        )
    _require(table, _SGLANG_TABLE, "SGLang cost table")
    tokens, rates = _integers(table, "sample_batch_tokens"), _numbers(table, "sample_steps_per_sec")
    if any(rate <= 0 for rate in rates):
        raise DSparkError("sample_steps_per_sec: every rate must be above 0")
    if tokens and _number(table, "max_batch_tokens") < tokens[-1]:
        raise DSparkError("max_batch_tokens lies below the last of sample_batch_tokens; one of them is wrong")
    return TableCost(tokens, tuple(1 / rate for rate in rates))


def to_sglang(cost: TableCost | AdditiveCost, max_batch_tokens: int | None = None) -> dict[str, Any]:
    """`max_batch_tokens`: that engine's largest batch, by default the last probe."""
    if isinstance(cost, AdditiveCost):
        values = (cost.bias, cost.requests, cost.alpha, cost.tokens, cost.theta)
        return {
            key: list(v) if isinstance(v, tuple) else v
            for key, v in zip(_SGLANG_ADDITIVE, values, strict=True)
        }
    return {
        "sample_batch_tokens": list(cost.tokens),
        "sample_steps_per_sec": [1 / s for s in cost.seconds],
        "max_batch_tokens": cost.tokens[-1] if max_batch_tokens is None else max_batch_tokens,
    }


def from_tensorrt_llm(table: Mapping[str, Any]) -> TableCost | AdditiveCost:
    """TensorRT-LLM's table; additive where it prices the batch size. See `minimum_predicted_gain` for the rest.

    Raises:
        DSparkError: as `from_sglang`.
    """
    _require(table, _TENSORRT, "TensorRT-LLM cost table")
    tokens, step = _integers(table, "token_counts"), _numbers(table, "step_time_ms", 1e-3)
    fixed = _number(table, "fixed_overhead_ms") * 1e-3
    requests, overhead = _integers(table, "batch_sizes"), _numbers(table, "batch_overhead_ms", 1e-3)
    if not requests and not overhead:
        return TableCost(tokens, tuple(fixed + s for s in step))
    return AdditiveCost(fixed, requests, overhead, tokens, step)


def minimum_predicted_gain(table: Mapping[str, Any]) -> float:
    """The gain below which TensorRT-LLM keeps the shorter schedule.

    `PrefixScheduler.min_gain` is another quantity: the margin by which each single token must pay.
    """
    _require(table, ("minimum_predicted_gain",), "TensorRT-LLM cost table")
    return _number(table, "minimum_predicted_gain")


def to_tensorrt_llm(cost: TableCost | AdditiveCost, minimum_predicted_gain: float = 0.01) -> dict[str, Any]:
    step = cost.theta if isinstance(cost, AdditiveCost) else cost.seconds
    return {
        "token_counts": list(cost.tokens),
        "step_time_ms": [1e3 * s for s in step],
        "fixed_overhead_ms": 1e3 * cost.bias if isinstance(cost, AdditiveCost) else 0.0,
        "batch_sizes": list(cost.requests) if isinstance(cost, AdditiveCost) else [],
        "batch_overhead_ms": [1e3 * a for a in cost.alpha] if isinstance(cost, AdditiveCost) else [],
        "minimum_predicted_gain": minimum_predicted_gain,
    }


def _require(table: Mapping[str, Any], keys: Sequence[str], what: str) -> None:
    missing = [key for key in keys if key not in table]
    if missing:
        raise DSparkError(f"{what}: key {missing[0]!r} is missing; it needs {', '.join(keys)}")


def _finite(value: object) -> bool:
    """A number that a float can hold: JSON as Python reads it has NaN, infinities and whole numbers of any size."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _number(table: Mapping[str, Any], key: str) -> float:
    value = table[key]
    if not _finite(value):
        raise DSparkError(f"{key}: must be a finite number, got {value!r}")
    return float(value)


def _numbers(table: Mapping[str, Any], key: str, scale: float = 1.0) -> tuple[float, ...]:
    values = table[key]
    if not isinstance(values, list | tuple) or not all(map(_finite, values)):
        raise DSparkError(f"{key}: must be a list of numbers, all finite")
    return tuple(float(v) * scale for v in values)


def _integers(table: Mapping[str, Any], key: str) -> tuple[int, ...]:
    values = _numbers(table, key)
    if any(not v.is_integer() for v in values):
        raise DSparkError(f"{key}: must be a list of whole numbers")
    return tuple(int(v) for v in values)
