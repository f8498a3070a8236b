"""Measuring on a clock that a model's passes move, and profiles as files."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dspark.core import DSparkError
from dspark.drafters.lookup import LookupFirst
from dspark.drafters.ngram import NgramDrafter
from dspark.engine.judge import judge
from dspark.profile import (
    Profile,
    ProfileSettings,
    Sample,
    ensure_profile,
    fingerprint,
    load_cost_table,
    measure_profile,
    read_cost_table,
    write_cost_table,
)
from dspark.profile.measure import GROWTH, largest_pass
from dspark.schedule.cost import TableCost
from dspark.testing import tiny_decoder, tiny_drafter
from dspark.testing.chain import tiny_chain_drafter

CONTEXT = 1e-6  # seconds of a cached position
SETTINGS = ProfileSettings(seconds=0.0, repeats=2, context_lengths=(20, 30, 40), max_rows=12)


def near(seconds):
    """Up to what `Priced` asks for the tokens by which three requests grow while they are timed."""
    return pytest.approx(seconds, abs=6 * GROWTH * CONTEXT)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Priced:
    """A target whose passes take as long as is said here; everything else is the real one's."""

    def __init__(self, target, clock):
        self._target, self._clock = target, clock
        self.late = 0.0  # of the next pass alone

    def __getattr__(self, name):
        return getattr(self._target, name)

    def forward(self, batch, pool, taps=()):
        late, self.late = self.late, 0.0
        self._clock.now += late + 0.02 + 0.002 * batch.num_rows + CONTEXT * float(batch.context_lens.sum())
        return self._target.forward(batch, pool, taps)


class PricedDrafter:
    def __init__(self, drafter, clock, upkeep=0.0):
        self._drafter, self._clock, self._upkeep = drafter, clock, upkeep

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def propose(self, batch):
        self._clock.now += 0.003 + 0.0004 * int(batch.lengths.sum())
        return self._drafter.propose(batch)

    def observe(self, batch):
        self._clock.now += self._upkeep
        self._drafter.observe(batch)


@pytest.fixture(scope="module")
def target():
    return tiny_decoder(vocab_size=16, layers=1, hidden=16, max_context=64)


@pytest.fixture(scope="module")
def measured(target):
    clock = Clock()
    drafter = PricedDrafter(tiny_drafter(target, "dspark", "vanilla", 3, None), clock)
    return measure_profile(Priced(target, clock), drafter, 3, 16, SETTINGS, clock)


def test_the_engine_s_parts_are_timed(measured, target):
    cost = Profile({}, tuple(measured)).cost()
    assert isinstance(cost, TableCost), "requests have no price of their own"
    for rows, context in ((1, 4), (9, 4), (12, 4), (30, 4), (1, 40), (3, 1000)):
        expected = 0.02 + 0.002 * rows + CONTEXT * context
        assert float(cost.step_seconds(1, rows, context)) == near(expected)
    assert float(cost.draft_seconds(2, 6)) == near(0.003 + 0.0004 * 6)
    assert len({s.context for s in measured if s.kind == "step"}) == 3
    assert max(s.rows for s in measured if s.kind == "step") == 12


def test_a_pass_behind_a_draft_is_timed_as_such(target):
    """Passes alone are timed behind passes alone; the one right behind a draft is late by 4 ms here."""
    clock = Clock()
    priced = Priced(target, clock)

    class Displacing(PricedDrafter):
        def propose(self, batch):
            priced.late = 0.004
            return super().propose(batch)

    drafter = Displacing(tiny_drafter(target, "dspark", "vanilla", 3, None), clock)
    cost = Profile({}, tuple(measure_profile(priced, drafter, 3, 16, SETTINGS, clock))).cost()
    assert cost.displacement == near(0.004)
    assert float(cost.step_seconds(1, 1, 4)) == near(0.02 + 0.002 + 4 * CONTEXT)


