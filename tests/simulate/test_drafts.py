"""Acceptance models: what is stated comes out, and confidences are as good as they are said to be."""

import json

import numpy as np
import pytest

from dspark.core import DSparkError
from dspark.simulate.acceptance import Confidence, Domain, SyntheticAcceptance, leading
from dspark.simulate.presets import acceptance
from dspark.simulate.quality import measure_quality
from dspark.simulate.rounds import RecordedRounds, read_rounds

SPREAD = {"slot_spread": 1.5, "request_spread": 0.7, "passage_spread": 0.7}


def quality(domain, confidence=None, **options):
    return measure_quality(
        SyntheticAcceptance({"any": domain}, confidence or Confidence()), "any", requests=1000, **options
    )


def test_first_slot_is_accepted_as_often_as_stated():
    found = quality(Domain((0.8, 0.5, 0.3), **SPREAD))
    assert found.conditional[0] == pytest.approx(0.8, abs=0.02)
    assert found.conditional[1] > 0.5  # easy requests get there


def test_without_spread_every_slot_is_as_stated_and_nothing_can_be_told_apart():
    found = quality(Domain((0.8, 0.5, 0.3)))
    assert found.conditional == pytest.approx([0.8, 0.5, 0.3], abs=0.02)
    assert found.accepted_length == pytest.approx(1 + 0.8 + 0.4 + 0.12, abs=0.03)
    assert found.auc == pytest.approx(0.717, abs=0.02)  # slots differ, requests do not


@pytest.mark.parametrize("length", [1.6, 3.6, 6.1])
def test_accepted_length_is_met_whatever_the_spreads(length):
    domain = Domain.of_accepted_length(length, 7, **SPREAD)
    assert domain.accepted_length() == pytest.approx(length, abs=1e-6)
    assert quality(domain).accepted_length == pytest.approx(length, abs=0.15)


def test_perfect_confidences_are_calibrated_and_others_are_worse_as_stated():
    domain = Domain((0.7,) * 4, **SPREAD)
    perfect = quality(domain)
    noisy, sure = quality(domain, Confidence(noise=2.0)), quality(domain, Confidence(scale=2.0))
    assert perfect.ece < 0.015
    assert 0.75 < perfect.auc < 0.9
    assert noisy.auc < perfect.auc - 0.05
    assert sure.ece > 0.04
    assert sure.auc == pytest.approx(perfect.auc, abs=0.01)
    assert quality(domain, Confidence(available=False)).auc is None


def test_difficulty_stays_with_the_request_and_fades_along_the_passage():
    def agreement(**spreads):
        state = SyntheticAcceptance({"any": Domain((0.5,), **spreads)}).start(
            ("any",), np.zeros(4000, dtype=np.int64), np.random.SeedSequence(0)
        )
        p = [state.block(np.arange(4000), True).survival[:, 0] for _ in range(12)]
        return np.corrcoef(p[0], p[1])[0, 1], np.corrcoef(p[0], p[11])[0, 1]

    assert agreement(request_spread=1.0) == pytest.approx((1, 1))
    near, far = agreement(passage_spread=1.0, persistence=0.8)
    assert near == pytest.approx(0.8, abs=0.05)
    assert abs(far) < 0.2


def test_leading():
    hits = np.array([[1, 1, 0], [0, 1, 1], [1, 1, 1]], dtype=bool)
    assert leading(hits).tolist() == [2, 0, 3]


