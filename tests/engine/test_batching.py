"""Company changes nothing: a request in a batch gives what it gives alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dspark.core import RequestOutput, SamplingParams
from dspark.drafters.base import Drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.target.decoder import Decoder
from dspark.testing import ScriptedDrafter, run_engine, tiny_decoder, tiny_drafter
from dspark.testing.chain import tiny_chain_drafter

GREEDY = SamplingParams(temperature=0, max_tokens=14, seed=2)
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    ([1, 2, 3], GREEDY),
    ([7], SamplingParams(temperature=1.3, max_tokens=14, seed=5)),
    (list(range(12)) * 2, SamplingParams(temperature=0.8, top_k=4, max_tokens=9, seed=5)),
    ([4, 4], replace(GREEDY, max_tokens=5, presence_penalty=1.1)),
    ([9, 0, 9, 0], SamplingParams(temperature=2.0, top_p=0.9, max_tokens=20, seed=5, frequency_penalty=0.5)),
    ([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=14, seed=5, speculative=False)),
    ([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=14, seed=5)),
    ([6] * 13, SamplingParams(temperature=1.5, min_p=0.1, max_tokens=14, seed=8, stop_token_ids=(3,))),
]

DRAFTERS: dict[str, Callable[[Decoder], Drafter | None]] = {
    "none": lambda target: None,
    "ngram": lambda target: NgramDrafter(5, lookup_max=2, lookup_min=1),
    "dspark": lambda target: tiny_drafter(target, head="gated"),
    "dspark-pruned": lambda target: tiny_drafter(target, head="rnn", draft_vocab_size=8),
    "dflash": lambda target: tiny_drafter(target, method="dflash"),
    "unreliable": lambda target: ScriptedDrafter.unreliable(target, 5),
    "eagle3-pruned": lambda target: tiny_chain_drafter(target, draft_vocab_size=8),
    "mtp": lambda target: tiny_chain_drafter(target, "mtp"),
}


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny_decoder(seed=6, vocab_size=12, max_context=128)


def alone(target: Decoder, drafter: Drafter | None, uid: int) -> RequestOutput:
    """Request `uid` in an engine of its own; ended requests before it use up the lower uids."""
    engine = Engine(target, drafter)
    fillers = [([0], replace(GREEDY, max_tokens=0))] * uid
    prompts, params = zip(*fillers, REQUESTS[uid], strict=True)
    return run_engine(engine, prompts, params)[-1]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_batch_gives_what_its_requests_give_alone(name: str, target: Decoder) -> None:
    prompts, params = zip(*REQUESTS, strict=True)
    single = [alone(target, DRAFTERS[name](target), uid) for uid in range(len(REQUESTS))]
    for config in (
        EngineConfig(max_num_seqs=8),
        EngineConfig(max_num_seqs=3, block_size=4),
        EngineConfig(max_num_seqs=8, max_num_batched_tokens=9, block_size=1),
    ):
        together = run_engine(Engine(target, DRAFTERS[name](target), config=config), prompts, params)
        assert [o.token_ids for o in together] == [o.token_ids for o in single]
        assert [o.metrics for o in together] == [o.metrics for o in single]
        assert [o.stop_reason for o in together] == [o.stop_reason for o in single]


def test_sampled_requests_with_one_seed_differ_by_uid(target: Decoder) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, seed=5)
    outputs = run_engine(Engine(target, tiny_drafter(target)), [[1, 2]] * 6, params)
    assert len({tuple(o.token_ids) for o in outputs}) == 6
    again = run_engine(Engine(target, tiny_drafter(target)), [[1, 2]] * 6, params)
    assert [o.token_ids for o in again] == [o.token_ids for o in outputs]


def test_a_request_without_a_seed_records_a_fresh_one(target: Decoder) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12)
    drafter = tiny_drafter(target)
    first, second = (run_engine(Engine(target, drafter), [[1, 2]], params)[0] for _ in range(2))
    assert first.seed != second.seed
    (again,) = run_engine(Engine(target, drafter), [[1, 2]], replace(params, seed=first.seed))
    assert again.token_ids == first.token_ids


def test_late_arrivals_join_a_running_batch(target: Decoder) -> None:
    """Requests added between steps, others aborted: nobody's tokens change."""
    drafter = tiny_drafter(target)
    single = [alone(target, drafter, uid).token_ids for uid in range(len(REQUESTS))]
    engine = Engine(target, drafter, config=EngineConfig(max_num_seqs=4, block_size=4))
    results, ids, queue = {}, [], list(REQUESTS)
    while queue or engine.has_unfinished:
        if queue:
            ids.append(engine.add(*queue.pop(0)))
        if len(ids) == 6 and queue:
            engine.abort(ids[4])
        for event in engine.step():
            if event.output is not None:
                results[event.request_id] = event.output.token_ids
    expected = {i: tokens for i, tokens in zip(ids, single, strict=True) if i != ids[4]}
    assert {i: t for i, t in results.items() if i != ids[4]} == expected