def test_a_row_is_timed_once_it_has_settled(target):
    """Passes get faster by 1 ms each over the first twelve of a kind, as caches fill with what they read."""

    class Settling(Priced):
        kind, passes = (0, 0), 0

        def forward(self, batch, pool, taps=()):
            kind = batch.num_rows, len(batch.context_lens)
            self.passes = self.passes + 1 if kind == self.kind else 0
            self.kind, self.late = kind, 0.001 * max(0, 12 - self.passes)
            return super().forward(batch, pool, taps)

    clock = Clock()
    found = measure_profile(Settling(target, clock), None, 0, 4, SETTINGS, clock)
    assert Profile({}, tuple(found)).cost().step_price(1, 1, 20) == near(0.02 + 0.002 + 20 * CONTEXT)


def test_what_a_drafter_follows_is_part_of_a_drafts_price(target):
    """EAGLE-3 follows every commit of rounds with drafts at once, and none where drafting rests."""
    clock = Clock()
    drafter = PricedDrafter(tiny_chain_drafter(target, block_size=3), clock, upkeep=0.0005)
    cost = Profile({}, tuple(measure_profile(Priced(target, clock), drafter, 3, 16, SETTINGS, clock))).cost()
    assert float(cost.step_seconds(1, 9, 4)) == near(0.02 + 0.002 * 9 + 4 * CONTEXT)
    assert cost.displacement == near(0.0005)


def test_behind_a_lookup_the_model_is_timed(target):
    """It drafts less than is copied; in a vocabulary of 16, copies would take its place most of the time."""
    clock = Clock()
    model = PricedDrafter(tiny_drafter(target, "dspark", "vanilla", 3, None), clock)
    found = measure_profile(Priced(target, clock), LookupFirst(model, 3, 8), 8, 16, SETTINGS, clock)
    cost = Profile({}, tuple(found)).cost()
    assert float(cost.draft_seconds(2, 6)) == near(0.003 + 0.0004 * 6)
    assert cost.draft.per_draft == pytest.approx(0.0004)


def test_a_lookup_does_not_hide_upkeep(target):
    clock = Clock()
    eagle = PricedDrafter(tiny_chain_drafter(target, block_size=3), clock)
    found = measure_profile(Priced(target, clock), LookupFirst(eagle, 3, 8), 8, 16, SETTINGS, clock)
    assert {s.rows for s in found if s.kind == "upkeep"} == {1, 9}


def test_plain_decoding_of_many_requests_is_timed_as_such(measured):
    plain = {s.requests for s in measured if s.kind == "step" and s.requests == s.rows}
    assert plain == {1, 8}, "no more rows than max_rows"


def test_a_bench_whose_drafts_are_all_accepted_keeps_its_bounds(caplog):
    """Of a vocabulary of one every draft is right: requests reach the end of the context, and their last rounds fail to
    come. And of a larger one hardly any is: nobody is told that the drafter be a bad one."""
    clock = Clock()
    sure = tiny_decoder(vocab_size=1, layers=1, hidden=16, max_context=24)
    found = measure_profile(Priced(sure, clock), None, 3, 4, SETTINGS, clock)
    assert Profile({}, tuple(found)).cost().step_price(1, 1, 4) > 0
    many = tiny_decoder(vocab_size=300, layers=1, hidden=16, max_context=64)
    drafter = tiny_drafter(many, "dspark", "vanilla", 3, None)
    measure_profile(Priced(many, clock), drafter, 3, 16, replace(SETTINGS, repeats=8), clock)
    assert not caplog.records


def test_the_same_is_measured_whatever_was_drawn_before(target):
    """What is accepted of drafts at random decides how requests grow, and with them the time of a pass."""
    drafter, found = tiny_drafter(target, "dspark", "vanilla", 3, None), []
    for seed in (0, 1):
        clock = Clock()
        torch.manual_seed(seed)
        priced = PricedDrafter(drafter, clock)
        found.append(measure_profile(Priced(target, clock), priced, 3, 4, SETTINGS, clock))
    assert found[0] == found[1]


def test_short_contexts_and_lookup_drafters_can_be_profiled(target):
    clock = Clock()
    small = tiny_decoder(vocab_size=16, layers=1, hidden=16, max_context=24)
    found = measure_profile(Priced(small, clock), NgramDrafter(2), 2, 4, SETTINGS, clock)
    assert max(s.context for s in found) + 2 < 24
    assert Profile({}, tuple(found)).cost().draft.base == 0
    with pytest.raises(DSparkError, match="three context lengths"):
        ProfileSettings(context_lengths=(64, 512))


