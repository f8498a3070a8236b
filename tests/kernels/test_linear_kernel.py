"""Packed linear layers equal plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dspark.kernels.linear import PackedLinear, can_pack, pack_linear, pack_linears

# Two orders of summation over 96 products of unit size: a few roundings of 2^-24 (2^-8) each.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_equals_linear(dtype: torch.dtype, has_bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(80, 96, dtype=dtype)
    bias = torch.randn(80, dtype=dtype) if has_bias else None
    x = torch.randn(rows, 96, dtype=dtype)
    with torch.inference_mode():
        out = pack_linear(weight, bias)(x)
        expected = nn.functional.linear(x, weight, bias)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out, expected, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=TOLERANCE[dtype]
    )


def test_what_can_be_packed() -> None:
    assert can_pack(torch.zeros(2, 2)) == torch.backends.mkldnn.is_available()
    assert not can_pack(torch.zeros(2, 2, dtype=torch.float64))
    assert not can_pack(torch.zeros(2, 2, device="meta"))


class Tied(nn.Module):
    """An embedding whose table is also the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(
            [nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16, bias=False), nn.GELU())]
        )
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@torch.inference_mode()
def test_pack_linears_swaps_all_and_keeps_a_tied_embedding() -> None:
    torch.manual_seed(1)
    model = Tied()
    ids = torch.arange(10)[None]
    expected, embedded = model(ids), model.embedding(ids)
    assert pack_linears(model) is model
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(PackedLinear) == 3
    assert nn.Linear not in kinds
    torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.embedding(ids), embedded)
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight"]  # the others are freed


def test_pack_linears_packs_a_shared_layer_once() -> None:
    layer = nn.Linear(4, 4)
    packed = pack_linears(nn.Sequential(layer, nn.ReLU(), layer))
    assert isinstance(packed[0], PackedLinear)
    assert packed[0] is packed[2]


def test_pack_linears_of_a_linear() -> None:
    assert isinstance(pack_linears(nn.Linear(4, 4)), PackedLinear)
