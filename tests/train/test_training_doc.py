"""docs/training.md: the walk-through works as written, on a tiny model, with small numbers."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.cli import main

DOC = Path(__file__).parents[2] / "docs" / "training.md"

LAUNCHERS = importlib.util.find_spec("accelerate") is not None
# What the document says for a real model, and what a test can afford. Every entry must occur.
SMALLER = {
    "--self-prompts 1000": "--self-prompts 4",
    "--max-tokens 320": "--max-tokens 24",
    "draft_vocab_size = 8192": "draft_vocab_size = 32\nmarkov_rank = 4",
    "steps = 3000": "steps = 2\neval_every = 1",
    "anchors_per_sequence = 36": "anchors_per_sequence = 4",
    "steps=6000": "steps=1",
    "--nproc-per-node 4 -m dspark train drafter.toml": (
        "--nproc-per-node 2 -m dspark train drafter.toml --set output=runs/shared"
    ),
    "--multi_gpu --num_processes 8 -m dspark train drafter.toml": (
        "--cpu --num_processes 1 -m dspark train drafter.toml --set output=runs/launched"
    ),
    "device=cuda": "device=cpu",
    "sequences_per_step=48": "sequences_per_step=2",
    " --compare": " --compare --repeats 1 --max-tokens 8",
}


def fenced(text: str) -> list[tuple[str, str]]:
    """(language, content) of the code blocks, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def launch(program: str, arguments: list[str]) -> None:
    """A launcher of this environment, where accelerate is installed."""
    if not LAUNCHERS:
        return
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.count("drafter written to") == 1, "one process speaks for all"


def test_every_command_of_the_document_runs(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = DOC.read_text(encoding="utf-8")
    for real, small in SMALLER.items():
        assert real in text, f"the document no longer says {real!r}"
        text = text.replace(real, small)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "my-model")
    Path("prompts.jsonl").write_text('{"prompt": "abc", "domain": "code"}\n{"prompt": "Why"}\n')
    seen = []
    for language, content in fenced(text):
        if language == "toml":
            Path("drafter.toml").write_text(content)
        elif language == "sh":
            for line in content.splitlines():
                program, *arguments = shlex.split(line, comments=True)
                if program in ("torchrun", "accelerate"):
                    launch(program, arguments)
                    continue
                assert program == "dspark"
                assert main(arguments) == 0, f"{line}\n{capfd.readouterr().err}"
                seen.append(arguments[0])
    assert seen == ["data", "data", "train", "train", "generate", "data", "train", "train"]
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert {a["source"] for a in answers} == {"prompts", "self"}
    assert {a["domain"] for a in answers} == {"code", "", "chat"}
    for run in ("my-model", "second", *(("shared", "launched") if LAUNCHERS else ())):
        provenance = json.loads(Path("runs", run, "drafter", "config.json").read_text())["provenance"]
        assert provenance["config"]["data"] == ["answers.jsonl"]
        assert provenance["held_out"]["tau_greedy"] >= 1
