"""Autoregressive drafters: what is served is what was trained, and rollbacks leave no trace."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from dspark.core import Draft, Request, SamplingParams
from dspark.drafters.base import ObserveBatch, ProposeBatch
from dspark.drafters.chain import ChainDrafter
from dspark.engine.engine import Engine
from dspark.kernels.lowbit import LowBitLinear, supports
from dspark.kv import BlockTable, KVPool
from dspark.sampling import SamplingRows
from dspark.target.decoder import Decoder
from dspark.testing import tiny_decoder
from dspark.testing.chain import tiny_chain_drafter, tiny_chain_model
from dspark.train.blocks import make_batch
from dspark.train.chains import chain_forward
from dspark.train.data import Sequence
from dspark.train.features import FeatureSource

G = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, 60, (30,), generator=G).tolist()
OTHERS = torch.randint(0, 60, (17,), generator=G).tolist()
METHODS = ("eagle3", "mtp")


@dataclass
class Served:
    """One drafter over a pool of its own, fed with the target's features by hand."""

    target: Decoder
    drafter: ChainDrafter
    block_size: int = 4
    requests: list[Request] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = KVPool(self.drafter.kv_specs, 60, self.block_size, self.target.dtype)
        self.drafter.attach(self.pool, 0)

    def add(self, tokens: list[int], temperature: float = 0) -> Request:
        params = SamplingParams(temperature=temperature)
        request = Request(len(self.requests), "r", list(tokens), params, seed=7, max_total=99)
        self.requests.append(request)
        self.tables.append(BlockTable())
        return request

    def observe(self, stops: list[int]) -> None:
        """Each request's positions cached .. stop become committed and observed, in one batch."""
        taps, positions, slots, counts = [], [], [], []
        for request, table, stop in zip(self.requests, self.tables, stops, strict=True):
            assert self.pool.reserve(table, stop + self.drafter.max_draft)
            ids = torch.tensor([request.token_ids[:stop]])
            taps.append(self.target.hidden_states(ids, self.drafter.taps)[0][0, request.cached :])
            positions.append(torch.arange(request.cached, stop))
            slots.append(torch.from_numpy(self.pool.slots(table, request.cached, stop)))
            counts.append(stop - request.cached)
        start = np.concatenate(([0], np.cumsum(counts)))
        self.drafter.observe(
            ObserveBatch(self.requests, start, torch.cat(positions), torch.cat(slots), torch.cat(taps))
        )
        for request, stop in zip(self.requests, stops, strict=True):
            request.cached = stop

    def propose(self, lengths: list[int]) -> Draft:
        width = max(len(t.blocks) for t in self.tables)
        tables = np.array([t.blocks + [0] * (width - len(t.blocks)) for t in self.tables])
        rows, none = SamplingRows.of(self.requests), [None] * len(self.requests)
        return self.drafter.propose(ProposeBatch(self.requests, np.array(lengths), rows, tables, none))

    def kv(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pool.read(0, self.tables[index], self.requests[index].cached)


def logits_served(drafter: ChainDrafter, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the LM head gives from now on, slot by slot."""
    seen: list[torch.Tensor] = []
    head = drafter.model.lm_head
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda x: (seen.append(forward(x)), seen[-1])[1])
    return seen


@pytest.mark.parametrize("confidence", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("method", METHODS)
def test_serving_form_equals_training_form(method, kind, confidence, monkeypatch):
    """The training form, forced to the tokens that serving drafted, computes serving's logits."""
    target = tiny_decoder(kind=kind)
    model = tiny_chain_model(target, method, 5, 40, confidence)
    drafter = tiny_chain_drafter(target, method, 5, 40, confidence)
    for prefix, anchor in ((TOKENS, 12), (TOKENS, 1), (OTHERS, 16)):
        served = Served(target, drafter)
        served.add(prefix[: anchor + 1])
        served.observe([anchor])
        seen = logits_served(drafter, monkeypatch)
        draft = served.propose([5])
        drafted = [*prefix[: anchor + 1], *draft.tokens[0].tolist()]
        sequence = Sequence(drafted, 1)
        features = FeatureSource(target, drafter.taps)([sequence])
        batch = make_batch([sequence], features, [torch.tensor([anchor])], 5)
        _, logits, trained_confidence = chain_forward(model, batch)
        assert batch.mask.all()
        torch.testing.assert_close(logits[0].detach(), torch.cat(seen))
        assert (trained_confidence is not None) == confidence
        if trained_confidence is not None:
            torch.testing.assert_close(trained_confidence.detach(), draft.confidence)
        drafter.forget(served.requests[0])


@pytest.mark.parametrize("method", METHODS)
def test_many_anchors_equal_each_alone(method):
    target = tiny_decoder()
    model = tiny_chain_model(target, method)
    sequences = [Sequence(TOKENS, 8), Sequence(OTHERS, 1), Sequence(TOKENS[:9], 3)]
    anchors = [torch.tensor([8, 13, 28]), torch.tensor([1, 15]), torch.tensor([3])]
    features = FeatureSource(target, model.config.taps)(sequences)
    together = chain_forward(model, make_batch(sequences, features, anchors, 4))[1]
    alone = [
        chain_forward(model, make_batch([s], [f], [a[i : i + 1]], 4))[1]
        for s, f, a in zip(sequences, features, anchors, strict=True)
        for i in range(len(a))
    ]
    torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize("method", METHODS)
def test_nothing_at_or_behind_the_anchor_leaks_into_a_chain(method):
    target = tiny_decoder()
    model = tiny_chain_model(target, method)
    sequence, anchor = Sequence(TOKENS, 8), [torch.tensor([14])]
    features = FeatureSource(target, model.config.taps)([sequence])
    clean = chain_forward(model, make_batch([sequence], features, anchor, 4))[1]
    features[0].taps[14:] += 100.0  # the target has not seen the anchor yet
    again = chain_forward(model, make_batch([sequence], features, anchor, 4))[1]
    torch.testing.assert_close(clean, again, rtol=0, atol=0)
    features[0].taps[13] += 1.0
    other = chain_forward(model, make_batch([sequence], features, anchor, 4))[1]
    assert (clean - other).abs().max() > 1e-6
    # Slot k sees the anchor and the k - 1 tokens behind it.
    changed = Sequence([*TOKENS[:16], (TOKENS[16] + 1) % 60, *TOKENS[17:]], 8)
    later = chain_forward(model, make_batch([changed], features, anchor, 4))[1]
    torch.testing.assert_close(other[:, :2], later[:, :2], rtol=0, atol=0)
    assert (other[:, 2] - later[:, 2]).abs().max() > 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_rollback_leaves_the_kv_of_a_fresh_observe(method):
    """After chains of which 0, 2 and all tokens are accepted, the KV is that of true features alone."""
    target = tiny_decoder()
    drafter = tiny_chain_drafter(target, method)
    served = Served(target, drafter)
    request = served.add(TOKENS[:11])
    served.observe([10])
    for accepted in (0, 2, 6):
        served.propose([6])
        committed = len(request.token_ids) + accepted + 1
        request.token_ids[:] = TOKENS[:committed]
        served.observe([committed - 1])
        fresh = Served(target, tiny_chain_drafter(target, method), block_size=16)
        fresh.add(TOKENS[:committed])
        fresh.observe([committed - 1])
        for got, want in zip(served.kv(0), fresh.kv(0), strict=True):
            torch.testing.assert_close(got, want)
        assert served.propose([6]).tokens.tolist() == fresh.propose([6]).tokens.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_ragged_batches_draft_what_each_request_drafts_alone(method, temperature):
    target = tiny_decoder()
    lengths, stops = [3, 0, 5, 1], [12, 4, 7, 1]
    served = Served(target, tiny_chain_drafter(target, method, draft_vocab_size=40))
    for stop in stops:
        served.add(TOKENS[: stop + 1], temperature)
    served.observe([2, 2, 3, 1])  # a prefill in two chunks
    served.observe(stops)
    draft = served.propose(lengths)
    assert draft.lengths.tolist() == lengths
    for i, (length, stop) in enumerate(zip(lengths, stops, strict=True)):
        alone = Served(target, tiny_chain_drafter(target, method, draft_vocab_size=40))
        for _ in range(i):
            alone.add([1, 2])  # the uid addresses the randomness
        alone.add(TOKENS[: stop + 1], temperature)
        alone.observe([1] * i + [stop])
        single = alone.propose([0] * i + [length])
        assert single.tokens[i, :length].tolist() == draft.tokens[i, :length].tolist()
        if temperature and length:
            torch.testing.assert_close(single.probs[i, :length], draft.probs[i, :length])


def test_a_request_that_was_never_observed_drafts_nothing():
    target = tiny_decoder()
    served = Served(target, tiny_chain_drafter(target))
    served.add(TOKENS[:4])
    assert served.pool.reserve(served.tables[0], 8)
    assert served.propose([3]).lengths.tolist() == [0]
    served.observe([3])
    assert served.propose([3]).lengths.tolist() == [3]
    served.drafter.forget(served.requests[0])
    assert served.propose([3]).lengths.tolist() == [0]


@pytest.mark.skipif(not supports(), reason="this processor lacks the low-bit kernels")
@pytest.mark.parametrize("method", METHODS)
def test_quantised_serving_stays_close(method):
    target = tiny_decoder(dtype=torch.float32, hidden=64)
    plain, small = (
        Served(target, ChainDrafter(tiny_chain_model(target, method), rounded)) for rounded in (False, True)
    )
    for served in (plain, small):
        served.add(TOKENS[:13])
        served.observe([12])
    assert isinstance(small.drafter._project, LowBitLinear)
    for got, want in zip(small.kv(0), plain.kv(0), strict=True):
        assert 0 < float((got - want).abs().max()) < 0.2 * float(want.abs().max())
    assert small.propose([4]).tokens.shape == (1, 4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("nth", range(4))
def test_a_request_may_end_inside_an_accepted_block(method, nth, monkeypatch):
    """Rows behind the end were processed, but belong to no token: nobody is told of them."""
    target = tiny_decoder()

    def generate(engine: Engine, stop_ids: list[int]) -> list[int]:
        engine.add([5, 6, 7], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=stop_ids))
        engine.add([9, 3], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        done = {}
        while engine.has_unfinished:
            done |= {e.request_id: e.output for e in engine.step() if e.output is not None}
        assert len(done["request-1"].token_ids) == 20
        return done["request-0"].token_ids

    reference = generate(Engine(target), [])
    ends = [i for i, token in enumerate(reference) if i > 3 and token not in reference[:i]]
    stop = ends[nth]  # stop tokens that occur there first, so that they end it there
    drafter = tiny_chain_drafter(target, method)

    def right(batch: ProposeBatch) -> Draft:
        tokens = torch.zeros(len(batch.lengths), int(batch.lengths.max()), dtype=torch.int64)
        for r, request in enumerate(batch.requests):
            ahead = (reference + [0] * 20)[request.num_output :]
            tokens[r] = torch.tensor(ahead[: tokens.shape[1]])
        return Draft(tokens, batch.lengths.copy())

    monkeypatch.setattr(drafter, "propose", right)
    assert generate(Engine(target, drafter), [reference[stop]]) == reference[: stop + 1]
