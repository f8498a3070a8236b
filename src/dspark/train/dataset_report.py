"""What is in a training set: lengths, domains, temperatures, loops, duplicates, draft vocabulary coverage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dspark.core import DSparkError
from dspark.drafters.checkpoint import read_drafter_config
from dspark.evaluate.repetition import repetition_share
from dspark.target.hf import read_config
from dspark.target.tokenizer import Tokenizer
from dspark.target.zoo import resolve
from dspark.train.data import Sequence as TokenSequence
from dspark.train.data import conversation, read_records, split, to_sequence
from dspark.train.prompts import built_in_keys, normal_text
from dspark.train.setup import draft_vocabulary, token_counts

__all__ = ["Answer", "describe", "drafter_vocabulary", "read_answers"]

HELD_OUT = 0.1  # of the prompts, to measure coverage on answers that did not choose the vocabulary
LOOPING = 0.5  # share of repeated 4-grams above which an answer counts as a loop


@dataclass(frozen=True)
class Answer:
    """One record: its tokens and what it says about itself."""

    sequence: TokenSequence
    prompt_key: str
    source: str
    temperature: str  # "-" where the record has none
    cut: bool  # ended by the length limit

    @property
    def tokens(self) -> list[int]:
        return self.sequence.token_ids[self.sequence.answer_start :]

    @property
    def repetition(self) -> float:
        return repetition_share(self.tokens)


def read_answers(paths: Iterable[Path], tokenizer: Tokenizer) -> list[Answer]:
    """All records of jsonl or jsonl.gz files, uncut.

    Raises:
        DSparkError: an unreadable file or a malformed record; the message names file and line.
    """
    answers = []
    for path in paths:
        for number, record in read_records(path):
            sequence = to_sequence(record, f"{path}:{number}", tokenizer, max_length=1 << 30)
            prompt_key = sequence.group or normal_text(conversation(record, str(path))[:-1])
            temperature = record.get("temperature")
            answers.append(
                Answer(
                    sequence,
                    prompt_key,
                    str(record.get("source") or ""),
                    "-" if temperature is None else f"{temperature:g}",
                    record.get("finish_reason") == "length",
                )
            )
    if not answers:
        raise DSparkError("the files hold no records: name jsonl files with answers")
    return answers


def drafter_vocabulary(directory: Path) -> torch.Tensor | None:
    """Target ids that a drafter checkpoint can draft, [Vd] int64; None: the whole vocabulary.

    Raises:
        DSparkError: no checkpoint there, or it lacks its vocabulary.
    """
    if read_drafter_config(directory).draft_vocab_size is None:
        return None
    path = directory / "model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            vocab: torch.Tensor = file.get_tensor("vocab")
    except (OSError, SafetensorError) as error:
        raise DSparkError(f"{path} has no draft vocabulary to read ({error})") from None
    return vocab.long()


def describe(
    model: str,
    paths: Sequence[Path],
    sizes: Sequence[int],
    drafter: Path | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Figures of the training set in `paths`, tokenised as for `model`.

    Lengths are in tokens, the answer's end token included. `coverage`: the share of answer tokens inside the most
    frequent tokens, chosen on 90% of the prompts and measured on the answers to the others.
    """
    directory = resolve(model, report)
    tokenizer = Tokenizer(directory)
    if not tokenizer.eos_token_ids:
        raise DSparkError(f"{model} states no end token: add eos_token_id to its generation_config.json")
    answers = read_answers(paths, tokenizer)
    shape = read_config(directory)
    largest = max((max(a.sequence.token_ids, default=0) for a in answers), default=0)
    if largest >= shape.vocab_size:
        raise DSparkError(
            f"token id {largest} is outside the vocabulary of {model} ({shape.vocab_size}): "
            "another model wrote these answers"
        )
    held_out = built_in_keys()
    return {
        "files": [str(path) for path in paths],
        "answers": len(answers),
        "prompts": len({a.prompt_key for a in answers}),
        "answer_tokens": sum(len(a.tokens) for a in answers),
        "prompt_tokens": sum(a.sequence.answer_start for a in answers),
        "answer_length": _spread([len(a.tokens) for a in answers]),
        "prompt_length": _spread([a.sequence.answer_start for a in answers]),
        "repetition_share": sum(a.repetition for a in answers) / len(answers),
        "looping": sum(a.repetition > LOOPING for a in answers) / len(answers),
        "duplicates": len(answers) - len({(a.prompt_key, tuple(a.tokens)) for a in answers}),
        "evaluation_prompts": len({a.prompt_key for a in answers} & held_out),
        "domains": _groups(answers, lambda a: a.sequence.domain or "-"),
        "sources": _groups(answers, lambda a: a.source or "-"),
        "temperatures": _groups(answers, lambda a: a.temperature),
        "coverage": _coverage(answers, shape.vocab_size, tokenizer.eos_token_ids, sizes, drafter),
    }


def _spread(values: list[int]) -> dict[str, float]:
    ranked = sorted(values)
    points = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}
    at = {name: ranked[round(share * (len(ranked) - 1))] for name, share in points.items()}
    return {"mean": sum(ranked) / len(ranked), **at}


def _groups(answers: list[Answer], key: Callable[[Answer], str]) -> dict[str, dict[str, float]]:
    """Figures by domain, source or temperature, in order of name."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(key(answer), []).append(answer)
    return {
        name: {
            "answers": len(group),
            "prompts": len({a.prompt_key for a in group}),
            "answer_tokens": sum(len(a.tokens) for a in group),
            "mean_length": sum(len(a.tokens) for a in group) / len(group),
            "cut": sum(a.cut for a in group) / len(group),
            "repetition_share": sum(a.repetition for a in group) / len(group),
            "looping": sum(a.repetition > LOOPING for a in group) / len(group),
        }
        for name, group in sorted(groups.items())
    }


def _coverage(
    answers: list[Answer],
    vocab_size: int,
    keep: tuple[int, ...],
    sizes: Sequence[int],
    drafter: Path | None,
) -> dict[str, Any]:
    """Share of held-out answer tokens inside draft vocabularies; None where too few prompts are there."""
    train, held_out = split([a.sequence for a in answers], HELD_OUT, seed=0)
    chosen_by, measured = token_counts(train, vocab_size), token_counts(held_out, vocab_size)
    every = token_counts([*train, *held_out], vocab_size)

    def share(counts: torch.Tensor, vocab: torch.Tensor | None) -> float:
        covered = counts.sum() if vocab is None else counts[vocab].sum()
        return float(covered / counts.sum().clamp(min=1))

    result: dict[str, Any] = {
        "distinct_tokens": int((every > 0).sum()),
        "held_out_tokens": int(measured.sum()),
        "sizes": {
            str(size): share(measured, draft_vocabulary(chosen_by, size, keep)) if train else None
            for size in sizes
            if size < vocab_size
        },
    }
    if drafter is not None:
        vocab = drafter_vocabulary(drafter)
        if vocab is not None and int(vocab.max()) >= vocab_size:
            raise DSparkError(f"{drafter} drafts for another model's vocabulary: name this model's drafter")
        result["drafter"] = {
            "path": str(drafter),
            "size": vocab_size if vocab is None else len(vocab),
            "coverage": share(every, vocab),
        }
    return result
