"""examples/varied_prompts.py: prompts that `dspark data generate` reads, the same for a seed, none of them built in."""

import json
import subprocess
import sys
from pathlib import Path

from dspark.train.prompts import built_in_keys, read_prompts

SCRIPT = Path(__file__).parents[2] / "examples" / "varied_prompts.py"


def prompts(output: Path, *args: str) -> list[dict]:
    subprocess.run([sys.executable, str(SCRIPT), *args, "--output", str(output)], check=True)
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_prompts_are_varied_and_repeat_with_the_seed(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so."}]
    answers.write_text(json.dumps({"domain": "chat", "messages": turns}) + "\n")
    first = prompts(tmp_path / "a.jsonl", str(answers), "--count", "300")
    assert first == prompts(tmp_path / "b.jsonl", str(answers), "--count", "300")
    assert first != prompts(tmp_path / "c.jsonl", str(answers), "--count", "300", "--seed", "1")
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
