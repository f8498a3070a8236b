"""All layers in one call: the same as layer by layer, and the same to the last bit however rows are grouped."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dspark.kernels import lowbit
from dspark.kernels.attention import AttentionPlan
from dspark.kernels.lowbit import QuantizedWeight, lowbit_linears
from dspark.kernels.parallel import parallel
from dspark.kernels.target import CompiledTarget
from dspark.kv import KVPool
from dspark.target.base import ForwardBatch, TargetOutput
from dspark.target.decoder import Decoder
from dspark.testing import tiny_decoder

pytestmark = pytest.mark.skipif(
    not lowbit.supports(), reason="no compiled low-bit products on this processor"
)

BLOCK = 16
TAPS = (1, -1, 2)  # in the order asked for; the last layer's state lies before the final norm
TOKENS = torch.randint(0, 64, (3, 80), generator=torch.Generator().manual_seed(3)).tolist()


def decoder(
    kind: str = "llama", windows: tuple[int | None, ...] = (), bits: int = 8, integer: bool = False
) -> Decoder:
    model = tiny_decoder(kind=kind, hidden=128, dtype=torch.float32, windows=windows)  # type: ignore[arg-type]
    lowbit_linears(model, bits, integer)
    return model.prepare()


class Stream:
    """Requests over one pool: feeds some tokens of each, and remembers what came out."""

    def __init__(self, model: Decoder, requests: int, kv_dtype: torch.dtype = torch.float32) -> None:
        specs = (*model.kv_specs, model.kv_specs[0])  # a drafter's layer lies behind the target's
        self.model, self.pool = model, KVPool(specs, 8 * requests, BLOCK, kv_dtype)
        for part in (*self.pool.k, *self.pool.v):
            part.zero_()
        # Blocks of requests interleave: nothing may depend on their order.
        self.tables = np.arange(8 * requests).reshape(8, requests).T.copy()
        self.done = [0] * requests

    def feed(self, counts: Sequence[int], causal: bool = True) -> TargetOutput:
        starts, lens = np.concatenate(([0], np.cumsum(counts))), np.array(self.done)
        at = np.concatenate([np.arange(n, n + c) for n, c in zip(self.done, counts, strict=True)])
        which = np.repeat(np.arange(len(counts)), counts)
        tokens = [TOKENS[r][p] for r, p in zip(which, at, strict=True)]
        slots = self.tables[which, at // BLOCK] * BLOCK + at % BLOCK
        batch = ForwardBatch(
            torch.tensor(tokens),
            torch.from_numpy(at),
            starts,
            lens,
            self.tables,
            torch.from_numpy(slots),
            causal=causal,
        )
        self.done = [n + c for n, c in zip(self.done, counts, strict=True)]
        return self.model.forward(batch, self.pool, TAPS)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("kind", "windows", "bits"),
    [("llama", (), 8), ("llama", (), 4), ("llama", (None, 7, 20), 8), ("qwen2", (), 8), ("qwen3", (), 8)],
)
def test_equals_layer_by_layer(kind: str, windows: tuple[int | None, ...], bits: int, causal: bool) -> None:
    model = decoder(kind, windows, bits)
    compiled, plain = Stream(model, 3), Stream(model, 3)
    assert model._compiled is not None
    for counts in ((40, 1, 17), (1, 30, 2), (5, 1, 1)):
        one = compiled.feed(counts, causal)
        whole, model._compiled = model._compiled, None
        other = plain.feed(counts, causal)
        model._compiled = whole
        torch.testing.assert_close(one.logits, other.logits, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(one.taps, other.taps, atol=2e-4, rtol=1e-4)
    for mine, theirs in zip(
        (*compiled.pool.k, *compiled.pool.v), (*plain.pool.k, *plain.pool.v), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_and_halves_differ_by_their_rounding(bits: int) -> None:
    """Rounded activations, keys and values in float16: near the float32 pass, and layer by layer nearly the same."""
    plain, rounded = decoder(bits=bits), decoder(bits=bits, integer=True)
    if not lowbit.supports_integers():
        pytest.skip("the machine has no integer products that the kernel knows")
    assert rounded._compiled is not None
    exact, near = Stream(plain, 3), Stream(rounded, 3, torch.float16)
    by_layer = Stream(rounded, 3, torch.float16)
    for counts in ((40, 1, 17), (1, 30, 2)):
        one, two = exact.feed(counts).logits, near.feed(counts).logits
        whole, rounded._compiled = rounded._compiled, None
        three = by_layer.feed(counts).logits
        rounded._compiled = whole
        size = one.square().mean().sqrt()
        assert 1e-4 * size < (one - two).square().mean().sqrt() < 0.05 * size
        # A last bit in a norm may move an activation to the next code.
        assert (two - three).square().mean().sqrt() < 0.02 * size


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16])
def test_a_row_is_the_same_to_the_bit_alone_and_in_any_batch(integer: bool, kv_dtype: torch.dtype) -> None:
    if integer and not lowbit.supports_integers():
        pytest.skip("the machine has no integer products that the kernel knows")
    model = decoder(integer=integer)
    assert model._compiled is not None
    together, alone, chunked = (Stream(model, n, kv_dtype) for n in (2, 1, 1))
    batched = [together.feed(counts).logits for counts in ((33, 5), (1, 40), (8, 1))]
    whole = alone.feed((42,)).logits
    pieces = torch.cat([chunked.feed((n,)).logits for n in (1, 20, 21)])
    mine = torch.cat([batched[0][:33], batched[1][:1], batched[2][:8]])
    assert torch.equal(mine, whole)
    assert torch.equal(pieces, whole)


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.kernels.program.PARALLEL_WORK", 0)
    model, before = decoder(), torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            outputs.append(Stream(model, 2).feed((37, 4)).logits)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_threads_may_change_between_passes_and_not_all_of_them_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.kernels.program.PARALLEL_WORK", 0)
    model, before = decoder(), torch.get_num_threads()
    expected, stream = Stream(model, 2).feed((37, 4)).logits, Stream(model, 2)
    asked, run = [], parallel()

    def fewer(function: int, argument: int, threads: int) -> None:
        asked.append(threads)
        run(function, argument, max(1, threads - 2))

    monkeypatch.setattr("dspark.kernels.program.parallel", lambda: fewer)
    try:
        for threads in (2, 5, 3):
            torch.set_num_threads(threads)
            stream.done = [0, 0]
            assert torch.equal(stream.feed((37, 4)).logits, expected)
    finally:
        torch.set_num_threads(before)
    assert asked == [2, 5, 3]


def test_taps_and_pools_may_change_between_passes() -> None:
    model = decoder()
    first, second = Stream(model, 1), Stream(model, 1)
    a, b = first.feed((20,)), second.feed((20,))
    assert torch.equal(a.logits, b.logits)
    assert a.taps is not None
    assert a.taps.shape == (20, 3 * 128)
    more = [stream.feed((7,)).logits for stream in (first, second)]
    assert torch.equal(*more)


def test_positions_beyond_the_rotary_table_are_caught() -> None:
    model = decoder()
    assert model._compiled is not None
    stream = Stream(model, 1)
    stream.done = [79]
    rotation = model._compiled.stack.rotation
    model._compiled.stack.rotation = dataclasses.replace(rotation, cos=rotation.cos[:50])
    with pytest.raises(AssertionError):
        stream.feed((1,))


@pytest.mark.parametrize("hidden", [32, 64])  # halves of heads that fill no vector
def test_unsuitable_shapes_run_layer_by_layer(hidden: int) -> None:
    model = tiny_decoder(hidden=hidden, dtype=torch.float32)
    lowbit_linears(model)
    assert model.prepare()._compiled is None


def test_layers_in_full_precision_run_layer_by_layer() -> None:
    assert tiny_decoder(hidden=128, dtype=torch.float32).prepare()._compiled is None


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_embedding_and_head_in_the_same_call(bits: int, integer: bool) -> None:
    """Token ids to logits: the layers' own results with a look-up before and a product behind, to the bit."""
    if integer and not lowbit.supports_integers():
        pytest.skip("the machine has no integer products that the kernel knows")
    model = decoder(bits=bits, integer=integer)
    head = model.lm_head
    assert isinstance(head, lowbit.LowBitLinear)
    table = QuantizedWeight.from_float(torch.randn(64, 128, generator=torch.Generator().manual_seed(1)), bits)
    layer = lowbit.LowBitLinear(table, integer=integer)
    stack = model._compiled.stack
    passes = [CompiledTarget(stack), CompiledTarget(stack, head), CompiledTarget(stack, head, layer)]
    ids, rows = torch.tensor([3, 63, 0, 31, 32, 3]), torch.tensor([5, 1])
    results = []
    for compiled in passes:
        pool = KVPool(model.kv_specs, 1, BLOCK)
        plan = AttentionPlan(
            np.array([0, 6]), np.zeros(1, np.int64), np.zeros((1, 1), np.int64), torch.arange(6), True, BLOCK
        )
        inputs = ids if compiled.embedding is not None else table.dequantize()[ids]
        for wanted in (None, rows):
            given = (inputs.clone(), torch.arange(6), plan, pool.k, pool.v, TAPS, wanted)
            out, tapped, best = compiled(*given, argmax=True)
            logits = out if compiled.head is not None else head(out)
            assert (best is None) == (compiled.head is None)
            assert best is None or torch.equal(best, logits.argmax(-1))
            assert compiled(*given)[2] is None
            without = compiled(inputs.clone(), *given[1:5], (), wanted)  # in the same memory, taps left out
            assert torch.equal(without[0], out)
            assert without[1].shape == (6, 0)
            results.append((logits, tapped))
    for i, (logits, tapped) in enumerate(results):
        assert torch.equal(logits, results[0][0] if i % 2 == 0 else results[0][0][rows])
        assert torch.equal(tapped, results[0][1])
    with pytest.raises(IndexError, match=r"0\.\.63"):
        passes[2](torch.tensor([64] * 6), torch.arange(6), plan, pool.k, pool.v)
