"""Products in integers: the rounding of activations is the only approximation, and no row sees its batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from random_weights import random_weight

from dspark.kernels import lowbit
from dspark.kernels.lowbit import LowBitLinear, QuantizedWeight, lowbit_linears
from dspark.kernels.quantized import round_activations

pytestmark = pytest.mark.skipif(
    not lowbit.supports_integers(), reason="the machine has no integer products that the kernel knows"
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows(count: int, size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("out", "size"), [(32, 32), (1, 64), (33, 96), (200, 544), (7, 1536)])
def test_equals_the_product_with_rounded_activations(bits: int, out: int, size: int) -> None:
    weight, x = random_weight(out, size, bits), rows(20, size)
    layer = LowBitLinear(weight, integer=True)
    rounded, exact_weight = round_activations(x.double()), weight.dequantize().double()
    expected = rounded @ exact_weight.T
    # A few roundings of 2^-24 for each block, of terms that the magnitudes bound. The 4-bit terms are scale x code and
    # minimum, which may cancel.
    terms = exact_weight.abs()
    if weight.minimum is not None:
        terms = terms + 2 * weight.minimum.double().abs().repeat_interleave(32, -1)
    bound = (size // 32 + 4) * 2**-23 * (rounded.abs() @ terms.T) + 1e-12
    for count in (*range(1, 10), 20):
        result = layer(x[:count])
        assert result.shape == (count, out)
        assert bool(((result - expected[:count]).abs() <= bound[:count]).all()), count


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_codes_do_not_overflow(bits: int) -> None:
    """All activations at the ends of their range against the largest weights of either sign."""
    if bits == 8:
        codes = torch.tensor([[-128], [127]], dtype=torch.int8).expand(2, 64).contiguous()
        weight = QuantizedWeight(codes, torch.ones(2, 2).half(), None, 8)
    else:
        packed = torch.tensor([[255], [0]], dtype=torch.uint8).expand(2, 32).contiguous()
        weight = QuantizedWeight(packed, torch.ones(2, 2).half(), torch.full((2, 2), -8.0).half(), 4)
    x = torch.cat([torch.full((1, 64), 127.0), torch.full((1, 64), -127.0)])
    result = LowBitLinear(weight, integer=True)(x)
    assert torch.equal(result, x @ weight.dequantize().T)


@pytest.mark.parametrize("bits", [4, 8])
def test_activations_that_are_codes_are_exact(bits: int) -> None:
    weight = random_weight(64, 96, bits)
    x = torch.randint(-127, 128, (3, 96), generator=torch.Generator().manual_seed(2)).float()
    x[:, ::32] = 127.0  # the scale is 1
    assert torch.equal(round_activations(x), x)
    integer, plain = LowBitLinear(weight, integer=True)(x), LowBitLinear(weight)(x)
    torch.testing.assert_close(integer, plain, rtol=1e-5, atol=1e-3)


def test_blocks_round_on_their_own_and_zeros_stay() -> None:
    x = rows(2, 96)
    x[:, 32:64] *= 1e-6
    x[:, 64:] = 0.0
    rounded = round_activations(x)
    steps = x.unflatten(-1, (3, 32)).abs().amax(-1, keepdim=True) / 127
    error = (rounded - x).unflatten(-1, (3, 32)).abs()
    assert bool((error <= 0.5001 * steps).all())
    weight = QuantizedWeight.from_float(torch.eye(96))
    torch.testing.assert_close(LowBitLinear(weight, integer=True)(x), rounded, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_vanish(value: float) -> None:
    x = rows(3, 64)
    x[1, 40] = value
    result = LowBitLinear(random_weight(32, 64, 4), integer=True)(x)
    assert bool(result[[0, 2]].isfinite().all())
    assert not bool(result[1].isfinite().any())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_is_the_same_alone_and_in_any_batch(bits: int) -> None:
    layer, x = LowBitLinear(random_weight(96, 608, bits), integer=True), rows(41, 608)
    alone = torch.cat([layer(row[None]) for row in x])
    for count in range(1, 42):
        assert torch.equal(layer(x[:count]), alone[:count]), count
        assert torch.equal(layer(x[41 - count :]), alone[41 - count :]), count


@pytest.mark.parametrize("bits", [4, 8])
def test_threads_do_not_change_a_bit(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = LowBitLinear(random_weight(320, 256, bits), integer=True), rows(6, 256)
    torch.set_num_threads(1)
    expected = layer(x)
    monkeypatch.setattr(lowbit, "PARALLEL_WORK", 0)
    for count in (2, 3, 16):
        torch.set_num_threads(count)
        assert torch.equal(layer(x), expected), count


@pytest.mark.parametrize("bits", [4, 8])
def test_where_the_kernel_does_not_run_the_rounding_is_the_same(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = random_weight(48, 64, bits), rows(5, 64)
    compiled = LowBitLinear(weight, integer=True)(x)
    monkeypatch.setattr(lowbit, "supports_integers", lambda: False)
    layer = LowBitLinear(weight, integer=True)
    assert layer.packed is None
    torch.testing.assert_close(layer(x), compiled, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_lowbit_linears_in_integers() -> None:
    model, x = torch.nn.Linear(64, 40), rows(5, 64)
    expected = model(x)
    layer = lowbit_linears(model, integer=True)
    assert isinstance(layer, LowBitLinear)
    assert layer.integer
    torch.testing.assert_close(layer(x), expected, rtol=0.03, atol=0.03)


CHECKSUM = """
import sys, torch
sys.path.insert(0, {here!r})
from test_integer_kernel import random_weight, rows
from dspark.kernels.lowbit import LowBitLinear
for bits in (4, 8):
    out = LowBitLinear(random_weight(64, 160, bits), integer=True)(rows(6, 160))
    print(out.view(torch.int32).long().mul(torch.arange(out.numel()).view_as(out)).sum().item())
"""


@pytest.mark.parametrize("features", ["", "+avxvnni"])
def test_other_instructions_give_the_same_bits(features: str, tmp_path: os.PathLike[str]) -> None:
    """AVX2 alone, and with VNNI in half as wide vectors, against whatever this machine has."""
    base = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c"
    if features and "avx_vnni" not in _cpu_flags():
        pytest.skip("the processor has no AVX-VNNI")
    program = CHECKSUM.format(here=os.path.dirname(__file__))
    results = []
    for choice in (None, ",".join(filter(None, [base, features]))):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        if choice is not None:
            environment |= {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": choice}
        else:
            environment.pop("NUMBA_CACHE_DIR")
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        results.append(run.stdout)
    assert results[0] == results[1]


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return set(next((line for line in file if line.startswith("flags")), "").split())
    except OSError:
        return set()
