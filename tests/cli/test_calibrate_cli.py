"""`dspark calibrate` from prompts to a file, on a tiny model and drafter that lie on disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import dspark
from dspark.calibrate import Answer, Calibration, Rounds, Source, load_calibration, load_rounds, save_rounds
from dspark.calibrate.formats import FORMATS, save_calibration
from dspark.cli import main
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.checkpoint import save_drafter_model
from dspark.target.hf import read_config, weight_shapes
from dspark.target.load import load_decoder
from dspark.testing import tiny_drafter, tiny_tokenizer

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model`, `drafter` and `prompts.jsonl`."""
    root = tmp_path_factory.mktemp("tiny")
    model = root / "model"
    model.mkdir()
    tiny_tokenizer(model)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    generator = torch.Generator().manual_seed(0)
    shapes = weight_shapes(read_config(model))
    weights = {n: 0.3 * torch.randn(s, generator=generator) + (len(s) == 1) for n, s in shapes.items()}
    save_file(weights, model / "model.safetensors")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        drafter = BlockDrafterModel(tiny_drafter(load_decoder(model), block_size=3).model.config)
        drafter.confidence.proj.bias.fill_(3.0)  # far too sure of itself
    save_drafter_model(drafter, root / "drafter", {})
    lines = [{"prompt": f"abc{i}", "domain": ("chat", "code")[i % 2]} for i in range(6)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return root


@pytest.fixture
def command(files: Path, tmp_path: Path) -> list[str]:
    """Arguments for a run on the tiny model; files go to `tmp_path`."""
    return [
        "calibrate", "--model", str(files / "model"), "--drafter", str(files / "drafter"), "--dtype", "float64",
        "--prompts", str(files / "prompts.jsonl"), "--max-tokens", "24", "--bins", "5",
        "--out", str(tmp_path / "c.json"),
    ]  # fmt: skip


def synthetic(path: Path, scale: float, shift: float = 0.0) -> Path:
    """A file of rounds whose logits are right up to a factor, and a constant."""
    rng = np.random.default_rng(0)
    honest = rng.normal(0.5, 1, (4000, 2))
    acceptance = 1 / (1 + np.exp(-honest))
    accepted = (rng.random((4000, 2)) < acceptance).cumprod(axis=1).sum(axis=1)
    answers = tuple(Answer(f"p{i}", "chat", 1.0) for i in range(8))
    source = Source("t", "1" * 16, "d", "2" * 16, 2, "ratio", "float32")
    lengths, answer = np.full(4000, 2), np.arange(4000) % 8
    save_rounds(
        path, Rounds(scale * (honest + shift), acceptance, lengths, accepted, answer, answers, source)
    )
    return path


def report_of(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_from_prompts_to_a_calibration(
    files: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diagram = tmp_path / "d.svg"
    assert main([*command, "--temperatures", "0,1", "--diagram", str(diagram), "--json"]) == 0
    report, err = report_of(capsys)
    saved = load_calibration(tmp_path / "c.json")
    assert saved.temperatures == tuple(report["temperatures"])
    assert saved.gamma == 3
    assert (saved.prompts_fit, saved.prompts_held_out) == (3, 3)
    assert (saved.dataset, saved.sampling_temperatures) == ("prompts.jsonl", (0.0, 1.0))
    assert saved.target_identity
    assert len(saved.drafter_identity) == 16
    assert any(v.startswith("dspark ") for v in saved.versions)
    assert [g["name"] for g in report["groups"]] == [
        "all", "domain chat", "domain code", "temperature 0", "temperature 1",
    ]  # fmt: skip
    overall = report["groups"][0]
    assert overall["ece_after"] < overall["ece_before"]
    assert overall["rounds"] == saved.rounds_held_out
    assert "fewer than 10000" in err
    assert report["saved"] == str(tmp_path / "c.json")
    svg = diagram.read_text()
    assert svg.startswith("<svg")
    assert svg.count("<g ") == 3
    rounds = load_rounds(tmp_path / "c.rounds.safetensors")
    assert len(rounds) == saved.rounds_fit + saved.rounds_held_out
    assert len(rounds.answers) == 12


def test_collection_goes_on_where_it_was_and_needs_no_model_when_told(
    files: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    kept = tmp_path / "r.safetensors"
    command += ["--rounds", str(kept), "--json"]
    main([*command, "--temperatures", "0"])
    first = load_rounds(kept)
    main([*command, "--temperatures", "0,1"])
    both = load_rounds(kept)
    assert {a.temperature for a in both.answers} == {0.0, 1.0}
    greedy = both.of_answers([a.temperature == 0 for a in both.answers])
    assert np.array_equal(greedy.logits, first.logits, equal_nan=True)
    before = kept.read_bytes()
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "dspark.llm", None)  # loading a model would fail
    assert main([*command, "--no-collect"]) == 0
    everything, _ = report_of(capsys)
    main([*command, "--no-collect", "--temperatures", "1"])
    sampled, _ = report_of(capsys)
    assert sampled["groups"][0]["rounds"] < everything["groups"][0]["rounds"]
    assert kept.read_bytes() == before


def test_rounds_of_another_drafter_are_not_mixed(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = synthetic(tmp_path / "r.safetensors", 1.0)
    before = kept.read_bytes()
    assert main([*command, "--rounds", str(kept)]) == 2
    assert "holds rounds with target_identity" in capsys.readouterr().err
    assert kept.read_bytes() == before


def test_a_finished_part_survives_an_interruption(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark.calibrate import collect as module

    genuine = module.collect

    def interrupted(*args: Any) -> Any:
        for i, part in enumerate(genuine(*args)):
            if i == 3:
                raise KeyboardInterrupt
            yield part

    monkeypatch.setattr(module, "collect", interrupted)
    assert main(command) == 130
    assert len(load_rounds(tmp_path / "c.rounds.safetensors").answers) == 3
    assert not (tmp_path / "c.json").exists()


def test_what_is_no_improvement_is_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = synthetic(tmp_path / "r.safetensors", 1.0)
    out = tmp_path / "c.json"
    out.write_text("an earlier one")
    assert main(["calibrate", "--no-collect", "--rounds", str(kept), "--out", str(out)]) == 1
    shown, err = capsys.readouterr()
    assert "refused: nothing to mend" in err
    assert "nothing was saved" in err
    assert out.read_text() == "an earlier one"
    assert "--offsets" not in err
    assert "floor" in shown
    assert max(map(len, shown.split("\n"))) <= 200


def test_text_shows_errors_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = synthetic(tmp_path / "r.safetensors", 3.0)
    out = tmp_path / "c.json"
    assert main(["calibrate", "--no-collect", "--rounds", str(kept), "--out", str(out)]) == 0
    shown, err = capsys.readouterr()
    assert f"saved: {out}" in shown.replace("\n", "")
    assert "warning: only 2000 held-out rounds, fewer than 10000" in err
    assert load_calibration(out).temperatures == pytest.approx((3.0, 3.0), rel=0.1)


def test_check_holds_a_given_calibration_to_the_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = synthetic(tmp_path / "r.safetensors", 3.0)
    given, out = tmp_path / "given.json", tmp_path / "c.json"
    command = ["calibrate", "--no-collect", "--rounds", str(kept), "--out", str(out), "--check", str(given)]
    save_calibration(given, Calibration((3.0, 3.0)), "sglang")
    assert main(command) == 0
    save_calibration(given, Calibration((0.2, 0.2)))
    assert main(command) == 1
    save_calibration(given, Calibration((3.0, 3.0), drafter_identity="9" * 16))
    assert main(command) == 2
    assert "another drafter" in capsys.readouterr().err
    assert not out.exists()


def test_offsets_are_suggested_where_temperatures_do_not_mend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head is not sure enough throughout, by 0.75 logits, and about 0 in the middle: no temperature mends that."""
    kept, out = synthetic(tmp_path / "r.safetensors", 1.0, shift=-0.75), tmp_path / "c.json"
    command = ["calibrate", "--no-collect", "--rounds", str(kept), "--out", str(out)]
    main(command)
    assert "hint: --offsets may help: slot" in capsys.readouterr().err.splitlines()[-1]
    diagram = tmp_path / "d.svg"
    assert main([*command, "--offsets", "--diagram", str(diagram)]) == 0
    shown, err = capsys.readouterr()
    assert "hint" not in err
    assert "  b" in shown
    saved = load_calibration(out)
    assert saved.offsets == pytest.approx((0.75, 0.75), abs=0.1)
    assert saved.temperatures == pytest.approx((1.0, 1.0), rel=0.1)
    assert (saved.rounds_fit, saved.rounds_held_out, saved.dataset) == (2000, 2000, "r.safetensors")
    assert max(saved.ece_after) < min(saved.ece_before) / 2
    assert main([*command, "--check", str(out), "--json"]) == 0
    report, err = report_of(capsys)
    assert report["offsets"] == list(saved.offsets)
    assert report["hint"] is None
    assert report["groups"][0]["slots"][0]["after"]["ece"] == pytest.approx(saved.ece_after[0])
    convert = ["calibrate", "--convert", str(out), "--out", str(tmp_path / "x.json"), "--format", "sglang"]
    assert main(convert) == 2
    err = capsys.readouterr().err
    assert "has offsets" in err
    assert "--no-collect" in err
    assert "--drop-offsets" in err
    assert not (tmp_path / "x.json").exists()
    assert main([*convert, "--drop-offsets"]) == 0
    err = capsys.readouterr().err
    assert f"dropped: offsets {saved.offsets[0]:.2f}, {saved.offsets[1]:.2f}" in err
    assert "--no-collect" in err
    table = json.loads((tmp_path / "x.json").read_text())
    assert table["temperatures"] == list(saved.temperatures)
    assert table["ece_before"] == list(saved.ece_before)
    assert table["ece_after"] == [], "it was measured with the offsets"


def test_the_shipped_calibration_can_be_taken_along(tmp_path: Path) -> None:
    shipped = Path(dspark.__file__).parent / "drafters/shipped/smollm2-135m-dspark/calibration.json"
    convert = ["calibrate", "--convert", str(shipped), "--out", str(tmp_path / "x.json"), "--drop-offsets"]
    for form in FORMATS:
        assert main([*convert, "--format", form]) == 0
        taken = load_calibration(tmp_path / "x.json")
        assert (taken.temperatures, taken.offsets) == (load_calibration(shipped).temperatures, ())


def test_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    save_calibration(ours, Calibration((1.5, 2.0), rounds_fit=7))
    assert main(["calibrate", "--convert", str(ours), "--out", str(theirs), "--format", "sglang"]) == 0
    assert json.loads(theirs.read_text())["num_samples"] == 7
    back = tmp_path / "back.json"
    assert main(["calibrate", "--convert", str(theirs), "--out", str(back)]) == 0
    assert load_calibration(back).temperatures == (1.5, 2.0)
    assert not capsys.readouterr().err
    assert main(["calibrate", "--convert", str(ours), "--out", str(back), "--drop-offsets"]) == 0
    assert "has no offsets to drop" in capsys.readouterr().err
    assert back.read_text() == ours.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "vllm"], "choose from dspark, sglang, tensorrt-llm"),
        (["--offsets", "--format", "sglang"], "--format sglang cannot hold offsets"),
        (["--diagram", "d.png"], "writes an .svg file"),
        (["--out", "no/such/place/c.json"], "create it first"),
        (["--held-out", "1"], "--held-out must lie between 0 and 1"),
        (["--temperatures", "hot"], "not a list of numbers"),
        (["--temperatures", "-1", "--no-collect"], "no rounds at"),
        (["--bins", "0"], "bins must be 1 or more"),
        (["--prompts", "1"], "--prompts must be 2 or more"),
        (["--prompts", "no.jsonl"], "cannot read prompts"),
        (["--concurrency", "0"], "--concurrency must be 1 or more"),
        (["--drop-offsets"], "--drop-offsets belongs to --convert"),
        (["--convert", "none.json"], "cannot read the calibration"),
        (["--check", "a", "--convert", "b"], "not allowed with"),
        (["--convert", "a", "--no-collect"], "without use for --no-collect"),
        (["--convert", "a", "--diagram", "b.svg"], "without use for --diagram"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any, options: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
