"""Rounds under full verification: what a calibration is fitted to, and the file that keeps them.

One safetensors file: arrays below, and as metadata what they came from and which answers are in. It is replaced
as a whole whenever it grows, so it can be read, and an interrupted collection continued, at any time.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dspark.errors import DSparkError
from dspark.typed import check_fields

__all__ = ["Answer", "Rounds", "Source", "load_rounds", "save_rounds"]

_FORMAT = 1
_KEY = "dspark_rounds"
_ARRAYS = {
    "logits": np.float32,
    "acceptance": np.float32,
    "lengths": np.int64,
    "accepted": np.int64,
    "answer": np.int64,
}


@dataclass(frozen=True)
class Answer:
    """The text that rounds belong to. `sample` tells several answers to one prompt at one temperature apart."""

    prompt_id: str
    domain: str
    temperature: float
    sample: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "an answer's")


@dataclass(frozen=True)
class Source:
    """What the rounds came from; rounds of different sources never share a file."""

    target: str
    target_identity: str
    drafter: str
    drafter_identity: str
    gamma: int
    acceptance_rule: str
    dtype: str

    def __post_init__(self) -> None:
        check_fields(self, "the rounds'")

    def check_same(self, other: Source, where: str) -> None:
        """Refuse to mix. Names of models may differ, what they are may not.

        Raises:
            DSparkError: names the first difference.
        """
        for field in dataclasses.fields(self):
            own, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name not in ("target", "drafter") and own != theirs:
                raise DSparkError(
                    f"{where} holds rounds with {field.name} {own!r}, this run has {theirs!r}: give another file"
                )


@dataclass(frozen=True, eq=False)
class Rounds:
    """n rounds of gamma slots; what lies at and past a round's length is NaN.

    `acceptance` is the probability with which the ratio rule takes x_k once it is asked, min(1, p_t / p_d), 0 or 1
    at temperature 0; slots behind a rejection have one too. Under the shared-noise rule it is what happened: once
    x_k is drafted nothing is left to chance.
    """

    logits: np.ndarray  # [n, gamma] float32
    acceptance: np.ndarray  # [n, gamma] float32
    lengths: np.ndarray  # [n] int64 drafts verified: all that were drafted
    accepted: np.ndarray  # [n] int64
    answer: np.ndarray  # [n] int64, index into `answers`
    answers: tuple[Answer, ...]
    source: Source

    def __post_init__(self) -> None:
        n, gamma = len(self.lengths), self.source.gamma
        for name, dtype in _ARRAYS.items():
            array = np.asarray(getattr(self, name), dtype)
            shape = (n, gamma) if name in ("logits", "acceptance") else (n,)
            if array.shape != shape:
                raise DSparkError(f"rounds: {name} has shape {array.shape}, expected {shape}")
            object.__setattr__(self, name, array)
        self._check_values(gamma)

    def _check_values(self, gamma: int) -> None:
        inside = np.where(self.observed, self.acceptance, 0)
        checks = (
            ("lengths", ((self.lengths >= 1) & (self.lengths <= gamma)).all()),
            ("accepted", ((self.accepted >= 0) & (self.accepted <= self.lengths)).all()),
            ("answer", ((self.answer >= 0) & (self.answer < len(self.answers))).all()),
            ("acceptance", ((inside >= 0) & (inside <= 1)).all()),
            ("logits", not np.isnan(self.logits[self.observed]).any()),
            ("answers", len(set(self.answers)) == len(self.answers)),
        )
        for name, holds in checks:
            if not holds:
                raise DSparkError(f"rounds: {name} holds values that no round can have; collect them again")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def observed(self) -> np.ndarray:
        """[n, gamma] bool: slots that were verified."""
        return np.arange(self.source.gamma) < self.lengths[:, None]

    @property
    def survived(self) -> np.ndarray:
        """[n, gamma] float64, 1 where x_1..x_k were all accepted."""
        return (np.arange(self.source.gamma) < self.accepted[:, None]).astype(np.float64)

    @property
    def expected_survival(self) -> np.ndarray:
        """[n, gamma] float64, the probability of that, given the drafted tokens: `survived` with less noise."""
        return np.where(self.observed, self.acceptance, 0).astype(np.float64).cumprod(axis=1)

    def column(self, name: str) -> np.ndarray:
        """A field of `Answer` for every round, [n]."""
        return np.array([getattr(a, name) for a in self.answers])[self.answer] if len(self) else np.array([])

    def select(self, rows: np.ndarray) -> Rounds:
        """The rounds at `rows` (mask or indices), with all answers."""
        arrays = {name: getattr(self, name)[rows] for name in _ARRAYS}
        return dataclasses.replace(self, **arrays)

    def of_answers(self, keep: Sequence[bool] | np.ndarray) -> Rounds:
        """The rounds of the answers that are kept, and no other answers."""
        mask = np.asarray(keep, dtype=bool)
        chosen = self.select(mask[self.answer])
        renumbered = (np.cumsum(mask) - 1)[chosen.answer]
        answers = tuple(a for a, kept in zip(self.answers, mask, strict=True) if kept)
        return dataclasses.replace(chosen, answer=renumbered, answers=answers)

    @staticmethod
    def join(parts: Sequence[Rounds]) -> Rounds:
        """All rounds of parts with the same source and different answers."""
        offsets = np.cumsum([0, *(len(p.answers) for p in parts[:-1])])
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(p, name) for p in parts]) for name in _ARRAYS if name != "answer"
        }
        answer = np.concatenate([p.answer + o for p, o in zip(parts, offsets, strict=True)])
        answers = tuple(a for p in parts for a in p.answers)
        return Rounds(**arrays, answer=answer, answers=answers, source=parts[0].source)

    def split(self, held_out: float, seed: int = 0) -> tuple[Rounds, Rounds]:
        """Rounds to fit to, and held-out ones: the share `held_out` of every domain's *prompts*.

        Rounds of one prompt resemble each other, so they are never on both sides.

        Raises:
            DSparkError: a share outside 0..1, or fewer than two prompts.
        """
        if not 0 < held_out < 1:
            raise DSparkError(f"the held-out share must lie between 0 and 1, got {held_out}")
        domains: dict[str, list[str]] = {}
        for answer in sorted(self.answers, key=lambda a: a.prompt_id):
            names = domains.setdefault(answer.domain, [])
            if answer.prompt_id not in names:
                names.append(answer.prompt_id)
        rng, chosen = np.random.default_rng(seed), set()
        order = [names[i] for _, names in sorted(domains.items()) for i in rng.permutation(len(names))]
        for i, name in enumerate(order):  # evenly along the list, hence evenly in every domain
            if int((i + 1) * held_out + 0.5) > int(i * held_out + 0.5):
                chosen.add(name)
        if not chosen or len(chosen) == len(set(order)):
            raise DSparkError("a held-out split needs prompts on both sides: collect rounds of more prompts")
        away = np.array([a.prompt_id in chosen for a in self.answers])
        return self.of_answers(~away), self.of_answers(away)


def save_rounds(path: Path, rounds: Rounds) -> None:
    """Write the file, or replace it: another process sees the old or the new one, never half of it."""
    facts = {
        "format_version": _FORMAT,
        "source": dataclasses.asdict(rounds.source),
        "answers": [dataclasses.astuple(a) for a in rounds.answers],
    }
    arrays = {name: np.ascontiguousarray(getattr(rounds, name)) for name in _ARRAYS}
    beside = path.with_name(path.name + ".part")
    try:
        save_file(arrays, beside, metadata={_KEY: json.dumps(facts)})
        os.replace(beside, path)
    except (OSError, SafetensorError) as error:
        raise DSparkError(f"cannot write the rounds to {str(path)!r}: {error}") from None


def load_rounds(path: Path) -> Rounds:
    """Read what `save_rounds` wrote.

    Raises:
        DSparkError: no such file, another kind of file, or contents that contradict each other.
    """
    if not path.is_file():
        raise DSparkError(f"there are no rounds at {str(path)!r}: collect some first")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = json.loads(metadata[_KEY])
        if facts["format_version"] != _FORMAT:
            raise DSparkError(
                f"{path} has rounds of format {facts['format_version']}, this version reads {_FORMAT}"
            )
        answers = tuple(Answer(*a) for a in facts["answers"])
        source = Source(**facts["source"])
        return Rounds(**arrays, answers=answers, source=source)
    except DSparkError:
        raise
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DSparkError(
            f"{str(path)!r} is no file of rounds, or a damaged one ({error}): collect them again"
        ) from None