def test_an_engine_of_one_request_without_drafts_has_prices(target):
    clock = Clock()
    cost = Profile({}, tuple(measure_profile(Priced(target, clock), None, 0, 1, SETTINGS, clock))).cost()
    assert float(cost.step_seconds(1, 1, 4)) == near(0.02 + 0.002 + 4 * CONTEXT)


def test_more_time_gives_more_samples(target):
    def count(seconds):
        clock = Clock()
        settings = ProfileSettings(
            seconds=seconds, repeats=1, most=6, context_lengths=(4, 16, 40), max_rows=4
        )
        return len(measure_profile(Priced(target, clock), None, 0, 4, settings, clock))

    assert count(100.0) == 6 * count(0.0)


@pytest.mark.parametrize("seconds", [0.0, 3.0, 1e9])
def test_progress_rises_to_the_whole(target, seconds):
    """Whether the fewest repeats, the time or the most of them end it; passes take about as long in each turn."""
    clock, seen = Clock(), []
    settings = replace(SETTINGS, seconds=seconds, most=4)
    measure_profile(Priced(target, clock), None, 0, 4, settings, clock, seen.append)
    assert 0 < seen[0] < 0.3
    assert seen[-1] == 1
    assert max(a - b for a, b in pairwise(seen)) < 0.35
    assert len(seen) > 8


