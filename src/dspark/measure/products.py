"""The matrix products of a whole model, in the order of its layers, in several ways and against the limits.

One layer timed over and over lies in a core's cache, as it never does while a model decodes. Here every weight is
read once before any is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import ModuleList
from torch.nn.functional import linear

from dspark.core import DSparkError
from dspark.kernels.linear import PackedLinear
from dspark.kernels.lowbit import LowBitLinear, QuantizedWeight, gather_weights, supports, supports_integers
from dspark.kernels.program import Program, Rows
from dspark.kernels.steps import Rotation, product, width
from dspark.measure.limits import Arithmetic, Reading
from dspark.measure.replay import WARM_UP
from dspark.measure.timing import Clock, clock_name, seconds, spread, suitable_clock
from dspark.target.blocks import fuse_blocks, read_blocks
from dspark.target.hf import read_config
from dspark.target.load import load_decoder
from dspark.target.zoo import resolve

__all__ = ["WAYS", "KernelSettings", "Products", "measure_kernels", "model_weights"]

WAYS = {
    "linear": "torch's F.linear on float32",
    "packed": "float32 laid out for oneDNN",
    "low-bit": "4-bit and 8-bit blocks, one call a matrix",
    "one call": "the same blocks, all matrices in one compiled call",
    "integers": "one call, with activations in 8 bits and integer dot products",
}
LOW_BIT = ("low-bit", "one call", "integers")


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """`rows` to multiply at once; `matrix`: side of the product that shows the arithmetic's limit."""

    rows: tuple[int, ...] = (1, 2, 4, 6, 8, 16, 64)
    ways: tuple[str, ...] = tuple(WAYS)
    repeats: int = 7
    matrix: int = 2048

    def __post_init__(self) -> None:
        if not self.rows or min(self.rows) < 1:
            raise DSparkError(f"rows must be one or several numbers of 1 or more, got {self.rows}")
        if unknown := [way for way in self.ways if way not in WAYS]:
            raise DSparkError(f"unknown way {unknown[0]!r}; choose from {', '.join(WAYS)}")
        if not self.ways or self.repeats < 1 or self.matrix < 1:
            raise DSparkError("give at least one way, and repeats and matrix of 1 or more")


def model_weights(model: str, report: Callable[[str], None]) -> list[QuantizedWeight]:
    """The matrices of a model in layer order, the LM head last: its own blocks, or its weights rounded to 8 bits.

    Raises:
        DSparkError: no such model, or one whose matrices have no whole blocks.
    """
    directory = resolve(model, report)
    blocks = read_blocks(directory)
    config = read_config(directory)
    fused = dict(fuse_blocks(config, blocks)) if blocks else {}
    names = [
        f"layers.{i}.{name}_proj"
        for i in range(config.num_layers)
        for name in ("qkv", "o", "gate_up", "down")
    ]
    names.append("lm_head")
    if missing := [name for name in names if name not in fused]:
        report(
            f"{len(missing)} of {len(names)} matrices are rounded to 8 bits here: the model has no blocks of them"
        )
        decoder = load_decoder(directory)
        for name in missing:
            weight = decoder.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            fused[name] = QuantizedWeight.from_float(weight)
    return [fused[name] for name in names]


class Products:
    """The products of `weights` in each way; a way's function takes the number of rows, `max_rows` at most."""

    def __init__(self, weights: Sequence[QuantizedWeight], ways: Sequence[str], max_rows: int) -> None:
        self._sizes = [weight.shape[1] for weight in weights]
        self._inputs = {size: torch.randn(max_rows, size) for size in dict.fromkeys(self._sizes)}
        self._max_rows = max_rows
        self.num_weights = sum(weight.shape[0] * weight.shape[1] for weight in weights)
        self.ways: dict[str, Callable[[int], None]] = {}
        self.num_bytes: dict[str, int] = {}
        if "linear" in ways:
            plain = [_unpacked(weight.dequantize()) for weight in weights]
            self._add("linear", plain, 4 * self.num_weights)
        if "packed" in ways:
            packed = [PackedLinear(weight.dequantize()) for weight in weights]
            self._add("packed", packed, 4 * self.num_weights)
        for integer in (False, True):
            usable = supports_integers() if integer else supports()
            if usable and set(ways) & set(LOW_BIT[2:] if integer else LOW_BIT[:2]):
                self._add_low_bit([LowBitLinear(weight, integer=integer) for weight in weights], ways)

    def _add(self, way: str, products: Sequence[Callable[[Tensor], Tensor]], num_bytes: int) -> None:
        def run(rows: int) -> None:
            for multiply, size in zip(products, self._sizes, strict=True):
                multiply(self._inputs[size][:rows])

        self.ways[way], self.num_bytes[way] = run, num_bytes

    def _add_low_bit(self, layers: list[LowBitLinear], ways: Sequence[str]) -> None:
        gather_weights(ModuleList(layers))
        num_bytes = sum(layer.packed.numel() for layer in layers if layer.packed is not None)
        integer = layers[0].integer
        if "low-bit" in ways and not integer:
            self._add("low-bit", layers, num_bytes)
        one_call = "integers" if integer else "one call"
        if one_call not in ways:
            return
        outputs = {width(layer): torch.empty(self._max_rows, width(layer)) for layer in layers}
        inputs = self._inputs
        if integer:  # zeros: speed does not depend on codes
            inputs = {
                layer.in_features: torch.zeros(self._max_rows, layer.code_bytes, dtype=torch.uint8)
                for layer in layers
            }
        steps = [product(layer, inputs[layer.in_features], outputs[width(layer)]) for layer in layers]
        none = torch.zeros(1, 1)
        program = Program(steps, Rotation(heads=1, kv_heads=1, head_dim=1, cos=none, sin=none))

        def run(rows: int) -> None:
            assert outputs, "the program writes there"
            assert inputs, "and reads here"
            program.run([Rows(rows)])

        self.ways[one_call], self.num_bytes[one_call] = run, num_bytes


