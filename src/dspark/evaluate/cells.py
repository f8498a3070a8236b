"""Measured cells on disk, one JSON line each, appended as they are made: an interrupted evaluation goes on from them.

A cell is one drafter on one group of conversations of a prompt set at one temperature. The cells of all drafters on
a group are made in turn and written together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dspark.core import DSparkError

__all__ = ["Cell", "CellKey", "CellStore"]

FORMAT_VERSION = 1
Cell = dict[str, Any]


class CellKey(NamedTuple):
    prompts: str
    temperature: float
    fingerprint: str  # of the group's conversations, contents included
    drafter: str

    @staticmethod
    def of(cell: Mapping[str, Any]) -> CellKey:
        return CellKey(cell["prompts"], cell["temperature"], cell["fingerprint"], cell["drafter"])


class CellStore:
    """`cells.jsonl` of a directory, and `settings.json` that says what its cells were made with.

    Raises:
        DSparkError: the directory cannot be used, or holds cells made with other settings.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        self.directory, self.path = directory, directory / "cells.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self.cells = self._read()
            self._agree(json.loads(json.dumps(settings)))
        except OSError as error:
            raise DSparkError(f"cannot use the directory {str(directory)!r}: {error}") from None

    def missing(self, keys: Iterable[CellKey]) -> list[CellKey]:
        return [key for key in keys if key not in self.cells]

    def append(self, cells: Sequence[Cell]) -> None:
        """Keep `cells` together, on disk before this returns. One measured anew replaces the old one."""
        text = "".join(json.dumps(cell, allow_nan=False) + "\n" for cell in cells)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        self.cells.update((CellKey.of(cell), cell) for cell in cells)

    def _agree(self, settings: dict[str, Any]) -> None:
        """Check against what the cells were made with. Drafters may come and go, but one of a name is one."""
        path = self.directory / "settings.json"
        kept: dict[str, Any] = {}
        if self.cells and path.exists():
            try:
                kept = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                raise DSparkError(f"{path} is damaged: choose another directory") from None
        merged = {"format": "dspark-evaluation-cells", "format_version": FORMAT_VERSION, **settings}
        for key in kept:
            if key == "drafters":
                merged[key] = {**kept[key], **merged.get(key, {})}
                changed = next((n for n in kept[key] if kept[key][n] != merged[key][n]), None)
                if changed is not None:
                    raise DSparkError(
                        f"{self.directory} holds results of another drafter {changed!r}: choose another directory"
                    )
            elif kept[key] != merged.get(key):
                raise DSparkError(
                    f"{self.directory} holds results with {key} {kept[key]!r}, not {merged.get(key)!r}: "
                    "choose another directory"
                )
        path.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")

    def _read(self) -> dict[CellKey, Cell]:
        """The cells on disk; a last line that an interruption cut short is removed."""
        if not self.path.exists():
            return {}
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
        try:
            cells = [json.loads(line) for line in data[:whole].decode().split("\n") if line]
            return {CellKey.of(cell): cell for cell in cells}
        except (ValueError, KeyError, TypeError):
            raise DSparkError(f"{self.path} is damaged: choose another directory") from None