def test_a_kept_profile_is_measured_with_its_progress_told(target, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    seen: list[float] = []
    ensure_profile(target, None, 0, 4, settings=SETTINGS, progress=seen.append)
    assert 1 in seen


def test_drafts_and_judgement_are_timed_at_the_temperature_asked_for(target, monkeypatch):
    clock, drafted, judged = Clock(), set(), set()

    class Listening(PricedDrafter):
        def propose(self, batch):
            drafted.update(r.params.temperature for r in batch.requests)
            return super().propose(batch)

    def listen(batch, draft, seen, rule):
        judged.update(r.params.temperature for r in batch.requests)
        return judge(batch, draft, seen, rule)

    monkeypatch.setattr("dspark.engine.engine.judge", listen)
    drafter = Listening(tiny_drafter(target, "dspark", "vanilla", 3, None), clock)
    measure_profile(
        Priced(target, clock), drafter, 3, 16, replace(SETTINGS, temperature=0.7, max_rows=4), clock
    )
    assert drafted == judged == {0.7}


def test_profiles_of_several_temperatures_are_kept_apart_and_all_fit(target, tmp_path, calls):
    cold, hot = (
        ensure_profile(target, None, 3, settings=replace(SETTINGS, temperature=t)) for t in (0.0, 0.7)
    )
    assert ensure_profile(target, None, 3, settings=replace(SETTINGS, temperature=0.7)) == hot
    assert ensure_profile(target, None, 3) == cold
    assert len(calls) == 2
    assert (cold.fingerprint["temperature"], hot.fingerprint["temperature"]) == ("0", "0.7")
    write_cost_table(hot, tmp_path / "hot.json", "dspark")
    assert read_cost_table(tmp_path / "hot.json", fingerprint(target, None)) == hot.cost()
    for t in (-1.0, float("nan"), float("inf")):
        with pytest.raises(DSparkError, match="temperature"):
            ProfileSettings(temperature=t)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What was measured, by numbers made up; profiles are kept in `tmp_path`."""
    calls = []

    def fake(target, drafter, gamma, max_num_seqs, settings, progress):
        calls.append(gamma)
        return [Sample("step", 1, n, 64, 0.02 + 0.01 * n) for n in (1, 2, 4 * max_num_seqs)]

    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.setattr("dspark.profile.store.measure_profile", fake)
    return calls


def test_a_profile_is_kept_and_belongs_to_what_it_was_measured_with(target, tmp_path, calls):
    said = []
    first = ensure_profile(target, None, 3, report=said.append)
    assert ensure_profile(target, None, 3, report=said.append) == first
    assert len(calls) == len(said) == 1
    assert "measuring" in said[0]
    ensure_profile(target, NgramDrafter(3), 3)
    ensure_profile(tiny_decoder(seed=1, vocab_size=16, layers=1, hidden=16), None, 3)
    ensure_profile(target, None, 3, again=True)
    assert len(calls) == 4
    kept = sorted((tmp_path / "profiles").iterdir())
    assert len(kept) == 3
    for content in (b"{", b"[]", b"\xff"):
        for path in kept:
            path.write_bytes(content)
        assert ensure_profile(target, None, 3) == first
    assert len(calls) == 7, "what is damaged is measured anew"
    ensure_profile(target, None, 3, max_num_seqs=2)
    assert len(calls) == 7, "it reaches further than is needed"
    for path in kept:
        path.unlink()
    for count, measured in ((1, 8), (8, 9), (8, 9), (1, 9)):
        ensure_profile(target, NgramDrafter(2), 3, max_num_seqs=count)
        assert len(calls) == measured


def test_a_profile_of_another_version_is_measured_anew(target, tmp_path, calls):
    ensure_profile(target, None, 3)
    (path,) = (tmp_path / "profiles").iterdir()
    path.write_text(path.read_text().replace('"dspark_version": "', '"dspark_version": "0.'))
    ensure_profile(target, None, 3)
    ensure_profile(target, None, 3)
    assert len(calls) == 2


def flat_up_to(rows, monkeypatch, tmp_path):
    """Have passes cost alike up to `rows`; returns the list of (max_rows, max_num_seqs) that are measured."""
    asked = []

    def fake(target, drafter, gamma, max_num_seqs, settings, progress):
        asked.append((settings.max_rows, max_num_seqs))
        sizes = (1, 4, largest_pass(settings, gamma, max_num_seqs))
        return [Sample("step", 1, n, 64, 0.02 + 0.01 * (n > rows)) for n in sizes]

    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.setattr("dspark.profile.store.measure_profile", fake)
    return asked


def test_a_flat_profile_is_measured_with_more_rows_once(target, tmp_path, monkeypatch):
    asked, said = flat_up_to(100, monkeypatch, tmp_path), []
    profile = ensure_profile(target, None, 7, 16, said.append)
    assert asked == [(64, 16), (256, 64)]
    assert profile.flat is None
    assert not any(line.startswith("warning") for line in said)
    assert ensure_profile(target, None, 7, 16) == profile
    assert len(asked) == 2


def test_a_profile_that_stays_flat_is_kept_with_a_warning(target, tmp_path, monkeypatch):
    asked, said = flat_up_to(10_000, monkeypatch, tmp_path), []
    profile = ensure_profile(target, None, 7, 1, said.append)
    assert asked == [(64, 1), (256, 4)]
    assert profile.cost().step_price(1, 8, 64) == profile.cost().step_price(1, 1, 64)
    assert said[-1].startswith("warning: the profile is flat: 32 rows cost no more than 1")
    assert ensure_profile(target, None, 7, 1, said.append) == profile
    assert said[-1] == said[-2]
    assert len(asked) == 2, "it is not measured anew at every start"
    ensure_profile(target, None, 7, 4)
    assert asked[2:] == [(64, 4), (256, 16)], "more rows than that might have a price"


def test_a_strict_profile_is_refused_where_it_is_flat(target, tmp_path, monkeypatch):
    asked = flat_up_to(10_000, monkeypatch, tmp_path)
    with pytest.raises(DSparkError, match=r"--max-rows 256.*--cost-table.*--policy fixed"):
        ensure_profile(target, None, 7, 16, strict=True)
    assert asked == [(64, 16)]
    assert not (tmp_path / "profiles").exists()


@pytest.mark.parametrize("requests", [1, 4])
def test_more_rows_than_the_engine_can_have_are_measured(target, requests):
    """What the wider bench is asked for: its pool holds the largest probe, whatever its requests."""
    clock = Clock()
    settings = replace(SETTINGS, max_rows=4 * 64, repeats=1)
    found = measure_profile(Priced(target, clock), None, 3, 4 * requests, settings, clock)
    assert max(s.rows for s in found if s.kind == "step") == 16 * requests


def test_tables_go_out_and_come_back(measured, target, tmp_path):
    profile = Profile(fingerprint(target, None), tuple(measured))
    said: list[str] = []
    for form in ("dspark", "sglang", "tensorrt-llm"):
        path = tmp_path / f"{form}.json"
        lost = write_cost_table(profile, path, form)
        assert bool(lost) == ("the price of drafting" in lost) == (form != "dspark")
        said.clear()
        cost = read_cost_table(path, profile.fingerprint, said.append)
        assert float(cost.step_seconds(1, 7, 4)) == near(0.02 + 7 * 0.002 + 4 * CONTEXT)
        assert bool(said) == (form != "dspark"), "a table that cannot say where it is from is spoken of"
        assert (float(cost.draft_seconds(1, 1)) > 0) == (form == "dspark")
    with pytest.raises(DSparkError, match="choose from"):
        write_cost_table(profile, tmp_path / "x", "csv")


def test_tables_of_other_engines_are_turned_into_each_other(tmp_path):
    """Prices survive; what only one engine's format holds is kept by it, and said to be lost by the other."""
    sglang = {"sample_batch_tokens": [1, 64], "sample_steps_per_sec": [10, 5], "max_batch_tokens": 512}
    tensorrt = {
        "token_counts": [1, 8], "step_time_ms": [2.0, 4.0], "fixed_overhead_ms": 1.0, "batch_sizes": [1, 8],
        "batch_overhead_ms": [0.0, 3.0], "minimum_predicted_gain": 0.05,
    }  # fmt: skip
    for data, form, other, beside in (
        (sglang, "sglang", "tensorrt-llm", "max_batch_tokens 512"),
        (tensorrt, "tensorrt-llm", "sglang", "minimum_predicted_gain 0.05"),
    ):
        path, there, again = (tmp_path / f"{name}.json" for name in ("here", "there", "again"))
        path.write_text(json.dumps(data))
        table, said = load_cost_table(path), []
        read_cost_table(path, {"cpu": "any"}, said.append)
        assert sum(beside in line for line in said) == 1
        assert write_cost_table(table, there, other) == [beside]
        assert load_cost_table(there).cost.step_price(2, 5, 0) == pytest.approx(
            table.cost.step_price(2, 5, 0)
        )
        assert write_cost_table(table, again, form) == []
        assert load_cost_table(again).beside == table.beside
        with pytest.raises(DSparkError, match="--cost-table as it is"):
            write_cost_table(table, again, "dspark")
    path.write_text(json.dumps(tensorrt | {"minimum_predicted_gain": "much"}))
    with pytest.raises(DSparkError, match="minimum_predicted_gain"):
        load_cost_table(path)


def test_foreign_damaged_and_suspicious_tables(measured, target, tmp_path):
    path = tmp_path / "table.json"
    profile = Profile(fingerprint(target, None), tuple(measured))
    write_cost_table(profile, path, "dspark")
    with pytest.raises(DSparkError, match="another drafter"):
        read_cost_table(path, fingerprint(target, NgramDrafter(2)))
    flat = {"sample_batch_tokens": [1, 64], "sample_steps_per_sec": [10, 10], "max_batch_tokens": 64}
    path.write_text(json.dumps(flat))
    assert "flat" in (read_cost_table(path).warning or "")
    for text, message in (
        ("[1]", "JSON object"),
        ("{", "cannot read"),
        ('{"a": 1}', "missing"),
        ('{"format": "dspark-cost-profile", "format_version": 9}', "version 3"),
        ('{"format": "dspark-cost-profile", "format_version": 3, "samples": [1]}', "damaged"),
        (
            '{"format": "dspark-cost-profile", "format_version": 3, "samples": [["step", Infinity, 1, 1, 1]]}',
            "damaged",
        ),
        (json.dumps(flat | {"sample_steps_per_sec": [10, float("nan")]}), "finite"),
        (json.dumps(flat | {"sample_steps_per_sec": [10, 10**400]}), "finite"),
        (json.dumps(flat | {"max_batch_tokens": 10**400}), "finite"),
    ):
        path.write_text(text)
        with pytest.raises(DSparkError, match=message):
            read_cost_table(path)
    with pytest.raises(DSparkError, match="cannot read"):
        read_cost_table(Path("/nonexistent/table.json"))


def test_threads_are_part_of_the_fingerprint(target):
    before = torch.get_num_threads()
    found = fingerprint(target, None)
    assert found["threads"] == str(before)
    assert found["model"] == target.identity
