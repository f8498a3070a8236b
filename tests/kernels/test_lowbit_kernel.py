"""Products with 4-bit and 8-bit blocks: exact weights, rounding only in sums, rows that do not see their batch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from random_weights import random_weight
from torch import nn

from dspark.core import DSparkError
from dspark.kernels import lowbit
from dspark.kernels.lowbit import (
    LowBitEmbedding,
    LowBitLinear,
    QuantizedWeight,
    WeightMemory,
    gather_weights,
    lowbit_linear_reference,
    lowbit_linears,
    packed_bytes,
)
from dspark.kernels.quantized import PackedRows, pack

compiled = pytest.mark.skipif(not lowbit.supports(), reason="the machine lacks what the kernel needs")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("out", "size"), [(32, 32), (64, 96), (1, 64), (33, 32), (200, 544), (7, 1536)])
def test_equals_the_reference_to_rounding(bits: int, out: int, size: int) -> None:
    weight = random_weight(out, size, bits)
    layer = LowBitLinear(weight)
    x = torch.randn(70, size, generator=torch.Generator().manual_seed(1))
    exact = lowbit_linear_reference(x.double(), weight)
    # One rounding of 2^-24 a term, of a running sum that is no larger than the sum of magnitudes.
    bound = size * 2**-24 * (x.abs().double() @ weight.dequantize().abs().double().T)
    for rows in [*range(1, 20), 31, 32, 33, 63, 64, 65, 70]:
        out_rows = layer(x[:rows])
        assert out_rows.shape == (rows, out)
        assert bool(((out_rows - exact[:rows]).abs() <= bound[:rows]).all()), rows


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_weights_are_exact(bits: int, rows: int) -> None:
    """Unit vectors pick single weights: what the kernel multiplies by is `dequantize`, to the last bit."""
    weight = random_weight(96, 64, bits)
    layer = LowBitLinear(weight)
    columns = torch.cat([layer(part) for part in torch.eye(64).split(rows)])
    assert torch.equal(columns.T, weight.dequantize())


@compiled
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_the_same_alone_and_in_any_batch(bits: int) -> None:
    layer = LowBitLinear(random_weight(96, 608, bits))
    x = torch.randn(70, 608, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(1, 71):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows
        assert torch.equal(layer(x[70 - rows :]), alone[70 - rows :]), rows


@compiled
@pytest.mark.parametrize("bits", [4, 8])
def test_an_output_is_the_same_in_any_matrix(bits: int) -> None:
    """Neither the tile nor the place in it matters."""
    weight = random_weight(80, 320, bits)
    minimum = None if weight.minimum is None else weight.minimum[40:]
    part = QuantizedWeight(weight.codes[40:], weight.scale[40:], minimum, bits)
    x = torch.randn(5, 320, generator=torch.Generator().manual_seed(3))
    assert torch.equal(LowBitLinear(weight)(x)[:, 40:], LowBitLinear(part)(x))


@compiled
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_threads_do_not_change_a_bit(bits: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LowBitLinear(random_weight(320, 256, bits))
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(4))
    torch.set_num_threads(1)
    expected = layer(x)
    monkeypatch.setattr(lowbit, "PARALLEL_WORK", 0)
    for threads in (2, 3, 16):
        torch.set_num_threads(threads)
        assert torch.equal(layer(x), expected), threads


def test_bias_shapes_and_no_rows() -> None:
    weight = random_weight(40, 64, 4)
    bias = torch.arange(40.0)
    layer = LowBitLinear(weight, bias)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(5))
    expected = nn.functional.linear(x, weight.dequantize(), bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-4)
    wide = torch.zeros(2, 3, 128)
    wide[..., ::2] = x  # rows that are not contiguous
    torch.testing.assert_close(layer(wide[..., ::2]), expected, rtol=1e-5, atol=1e-4)
    assert layer(torch.zeros(0, 64)).shape == (0, 40)
    assert layer(torch.ones(64)).shape == (40,)


def test_where_the_kernel_does_not_run_the_weights_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(48, 64, 8)
    monkeypatch.setattr(lowbit, "supports", lambda: False)
    layer = LowBitLinear(weight)
    assert layer.packed is None
    assert torch.equal(layer(torch.eye(64)).T, weight.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
def test_from_float_rounds_to_the_nearest_code(bits: int) -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(6))
    weight[3, 32:64] = 0.0
    weight[4] *= 1e-9  # scales that round to zero
    quantised = QuantizedWeight.from_float(weight, bits)
    blocks = weight.view(48, 3, 32)
    span = 2 * blocks.abs().amax(-1) / 254 if bits == 8 else (blocks.amax(-1) - blocks.amin(-1)) / 15
    # Half a step, and what a scale and minimum in 11 bits move the ends of the range.
    bound = (span * 0.51 + 2**-10 * blocks.abs().amax(-1) + 1e-7)[..., None]
    error = (quantised.dequantize().view_as(blocks) - blocks).abs()
    if bits == 8:
        assert bool((error <= bound).all())
    else:  # a range may be cut by a quarter, an eighth at each end, where that errs less in all
        assert bool((error <= bound + span[..., None] * 15 / 8).all())
        whole = (blocks - blocks.amin(-1, keepdim=True)) / span.clamp(min=1e-30)[..., None]
        plain = ((whole.round() - whole) * span[..., None]).square().sum(-1)
        assert bool((error.square().sum(-1) <= plain * 1.05 + 1e-7).all())
        assert float(error.square().sum()) < 0.97 * float(plain.sum())
    assert torch.equal(quantised.dequantize()[3, 32:64], torch.zeros(32))
    if bits == 4:
        return  # the cut range is not found again
    again = QuantizedWeight.from_float(quantised.dequantize(), bits)
    torch.testing.assert_close(again.dequantize(), quantised.dequantize(), rtol=2e-3, atol=2e-3)


def test_refuses_what_has_no_blocks() -> None:
    with pytest.raises(DSparkError, match="33 inputs"):
        QuantizedWeight.from_float(torch.zeros(4, 33))
    with pytest.raises(DSparkError, match="4 or 8 bits, not 5"):
        QuantizedWeight.from_float(torch.zeros(4, 32), bits=5)


@torch.inference_mode()
def test_lowbit_linears_swaps_layers_that_have_blocks() -> None:
    torch.manual_seed(7)
    shared = nn.Linear(64, 64)
    model = nn.Sequential(
        shared, nn.GELU(), nn.Sequential(shared, nn.Linear(64, 40, bias=False)), nn.Linear(40, 3)
    )
    x = torch.randn(5, 64)
    expected = model(x)
    assert lowbit_linears(model) is model
    assert isinstance(model[0], LowBitLinear)
    assert model[0] is model[2][0]
    assert type(model[3]) is nn.Linear  # 40 inputs
    torch.testing.assert_close(model(x), expected, rtol=0.02, atol=0.02)
    assert isinstance(lowbit_linears(nn.Linear(32, 4)), LowBitLinear)


@torch.inference_mode()
def test_gathered_weights_multiply_as_before() -> None:
    layers = nn.ModuleList(LowBitLinear(random_weight(40, 64, bits, seed=bits)) for bits in (4, 8, 4))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(8))
    expected = [layer(x) for layer in layers]
    gather_weights(layers)
    assert all(torch.equal(layer(x), before) for layer, before in zip(layers, expected, strict=True))
    if lowbit.supports():
        starts = [layer.packed.data_ptr() for layer in layers]
        sizes = [layer.packed.numel() for layer in layers]
        assert starts[0] % 64 == 0
        assert starts[1:] == [start + size for start, size in zip(starts[:2], sizes[:2], strict=True)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("out", [33, 64, 200])
def test_rows_are_looked_up_where_the_products_read_them(bits: int, out: int) -> None:
    weight = random_weight(out, 96, bits)
    layer = LowBitLinear(weight)
    embedding, table = LowBitEmbedding(layer), weight.dequantize()
    ids = torch.randint(0, out, (4, 5), generator=torch.Generator().manual_seed(9))
    ids[0, :2] = torch.tensor([0, out - 1])
    for _ in range(2):
        assert torch.equal(embedding(ids), table[ids])
        assert torch.equal(embedding(ids[:0]), table[ids[:0]])
        assert torch.equal(embedding.weight, table)
        if layer.packed is not None:  # nothing keeps the former memory
            assert embedding._rows is not None
            assert embedding._rows.packed is layer.packed
        gather_weights(layer)  # moves what was looked up
    assert not list(embedding.modules())[1:]
    assert not embedding.state_dict()
    for wrong in (-1, out):
        with pytest.raises(IndexError):
            embedding(torch.tensor([0, wrong]))


@compiled
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_come_back_as_they_were_packed(bits: int) -> None:
    weight = random_weight(70, 64, bits)
    rows = LowBitLinear(weight).rows(torch.tensor([69, 0, 31, 32, 0]))
    index = [69, 0, 31, 32, 0]
    assert torch.equal(rows.codes, weight.codes[index])
    assert torch.equal(rows.scale, weight.scale[index])
    assert (rows.minimum is None) == (bits == 8)
    assert torch.equal(rows.dequantize(), weight.dequantize()[index])


@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_that_fill_the_last_tile_are_zeros(bits: int) -> None:
    weight = random_weight(40, 64, bits)
    used = torch.full((packed_bytes(weight.shape, bits),), 255, dtype=torch.uint8)
    packed = pack(weight, used)
    assert packed.data_ptr() == used.data_ptr()
    rows = PackedRows(packed, bits).dequantized(np.arange(64))
    assert torch.equal(rows, torch.cat((weight.dequantize(), torch.zeros(24, 64))))


@compiled
def test_weights_are_laid_out_side_by_side() -> None:
    weights = [random_weight(out, 64, bits, seed=out) for out, bits in ((40, 4), (64, 8), (96, 4))]
    memory = WeightMemory(sum(packed_bytes(weight.shape, weight.bits) for weight in weights))
    layers = [LowBitLinear(weight, memory=memory) for weight in weights]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(8))
    ends = []
    for layer, weight in zip(layers, weights, strict=True):
        assert layer.packed is not None
        ends.append((layer.packed.data_ptr(), layer.packed.data_ptr() + layer.packed.numel()))
        assert torch.equal(layer(x), LowBitLinear(weight)(x))
    assert ends[0][0] % 64 == 0
    assert ends[0][1] == ends[1][0]
    assert ends[1][1] == ends[2][0]
