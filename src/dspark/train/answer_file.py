"""The file that generation appends answers to, such that a run can be killed at any time and repeated."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dspark.core import DSparkError
from dspark.train.data import conversation, read_records
from dspark.train.prompts import normal_text

__all__ = ["AnswerFile", "JobKey", "repair"]

JobKey = tuple[str, float, int | None]  # prompt key, temperature, seed; seed None: a record that names none


def repair(path: Path) -> bool:
    """Make a jsonl file end with a whole line; whether something was cut off.

    A kill may tear the last line. One that is JSON after all only lacks its end.

    Raises:
        DSparkError: the file cannot be read or written.
    """
    try:
        with path.open("rb+") as file:
            content = file.read()
            end = content.rfind(b"\n") + 1
            if end == len(content):
                return False
            try:
                json.loads(content[end:])
            except ValueError:
                file.truncate(end)
                return True
            file.write(b"\n")
            return False
    except OSError as error:
        raise DSparkError(f"cannot repair {path}: {error.strerror}") from error


class AnswerFile:
    """Records of answers in `path`, and beside it, in `path`.dropped, those that were filtered out.

    `kept` and `dropped` count them by domain (`dropped` by reason and domain), those of former runs included.

    Args:
        path: a .jsonl file; made when missing, continued when not.
        target: the identity of the model that answers; a file of another model is refused.

    Raises:
        DSparkError: the file cannot be written, has a malformed line, or another model wrote it.
    """

    def __init__(self, path: Path, target: str) -> None:
        if path.suffix != ".jsonl":
            raise DSparkError(f"{path} must be a .jsonl file: answers are appended to it line by line")
        self.path, self.dropped_path = path, path.with_name(path.name + ".dropped")
        self.target = target
        self.kept: Counter[str] = Counter()
        self.dropped: dict[str, Counter[str]] = {}
        self.tokens = 0
        self.torn = False
        self._done: Counter[JobKey] = Counter()
        self._answers: set[tuple[str, tuple[int, ...]]] = set()
        for record in self._read(self.dropped_path):
            self._note_dropped(record)
        for record in self._read(path):
            self._note_kept(record)
        self._files: dict[Path, IO[str]] = {}

    def _read(self, path: Path) -> Iterator[dict[str, Any]]:
        if not path.exists():
            return
        self.torn |= repair(path)
        for number, record in read_records(path):
            if record.get("target") not in (None, self.target):
                raise DSparkError(
                    f"{path}:{number} was written by another model ({record['target']}): name another output"
                )
            conversation(record, f"{path}:{number}")
            if "messages" not in record:
                raise DSparkError(
                    f"{path}:{number} was not written by `dspark data generate`: name another output"
                )
            yield record

    def _note_kept(self, record: dict[str, Any]) -> None:
        key = normal_text(record["messages"][:-1])
        self._done[key, float(record.get("temperature") or 0.0), record.get("seed")] += 1
        self._answers.add((key, tuple(record.get("token_ids") or ())))
        self.kept[record.get("domain", "")] += 1
        self.tokens += record.get("completion_tokens") or 0

    def _note_dropped(self, record: dict[str, Any]) -> None:
        key = normal_text(record["messages"][:-1])
        self._done[key, float(record.get("temperature") or 0.0), record.get("seed")] += 1
        self.dropped.setdefault(record["dropped"], Counter())[record.get("domain", "")] += 1

    def take(self, key: str, temperature: float, seed: int) -> bool:
        """Whether a former run did this job. A record without a seed stands for one job of its temperature."""
        if self._done[key, temperature, seed]:
            return True
        if self._done[key, temperature, None]:
            self._done[key, temperature, None] -= 1
            return True
        return False

    def has_answer(self, key: str, token_ids: list[int]) -> bool:
        """Whether the prompt has this very answer already."""
        return (key, tuple(token_ids)) in self._answers

    def keep(self, record: dict[str, Any]) -> None:
        self._append(self.path, record)
        self._note_kept(record)

    def drop(self, record: dict[str, Any], reason: str) -> None:
        record = {"dropped": reason, **record}
        self._append(self.dropped_path, record)
        self._note_dropped(record)

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        try:
            if path not in self._files:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files[path] = path.open("a", encoding="utf-8", newline="\n")
            self._files[path].write(json.dumps(record) + "\n")
            self._files[path].flush()  # a kill costs what is in flight, not what was finished
        except OSError as error:
            raise DSparkError(f"cannot write {path}: {error.strerror}") from error

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
