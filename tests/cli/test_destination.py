"""Paths that cannot be written are refused before any work: no model is there to be loaded."""

import os

import pytest

from dspark.cli import main
from dspark.cli.destination import check_directory, check_file
from dspark.core import DSparkError


def test_places_that_can_be_written(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    check_file(tmp_path / "old.json")
    check_file(tmp_path / "new.json")
    check_file(tmp_path / "a" / "b" / "new.json", make_parents=True)
    check_directory(tmp_path)
    check_directory(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]  # looked at, not made


def test_places_that_cannot(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(DSparkError, match="is a directory: name a file in it"):
        check_file(tmp_path)
    with pytest.raises(DSparkError, match="create it first"):
        check_file(tmp_path / "a" / "new.json")
    with pytest.raises(DSparkError, match="is a file, not a directory"):
        check_file(tmp_path / "file" / "new.json", make_parents=True)
    with pytest.raises(DSparkError, match="is a file, not a directory"):
        check_directory(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for place in (tmp_path / "file", tmp_path / "new.json"):
        with pytest.raises(DSparkError, match="cannot be written: change its permissions"):
            check_file(place)
    with pytest.raises(DSparkError, match="cannot be written: change its permissions"):
        check_directory(tmp_path / "a" / "b")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("simulate --csv no/where.csv", "create it first"),
        ("simulate --markdown .", "is a directory"),
        ("simulate --figures file", "not a directory"),
        ("profile --model none --export no/where.json", "create it first"),
        ("bench throughput --model none --json .", "is a directory"),
        ("calibrate --model none --out no/where.json", "create it first"),
        ("calibrate --model none --rounds .", "is a directory"),
        ("calibrate --model none --diagram no/where.svg", "create it first"),
        ("evaluate --model none --output file", "not a directory"),
        ("data generate --model none --self-prompts 1 --output file/a.jsonl", "not a directory"),
        ("train run.toml --set output=file", "not a directory"),
        ("train run.toml --set feature_dir=file", "not a directory"),
    ],
)
def test_the_commands_look_first(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "run.toml").write_text('target = "none"\ndata = ["none.jsonl"]\nsteps = 1\n')
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
