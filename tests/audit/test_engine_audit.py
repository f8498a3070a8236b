"""The statistical audit passes sound engines and catches planted faults; its statistics keep their promises."""

from __future__ import annotations

import math
from dataclasses import replace
from inspect import signature
from typing import Any

import engine_faults
import numpy as np
import pytest
import torch

from dspark import acceptance
from dspark.audit.engine_audit import EngineAudit, EngineAuditSettings, audit_engine
from dspark.audit.engine_exact import exact_cells, exact_kinds, run_cell
from dspark.audit.engine_report import describe
from dspark.audit.engine_statistics import critical_value, detectable_tv, holm, power, two_sample
from dspark.audit.engine_subjects import make_engine, play, policy_factories, subject
from dspark.core import DSparkError, Verdict
from dspark.drafters.base import Drafter
from dspark.drafters.ngram import NgramDrafter
from dspark.engine import engine as engine_module
from dspark.engine import judge as judge_module
from dspark.testing import ScriptedDrafter, TableTarget, tiny_decoder, tiny_drafter

TABLE = np.array([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4], [0.05, 0.9, 0.05]])
SETTINGS = EngineAuditSettings(tokens=8, samples=900, sampled_tokens=4, concurrency=300)
PROMPTS = [[1], [0, 2]]


def audited(
    drafter: Drafter, policies: list[str], target: Any = None, settings: EngineAuditSettings = SETTINGS
) -> EngineAudit:
    target = target or TableTarget(TABLE)
    factories = policy_factories(policies, settings.concurrency)
    return audit_engine(target, [subject("mine", drafter, target, factories, [2])], PROMPTS, settings)


def table_drafter() -> ScriptedDrafter:
    return engine_faults.make_right_temperature(TableTarget(TABLE))


def test_a_sound_pair_passes_and_was_put_to_the_test():
    report = audited(table_drafter(), ["fixed"])
    assert report.sound
    assert all(arm.sample.accepted > 500 for arm in report.arms)
    assert all(c.scheduled > 0 for c in report.cells if c.drafter == "mine")
    found = report.detectable_tv("position")
    assert found is not None
    assert found < 0.15
    text = "\n".join(describe(report))
    assert "equal" in text
    assert "no bias found" in text
    assert f"total variation {found:.3f} or more" in text


def test_a_decoder_with_trained_drafters_under_every_policy():
    """Kernels, caches and batching of a real decoder; LIVE policies where they are harmless."""
    target = tiny_decoder(seed=9, vocab_size=5, layers=1, hidden=16, max_context=64)
    settings = EngineAuditSettings(tokens=6, samples=40, sampled_tokens=4, concurrency=8, temperature=1.5)
    factories = policy_factories(["threshold", "global", "auto"], 8)
    subjects = [
        subject("dspark", tiny_drafter(target, block_size=3), target, factories, [3]),
        subject("ngram", NgramDrafter(3, 2, 1), target, factories, [3]),
    ]
    report = audit_engine(target, subjects, [[1, 2, 3], [0, 1, 0, 1]], settings)
    assert report.sound
    assert {(c.drafter, c.policy) for c in report.cells} >= {("dspark", "threshold"), ("dspark", "global")}
    assert ("ngram", "threshold") not in {
        (c.drafter, c.policy) for c in report.cells
    }  # it has no confidences
    refused = [(a.arm.drafter_name, a.arm.policy_name) for a in report.arms if a.sample.refused is not None]
    assert refused == [("dspark", "global")]
    assert "refused by the engine: LIVE" in "\n".join(describe(report))


def test_draft_probabilities_after_the_wrong_temperature():
    report = audited(engine_faults.make_wrong_temperature(TableTarget(TABLE)), ["fixed"])
    assert not report.differences  # neither greedy text nor shared noise reads p_d
    assert report.biased
    assert not report.sound
    assert "BIASED" in "\n".join(describe(report))


