"""Products of a model: every way computes the same, figures follow from the times, and missing ways are named."""

import itertools

import pytest
import torch

from dspark.core import DSparkError
from dspark.kernels import lowbit
from dspark.kernels.lowbit import QuantizedWeight
from dspark.measure import KernelSettings, measure_kernels, model_weights
from dspark.measure.limits import Reading
from dspark.measure.products import WAYS, Products

SHAPES = ((96, 64), (64, 64), (128, 64), (64, 128), (50, 64))  # the last one fills no whole tile


@pytest.fixture
def weights():
    g = torch.Generator().manual_seed(0)
    bits = (4, 8, 4, 4, 8)
    return [
        QuantizedWeight.from_float(torch.randn(shape, generator=g), b)
        for shape, b in zip(SHAPES, bits, strict=True)
    ]


class Ticks:
    """A clock that goes on by one second a reading."""

    def __init__(self):
        self._count = itertools.count()

    def __call__(self):
        return float(next(self._count))


@pytest.mark.skipif(not lowbit.supports(), reason="no compiled low-bit products on this processor")
def test_every_way_multiplies_all_weights(weights, monkeypatch):
    outputs = {}
    for way in ("linear", "packed", "low-bit"):
        kept = outputs.setdefault(way, [])
        original = Products._add

        def keep(self, name, products, num_bytes, kept=kept, original=original):
            def kept_product(multiply):
                return lambda x: kept.append(multiply(x))

            original(self, name, [kept_product(p) for p in products], num_bytes)

        monkeypatch.setattr(Products, "_add", keep)
        torch.manual_seed(1)
        Products(weights, (way,), 5).ways[way](3)
        monkeypatch.undo()
    for way, result in outputs.items():
        assert [tuple(out.shape) for out in result] == [(3, shape[0]) for shape in SHAPES], way
        for mine, theirs in zip(result, outputs["linear"], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-4)


def test_figures_follow_from_the_times(weights):
    settings = KernelSettings(rows=(1, 4), repeats=2, matrix=8)
    seen = []
    report = measure_kernels(weights, settings, lambda: seen.append(1), Ticks())
    assert len(seen) == 2
    ways = [way for way in WAYS if way not in report["unsupported"]]
    assert [(r["rows"], r["way"]) for r in report["results"]] == [(n, way) for n in (1, 4) for way in ways]
    count = sum(out * size for out, size in SHAPES)
    assert report["weights"] == count
    for r in report["results"]:
        assert r["ms"] == {"median": 1000.0, "min": 1000.0, "max": 1000.0}
        assert r["gb_per_s"] == pytest.approx(r["bytes"] * 1e-9)
        assert r["gflop_per_s"] == pytest.approx(2 * count * r["rows"] * 1e-9)
        assert r["share_of_reading"] == pytest.approx(1.0)  # it read as many bytes in as long as the reader
        assert r["share_of_arithmetic"] == pytest.approx(2 * count * r["rows"] / (2 * 8**3))
        assert r["share_of_limit"] == max(r["share_of_reading"], r["share_of_arithmetic"])
    plain = next(r for r in report["results"] if r["way"] == "linear")
    assert plain["bytes"] == 4 * count


def test_ways_of_missing_kernels_are_named(weights, monkeypatch):
    for name in ("supports", "supports_integers"):
        monkeypatch.setattr(f"dspark.measure.products.{name}", lambda: False)
    report = measure_kernels(weights, KernelSettings(rows=(2,), repeats=1, matrix=8), clock=Ticks())
    assert report["unsupported"] == ["low-bit", "one call", "integers"]
    assert [r["way"] for r in report["results"]] == ["linear", "packed"]


def test_a_copy_moves_twice_the_bytes():
    reading = Reading(4000)
    assert reading.num_bytes == 4000
    assert reading.bytes_of("sum") == 4000
    assert reading.bytes_of("copy") == 8000
    assert float(reading.ways["sum"]()) == 1000.0


def test_weights_without_blocks_are_rounded(tiny_model):
    said = []
    weights = model_weights(str(tiny_model), said.append)
    assert [w.shape for w in weights] == [*[(64, 32), (32, 32), (128, 32), (32, 64)] * 3, (64, 32)]
    assert any("rounded to 8 bits" in line for line in said)


@pytest.mark.parametrize(
    "wrong", [{"rows": ()}, {"rows": (0,)}, {"ways": ("blas",)}, {"ways": ()}, {"repeats": 0}]
)
def test_settings_out_of_range(wrong):
    with pytest.raises(DSparkError):
        KernelSettings(**wrong)
