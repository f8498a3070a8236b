"""`dspark data generate` and `dspark data inspect` on a tiny model."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.cli import main
from dspark.data import load_prompts
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.checkpoint import save_drafter_model
from dspark.drafters.config import DrafterConfig
from dspark.engine.engine import Engine


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text, "domain": "math"} for text in ("abc", "dog", "ABC", "x" * 200)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def arguments(tiny_model: Path, prompts: Path, *more: str) -> list[str]:
    output = str(prompts.with_name("out.jsonl"))
    own = ["--model", str(tiny_model), "--output", output, "--max-tokens", "16", "--temperatures", "0,1"]
    return ["data", "generate", str(prompts), *own, *more]


def test_generate_tells_what_it_did_and_the_same_command_resumes(
    tiny_model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tiny_model, prompts, "--json", "--limit", "3")) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert facts["skipped"] == {"duplicate_prompt": 1, "prompt_too_long": 1}
    assert (facts["planned"], facts["finished"], facts["new_answers"], facts["answers"]) == (3, 3, 2, 2)
    assert facts["domains"] == {"math": 2}
    assert facts["answer_tokens"] == facts["new_tokens"] > 0
    assert "error" not in err
    with prompts.with_name("out.jsonl").open("a") as file:
        file.write('{"torn')
    assert main(arguments(tiny_model, prompts)) == 0
    out, err = capsys.readouterr()
    assert "out.jsonl: 4 answers" in out
    assert "skipped: already there 2, duplicate prompt 1, prompt too long 2" in out
    assert "the last line was torn" in err


def test_ctrl_c_keeps_what_was_finished(
    tiny_model: Path, prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, output = Engine.step, prompts.with_name("out.jsonl")

    def interrupted(engine: Engine) -> Any:
        if output.exists():
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    prompts.write_text("\n".join(json.dumps({"prompt": f"p{i}"}) for i in range(20)))
    assert main(arguments(tiny_model, prompts, "--max-num-seqs", "2")) == 130
    kept = output.read_text().count("\n")
    assert f"stopped with {kept} answers; the same command goes on" in capsys.readouterr().err
    assert 1 <= kept <= 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperatures", "hot"], "not a list of numbers"),
        (["--temperatures", "0,-1"], "temperatures must be"),
        (["--max-repetition", "2"], "max_repetition is a share"),
        (["--limit", "0"], "limit must be 1 or more"),
        (["--method", "none", "--num-speculative-tokens", "3"], "no meaning with the method none"),
        (["--model", "none"], "no model 'none'"),
        (["--output", "x.txt"], "must be a .jsonl file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    more: list[str], message: str, tiny_model: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tiny_model, prompts, *more)) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_no_prompts_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "generate", "--output", "x.jsonl"]) == 2
    assert "there are no prompts" in capsys.readouterr().err
    assert main(["data", "generate", "none.jsonl", "--output", "x.jsonl"]) == 2
    assert "cannot read training data none.jsonl" in capsys.readouterr().err


# inspect


def answer(prompt: str, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    return {"messages": messages, "finish_reason": "length", **more}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts of 5 tokens; answers of 10 letters a to h, one a loop of 40, one twice, one to a held-out prompt."""
    letters = "abcdefghab"
    rows = [answer(f"p{chr(97 + i)}q", letters, domain="chat", temperature=0.5) for i in range(20)]
    rows.append(answer("loop", "ab" * 20, domain="math", temperature=0, source="s"))
    rows.append(rows[0])
    held_out = load_prompts(limit=1)[0].messages
    rows.append({"messages": [*held_out, {"role": "assistant", "content": letters}]})
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_inspect_counts_what_is_there(
    tiny_model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "data",
                "inspect",
                str(data),
                "--model",
                str(tiny_model),
                "--draft-vocab-sizes",
                "5,9,40",
                "--json",
            ]
        )
        == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert (facts["answers"], facts["prompts"], facts["duplicates"]) == (23, 22, 1)
    assert facts["evaluation_prompts"] == 1
    assert facts["answer_tokens"] == 21 * 10 + 40 + 11  # the last one ended by itself: one more token
    assert facts["answer_length"]["median"] == 10
    assert facts["answer_length"]["max"] == 40
    assert facts["looping"] == pytest.approx(1 / 23)
    chat, math = facts["domains"]["chat"], facts["domains"]["math"]
    assert (chat["answers"], chat["cut"], chat["looping"], chat["repetition_share"]) == (21, 1, 0, 0)
    assert (math["answers"], math["mean_length"], math["looping"]) == (1, 40, 1)
    assert set(facts["temperatures"]) == {"-", "0", "0.5"}
    assert set(facts["sources"]) == {"-", "s"}
    sizes = facts["coverage"]["sizes"]
    assert sizes["5"] == pytest.approx(
        0.6, abs=0.11
    )  # a, b (twice each in ten), two more letters, the end token
    assert sizes["9"] == sizes["40"] == 1


def test_inspect_prints_markdown_with_warnings_and_a_drafters_coverage(
    tiny_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = DrafterConfig(
        method="dspark", block_size=3, num_layers=1, hidden_size=32, intermediate_size=64, num_heads=4,
        num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, rope_theta=1e4, qk_norm=False, max_context=128, vocab_size=64,
        mask_token_id=1, taps=(0,), markov_rank=2, draft_vocab_size=2,
    )  # fmt: skip
    model = BlockDrafterModel(config)
    model.vocab.copy_(torch.tensor([0, 1]))
    save_drafter_model(model, tmp_path / "drafter", {})
    command = [
        "data",
        "inspect",
        str(data),
        "--model",
        str(tiny_model),
        "--drafter",
        str(tmp_path / "drafter"),
    ]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "WARNING: 1 of the built-in evaluation prompts" in out
    assert "WARNING: 1 answers occur twice" in out
    assert "| chat | 21 | 20 | 210 | 10 | 100.0% | 0.0% | 0.0% |" in out
    inside = 21 * 4 + 40 + 4
    assert f"| 2 of {tmp_path / 'drafter'} | {100 * inside / 261:.1f}% |" in out


def test_inspect_refuses_tokens_of_another_model(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(answer("abc", "x", token_ids=[64])))
    assert main(["data", "inspect", str(path), "--model", str(tiny_model)]) == 2
    assert "token id 64 is outside the vocabulary" in capsys.readouterr().err
    path.write_text("")
    assert main(["data", "inspect", str(path), "--model", str(tiny_model)]) == 2
    assert "the files hold no records" in capsys.readouterr().err