def _unpacked(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: linear(x, weight)


@torch.inference_mode()
def measure_kernels(
    weights: Sequence[QuantizedWeight],
    settings: KernelSettings | None = None,
    progress: Callable[[], None] = lambda: None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Time all products; limits and ways take turns within every repeat, each behind some untimed calls of its own.

    Args:
        progress: called behind each repeat.

    Returns:
        {"clock", "weights", "limits", "results"} of plain JSON values. A result's `share_of_reading` is its rate of
        reading weights over the fastest reader's of as many bytes, `share_of_arithmetic` its rate of operations
        over that of a large product, and `share_of_limit` the larger: what an ideal way would take of its time.
    """
    settings, clock = settings or KernelSettings(), clock or suitable_clock()
    products = Products(weights, settings.ways, max(settings.rows))
    readings = {size: Reading(size) for size in dict.fromkeys(products.num_bytes.values())}
    arithmetic = Arithmetic(settings.matrix)
    calls: dict[tuple[str, int], Callable[[], object]] = {("arithmetic", 0): arithmetic.run}
    for size, reading in readings.items():
        calls |= {(way, size): call for way, call in reading.ways.items()}
    timed: dict[tuple[str, int], list[float]] = {}
    for _ in range(settings.repeats):
        for key, call in (*calls.items(), *_cells(products, settings.rows)):
            for _ in range(WARM_UP):
                call()
            timed.setdefault(key, []).append(seconds(call, clock))
        progress()
    limits = _limits(readings, arithmetic, timed)
    results = [
        _result(products, way, rows, timed[way, rows], limits)
        for rows in settings.rows
        for way in products.ways
    ]
    missing = [way for way in settings.ways if way not in products.ways]
    facts = {"clock": clock_name(clock), "weights": products.num_weights, "unsupported": missing}
    return {**facts, "limits": limits, "results": results}


def _cells(products: Products, rows: Sequence[int]) -> Iterator[tuple[tuple[str, int], Callable[[], object]]]:
    for count in rows:
        for way, run in products.ways.items():
            yield (way, count), lambda run=run, count=count: run(count)  # type: ignore[misc]


def _limits(
    readings: dict[int, Reading], arithmetic: Arithmetic, timed: dict[tuple[str, int], list[float]]
) -> dict[str, Any]:
    reading = []
    for size, probe in readings.items():
        rates = {way: spread([probe.bytes_of(way) / s for s in timed[way, size]], 1e-9) for way in probe.ways}
        fastest = max(("sum", "dot"), key=lambda way: rates[way]["median"])
        reading.append(
            {"bytes": size, "gb_per_s": rates[fastest], "reader": fastest, "copy_gb_per_s": rates["copy"]}
        )
    flops = spread([arithmetic.flops / s for s in timed["arithmetic", 0]], 1e-9)
    return {"reading": reading, "gflop_per_s": flops}


def _result(
    products: Products, way: str, rows: int, times: list[float], limits: dict[str, Any]
) -> dict[str, Any]:
    ms = spread(times, 1e3)
    size, flops = products.num_bytes[way], 2 * products.num_weights * rows
    rates = {"gb_per_s": size / ms["median"] / 1e6, "gflop_per_s": flops / ms["median"] / 1e6}
    fastest = next(r["gb_per_s"]["median"] for r in limits["reading"] if r["bytes"] == size)
    shares = {
        "share_of_reading": rates["gb_per_s"] / fastest,
        "share_of_arithmetic": rates["gflop_per_s"] / limits["gflop_per_s"]["median"],
    }
    most = {"share_of_limit": max(shares.values())}
    return {"way": way, "rows": rows, "ms": ms, "bytes": size, **rates, **shares, **most}