def test_a_residual_that_is_not_renormalised(monkeypatch):
    def unscaled(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        picked = torch.searchsorted(p.cumsum(-1), u[:, None].to(p.dtype), right=True)
        return picked.clamp_(max=p.shape[1] - 1)[:, 0]

    monkeypatch.setattr(acceptance, "sample", unscaled)
    assert audited(table_drafter(), ["fixed"]).biased


def test_a_rejected_slot_that_draws_from_the_target_instead_of_the_residual(monkeypatch):
    def without_residual(*args: Any, **named: Any) -> Verdict:
        given = signature(acceptance.ratio_rule).bind(*args, **named).arguments
        verdict = acceptance.ratio_rule(*args, **named)
        rows = given["p_target"][given["row_start"] + verdict.num_accepted]
        return replace(verdict, next_token=acceptance.sample(rows, given["resample_u"]))

    monkeypatch.setattr(judge_module, "ratio_rule", without_residual)
    assert audited(table_drafter(), ["fixed"]).biased


def one_too_many(*args: Any) -> judge_module.Judgement:
    """Accepts the first rejected draft as well."""
    judgement = judge_module.judge(*args)
    return replace(judgement, accepted=np.minimum(judgement.accepted + 1, args[2].lengths))


def test_one_draft_too_many_shows_at_its_position(monkeypatch):
    monkeypatch.setattr(engine_module, "judge", one_too_many)
    target = TableTarget(TABLE)
    report = audited(ScriptedDrafter.always_wrong(target, 2), ["fixed"], target, replace(SETTINGS, samples=0))
    cells = {(c.kind, c.mix): c for c in report.differences}
    assert {kind for kind, _ in cells} == {"greedy", "shared noise"}
    assert {mix for _, mix in cells} == {"alone", "batched", "mixed", "staggered"}
    for mix in ("alone", "staggered"):
        first = cells["greedy", mix].differences[0]
        # Prompt 1 goes on with 2 (the prefill's), then 1; the drafter says 2.
        assert (first.prompt, first.position, first.expected, first.got) == (0, 1, 1, 2)
        assert first.gap == pytest.approx(math.log(0.9 / 0.05))
        assert not first.tie
    assert "output token 1 is 2, plain decoding's is 1" in "\n".join(describe(report))


def test_one_draft_too_many_changes_the_distribution(monkeypatch):
    monkeypatch.setattr(engine_module, "judge", one_too_many)
    assert audited(table_drafter(), ["fixed"]).biased


def test_a_policy_that_looks_at_what_it_decides():
    """It is harmless wherever output must be equal, so only the distribution can tell."""
    drafter = engine_faults.SelfAware.from_table(engine_faults.close_table(), 2)
    report = audited(drafter, ["engine_faults:make_liar"])
    assert not report.differences
    assert report.biased


def test_the_same_policy_is_refused_where_it_says_so():
    drafter = engine_faults.SelfAware.from_table(engine_faults.close_table(), 2)
    report = audited(drafter, ["engine_faults:make_honest_liar"], settings=replace(SETTINGS, samples=2))
    assert report.sound
    assert [arm.sample.refused is not None for arm in report.arms] == [True]


def test_a_policy_that_breaks_off_is_a_finding():
    report = audited(table_drafter(), ["engine_faults:make_too_long"], settings=replace(SETTINGS, samples=2))
    assert not report.sound
    assert all("verify_lengths" in str(c.error) for c in report.differences)
    assert [arm.sample.failure is not None for arm in report.arms] == [True]
    assert "broke off with DSparkError" in "\n".join(describe(report))


def test_requests_that_share_noise_are_found():
    """Neighbours in a batch that get each other's text: every single request is distributed as it should be."""
    drawn = np.random.default_rng(0).integers(0, 3, (1, 600, 3))
    tied = np.repeat(np.random.default_rng(1).integers(0, 3, (1, 300, 3)), 2, axis=1)
    from dspark.audit.engine_sampling import Arm, compare

    p = {t.kind: t.chi_square.p_value for t in compare(Arm("", "", 1), drawn, tied, 3)}
    assert p["neighbours"] < 1e-20
    assert p["position"] > 1e-4


@pytest.mark.parametrize(("distance", "tie"), [(1e-9, True), (0.01, False)])
def test_a_tiny_gap_is_called_a_tie(distance: float, tie: bool):
    target = TableTarget(np.array([[0.5 + distance, 0.5], [0.5 + distance, 0.5]]))
    kind = exact_kinds(3, 1.0)[0]
    cell = next(c for c in exact_cells([]) if c[-1] == "batched")
    found = run_cell(target, cell, kind, [[0]], 0, 4, [[0, 1, 0]]).differences
    assert [(d.position, d.expected, d.got, d.tie) for d in found] == [(1, 1, 0, tie)]
    assert found[0].gap == pytest.approx(-math.log1p(2 * distance))


def test_the_gap_under_shared_noise_has_the_noise_of_its_position():
    """What plain decoding drew scores highest, so in its place any other token has a gap below 0."""
    target = TableTarget(TABLE)
    kind = exact_kinds(8, 1.3)[1]
    cell = next(c for c in exact_cells([]) if c[-1] == "batched")
    work = kind.work(PROMPTS, 5)
    drawn = [o.token_ids for o in play(make_engine(target, None, None, kind.rule, 0, 1, 20), work)]
    for k in range(8):
        altered = [[*t[:k], (t[k] + 1) % 3, *t[k + 1 :]] for t in drawn]
        found = run_cell(target, cell, kind, PROMPTS, 5, 4, altered).differences
        assert [d.position for d in found] == [k, k]
        assert all(d.gap is not None and d.gap < 0 for d in found)


@pytest.mark.parametrize(("every", "passes"), [(0, 3), (1, 5), (4, 9)])
def test_arrivals_are_staggered(every: int, passes: int):
    target = TableTarget(TABLE)
    work = exact_kinds(3, 1.0)[0].work([[0], [1], [2]], 0)
    outputs = play(make_engine(target, None, None, "ratio", 0, 4, 8), work, every)
    assert [o.prompt_token_ids for o in outputs] == [[0], [1], [2]]
    assert target.forwards == passes


def test_draft_lengths_out_of_range_are_refused():
    target = TableTarget(TABLE)
    with pytest.raises(DSparkError, match="drafts 1 to 2 tokens"):
        subject("mine", table_drafter(), target, {}, [7])


def test_chi_square_of_a_known_table():
    samples = np.repeat([0, 1], [10, 20]), np.repeat([0, 1], [20, 10])
    result = two_sample([samples])
    assert result.statistic == pytest.approx(20 / 3)
    assert (result.freedom, result.samples, result.pooled) == (1, 30, 0)
    assert result.p_value == pytest.approx(math.erfc(math.sqrt(10 / 3)))
    twice = two_sample([samples, samples])
    assert (twice.freedom, twice.samples) == (2, 60)
    assert twice.p_value == pytest.approx(math.exp(-20 / 3))


def test_rare_outcomes_share_cells():
    """Ten of the outcomes seen twice fill a cell (10 expected in each sample); ten seen once do not, and join it."""
    rare = np.arange(100, 140)
    result = two_sample([(np.concatenate((np.zeros(60), rare)), np.concatenate((np.zeros(70), rare[:30])))])
    assert result.freedom == 3
    assert result.pooled == pytest.approx(70 / 200)
    # 60 and 70 of the common one, 10 and 10 in two cells, 20 and 10 in the last.
    assert result.statistic == pytest.approx(50 / 65 + 50 / 15)


def test_a_law_without_any_common_outcome_still_tells():
    """A model's open beginning: no token occurs twice, but one sample prefers the first half of the vocabulary."""
    rng = np.random.default_rng(2)
    a, b = rng.permutation(1000)[:200], rng.permutation(500)[:200]
    assert two_sample([(a, b)]).p_value < 1e-6
    assert two_sample([(a, rng.permutation(1000)[:200])]).p_value > 1e-3


def test_false_alarms_are_as_rare_as_promised():
    """A long-tailed law, 4,000 pairs of samples: the share of p-values below a level is at most the level."""
    rng = np.random.default_rng(3)
    p = 0.7 ** np.arange(30)
    drawn = rng.choice(30, (4000, 2, 2, 100), p=p / p.sum())
    values = np.array([two_sample(zip(a, b, strict=True)).p_value for a, b in drawn])
    for level in (0.1, 0.01, 0.001):
        assert (values <= level).mean() <= level + 4 * math.sqrt(level / len(values))
    assert (values <= 0.1).mean() > 0.07  # and not because nothing is ever found


def test_power_is_what_simulation_says():
    critical = critical_value(7, 1e-4)
    drawn = np.random.default_rng(5).noncentral_chisquare(7, 40.0, 200_000)
    assert power(40.0, 7, critical) == pytest.approx((drawn > critical).mean(), abs=0.005)
    assert power(0.0, 7, critical) == pytest.approx(1e-4)


def test_the_distance_stated_is_found_with_99_percent():
    """The deviation of least effect: the same factor on every outcome, up or down."""
    cells, samples, level = 6, 500, 1e-4
    distance = detectable_tv(cells - 1, samples, level)
    assert 0.1 < distance < 0.3
    rng = np.random.default_rng(7)
    half = np.repeat([1, -1], cells // 2)
    found = 0
    for _ in range(1000):
        a, b = (rng.choice(cells, samples, p=(1 + s * distance * half) / cells) for s in (1, -1))
        found += two_sample([(a, b)]).p_value <= level
    assert found >= 975


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
