"""Every format of training data that is read, and what is said about those that are not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dspark.core import DSparkError
from dspark.target.tokenizer import Tokenizer
from dspark.train.data import Sequence, load_sequences, split

A = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def"}]
END = 63


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def write(path: Path, *records: Any) -> Path:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return path


SHAREGPT = [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "def"}]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": A},
        {"id": "7", "conversations": A},
        {"conversations": SHAREGPT},
        {"conversations": [{"from": "Human", "value": "abc"}, {"from": "ChatGPT", "value": "def"}]},
        {"messages": [A[0], {"role": "assistant", "content": "?"}], "token_ids": [3, 4, 5]},
        {"messages": A, "token_ids": [3, 4, 5, END]},
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_one_conversation_in_every_format_is_the_same_sequence(
    record: dict[str, Any], name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write(tmp_path / name, "", record)
    prompt = tokenizer.apply_chat_template(A[:1])
    assert load_sequences([path], tokenizer) == [Sequence([*prompt, 3, 4, 5, END], len(prompt))]


def test_a_cut_answer_gets_no_end_token(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": A, "finish_reason": "length", "domain": "x"})
    (sequence,) = load_sequences([path], tokenizer)
    assert sequence.token_ids[-1] == 5
    assert sequence.domain == "x"


def test_all_of_a_raw_text_is_trained_on_and_texts_are_split_apart(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", *({"id": str(i), "text": "abc" + "xyz"[i % 3] * i} for i in range(40)))
    sequences = load_sequences([path], tokenizer)
    assert len(sequences) == 40
    assert all(s.answer_start == 1 and s.token_ids[:3] == [0, 1, 2] for s in sequences)
    train, held_out = split(sequences, 0.25, seed=1)
    assert 4 <= len(held_out) <= 16  # they all begin alike: by their first token they would land on one side
    assert len(train) + len(held_out) == 40


def test_answers_to_one_prompt_stay_on_one_side_when_data_are_added() -> None:
    sequences = [Sequence([p, 1, a, 5], 2) for p in range(30) for a in range(3)]
    train, held_out = split(sequences[:45], 0.3, seed=0)
    more_train, more_held_out = split(sequences, 0.3, seed=0)
    assert {s.token_ids[0] for s in train}.isdisjoint(s.token_ids[0] for s in held_out)
    assert {tuple(s.token_ids) for s in held_out} <= {tuple(s.token_ids) for s in more_held_out}
    assert {tuple(s.token_ids) for s in train} <= {tuple(s.token_ids) for s in more_train}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"messages": ', "is not JSON"),
        ("[1]", "is not a JSON object"),
        ({"prompt": "abc"}, 'needs "messages", "conversations" or "text"; it has prompt'),
        ({"messages": []}, 'needs "messages"'),
        ({"messages": A[:1]}, "end with an assistant message"),
        ({"messages": A[1:]}, "behind a prompt"),
        (
            {"messages": [A[0], {"role": "assistant", "content": None}]},
            'messages[1] needs "role" and "content"',
        ),
        ({"conversations": [{"from": "narrator", "value": "x"}]}, "conversations[0] is from 'narrator'"),
        ({"messages": A, "token_ids": ["3"]}, '"token_ids" must be a list of token ids'),
        ('{"text": "\\ud83d"}', "lone surrogate"),
    ],
)
def test_a_malformed_record_is_named_by_file_and_line(
    record: Any, message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": A}, "", record)
    with pytest.raises(DSparkError) as error:
        load_sequences([path], tokenizer)
    assert str(error.value).startswith(f"{path}:3")
    assert message in str(error.value)


def test_damaged_files_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps({"messages": A}).encode() * 50)
    for name, content, message in (
        ("a.jsonl.gz", whole[: len(whole) // 2], "is damaged"),
        ("b.jsonl.gz", b"no gzip", "is damaged"),
        ("c.jsonl", b'{"text": "\xff"}', "is not UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DSparkError, match=message):
            load_sequences([tmp_path / name], tokenizer)
    with pytest.raises(DSparkError, match="cannot read training data"):
        load_sequences([tmp_path / "none.jsonl"], tokenizer)
