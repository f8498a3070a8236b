"""`dspark evaluate` on a tiny model and drafter saved to disk."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspark.cli import main
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.checkpoint import save_drafter_model
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.evaluate import evaluation
from dspark.evaluate.playing import Contestant
from dspark.target.hf import read_config, weight_shapes
from dspark.target.load import load_decoder
from dspark.testing import tiny_decoder, tiny_drafter, tiny_tokenizer

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 63,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with model/, runs/drafter/ and two prompt files."""
    root = tmp_path_factory.mktemp("evaluate")
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    shapes = weight_shapes(read_config(model))
    save_file(
        {n: torch.randn(s, generator=generator) * 0.3 for n, s in shapes.items()}, model / "model.safetensors"
    )
    tiny_tokenizer(model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = tiny_drafter(load_decoder(model, torch.float64), block_size=3).model.config
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_drafter_model(BlockDrafterModel(config), root / "runs" / "drafter", {})
    (root / "talk.jsonl").write_text('{"turns": ["abc", "de"]}\n{"turns": ["x"]}\n')
    (root / "ask.jsonl").write_text('{"prompt": "hello"}\n')
    return root


def arguments(home: Path, output: Path, *options: str) -> list[str]:
    # float64 takes the torch reference: nothing is compiled
    model = ["--model", str(home / "model"), "--dtype", "float64"]
    prompts = ["--prompts", str(home / "talk.jsonl"), str(home / "ask.jsonl")]
    drafters = ["--drafters", f"none,ngram,{home / 'runs' / 'drafter'}"]
    return ["evaluate", *drafters, *prompts, *model, "--max-tokens", "8", "--output", str(output), *options]


def test_drafters_by_prompts_by_temperatures(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(arguments(home, tmp_path / "out", "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    entries = {(e["prompts"], e["temperature"], e["drafter"]): e for e in report["summary"]}
    drafters = ("none", "ngram", "runs/drafter")
    assert set(entries) == {(p, t, d) for p in ("talk", "ask") for t in (0.0, 1.0) for d in drafters}
    talk = entries["talk", 0.0, "runs/drafter"]
    assert (talk["gamma"], talk["prompts_asked"], talk["answers"]) == (3, 2, 3)
    assert (talk["identical"], talk["compared"]) == (3, 3)
    assert talk["accepted_length"] == pytest.approx(talk["committed"] / talk["rounds"])
    assert talk["committed"] == talk["accepted"] + talk["rounds"]
    assert talk["positions"][0]["reached"] > 0
    assert talk["draft_ms"] > 0
    assert entries["ask", 1.0, "ngram"]["identical"] is None
    assert (report["complete"], report["settings"]["max_tokens"]) == (True, 8)
    names = {"report.md", "summary.csv", "positions.csv", "evaluation.json", "cells.jsonl", "settings.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names

    def load_no_more(*args: Any, **options: Any) -> None:
        raise AssertionError("everything was measured already")

    monkeypatch.setattr("dspark.cli.evaluate.load_llm", load_no_more)
    assert main(arguments(home, tmp_path / "out", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["summary"] == report["summary"]


def test_table_names_what_was_written(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--limit", "1", "--temperatures", "0", "--concurrency", "2", "--num-speculative-tokens", "2")
    assert main(arguments(home, tmp_path, *options)) == 0
    out = capsys.readouterr().out
    assert "runs/drafter" in out
    assert f"{tmp_path}: report.md, summary.csv, positions.csv, evaluation.json" in out
    assert all(len(line) <= 80 for line in out.split("\n")[:-2])


def test_ctrl_c_keeps_what_was_measured(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    whole = evaluation._measure

    def measure(*args: Any) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(args)
        return whole(*args)

    monkeypatch.setattr(evaluation, "_measure", measure)
    command = arguments(home, tmp_path, "--temperatures", "0", "--drafters", "ngram")
    assert main(command) == 130
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert (report["complete"], {e["prompts"] for e in report["summary"]}) == (False, {"talk"})
    monkeypatch.setattr(evaluation, "_measure", whole)
    assert main(command) == 0
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert (report["complete"], {e["prompts"] for e in report["summary"]}) == (True, {"talk", "ask"})


def test_other_greedy_tokens_are_exit_code_1(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = evaluation.make_contestants

    def with_another_model(*args: Any) -> list[Contestant]:
        plain, _ = make(*args)
        engine = Engine(tiny_decoder(), None, None, args[2], EngineConfig(kv_cache_tokens=512))
        return [plain, Contestant("ngram", engine, None, 0)]

    monkeypatch.setattr(evaluation, "make_contestants", with_another_model)
    assert main(arguments(home, tmp_path, "--temperatures", "0", "--drafters", "ngram")) == 1
    err = capsys.readouterr().err
    assert "NOT identical to plain decoding: ngram on talk, prompt talk-1, turn 1: token " in err
    assert "Greedy answers that differ from plain decoding" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--drafters", "eagle"], "'eagle' is neither a method"),
        (["--prompts", "nowhere.jsonl"], "cannot read prompts from 'nowhere.jsonl'"),
        (["--temperatures", "warm"], "'warm' is not a list of numbers"),
        (["--limit", "0"], "number of prompts must be 1 or more"),
        (["--max-tokens", "0"], "max_tokens must be 2 or more"),
        (["--improbable", "0.5"], "improbable < probable"),
        (["--num-speculative-tokens", "0"], "--num-speculative-tokens must be 1 or more"),
        (["--num-speculative-tokens", "4"], "exceeds the block of 3"),
    ],
)
def test_bad_input(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(arguments(home, tmp_path, *options)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_figures_need_the_extra(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(arguments(home, tmp_path, "--figures")) == 2
    assert "pip install 'dspark[figures]'" in capsys.readouterr().err


def test_two_checkpoints_of_one_name(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "runs" / "drafter"
    copy.mkdir(parents=True)
    for file in (home / "runs" / "drafter").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    both = f"{home / 'runs' / 'drafter'},{copy}"
    assert main(arguments(home, tmp_path / "out", "--drafters", both)) == 2
    assert "two checkpoints end in 'runs/drafter'" in capsys.readouterr().err


def test_a_checkpoint_trained_further_is_another_drafter(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for file in (home / "runs" / "drafter").iterdir():
        (mine / file.name).write_bytes(file.read_bytes())
    options = ("--drafters", str(mine), "--limit", "1", "--temperatures", "0")
    assert main(arguments(home, tmp_path / "out", *options)) == 0
    config = json.loads((mine / "config.json").read_text())
    (mine / "config.json").write_text(json.dumps({**config, "provenance": {"steps": 2}}))
    assert main(arguments(home, tmp_path / "out", *options)) == 2
    assert "holds results of another drafter" in capsys.readouterr().err
