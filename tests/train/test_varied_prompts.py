"""examples/varied_prompts.py: prompts that `dspark data generate` reads, the same for a seed, none of them built in."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.train.prompts import built_in_keys, read_prompts

SCRIPT = Path(__file__).parents[2] / "examples" / "varied_prompts.py"


def prompts(output: Path, *args: str) -> list[dict]:
    subprocess.run([sys.executable, str(SCRIPT), *args, "--output", str(output)], check=True)
    return [json.loads(line) for line in output.read_text().splitlines()]


TURNS = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so."}]


def test_prompts_are_varied_and_repeat_with_the_seed(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    line = json.dumps({"domain": "chat", "messages": TURNS}) + "\n"
    answers.write_text(line)
    first = prompts(tmp_path / "a.jsonl", str(answers), "--count", "300")
    assert first == prompts(tmp_path / "b.jsonl", str(answers), "--count", "300")
    assert first != prompts(tmp_path / "c.jsonl", str(answers), "--count", "300", "--seed", "1")
    with gzip.open(tmp_path / "answers.jsonl.gz", "wt") as packed:
        packed.write(line)
    assert first == prompts(tmp_path / "z.jsonl", str(tmp_path / "answers.jsonl.gz"), "--count", "300")
    assert len({json.dumps(row["messages"]) for row in first}) == 300
    assert {row["source"] for row in first} == {"topic", "program", "sum", "document", "follow-up"}
    filled = [row["messages"][0]["content"] for row in first if row["source"] in ("topic", "program", "sum")]
    assert not any("{" in text for text in filled)
    read = read_prompts([tmp_path / "a.jsonl"])
    assert len(read) == 300
    assert not built_in_keys() & {prompt.key for prompt in read}
    assert {row["source"] for row in prompts(tmp_path / "d.jsonl", "--count", "50")} == {
        "topic",
        "program",
        "sum",
    }


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{}\n", "a.jsonl:1 needs"),
        ("a.jsonl", json.dumps({"messages": TURNS[:1]}).encode(), "a.jsonl:1 needs messages that end"),
        ("a.jsonl", b"nothing\n", "a.jsonl:1 is not JSON"),
        ("a.jsonl.gz", b"nothing\n", "a.jsonl.gz is damaged"),
        ("b.jsonl", None, "cannot read training data"),
    ],
)
def test_answers_that_cannot_be_read_are_one_line(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    output = tmp_path / "prompts.jsonl"
    argv = [sys.executable, str(SCRIPT), str(tmp_path / name), "--output", str(output)]
    ended = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not output.exists()
