"""Target features on disk: safetensors shards and an index, so that a run, or the next one, computes them once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dspark.core import DSparkError
from dspark.train.data import Sequence

__all__ = ["FeatureStore"]

FORMAT = 1
SHARD_BYTES = 1 << 28


class FeatureStore:
    """Named groups of tensors per sequence, found by the sequence's tokens.

    A directory of `shard-NNNNN.safetensors` and `index.json`. Shards are never rewritten: data may grow, and a
    run that is killed loses at most the shard that was not yet full. Tensors come back bit for bit. Several
    processes may share a directory: each writes shards and an index of its own, and reads all.

    Args:
        directory: made when missing.
        origin: what the features depend on (target, taps, precision); a directory of another origin is refused.
        writer: this process's number among those that write at the same time.

    Raises:
        DSparkError: the directory holds features of another origin or cannot be read.
    """

    def __init__(self, directory: Path, origin: dict[str, Any], writer: int = 0) -> None:
        self.directory, self.origin = directory, origin
        self._where: dict[str, str] = {}  # key -> shard
        self._open: dict[str, Any] = {}
        self._pending: dict[str, dict[str, torch.Tensor]] = {}
        self._pending_bytes = 0
        self._mark = f"-{writer}" if writer else ""
        self._written: dict[str, list[str]] = {}  # this writer's shards -> keys
        self._refresh()

    def _refresh(self) -> None:
        """Take in what the indexes say, those of other writers too."""
        for path in sorted(self.directory.glob("index*.json")):
            shards = self._read_index(path)
            self._where |= {key: shard for shard, keys in shards.items() for key in keys}
            if path.name == f"index{self._mark}.json":
                self._written = shards

    def _read_index(self, path: Path) -> dict[str, list[str]]:
        try:
            content = json.loads(path.read_text("utf-8"))
            origin, shards = content["origin"], content["shards"]
        except (OSError, ValueError, KeyError) as error:
            raise DSparkError(f"{path} is not a feature index: delete {path.parent}") from error
        if content.get("format") != FORMAT or origin != self.origin:
            raise DSparkError(
                f"{path.parent} holds features of {origin}, this run needs {self.origin}: name another feature_dir"
            )
        return dict(shards)

    def __len__(self) -> int:
        return len(self._where) + len(self._pending)

    def __contains__(self, sequence: Sequence) -> bool:
        key = _key(sequence)
        return key in self._where or key in self._pending

    def get(self, sequence: Sequence, names: Seq[str]) -> list[torch.Tensor] | None:
        """The stored tensors of a sequence, or None."""
        key = _key(sequence)
        if key in self._pending:
            return [self._pending[key][name] for name in names]
        shard = self._where.get(key)
        if shard is None:
            return None
        if shard not in self._open:
            try:
                self._open[shard] = safe_open(self.directory / shard, "pt")
            except (OSError, ValueError) as error:
                raise DSparkError(
                    f"cannot read {self.directory / shard} ({error}): delete the directory"
                ) from error
        return [self._open[shard].get_tensor(f"{key}.{name}") for name in names]

    def put(self, sequence: Sequence, tensors: dict[str, torch.Tensor]) -> None:
        """Keep a sequence's tensors; they reach the disk when a shard is full, or at `flush`."""
        self._pending[_key(sequence)] = tensors
        self._pending_bytes += sum(t.nbytes for t in tensors.values())
        if self._pending_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as a shard, then the index: a shard that the index lacks is overwritten later."""
        if self._pending:
            self._write()
        self._refresh()

    def _write(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        shard = f"shard{self._mark}-{len(self._written):05d}.safetensors"
        flat = {
            f"{k}.{name}": t.contiguous() for k, group in self._pending.items() for name, t in group.items()
        }
        save_file(flat, self.directory / shard)
        self._written[shard] = list(self._pending)
        self._pending, self._pending_bytes = {}, 0
        content = {"format": FORMAT, "origin": self.origin, "shards": self._written}
        part = self.directory / f"index{self._mark}.json.part"
        part.write_text(json.dumps(content), "utf-8")
        part.replace(self.directory / f"index{self._mark}.json")


def _key(sequence: Sequence) -> str:
    text = f"{sequence.answer_start}:{','.join(map(str, sequence.token_ids))}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
