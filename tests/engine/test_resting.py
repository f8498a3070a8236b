"""Rounds that a drafter does not follow: cheaper, the text the same, and no draft from a context with holes."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.core import SamplingParams
from dspark.drafters.lookup import LookupFirst
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.schedule.forward import ForwardingPolicy
from dspark.schedule.policies import FixedLength, Resting
from dspark.testing import tiny_decoder, tiny_drafter


class _Rests(FixedLength):
    """Drafts in all rounds but those of `asleep`, which nobody need follow."""

    def __init__(self, length: int, asleep: range, far: float = 1000) -> None:
        super().__init__(length)
        object.__setattr__(self, "far", far)
        object.__setattr__(self, "asleep", asleep)
        object.__setattr__(self, "rooms", [])

    def draft_lengths(self, state):
        self.rooms.append(state.room.tolist())
        if len(self.rooms) - 1 in self.asleep:
            return np.zeros_like(state.room)
        return super().draft_lengths(state)

    def rests(self, num_requests):
        return self.far if len(self.rooms) - 1 in self.asleep else 0


def run(engine, prompts, max_tokens=24):
    """Ids by request, and the engine's rounds; a request more joins in round 8."""
    for i, prompt in enumerate(prompts[:-1]):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), str(i))
    outputs, rounds = {}, 0
    while engine.has_unfinished:
        if rounds == 8:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            engine.add(prompts[-1], params, "late")
        for event in engine.step():
            if event.output is not None:
                outputs[event.request_id] = event.output
        rounds += 1
    return {name: output.token_ids for name, output in outputs.items()}, outputs


PROMPTS = [[5, 6, 7], [9, 9, 3, 4, 1, 2], [8, 1]]


def test_rows_that_were_not_followed_are_not_drafted_for() -> None:
    target, taps = tiny_decoder(), []
    forward = target.forward
    target.forward = lambda batch, pool, wanted=(): taps.append(wanted) or forward(batch, pool, wanted)
    policy = _Rests(2, range(3, 6))
    assert isinstance(policy, Resting)
    ids, outputs = run(Engine(target, tiny_drafter(target), policy), PROMPTS)
    assert ids == run(Engine(tiny_decoder()), PROMPTS)[0]
    drafter_taps = tiny_drafter(target).taps
    assert [wanted == () for wanted in taps[:8]] == [False] * 3 + [True] * 5, "nobody is left to follow"
    assert set(taps) == {(), drafter_taps}
    assert all(min(room) > 0 for room in policy.rooms[1:4])
    assert all(room[:2] == [0, 0] for room in policy.rooms[4:9])
    late = policy.rooms[10:12]  # the request that came behind the rest has all its rows followed
    assert all(room[-1] > 0 and room[0] == 0 for room in late)
    assert outputs["late"].metrics.drafted > 0


def test_a_request_that_outlasts_the_rest_is_followed() -> None:
    """Its drafts come again when the rest is over; so do those of shorter ones beside it."""
    target, taps = tiny_decoder(), []
    forward = target.forward
    target.forward = lambda batch, pool, wanted=(): taps.append(wanted) or forward(batch, pool, wanted)
    policy = _Rests(2, range(3, 6), far=12)
    ids, _ = run(Engine(target, tiny_drafter(target), policy), PROMPTS)
    assert ids == run(Engine(tiny_decoder()), PROMPTS)[0]
    assert () not in taps
    assert min(policy.rooms[6]) > 0


def test_copies_need_no_context() -> None:
    """Prompt lookup in front of a drafter that was left behind goes on."""
    target = tiny_decoder()
    drafter = LookupFirst(tiny_drafter(target), 2, 4)
    policy = _Rests(2, range(1, 3))
    prompts = [[1, 2, 3, 4, 1, 2, 3, 4, 1, 2], [3, 3, 3, 3, 3], [8, 1]]
    ids, _ = run(Engine(target, drafter, policy), prompts, 30)
    assert ids == run(Engine(tiny_decoder()), prompts, 30)[0]
    assert any(max(room[:2]) > 0 for room in policy.rooms[4:])


def test_a_preempted_request_is_followed_again() -> None:
    """It runs all its rows anew, which the drafter sees."""
    target = tiny_decoder()
    policy = _Rests(2, range(2, 4))
    config = EngineConfig(block_size=16, kv_cache_tokens=64, max_model_len=64)
    engine = Engine(target, tiny_drafter(target), policy, config=config)
    prompts = [[5, 6, 7], [9, 9, 3, 4, 1, 2], [8, 1]]
    ids, outputs = run(engine, prompts, 40)
    assert ids == run(Engine(tiny_decoder()), prompts, 40)[0]
    assert outputs["1"].metrics.drafted > 6


def test_who_forwards_a_policy_forwards_its_rest() -> None:
    inner = _Rests(2, range(5))
    inner.rooms.append([1])
    assert ForwardingPolicy(inner).rests(1) == 1000
    assert ForwardingPolicy(FixedLength(2)).rests(1) == 0


def test_what_was_decided_is_told_though_the_clock_s_listener_fails() -> None:
    class Deaf(FixedLength):
        def timed(self, state, drafted, scheduled, draft_s, step_s):
            raise RuntimeError("no")

    engine = Engine(tiny_decoder(), None, Deaf(0))
    engine.add([1, 2], SamplingParams(temperature=0, max_tokens=1), "short")
    engine.add([1, 2], SamplingParams(temperature=0, max_tokens=5), "long")
    with pytest.raises(RuntimeError, match="no"):
        engine.step()
    told = {event.request_id: event.output for event in engine.step() if event.output is not None}
    assert told["short"].finish_reason == "length"
    assert told["long"].finish_reason == "abort"
    assert not engine.has_unfinished
