"""What goes wrong inside or around a round must not reach other requests, nor stay behind."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dspark.core import Draft, DSparkError, SamplingParams
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.schedule.policies import Dependence, FixedLength
from dspark.testing import ScriptedDrafter, TableTarget, run_engine, tiny_decoder, tiny_drafter

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CYCLE = torch.eye(8)[torch.arange(1, 9) % 8]


def finish(engine):
    outputs = {}
    while engine.has_unfinished:
        outputs |= {e.request_id: e.output for e in engine.step() if e.output is not None}
    return outputs


class Lying(FixedLength):
    """Asks for more than there is room for."""

    def draft_lengths(self, state):
        return np.where(state.room > 0, state.room + 1, 0)


class Overlong:
    """Wraps a drafter and returns longer drafts than were asked for."""

    def __init__(self, inner):
        self.__dict__["inner"] = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def propose(self, batch):
        draft = self.inner.propose(batch)
        return Draft(draft.tokens.repeat(1, 30), draft.lengths * 30)


@pytest.mark.parametrize("wrong", ["policy", "drafter"])
def test_lengths_beyond_the_room_are_refused_by_name(wrong):
    target = TableTarget(CYCLE)
    drafter = ScriptedDrafter.fixed([1, 2])
    if wrong == "policy":
        engine, name = Engine(target, drafter, Lying(2)), "draft_lengths"
    else:
        engine, name = Engine(target, Overlong(drafter), FixedLength(2)), "drafter fixed"
    engine.add([0], GREEDY)
    with pytest.raises(DSparkError, match=name):
        finish(engine)
    outputs = finish(engine)  # the round's requests were aborted, and the engine goes on
    assert [o.finish_reason for o in outputs.values()] == ["abort"]
    assert engine.pool.num_free == engine.pool.num_blocks


def test_an_error_in_a_round_aborts_its_requests_and_no_others():
    target = tiny_decoder()
    engine = Engine(target, config=EngineConfig(max_num_seqs=2))
    ids = [engine.add([i + 1, 2, 3], GREEDY) for i in range(3)]
    engine.step()
    stream = engine._by_id[ids[1]].stream
    stream.commit = lambda tokens: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs = finish(engine)
    assert [outputs[i].finish_reason for i in ids] == ["abort", "abort", "length"]
    (alone,) = run_engine(Engine(target), [[3, 2, 3]], GREEDY)
    assert outputs[ids[2]].token_ids == alone.token_ids
    assert engine.pool.num_free == engine.pool.num_blocks


def test_an_event_outside_a_round_survives_an_error_in_it():
    engine = Engine(TableTarget(CYCLE), ScriptedDrafter.fixed([1]), Lying(1))
    engine.add([0], GREEDY)
    engine.step()  # prefill
    empty = engine.add([0], replace(GREEDY, max_tokens=0))
    with pytest.raises(DSparkError):
        engine.step()
    assert finish(engine)[empty].finish_reason == "length"


def test_speculation_never_takes_a_place_that_plain_decoding_has():
    target = tiny_decoder()
    config = EngineConfig(block_size=4, kv_cache_tokens=64)
    prompts = [[i + 1, 5, 9, 3, 2, 7] for i in range(4)]
    steps = []
    for drafter in (None, ScriptedDrafter.always_wrong(target, 7)):
        engine = Engine(target, drafter, config=config)
        run_engine(engine, prompts, replace(GREEDY, max_tokens=20))
        steps.append(engine.timings.steps)
    assert steps[1] <= steps[0]


def test_room_for_drafts_is_handed_out_in_part():
    target = TableTarget(CYCLE)
    config = EngineConfig(block_size=4, kv_cache_tokens=8)
    engine = Engine(target, ScriptedDrafter.copy_target(target, 7), config=config)
    (output,) = run_engine(engine, [[0]], replace(GREEDY, max_tokens=7))
    assert output.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert output.metrics.rounds == 1  # 6 drafts fit although 7 do not


def test_drafts_accepted_behind_the_end_are_not_counted():
    target = TableTarget(CYCLE, eos_token_ids=(4,))
    engine = Engine(target, ScriptedDrafter.copy_target(target, 7))
    (output,) = run_engine(engine, [[0]], replace(GREEDY, max_tokens=20))
    assert output.token_ids == [1, 2, 3, 4]
    assert output.metrics.committed == 3  # the first token came from the prompt's pass
    assert output.metrics.accepted == 3
    assert output.metrics.accepted_length == 3.0


def test_a_static_policy_must_not_read_survival():
    with pytest.raises(DSparkError, match="STATIC"):
        Engine(TableTarget(CYCLE), None, FixedLength(1, uses_survival=True))
    Engine(TableTarget(CYCLE), None, FixedLength(1, dependence=Dependence.CAUSAL, uses_survival=True))


def test_a_parallel_drafter_may_have_a_confidence_head():
    target = tiny_decoder()
    drafter = tiny_drafter(target, "dflash")
    config = replace(drafter.model.config, confidence_head=True)
    model = type(drafter.model)(config).to(target.dtype)
    model.requires_grad_(False)
    fresh = type(drafter)(model)
    seen = []
    fresh.propose = lambda batch, inner=fresh.propose: seen.append(inner(batch)) or seen[-1]
    run_engine(Engine(target, fresh), [[1, 2, 3]], GREEDY)
    assert seen[0].confidence.shape == (1, 7)


def test_a_drafter_that_never_hits_is_reported_once(caplog):
    target = tiny_decoder(max_context=512)
    engine = Engine(target, tiny_drafter(target))
    engine.watch._accepted = -(10**6)  # whatever this random drafter achieves
    run_engine(engine, [[1, 2, 3]], replace(GREEDY, max_tokens=200))
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "hardly ever accepted" in caplog.text


def test_request_ids_never_collide():
    engine = Engine(TableTarget(CYCLE))
    engine.add([0], GREEDY, request_id="request-1")
    engine.add([0], GREEDY)
    engine.add([0], GREEDY)
    assert len(finish(engine)) == 3
    engine.add([0], GREEDY, request_id="a")
    with pytest.raises(DSparkError, match="'a' is in use"):
        engine.add([0], GREEDY, request_id="a")


def test_numpy_numbers_are_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), max_tokens=np.int64(3), stop=None, stop_token_ids=None
    )
    assert params.stop_strings == ()
    for bad in ({"stop": 5}, {"logit_bias": [1]}, {"speculative": "no"}, {"stop_token_ids": 5}):
        with pytest.raises(DSparkError, match=next(iter(bad))):
            SamplingParams(**bad)
