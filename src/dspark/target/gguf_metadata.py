"""The key-value section of a GGUF file, where a model says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from dspark.core import DSparkError

__all__ = ["ARCHITECTURES", "Metadata"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)


def _read(path: Path) -> gguf.GGUFReader:
    """The file as the package gguf reads it, which tells of damage in NumPy's words."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise DSparkError(f"{path} cannot be read ({error.strerror})") from None
    if not _MAGIC.startswith(head[:4]):
        raise DSparkError(f"{path} is no GGUF file: it begins with other bytes than {_MAGIC.decode()}")
    version = int.from_bytes(head[4:], "little")
    if len(head) == 8 and version not in _VERSIONS:
        raise DSparkError(f"{path}: only little-endian files of versions 2 and 3 of GGUF are supported")
    try:
        return gguf.GGUFReader(path)
    except (ValueError, LookupError, TypeError, OverflowError, OSError):
        size = path.stat().st_size
        raise DSparkError(f"{path} is damaged or truncated (it has {size} bytes): fetch it again") from None


class Metadata:
    """Key-value section of a GGUF file; errors name the key and the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = _read(path)
        self.arch = self.get("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise self.refuse("general.architecture", self.arch, f"use one of {', '.join(ARCHITECTURES)}")

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.fields.get(key.format(arch=getattr(self, "arch", "")))
        return default if field is None else field.contents()

    def need(self, key: str, kind: type) -> Any:
        value = self.get(key)
        if not isinstance(value, kind):
            name = key.format(arch=self.arch)
            raise DSparkError(f"{self.path}: {name} must be one {kind.__name__}, got {value!r:.60}")
        return value

    def refuse(self, key: str, value: object, supported: str) -> DSparkError:
        return DSparkError(
            f"{self.path}: {key.format(arch=self.arch)} = {value!r} is not supported; {supported}"
        )
