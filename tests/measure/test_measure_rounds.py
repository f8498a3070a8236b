"""Rounds in parts: rows and contexts are as asked, parts add up, and the pass in parts is the decoder's own."""

import itertools

import numpy as np
import pytest
import torch

from dspark.core import DSparkError
from dspark.kernels import lowbit
from dspark.kernels.lowbit import lowbit_linears
from dspark.kernels.program_numba import NORM, PRODUCT, ROTARY
from dspark.measure import RoundSettings, measure_rounds
from dspark.measure.replay import PARTS, PassReplay
from dspark.measure.rounds import ROUND, RowsPolicy
from dspark.measure.stopwatch import Stopwatch, Watched
from dspark.schedule.policies import ScheduleState
from dspark.testing import tiny_decoder, tiny_drafter

TEXTS = [torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(2)).tolist()] * 2
compiled = pytest.mark.skipif(not lowbit.supports(), reason="no compiled low-bit products on this processor")


class Ticks:
    """A clock that goes on by one second a reading."""

    def __init__(self):
        self._count = itertools.count()

    def __call__(self):
        return float(next(self._count))


@pytest.fixture
def models():
    target = tiny_decoder(hidden=128, dtype=torch.float32)
    drafter = tiny_drafter(target)
    lowbit_linears(target)
    return target.prepare(), drafter


def medians(figures):
    return {name: spread["median"] for name, spread in figures.items()}


@compiled
def test_rows_context_and_sums(models):
    settings = RoundSettings(rows=(1, 6, 11), context=40, repeats=2, rounds=2)
    seen = []
    report = measure_rounds(*models, TEXTS, settings, lambda: seen.append(1), Ticks())
    assert len(seen) == 3
    assert [(r["rows"], r["requests"]) for r in report["results"]] == [(1, 1), (6, 1), (11, 2)]
    for r in report["results"]:
        assert r["rows_run"] == {"median": r["rows"], "min": r["rows"], "max": r["rows"]}
        assert 40 <= r["context"]["min"] <= r["context"]["max"] <= 40 + 4 * 8
        parts = medians(r["round"])
        assert sum(parts[name] for name in ROUND[1:]) == pytest.approx(parts["round"])
        assert parts["pass"] == 1000.0  # from one reading to the next
        assert (parts["draft"] > 0) == (r["rows"] > 1)
        assert parts["observe"] > 0
        inner = r["parts"]
        assert set(PARTS) < set(inner)
        assert inner["layers"]["median"] == 1000.0
        assert (
            inner["products"]["in_place"]["median"] == inner["lm_head"]["median"] == 0.0
        )  # by this clock all programs take as long
    assert [ratio["pass"] for ratio in report["ratios"]] == [1.0, 1.0, 1.0]


@compiled
def test_parts_left_out_are_left_out_and_nothing_stays(models):
    """A program without products leaves their outputs alone; the decoder afterwards gives the same logits."""
    target, _ = models
    caught = []
    forward = target.forward

    class Spy(PassReplay):
        def times(self, clock):
            before = forward(self.batch, self.pool, self.taps).logits
            times = super().times(clock)
            caught.append((before, forward(self.batch, self.pool, self.taps).logits, times))
            program = self.compiled.bound.program
            assert (program.steps["units"][program.of_kind(PRODUCT)] > 0).all()
            return times

    settings = RoundSettings(rows=(2,), drafts=0, context=20, repeats=1, rounds=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark.measure.rounds.PassReplay", Spy)
        measure_rounds(target, None, TEXTS, settings)
    assert len(caught) == 2
    for before, after, times in caught:
        assert torch.equal(before, after)
        assert {f"only {name}" for name in PARTS} | {"program", "empty", "lm_head"} <= set(times)
    assert target._compiled is not None


@compiled
def test_kinds_without_units_do_nothing(models, monkeypatch):
    target, _ = models
    ran = []

    def spy(program, steps, groups, attention, clock):
        bound = target._compiled.bound
        memory, rows = bound.memory, groups[0].count
        for part in (memory.qkv, memory.normed):
            part.fill_(7.0)
        monkeypatch.setattr(replay, "_run_steps", original)
        replay._run_steps(program, steps, groups, attention, clock)
        monkeypatch.setattr(replay, "_run_steps", spy)
        kinds = set(program.steps["kind"][steps & (np.arange(len(steps)) < bound.layer_steps)])
        ran.append((kinds, bool((memory.qkv[:rows] != 7).any()), bool((memory.normed[:rows] != 7).any())))
        return 1.0

    from dspark.measure import replay

    original = replay._run_steps
    monkeypatch.setattr(replay, "_run_steps", spy)
    settings = RoundSettings(rows=(1,), drafts=0, context=20, repeats=1, rounds=1)
    measure_rounds(target, None, TEXTS, settings)
    assert len(ran) == 2 * (3 + 2 * len(PARTS))
    for kinds, products, norms in ran:
        assert products == (PRODUCT in kinds or ROTARY in kinds)  # rotary works in place on keys
        assert norms == (NORM in kinds)


def test_without_a_compiled_pass_there_are_no_parts():
    target = tiny_decoder().prepare()
    settings = RoundSettings(rows=(2,), drafts=0, context=20, repeats=1, rounds=1)
    report = measure_rounds(target, None, TEXTS, settings)
    assert report["results"][0]["parts"] is None
    assert report["results"][0]["by_modules"]["median"] > 0
    assert report["ratios"] == []


def test_policy_fills_the_rows():
    policy = RowsPolicy()
    uids = np.arange(3)
    state = ScheduleState(uids, np.array([7, 7, 7]), uids, np.ones(3, dtype=np.int64), np.ones(3, dtype=bool))
    assert policy.draft_lengths(state).tolist() == [0, 0, 0]
    policy.rows = 16
    assert policy.draft_lengths(state).tolist() == [5, 4, 4]
    policy.rows = 24
    assert policy.draft_lengths(state).tolist() == [7, 7, 7]


def test_watched_calls_are_timed_and_the_rest_passes():
    watch = Stopwatch(Ticks())
    watched = Watched([3, 1], ["append"], watch)
    watched.append(2)
    assert watched.last == {"append": (2,)}
    assert watched.count(2) == 1
    assert watch.spent == {"append": 1.0}
    watched.append(4)
    assert watch.spent == {"append": 2.0}


@pytest.mark.parametrize(
    "wrong", [{"rows": ()}, {"drafts": -1}, {"context": 1}, {"repeats": 0}, {"rounds": 0}]
)
def test_settings_out_of_range(wrong):
    with pytest.raises(DSparkError):
        RoundSettings(**wrong)


def test_a_context_that_does_not_fit():
    with pytest.raises(DSparkError, match="at most"):
        measure_rounds(tiny_decoder(), None, TEXTS, RoundSettings(rows=(1,), context=250))
    with pytest.raises(DSparkError, match="text"):
        measure_rounds(tiny_decoder(), None, [], RoundSettings(rows=(1,)))
