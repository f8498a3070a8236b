"""The calibration itself, its files in three formats, and files of rounds."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from synthetic import ANSWERS, SOURCE, synthetic_rounds

from dspark.calibrate import (
    Answer,
    Calibration,
    Rounds,
    load_calibration,
    load_rounds,
    save_calibration,
    save_rounds,
)
from dspark.calibrate.formats import from_sglang, from_tensorrt_llm, to_sglang, to_tensorrt_llm
from dspark.errors import DSparkError

FULL = Calibration(
    temperatures=(1.5, 0.75),
    acceptance_rule="ratio",
    sampling_temperatures=(0.0, 1.0),
    target="t",
    target_identity="1" * 16,
    drafter="d",
    drafter_identity="2" * 16,
    dataset="some prompts",
    labels="expected",
    prompts_fit=3,
    prompts_held_out=4,
    rounds_fit=500,
    rounds_held_out=600,
    bins=15,
    binning="mass",
    ece_before=(0.05, 0.06),
    ece_after=(0.01, 0.02),
    ece_floor=(0.01, 0.01),
    versions=("dspark 1",),
    created="2026-01-01",
    acceptance=(0.6, 0.5),
)


def test_probabilities_are_the_formula():
    logits = np.array([[0.0, 3.0], [-2.0, 1.5]])
    c = FULL.conditional(logits)
    assert c == pytest.approx(1 / (1 + np.exp(-logits / np.array([1.5, 0.75]))))
    assert FULL.survival(logits) == pytest.approx(np.cumprod(c, axis=1))
    assert FULL.conditional(logits[:, :1]) == pytest.approx(c[:, :1])  # a narrower block uses the first ones
    with pytest.raises(DSparkError, match="block of 3 drafts met a calibration for 2"):
        FULL.conditional(np.zeros((1, 3)))


OFFSET = replace(FULL, offsets=(-0.5, 0.25))


def test_offsets_shift_and_keep_the_order():
    logits = np.array([[0.0, 3.0], [-2.0, 1.5]])
    c = OFFSET.conditional(logits)
    assert c == pytest.approx(1 / (1 + np.exp(-(logits / np.array([1.5, 0.75]) + np.array([-0.5, 0.25])))))
    assert OFFSET.survival(logits) == pytest.approx(np.cumprod(c, axis=1))
    assert OFFSET.conditional(logits[:, :1]) == pytest.approx(c[:, :1])
    rising = OFFSET.conditional(np.linspace(-30, 30, 200)[:, None])[:, 0]
    assert (np.diff(rising) > 0).all()


def test_slot_k_knows_nothing_of_later_slots():
    logits = np.random.default_rng(0).normal(size=(6, 2))
    other = logits.copy()
    other[:, 1] += 5.0
    assert np.array_equal(OFFSET.survival(logits)[:, 0], OFFSET.survival(other)[:, 0])


def test_extreme_logits_neither_overflow_nor_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c = Calibration((0.05,)).conditional(np.array([[-1e30], [-np.inf], [1e30], [np.inf], [-20.0]]))
        assert np.isnan(Calibration((2.0, 1.0, 1.0)).survival(np.full((2, 3), np.nan))).all()
    assert c[:4, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert 0 < c[4, 0] < 1e-170


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperatures": ()}, "one temperature a slot"),
        ({"temperatures": (1.0, 0.0)}, "slot 2 has 0.0"),
        ({"temperatures": (1.0, -1.0)}, "above 0"),
        ({"temperatures": (1.0, float("nan"))}, "temperatures"),
        ({"temperatures": (1.0, float("inf"))}, "temperatures"),
        ({"temperatures": (1.0, "2")}, "temperatures"),
        ({"ece_after": (0.1,)}, "ece_after has 1 entries for 2"),
        ({"rounds_fit": 1.5}, "rounds_fit"),
        ({"offsets": (0.1,)}, "offsets has 1 entries for 2"),
        ({"offsets": (0.1, float("nan"))}, "offsets"),
    ],
)
def test_nonsense_is_refused(values, message):
    with pytest.raises(DSparkError, match=message):
        replace(FULL, **values)


def test_it_serves_what_it_was_fitted_to():
    FULL.check_fits("2" * 16, "1" * 16, 2)
    FULL.check_fits("", "", 1)
    Calibration((1.0,)).check_fits("2" * 16, "1" * 16, 1)
    with pytest.raises(DSparkError, match="another drafter"):
        FULL.check_fits("3" * 16, "1" * 16, 2)
    with pytest.raises(DSparkError, match="another target"):
        FULL.check_fits("2" * 16, "3" * 16, 2)
    with pytest.raises(DSparkError, match="this drafter makes 3"):
        FULL.check_fits("2" * 16, "1" * 16, 3)


def test_our_file_holds_everything(tmp_path):
    path = tmp_path / "c.json"
    save_calibration(path, FULL)
    assert load_calibration(path) == FULL
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


def test_offsets_make_a_file_of_version_2(tmp_path):
    plain, shifted = tmp_path / "plain.json", tmp_path / "shifted.json"
    save_calibration(plain, FULL)
    save_calibration(shifted, OFFSET)
    assert load_calibration(shifted) == OFFSET
    old, new = (json.loads(path.read_text()) for path in (plain, shifted))
    assert (old["format_version"], new["format_version"]) == (1, 2)
    assert "offsets" not in old
    assert {**new, "format_version": 1} == {**old, "offsets": [-0.5, 0.25]}


def test_a_file_from_before_offsets_still_loads_and_is_written_the_same(tmp_path):
    """Byte for byte what the first version of the format was, without offsets and acceptance."""
    path = tmp_path / "c.json"
    fields = """"temperatures": [\n  1.5,\n  0.75\n ],
 "acceptance_rule": "ratio",
 "sampling_temperatures": [\n  0.0,\n  1.0\n ],
 "target": "t",
 "target_identity": "1111111111111111",
 "drafter": "d",
 "drafter_identity": "2222222222222222",
 "dataset": "some prompts",
 "labels": "expected",
 "prompts_fit": 3,
 "prompts_held_out": 4,
 "rounds_fit": 500,
 "rounds_held_out": 600,
 "bins": 15,
 "binning": "mass",
 "ece_before": [\n  0.05,\n  0.06\n ],
 "ece_after": [\n  0.01,\n  0.02\n ],
 "ece_floor": [\n  0.01,\n  0.01\n ],
 "versions": [\n  "dspark 1"\n ],
 "created": "2026-01-01"\n}\n"""
    old = '{\n "format": "dspark-calibration",\n "format_version": 1,\n ' + fields
    path.write_text(old)
    assert load_calibration(path) == replace(FULL, acceptance=())
    save_calibration(path, load_calibration(path))
    assert path.read_text() == old


@pytest.mark.parametrize("name", ["sglang", "tensorrt-llm"])
def test_other_engines_cannot_hold_offsets(tmp_path, name):
    path = tmp_path / "c.json"
    with pytest.raises(DSparkError, match="has offsets, which SGLang's and TensorRT-LLM's files cannot hold"):
        save_calibration(path, OFFSET, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["sglang", "tensorrt-llm"])
def test_other_engines_files_engines_files_round_trip(tmp_path, name):
    path = tmp_path / "c.json"
    save_calibration(path, FULL, name)
    assert json.loads(path.read_text()) == {
        "temperatures": [1.5, 0.75],
        "dataset": "some prompts",
        "num_samples": 500,
        "ece_before": [0.05, 0.06],
        "ece_after": [0.01, 0.02],
    }
    read = load_calibration(path)
    assert read.temperatures == FULL.temperatures
    assert (read.dataset, read.rounds_fit, read.ece_after) == ("some prompts", 500, (0.01, 0.02))
    writes = {"sglang": to_sglang, "tensorrt-llm": to_tensorrt_llm}[name]
    reads = {"sglang": from_sglang, "tensorrt-llm": from_tensorrt_llm}[name]
    assert reads(writes(read)) == read


def test_tensorrt_llm_may_call_them_sts_temperatures():
    assert from_tensorrt_llm({"sts_temperatures": [2, 1.5]}).temperatures == (2, 1.5)
    with pytest.raises(DSparkError, match="keep one"):
        from_tensorrt_llm({"sts_temperatures": [2.0], "temperatures": [2.0]})
    with pytest.raises(DSparkError, match="'temperatures' is missing"):
        from_sglang({"sts_temperatures": [2.0]})


OWN = {"format": "dspark-calibration", "format_version": 1, "temperatures": [1.0]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "JSON object"),
        ("{}", "'temperatures' is missing"),
        ('{"temperatures": 1.0}', "must be a list"),
        ('{"temperatures": [0]}', "above 0"),
        ('{"temperatures": ["1"]}', "temperatures must be"),
        ('{"temperatures": [1], "teperatures": [1]}', "'teperatures' is not known"),
        ('{"temperatures": [1], "num_samples": "many"}', "rounds_fit"),
        ('{"temperatures": [1, 2], "ece_before": [0.1]}', "ece_before has 1 entries for 2"),
        (json.dumps({**OWN, "format": "dspark-cost"}), "'dspark-cost'"),
        (json.dumps({**OWN, "format_version": 3}), "format_version is 3, this version reads 1 and 2"),
        (json.dumps({**OWN, "format_version": 2}), "'offsets' is missing"),
        (json.dumps({**OWN, "offsets": [0.1]}), "'offsets' is not known"),
        (json.dumps({**OWN, "format_version": 2, "offsets": [0.1, 0.2]}), "offsets has 2 entries for 1"),
        (json.dumps({**OWN, "extra": 1}), "'extra' is not known"),
        (json.dumps({"format": "dspark-calibration", "format_version": 1}), "'temperatures' is missing"),
    ],
)
def test_loading_is_strict(tmp_path, content, message):
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(DSparkError, match=message) as caught:
        load_calibration(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(DSparkError, match="cannot read the calibration"):
        load_calibration(tmp_path / "none.json")
    with pytest.raises(DSparkError, match="cannot write the calibration"):
        save_calibration(tmp_path / "none" / "c.json", FULL)
    with pytest.raises(DSparkError, match="choose from dspark, sglang, tensorrt-llm"):
        save_calibration(tmp_path / "c.json", FULL, "vllm")


def same(a: Rounds, b: Rounds) -> bool:
    arrays = ("logits", "acceptance", "lengths", "accepted", "answer")
    return (a.answers, a.source) == (b.answers, b.source) and all(
        np.array_equal(getattr(a, n), getattr(b, n), equal_nan=n in ("logits", "acceptance")) for n in arrays
    )


def test_rounds_come_back_from_their_file(tmp_path):
    path = tmp_path / "r.safetensors"
    rounds = synthetic_rounds(n=50, ragged=True)
    save_rounds(path, rounds.select(np.zeros(0, dtype=int)))  # answers without a single round are kept, too
    assert load_rounds(path).answers == ANSWERS
    save_rounds(path, rounds)
    assert same(load_rounds(path), rounds)
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]


def test_damaged_files_of_rounds_are_named(tmp_path):
    path = tmp_path / "r.safetensors"
    with pytest.raises(DSparkError, match="there are no rounds at"):
        load_rounds(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(DSparkError, match="no file of rounds"):
        load_rounds(path)
    save_rounds(path, synthetic_rounds(n=50))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DSparkError, match="no file of rounds"):
        load_rounds(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": np.array([4, 0])}, "accepted"),
        ({"lengths": np.array([0, 3])}, "lengths"),
        ({"answer": np.array([0, 99])}, "answer"),
        ({"acceptance": np.full((2, 3), 1.5)}, "acceptance"),
        ({"logits": np.full((2, 3), np.nan)}, "logits"),
        ({"logits": np.zeros((2, 2))}, "shape"),
        ({"answers": (ANSWERS[0],) * 40}, "answers"),
    ],
)
def test_rounds_that_cannot_be_are_refused(change, message):
    rounds = synthetic_rounds(n=2)
    with pytest.raises(DSparkError, match=message):
        replace(rounds, **change)


def test_labels_of_a_round():
    rounds = Rounds(
        logits=np.zeros((2, 3)),
        acceptance=np.array([[0.5, 0.5, 1.0], [1.0, 0.25, np.nan]]),
        lengths=np.array([3, 2]),
        accepted=np.array([0, 2]),
        answer=np.array([0, 0]),
        answers=(ANSWERS[0],),
        source=SOURCE,
    )
    assert rounds.survived.tolist() == [[0, 0, 0], [1, 1, 0]]
    assert rounds.expected_survival.tolist() == [[0.5, 0.25, 0.25], [1, 0.25, 0]]
    assert rounds.observed.tolist() == [[True] * 3, [True, True, False]]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.7])
def test_the_split_is_by_prompt_and_even_in_every_domain(share):
    rounds = synthetic_rounds(n=500)
    to_fit, held_out = rounds.split(share)
    sides = [{a.prompt_id for a in part.answers} for part in (to_fit, held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 20
    for domain in ("chat", "math"):
        count = len({a.prompt_id for a in held_out.answers if a.domain == domain})
        assert abs(count - 10 * share) <= 1
    assert len(to_fit) + len(held_out) == 500
    assert set(held_out.column("prompt_id")) <= sides[1]
    assert same(rounds.split(share)[1], held_out)
    assert not same(rounds.split(share, seed=1)[1], held_out)


def test_a_split_needs_prompts_on_both_sides():
    rounds = synthetic_rounds(n=500)
    with pytest.raises(DSparkError, match="between 0 and 1"):
        rounds.split(1.0)
    one = rounds.of_answers([a.prompt_id == "prompt-3" for a in rounds.answers])
    assert {a.temperature for a in one.answers} == {0.0, 1.0}
    with pytest.raises(DSparkError, match="prompts on both sides"):
        one.split(0.5)


def test_parts_join_and_sources_must_agree():
    rounds = synthetic_rounds(n=300)
    parts = [rounds.of_answers([i % 2 == side for i in range(len(ANSWERS))]) for side in (0, 1)]
    joined = Rounds.join(parts)
    assert len(joined) == 300
    assert sorted(joined.column("prompt_id")) == sorted(rounds.column("prompt_id"))
    by_answer = [joined.of_answers([a == b for b in joined.answers]) for a in ANSWERS]
    for a, part in zip(ANSWERS, by_answer, strict=True):
        assert same(part, rounds.of_answers([a == b for b in rounds.answers]))
    with pytest.raises(DSparkError, match="answers"):
        Rounds.join([parts[0], parts[0]])
    SOURCE.check_same(replace(SOURCE, drafter="called otherwise"), "f")
    with pytest.raises(DSparkError, match="f holds rounds with gamma 3, this run has 2"):
        SOURCE.check_same(replace(SOURCE, gamma=2), "f")


def test_answers_are_typed():
    with pytest.raises(DSparkError, match="temperature"):
        Answer("p", "chat", "hot")