def test_presets_keep_their_lengths():
    model, source = acceptance("qwen3-4b", None, Confidence())
    assert model.domains["math"].accepted_length() == pytest.approx(6.11, abs=1e-5)
    assert "assumed" in source
    assert acceptance("qwen3-4b", 3, Confidence())[0].gamma == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Domain((1.2,)), "probabilities"),
        (lambda: Domain((0.5,), slot_spread=-1), "spreads"),
        (lambda: Domain.of_accepted_length(9, 7), "between 1 and 8"),
        (lambda: SyntheticAcceptance({"a": Domain((0.5,)), "b": Domain((0.5, 0.5))}), "widths"),
        (lambda: Confidence(scale=0), "scale"),
        (lambda: acceptance("no-such", None, Confidence()), "choose qwen3-4b"),
        (lambda: acceptance("qwen3-4b", 0, Confidence()), "policy plain"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(DSparkError, match=message):
        make()


def recorded(tmp_path, suffix, **changes):
    rng = np.random.default_rng(0)
    columns = {
        "confidence": rng.uniform(0, 1, (60, 3)),
        "accepted": np.arange(60) % 4,
        "request": np.arange(60) // 10,
        "domain": np.array(["chat", "code"])[np.arange(60) // 30],
        **changes,
    }
    path = tmp_path / f"rounds{suffix}"
    if suffix == ".npz":
        np.savez(path, **columns)
    else:
        rows = [
            dict(zip(columns, row, strict=True))
            for row in zip(*(v.tolist() for v in columns.values()), strict=True)
        ]
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize("suffix", [".npz", ".jsonl"])
def test_recorded_rounds_are_replayed_from_the_first_on(tmp_path, suffix):
    rounds = read_rounds(recorded(tmp_path, suffix))
    state = rounds.start(("code",), np.zeros(50, dtype=np.int64), np.random.SeedSequence(0))
    runs = np.stack([state.block(np.arange(50), False).run for _ in range(12)], axis=1)
    for run in runs.tolist():  # ten rounds each: 30 to 39, 40 to 49, 50 to 59 of the file
        assert run[10:] == run[:2], "it starts over"
        assert run[:10] in ([round % 4 for round in range(first, first + 10)] for first in (30, 40, 50))
    survival = state.block(np.arange(50), True).survival
    assert (np.isin(survival, rounds.confidence[30:].cumprod(axis=1))).all()


def test_recorded_means_are_kept(tmp_path):
    path = recorded(tmp_path, ".npz")
    rounds = read_rounds(path)
    for domain, part in (("chat", slice(0, 30)), ("code", slice(30, 60))):
        found = measure_quality(rounds, domain)
        assert found.accepted_length == pytest.approx(1 + rounds.accepted[part].mean())


def test_simulated_answers_spend_their_rounds_as_the_recorded_ones_did():
    """Two answers of 12 tokens: in 12 rounds of one token, and in 3 of four."""
    accepted, request = np.array([0] * 12 + [3] * 3), np.array([0] * 12 + [1] * 3)
    rounds = RecordedRounds(3, accepted, None, request, np.full(15, "any"))
    state = rounds.start(("any",), np.zeros(2000, dtype=np.int64), np.random.SeedSequence(0))
    hard = state.block(np.arange(2000), False).run == 0
    assert hard.mean() == pytest.approx(0.5, abs=0.05), "as many tokens, hence as many requests"


def test_rounds_of_the_calibration_are_read(tmp_path):
    from dspark.calibrate.rounds import Answer, Rounds, Source, save_rounds

    logits = np.array([[0.0, 1.0], [2.0, np.nan], [0.0, -1.0]])
    source = Source("t", "t", "d", "d", 2, "ratio", "float32")
    acceptance_ = np.where(np.isnan(logits), np.nan, 0.5)
    answers = (Answer("p", "chat", 0.0), Answer("q", "code", 0.0))
    collected = Rounds(
        logits, acceptance_, np.array([2, 1, 2]), np.array([1, 1, 2]), np.array([0, 0, 1]), answers, source
    )
    save_rounds(tmp_path / "r.safetensors", collected)
    rounds = read_rounds(tmp_path / "r.safetensors")
    assert rounds.accepted.tolist() == [1, 2]  # the short block is left out
    assert rounds.domain_names == ("chat", "code")
    assert rounds.confidence[0, 0] == 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduled": np.full(60, 2)}, "verified in part"),
        ({"accepted": np.full(60, 4)}, "between 0 and gamma"),
        ({"confidence": np.full((60, 3), 2.0)}, "between 0 and 1"),
    ],
)
def test_rounds_that_cannot_be_replayed_are_refused(tmp_path, changes, message):
    with pytest.raises(DSparkError, match=message):
        read_rounds(recorded(tmp_path, ".npz", **changes))


def test_unknown_domains_and_files_are_refused(tmp_path):
    with pytest.raises(DSparkError, match="no rounds of domain 'law'"):
        read_rounds(recorded(tmp_path, ".npz")).start(
            ("law",), np.zeros(1, dtype=np.int64), np.random.SeedSequence(0)
        )
    with pytest.raises(DSparkError, match="cannot read"):
        read_rounds(tmp_path / "none.npz")
    (tmp_path / "bad.jsonl").write_text('{"confidence": [0.5]}')
    with pytest.raises(DSparkError, match="'accepted' is missing"):
        read_rounds(tmp_path / "bad.jsonl")
