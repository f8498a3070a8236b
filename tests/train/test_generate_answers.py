"""The target writes training data: the plan, a full batch, resuming, what is set aside."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dspark.core import DSparkError, SamplingParams
from dspark.data import load_prompts
from dspark.llm import LLM
from dspark.target.tokenizer import Tokenizer
from dspark.train.answer_file import AnswerFile, repair
from dspark.train.data import load_sequences
from dspark.train.generate import GenerateSettings, Job, Tally, generate_answers, plan_jobs, rolling
from dspark.train.prompts import TrainingPrompt, distinct, read_prompts
from dspark.train.self_prompts import user_turn, write_prompts

SETTINGS = GenerateSettings(temperatures=(0.0, 0.5, 1.0), max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, max_num_seqs=4)


def prompt(text: str, domain: str = "") -> TrainingPrompt:
    return TrainingPrompt([{"role": "user", "content": text}], domain, "test")


PROMPTS = [prompt(text, "ab"[i % 2]) for i, text in enumerate(("abc", "xyz", "Hello", "dog"))]


def run(
    llm: LLM, path: Path, settings: GenerateSettings = SETTINGS, prompts: Any = PROMPTS
) -> tuple[Tally, AnswerFile]:
    file = AnswerFile(path, llm.engine.target.identity)
    tally = generate_answers(llm, plan_jobs(prompts, settings), settings, file)
    file.close()
    return tally, file


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def jobs_of(records: list[dict[str, Any]]) -> Counter[tuple[str, float, int]]:
    return Counter((r["messages"][0]["content"], r["temperature"], r["seed"]) for r in records)


def key(job: Job) -> tuple[str, float, int]:
    return job.prompt.messages[0]["content"], job.temperature, job.seed


# The plan


def test_all_prompts_get_a_first_answer_before_any_gets_a_second() -> None:
    jobs = plan_jobs(PROMPTS, SETTINGS)
    assert len(jobs) == 12
    for turn in range(3):
        assert {job.prompt.key for job in jobs[4 * turn : 4 * turn + 4]} == {p.key for p in PROMPTS}
    for p in PROMPTS:
        assert sorted(job.temperature for job in jobs if job.prompt is p) == [0.0, 0.5, 1.0]
    many = [prompt(str(i)) for i in range(200)]
    first = Counter(job.temperature for job in plan_jobs(many, SETTINGS)[:200])
    assert min(first.values()) > 40  # a mix from the start


def test_a_prompts_jobs_do_not_depend_on_the_other_prompts() -> None:
    alone = {key(job) for job in plan_jobs(PROMPTS[:1], SETTINGS)}
    among = {key(job) for job in plan_jobs(PROMPTS, SETTINGS) if job.prompt is PROMPTS[0]}
    assert alone == among
    other = plan_jobs(PROMPTS[:1], GenerateSettings(temperatures=(0.0, 0.5, 1.0), seed=1))
    assert {key(job) for job in other} & alone == {("abc", 0.0, 0)}  # greedy has one outcome only


def test_more_answers_repeat_the_temperatures_above_zero_with_other_seeds() -> None:
    jobs = plan_jobs(PROMPTS[:1], GenerateSettings(temperatures=(0.0, 1.0), answers_per_prompt=4))
    assert sorted(job.temperature for job in jobs) == [0.0, 1.0, 1.0, 1.0]
    assert len({job.seed for job in jobs}) == 4
    assert len(plan_jobs(PROMPTS, GenerateSettings(temperatures=(0.0,), answers_per_prompt=4))) == 4
    assert len(plan_jobs(PROMPTS, GenerateSettings(answers_per_prompt=1))) == 4
    assert len(plan_jobs(PROMPTS, GenerateSettings(limit=5))) == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperatures": ()},
        {"temperatures": (-1.0,)},
        {"max_repetition": 1.5},
        {"limit": 0},
        {"max_tokens": 0},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DSparkError):
        GenerateSettings(**wrong)


# The batch


def test_the_batch_is_refilled_whenever_a_request_ends(llm: LLM) -> None:
    lengths = [1, 9, 3, 5, 2, 7, 4, 6]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    requests = iter([([i, i], p, i) for i, p in enumerate(params)])
    running: list[int] = []
    outputs = dict(rolling(llm.engine, requests, 3, lambda tokens, live: running.append(live)))
    assert {i: len(o.token_ids) for i, o in outputs.items()} == dict(enumerate(lengths))
    assert set(running[:-9]) == {3}
    assert not llm.engine.has_unfinished


def test_closing_the_iterator_aborts_what_runs(llm: LLM) -> None:
    requests = iter([([1], SamplingParams(temperature=0, max_tokens=n), n) for n in (1, 50, 60)])
    outputs = rolling(llm.engine, requests, 3)
    assert next(outputs)[0] == 1
    outputs.close()
    assert not llm.engine.has_unfinished


# Answers


def test_records_are_what_training_reads_and_greedy_ones_what_the_target_says(
    llm: LLM, tmp_path: Path
) -> None:
    tally, file = run(llm, tmp_path / "a.jsonl")
    found = records(file.path)
    assert jobs_of(found) == Counter(key(job) for job in plan_jobs(PROMPTS, SETTINGS))
    assert (tally.answers, tally.finished, tally.planned) == (12, 12, 12)
    assert tally.tokens == file.tokens == sum(len(r["token_ids"]) for r in found)
    assert file.kept == {"a": 6, "b": 6}
    for record in found:
        assert record["completion_tokens"] == len(record["token_ids"])
        assert record["source"] == "test"
        if record["temperature"] == 0:
            alone = llm.generate(record["messages"][:1], SamplingParams(temperature=0, max_tokens=12))[0]
            assert (alone.token_ids, alone.text) == (record["token_ids"], record["messages"][1]["content"])
    sequences = load_sequences([file.path], llm.tokenizer)
    assert sequences
    answers = {tuple(r["token_ids"]) for r in found}
    assert all(tuple(s.token_ids[s.answer_start :]) in answers for s in sequences)


def test_a_killed_run_goes_on_where_it_was(llm: LLM, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run(llm, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:5]) + lines[5][:-20])  # torn in the middle of a record
    tally, file = run(llm, cut)
    assert file.torn
    assert tally.skipped == {"already_there": 5}
    assert tally.answers == 7
    assert jobs_of(records(cut)) == jobs_of(records(whole))
    tally, file = run(llm, cut)
    assert tally.answers == 0
    assert not file.torn
    assert file.kept.total() == 12


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}')
    assert not repair(path)
    assert path.read_bytes() == b'{"a": 1}\n{"a": 2}\n'
    path.write_bytes(b'{"a": 1')
    assert repair(path)
    assert path.read_bytes() == b""


def test_records_without_a_seed_count_as_done(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    old = {"temperature": 0.5, "messages": [*PROMPTS[0].messages, {"role": "assistant", "content": "z"}]}
    path.write_text(json.dumps(old) + "\n")
    tally, _ = run(llm, path)
    assert tally.skipped == {"already_there": 1}
    assert tally.answers == 11


def test_repetitive_and_equal_answers_are_set_aside_and_not_tried_again(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tight = GenerateSettings(temperatures=(0.0, 1e-4), max_tokens=60, max_repetition=0.2)
    _, file = run(llm, path, tight)
    dropped = records(file.dropped_path)
    reasons = Counter(r["dropped"] for r in dropped)
    assert reasons["repetition"]
    assert reasons["duplicate"]  # at temperature 0.0001 the greedy answer comes again
    assert file.kept.total() + len(dropped) == 8
    assert {reason: counts.total() for reason, counts in file.dropped.items()} == reasons
    assert file.dropped["repetition"].keys() <= {"a", "b"}
    tally, again = run(llm, path, tight)
    assert tally.answers == 0
    assert again.dropped == file.dropped


def test_too_long_prompts_are_counted(llm: LLM, tmp_path: Path) -> None:
    prompts = [*PROMPTS, prompt("a" * 200)]
    tally, _ = run(llm, tmp_path / "a.jsonl", SETTINGS, prompts)
    assert tally.skipped == {"prompt_too_long": 3}
    short = GenerateSettings(temperatures=(0.0,), max_tokens=4, max_prompt_tokens=5)
    tally, _ = run(llm, tmp_path / "b.jsonl", short, prompts)  # "-abc-" has 5 tokens
    assert (tally.skipped, tally.answers) == ({"prompt_too_long": 2}, 3)


def test_a_file_of_another_model_or_form_is_refused(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    run(llm, path, GenerateSettings(temperatures=(0.0,), max_tokens=2, limit=1))
    with pytest.raises(DSparkError, match=r"a.jsonl:1 was written by another model"):
        AnswerFile(path, "0123")
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(DSparkError, match=r"a.jsonl:1 needs"):
        AnswerFile(path, llm.engine.target.identity)
    with pytest.raises(DSparkError, match=r"must be a .jsonl file"):
        AnswerFile(tmp_path / "a.jsonl.gz", "")


def test_answers_in_another_format_are_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    path.write_text(json.dumps({"conversations": turns}) + "\n")
    with pytest.raises(DSparkError, match=r"a.jsonl:1 was not written by"):
        AnswerFile(path, "")


# Prompts


def test_prompts_in_every_form(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "no"}
    lines = [
        {"prompt": "one", "domain": "code", "source": "s"},
        {"turns": ["two", "never asked"]},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "three"}, answer]},
        {"conversations": [{"from": "human", "value": "four"}, {"from": "gpt", "value": "x"}]},
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "q.txt").write_text("five\n\n  six \n")
    prompts = read_prompts([tmp_path / "p.jsonl", tmp_path / "q.txt"])
    assert [p.messages[-1]["content"] for p in prompts] == ["one", "two", "three", "four", "five", "six"]
    assert [p.source for p in prompts] == ["s", "p", "p", "p", "q", "q"]
    assert prompts[0].domain == "code"
    assert prompts[2].messages[0]["role"] == "system"
    for bad in ({"question": "x"}, {"prompt": " "}, {"messages": [answer]}):
        (tmp_path / "bad.jsonl").write_text(json.dumps(bad))
        with pytest.raises(DSparkError, match=r"bad.jsonl:1 has no prompt"):
            read_prompts([tmp_path / "bad.jsonl"])


def test_duplicates_and_evaluation_prompts_are_left_out() -> None:
    held_out = TrainingPrompt(load_prompts(limit=1)[0].messages)
    skipped: Counter[str] = Counter()
    kept = list(distinct([prompt("a b"), prompt(" A  b"), held_out, prompt("c")], skipped))
    assert [p.messages[0]["content"] for p in kept] == ["a b", "c"]
    assert skipped == {"duplicate_prompt": 1, "evaluation_prompt": 1}


def test_the_target_writes_prompts_and_goes_on_where_it_was(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "p.prompts"
    three = write_prompts(llm, 3, path, seed=0)
    path.write_text(path.read_text() + '{"domain": "ch')
    five = write_prompts(llm, 5, path, seed=0)
    assert five[:3] == three
    assert write_prompts(llm, 4, path, seed=0) == five[:4]
    assert len({p.key for p in five}) == 5
    assert all(len(p.messages[0]["content"]) >= 8 and p.source == "self" for p in five)
    attempts = [r["attempt"] for r in records(path)]
    assert len(set(attempts)) == 5
    assert min(attempts[3:]) > max(attempts[:3])
    assert not llm.engine.has_unfinished


def test_a_template_without_a_user_turn_cannot_be_continued(tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    assert user_turn(tokenizer) == ("-", "")
    bare = Tokenizer(tiny_model)
    bare.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DSparkError, match="no opening of a user turn"):
        user_turn(bare)
