"""A quantised block drafter in compiled form equals the same drafter layer by layer."""

import dataclasses

import numpy as np
import pytest
import torch

from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.base import ObserveBatch
from dspark.drafters.block import BlockDrafter
from dspark.kernels import lowbit
from dspark.kv import KVPool
from dspark.target.decoder import DecoderLayer
from dspark.testing import tiny_decoder, tiny_drafter

pytestmark = pytest.mark.skipif(
    not lowbit.supports(), reason="no compiled low-bit products on this processor"
)

BLOCK = 16


@pytest.fixture(params=[True, False], ids=["qk_norm", "no_qk_norm"])
def drafter(request: pytest.FixtureRequest) -> BlockDrafter:
    target = tiny_decoder(hidden=128, dtype=torch.float32)
    model = tiny_drafter(target).model
    config = dataclasses.replace(model.config, qk_norm=request.param)
    torch.manual_seed(0)
    other = BlockDrafterModel(config)
    torch.nn.init.normal_(other.hidden_norm.weight, 1.0, 0.2)
    for layer in other.layers:
        assert isinstance(layer, DecoderLayer)
        for norm in (layer.k_norm, layer.q_norm):
            if norm is not None:
                torch.nn.init.normal_(norm.weight, 1.0, 0.2)
    return BlockDrafter(other, quantised=True)


def observe(drafter: BlockDrafter, rows: int, first_layer: int) -> KVPool:
    """Rows in two passes, of a pool in which `first_layer` layers lie before the drafter's."""
    specs = [drafter.kv_specs[0]] * first_layer + list(drafter.kv_specs)
    pool = KVPool(specs, 8, BLOCK)
    for part in (*pool.k, *pool.v):
        part.zero_()
    drafter.attach(pool, first_layer)
    taps = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1))
    slots = torch.randperm(8 * BLOCK, generator=torch.Generator().manual_seed(2))[:rows]
    for part in (slice(0, rows // 3), slice(rows // 3, rows)):
        at = torch.arange(rows)[part]
        drafter.observe(ObserveBatch([], np.array([0, len(at)]), at, slots[part], taps[part]))
        drafter.catch_up()
    return pool


@pytest.mark.parametrize(("rows", "first_layer"), [(2, 0), (50, 3)])
def test_context_keys_and_values(drafter: BlockDrafter, rows: int, first_layer: int) -> None:
    assert drafter._compiled_context is not None
    compiled = observe(drafter, rows, first_layer)
    drafter._compiled_context = None
    plain = observe(drafter, rows, first_layer)
    assert any(layer.any() for layer in plain.k)
    for mine, other in zip((*compiled.k, *compiled.v), (*plain.k, *plain.v), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_a_drafter_in_full_precision_has_no_compiled_form() -> None:
    drafter = tiny_drafter(tiny_decoder(hidden=128, dtype=torch.float32))
    assert drafter._compiled_context is None
    assert drafter._compiled is None
