"""`dspark train` on a tiny model."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from dspark.cli import main
from dspark.cli.progress import duration
from dspark.train.trainer import Trainer


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "defghijklmnop" * 3}]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"messages": messages}) for _ in range(6)))
    path = tmp_path / "c.toml"
    path.write_text(
        f'target = "{tiny_model}"\ndata = ["{data}"]\noutput = "{tmp_path / "run"}"\ntaps = [0, 1]\nmarkov_rank = 4\n'
        "draft_vocab_size = 32\nblock_size = 3\nsteps = 3\nsequences_per_step = 2\nanchors_per_sequence = 4\n"
        'eval_every = 2\nsave_every = 1\ndtype = "float32"\n'
    )
    return path


def test_train_resume_export_average(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "training from step 0 to 3, evaluating every 2 steps" in lines
    (second,) = (line for line in lines if line.startswith("step 2 of 3, blocks 16"))
    assert "accepted length" in second
    assert second.endswith(" left")
    assert lines[-1] == f"drafter written to {tmp_path / 'run' / 'drafter'}"
    assert main(["train", str(config), "--set", "steps=4", "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert (facts["steps"], facts["averaged_steps"]) == (4, [])
    assert facts["held_out"]["tau_greedy"] >= 1
    assert Path(facts["log"]).exists()
    assert "resumed at step 3" in err
    state = str(tmp_path / "run" / "state.pt")
    assert main(["train", str(config), "--json", "--average", state, state]) == 0
    assert json.loads(capsys.readouterr().out)["averaged_steps"] == [4, 4]
    assert main(["train", str(config), "--export"]) == 0
    provenance = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())["provenance"]
    assert (provenance["steps"], provenance["averaged_steps"]) == (4, [])


def test_ctrl_c_saves_and_says_so(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.train_step

    def pressed(trainer: Trainer) -> dict[str, float]:
        if trainer.step == 1:
            signal.raise_signal(signal.SIGINT)
        return step(trainer)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Trainer, "train_step", pressed)
    assert main(["train", str(config), "--set", "save_every=50"]) == 130
    assert "stopped at step 2 and saved; the same command goes on" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) == before
    monkeypatch.setattr(Trainer, "train_step", step)
    assert main(["train", str(config), "--set", "save_every=50"]) == 0
    assert "resumed at step 2" in capsys.readouterr().out


def test_a_second_ctrl_c_says_where_it_goes_on(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.train_step

    def interrupted(trainer: Trainer) -> dict[str, float]:
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return step(trainer)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    assert main(["train", str(config)]) == 130
    assert "stopped at step 2; the same command goes on from the last state" in capsys.readouterr().err
    monkeypatch.setattr(Trainer, "train_step", step)
    assert main(["train", str(config)]) == 0
    assert "resumed at step 2" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        ([str(tmp_path / "none.toml")], "cannot read training config"),
        ([str(config), "--set", "stepz=1"], "unknown training option 'stepz'"),
        ([str(config), "--set", f"data=['{tmp_path / 'none.jsonl'}']"], "cannot read training data"),
        ([str(config), "--set", "init_from=/none"], "init_from /none does not exist"),
        ([str(config), "--average", str(tmp_path / "none.pt")], "no resume state at"),
        ([str(config), "--export", "--average", "x.pt"], "not allowed with argument --export"),
    ):
        assert main(["train", *arguments]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert message in err


def test_missing_states_are_looked_for_before_anything_is_read(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.train.setup.build_trainer", lambda *_: pytest.fail("read for nothing"))
    assert main(["train", str(config), "--average", str(tmp_path / "none.pt")]) == 2
    assert capsys.readouterr().err == (
        f"error: no resume state at {tmp_path / 'none.pt'}: name state.pt files of this run\n"
    )


def test_durations_are_rounded_for_people() -> None:
    assert [duration(s) for s in (0.4, 59.4, 59.6, 3599, 7500)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "59 min 59 s",
        "2 h 05 min",
    ]
