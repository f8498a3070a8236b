"""Prompts that the target writes itself: the chat template opens a user turn, the target fills it.

Such prompts come from the distribution of the target's own training data, which nobody else may have.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dspark.core import DSparkError, RequestOutput, SamplingParams
from dspark.evaluate.repetition import repetition_share
from dspark.llm import LLM
from dspark.target.tokenizer import Tokenizer
from dspark.train.answer_file import repair
from dspark.train.data import read_records
from dspark.train.generate import rolling
from dspark.train.prompts import TrainingPrompt, built_in_keys, draw

__all__ = ["SelfPromptTally", "user_turn", "write_prompts"]

MARK = "PROMPT-GOES-HERE"
LONGEST_TOKENS = 160
SHORTEST_CHARACTERS = 8
MAX_REPETITION = 0.3
TRIES_PER_PROMPT = 10


@dataclass
class SelfPromptTally:
    """Prompts written so far, and how many attempts were refused, by reason."""

    wanted: int
    written: int
    refused: Counter[str]


def user_turn(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the chat template puts before and behind a first user message.

    Raises:
        DSparkError: the template opens a user turn with nothing that the target could continue.
    """
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], add_generation_prompt=False, tokenize=False
    )
    opening, found, ending = rendered.partition(MARK)
    if not found or not tokenizer.encode(opening):
        raise DSparkError(
            "the chat template has no opening of a user turn to continue: name files with prompts instead"
        )
    return opening, ending.strip()


def write_prompts(
    llm: LLM,
    count: int,
    path: Path,
    seed: int,
    progress: Callable[[SelfPromptTally], None] = lambda tally: None,
) -> list[TrainingPrompt]:
    """`count` distinct prompts of the target's, at temperature 1; fewer if it repeats itself too much.

    They are appended to the jsonl file `path` as they are found, and read from it first, so that a killed run goes
    on where it was.

    Raises:
        DSparkError: no user turn to open, or an unreadable file.
    """
    found, tried = _read(path)
    tally = SelfPromptTally(count, len(found), Counter())
    progress(tally)
    if len(found) >= count:
        return found[:count]
    seen = {prompt.key for prompt in found}
    held_out = built_in_keys()
    path.parent.mkdir(parents=True, exist_ok=True)
    attempts = rolling(llm.engine, _attempts(llm, seed, tried, count), llm.engine.config.max_num_seqs)
    with path.open("a", encoding="utf-8") as file:
        for number, output in attempts:
            prompt = TrainingPrompt([{"role": "user", "content": output.text.strip()}], "chat", "self")
            reason = _fault(output, llm.tokenizer)
            if reason is None and prompt.key in held_out:
                reason = "evaluation prompt"
            if reason is None and prompt.key in seen:
                reason = "duplicate"
            if reason is not None:
                tally.refused[reason] += 1
                continue
            seen.add(prompt.key)
            found.append(prompt)
            file.write(json.dumps({**_record(prompt), "attempt": number}) + "\n")
            file.flush()
            tally.written = len(found)
            progress(tally)
            if len(found) == count:
                attempts.close()
    return found


def _record(prompt: TrainingPrompt) -> dict[str, str]:
    return {"domain": prompt.domain, "source": prompt.source, "prompt": prompt.messages[0]["content"]}


def _read(path: Path) -> tuple[list[TrainingPrompt], int]:
    """Prompts of former runs, and the number of the first attempt that they did not make."""
    if not path.exists():
        return [], 0
    repair(path)
    prompts, tried = [], 0
    for number, record in read_records(path):
        if not isinstance(record.get("prompt"), str) or not isinstance(record.get("attempt"), int):
            raise DSparkError(f"{path}:{number} is no prompt that the target wrote: move the file away")
        messages = [{"role": "user", "content": record["prompt"]}]
        prompts.append(TrainingPrompt(messages, record["domain"], record["source"]))
        tried = max(tried, record["attempt"] + 1)
    return prompts, tried


def _attempts(llm: LLM, seed: int, first: int, count: int) -> Iterator[tuple[list[int], SamplingParams, int]]:
    opening, ending = user_turn(llm.tokenizer)
    prompt = llm.tokenizer.encode(opening)
    closing = llm.tokenizer.encode(ending)[:1]
    special = (
        bool(closing) and closing[0] in llm.tokenizer.special_token_ids
    )  # most often an end token already
    for number in range(first, first + TRIES_PER_PROMPT * count):
        params = SamplingParams(
            temperature=1.0,
            max_tokens=LONGEST_TOKENS,
            seed=draw(seed, "self", number),
            stop_token_ids=closing if special else (),
            stop=ending if ending and not special else (),
        )
        yield prompt, params, number


def _fault(output: RequestOutput, tokenizer: Tokenizer) -> str | None:
    """Why an attempt is no prompt."""
    if output.finish_reason != "stop":
        return "unfinished"
    if len(output.text.strip()) < SHORTEST_CHARACTERS:
        return "too short"
    if "\ufffd" in output.text or not tokenizer.special_token_ids.isdisjoint(output.token_ids[:-1]):
        return "broken text"
    if repetition_share(output.token_ids) > MAX_REPETITION:
        return "repeats itself"
    return None
