"""Quantised block drafters, and rounds of three requests with them."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dspark.core import Draft, Request, SamplingParams
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.drafters.block import BlockDrafter
from dspark.kernels import lowbit
from dspark.kv import KVPool
from dspark.sampling import SamplingRows
from dspark.shaping import LogitsShaper
from dspark.testing import tiny_decoder, tiny_drafter

BLOCK = 16

needs_low_bit = pytest.mark.skipif(
    not lowbit.supports(), reason="no compiled low-bit products on this processor"
)
each_kind = pytest.mark.parametrize(
    ("method", "head", "vocab"),
    [
        ("dspark", "vanilla", 48),
        ("dspark", "vanilla", None),
        ("dspark", "gated", 48),
        ("dflash", "vanilla", 32),
    ],
)


def quantised(method: str, head: str, draft_vocab_size: int | None, bias: bool = False) -> BlockDrafter:
    torch.manual_seed(3)
    target = tiny_decoder(hidden=128, dtype=torch.float32)
    config = tiny_drafter(target, method, head, block_size=5, draft_vocab_size=draft_vocab_size).model.config  # type: ignore[arg-type]
    rank = 32 if config.markov_rank else 0
    model = BlockDrafterModel(dataclasses.replace(config, markov_rank=rank, attention_bias=bias))
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):  # larger than the initial ones: heads and layers are to matter
            torch.nn.init.normal_(layer.weight, 0.0, 0.2)
            if layer.bias is not None:
                torch.nn.init.normal_(layer.bias, 0.0, 0.5)
    if draft_vocab_size is not None:
        model.vocab.copy_(torch.randperm(config.vocab_size)[:draft_vocab_size].sort().values)
    return BlockDrafter(model, quantised=True)


def with_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations in float32: rounded ones may differ by a code after sums in another order."""
    for module in ("block", "quantise"):
        monkeypatch.setattr(f"dspark.drafters.{module}.supports_integers", lambda: False)


GREEDY = (SamplingParams(temperature=0.0, seed=5),) * 3
SAMPLED = (SamplingParams(temperature=1.0, seed=5),) * 3
MIXED = tuple(SamplingParams(temperature=t, seed=5) for t in (0.7, 0.0, 2.5))


def propose_batch(lengths: list[int], cached: list[int], params: Sequence[SamplingParams]) -> ProposeBatch:
    requests = [
        Request(i, str(i), [(7 * i + j) % 60 + 1 for j in range(n + 1)], params[i], 5, 99, cached=n)
        for i, n in enumerate(cached)
    ]
    tables = np.arange(12).reshape(3, 4)[: len(cached)]
    shapers = [LogitsShaper.for_request(request, 64, []) for request in requests]
    return ProposeBatch(requests, np.array(lengths), SamplingRows.of(requests), tables, shapers)


def ready(drafter: BlockDrafter, blocks: int) -> None:
    """Attached to a pool of so many blocks, nothing in it."""
    pool = KVPool(drafter.kv_specs, blocks, BLOCK)
    for part in (*pool.k, *pool.v):
        part.zero_()
    drafter.attach(pool, 0)


def served(
    drafter: BlockDrafter, params: Sequence[SamplingParams] = GREEDY, compiled: bool = True
) -> list[Draft]:
    """Three rounds over three requests, some of which draft less or nothing; rows are observed in between."""
    before = drafter._compiled
    if not compiled:
        drafter._compiled = None
    ready(drafter, 12)
    drafts, cached = [], [0, 0, 0]
    g = torch.Generator().manual_seed(4)
    for new, lengths in (([20, 3, 9], [5, 2, 0]), ([1, 4, 0], [1, 1, 1]), ([0, 0, 0], [0, 5, 3])):
        if sum(new):
            at = [torch.arange(n, n + more) for n, more in zip(cached, new, strict=True)]
            slots = torch.cat([p + 4 * BLOCK * i for i, p in enumerate(at)])
            taps = torch.randn(len(slots), 256, generator=g)
            starts = np.cumsum([0, *new])
            drafter.observe(ObserveBatch([], starts, torch.cat(at), slots, taps))
        cached = [n + more for n, more in zip(cached, new, strict=True)]
        drafts.append(drafter.propose(propose_batch(lengths, cached, params)))
    drafter._compiled = before
    return drafts
