"""The target writes its own training data: answers to prompts, continuously batched, resumable.

jobs = plan_jobs(prompts, GenerateSettings(temperatures=(0.0, 1.0)))
summary = generate_answers(llm, jobs, settings, AnswerFile(path, llm.engine.target.identity), print)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dspark.core import DSparkError, RequestOutput, SamplingParams
from dspark.engine.engine import Engine
from dspark.evaluate.repetition import repetition_share
from dspark.llm import LLM
from dspark.train.answer_file import AnswerFile
from dspark.train.prompts import TrainingPrompt, draw
from dspark.typed import check_fields

__all__ = ["GenerateSettings", "Job", "Tally", "generate_answers", "plan_jobs", "rolling"]

Tag = TypeVar("Tag")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """What is asked of the target.

    `answers_per_prompt`: None is one at every temperature. `limit`: the first so many jobs of the list.
    `max_repetition`: answers with a larger share of repeated 4-grams are set aside; 1 keeps all.
    """

    temperatures: tuple[float, ...] = (0.0, 0.3, 0.7, 1.0)
    answers_per_prompt: int | None = None
    max_tokens: int = 320
    max_prompt_tokens: int | None = None
    max_repetition: float = 1.0
    limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "the option")
        if not self.temperatures or min(self.temperatures) < 0:
            raise DSparkError("temperatures must be one or more numbers of 0 (greedy) or more")
        if not 0 <= self.max_repetition <= 1:
            raise DSparkError(f"max_repetition is a share from 0 to 1, got {self.max_repetition:g}")
        for name in ("answers_per_prompt", "max_tokens", "max_prompt_tokens", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DSparkError(f"{name} must be 1 or more, got {value}")


@dataclass(frozen=True)
class Job:
    """One answer to write. `seed` is the request's; 0 for greedy answers, which have only one outcome."""

    prompt: TrainingPrompt
    temperature: float
    seed: int


def plan_jobs(prompts: Sequence[TrainingPrompt], settings: GenerateSettings) -> list[Job]:
    """Every prompt's answers, in random order: all prompts' first answers, then all second ones, and so on.

    A prompt's first answers go through all temperatures, in an order of its own, later ones through those above 0
    again. A prompt's jobs depend on it and the seed alone: adding prompts changes none of them.
    """
    ranked: list[tuple[int, int, int, Job]] = []
    for number, prompt in enumerate(prompts):
        key = prompt.key
        for turn, temperature in enumerate(_temperatures(key, settings)):
            seed = draw(settings.seed, key, temperature, turn) if temperature > 0 else 0
            rank = draw(settings.seed, "order", key, turn)
            ranked.append((turn, rank, number, Job(prompt, temperature, seed)))
    ranked.sort(key=lambda entry: entry[:3])
    return [job for *_, job in ranked[: settings.limit]]


def _temperatures(key: str, settings: GenerateSettings) -> list[float]:
    """The temperatures of a prompt's answers, in order."""
    each = sorted(dict.fromkeys(settings.temperatures), key=lambda t: draw(settings.seed, "t", key, t))
    sampled = [t for t in each if t > 0]
    count = settings.answers_per_prompt or len(each)
    while sampled and len(each) < count:
        each += sampled
    return each[:count]


def rolling(
    engine: Engine,
    requests: Iterator[tuple[list[int], SamplingParams, Tag]],
    window: int,
    watch: Callable[[int, int], None] = lambda tokens, running: None,
) -> Generator[tuple[Tag, RequestOutput], None, None]:
    """Outputs as requests finish; whenever one does, the next takes its place, so the batch stays full.

    `watch` hears of every step: the tokens it gave, and how many requests run. Closing the iterator aborts those.
    """
    live: dict[str, Tag] = {}
    more = True
    try:
        while True:
            while more and len(live) < window:
                request = next(requests, None)
                if request is None:
                    more = False
                    break
                prompt, params, tag = request
                live[engine.add(prompt, params)] = tag
            if not live:
                return
            events = engine.step()
            watch(sum(len(event.token_ids) for event in events), len(live))
            for event in events:
                if event.output is not None and event.request_id in live:
                    yield live.pop(event.request_id), event.output
    finally:
        for request_id in live:
            engine.abort(request_id)


@dataclass
class Tally:
    """How far a generation is. `skipped`: jobs that were not run, by reason."""

    planned: int
    finished: int = 0  # of `planned`, by former runs too
    answers: int = 0  # of this run
    tokens: int = 0  # of this run, those of unfinished answers too
    running: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def eta(self) -> float | None:
        """Seconds until the last job is done; None before anything runs. What runs counts as half done."""
        done = self.answers + self.running / 2
        return (self.planned - self.finished - self.running / 2) * self.seconds / done if done else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "planned": self.planned,
            "finished": self.finished,
            "new_answers": self.answers,
            "new_tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens / self.seconds,
            "skipped": dict(self.skipped),
        }


def generate_answers(
    llm: LLM,
    jobs: Sequence[Job],
    settings: GenerateSettings,
    file: AnswerFile,
    progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Run the jobs that `file` does not hold yet, and append their answers to it as they finish.

    Set aside, in `file`'s counts by domain: "repetition" (see `GenerateSettings`), "duplicate" (the prompt has this
    very answer). `progress` is called behind every step of the engine and every answer.
    """
    tally = Tally(len(jobs))
    longest = llm.engine.max_model_len - 1
    longest = min(longest, settings.max_prompt_tokens or longest)

    def requests() -> Iterator[tuple[list[int], SamplingParams, Job]]:
        for job in jobs:
            if file.take(job.prompt.key, job.temperature, job.seed):
                tally.finished += 1
                tally.skipped["already_there"] += 1
                continue
            prompt, reason = _encode(llm, job, longest)
            if reason is not None:
                tally.finished += 1
                tally.skipped[reason] += 1
                continue
            params = SamplingParams(
                temperature=job.temperature, max_tokens=settings.max_tokens, seed=job.seed
            )
            yield prompt, params, job

    def watch(tokens: int, running: int) -> None:
        tally.tokens += tokens
        tally.running = running
        progress(tally)

    for job, output in rolling(llm.engine, requests(), llm.engine.config.max_num_seqs, watch):
        _store(job, output, settings, file)
        tally.finished += 1
        tally.answers += 1
        tally.running -= 1
        progress(tally)
    return tally


def _encode(llm: LLM, job: Job, longest: int) -> tuple[list[int], str | None]:
    """The prompt's tokens, and why it cannot be asked, if it cannot."""
    try:
        prompt = llm.encode(job.prompt.messages)
    except DSparkError:
        if llm.tokenizer.chat_template is None:
            raise
        return [], "refused_by_chat_template"  # e.g. a system message that the model does not know
    return prompt, "prompt_too_long" if len(prompt) > longest else None


def _store(job: Job, output: RequestOutput, settings: GenerateSettings, file: AnswerFile) -> None:
    record = {
        "domain": job.prompt.domain,
        "source": job.prompt.source,
        "temperature": job.temperature,
        "seed": job.seed,
        "target": file.target,
        "finish_reason": output.finish_reason,
        "completion_tokens": len(output.token_ids),
        "token_ids": output.token_ids,
        "messages": [*job.prompt.messages, {"role": "assistant", "content": output.text}],
    }
    if repetition_share(output.token_ids) > settings.max_repetition:
        file.drop(record, "repetition")
    elif file.has_answer(job.prompt.key, output.token_ids):
        file.drop(record, "duplicate")
    else:
        file.keep(record)
