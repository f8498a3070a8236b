"""The key-value section of a GGUF file, where a model says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from dspark.core import DSparkError

__all__ = ["ARCHITECTURES", "Metadata"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Metadata:
    """Key-value section of a GGUF file; errors name the key and the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError, OSError) as error:
            raise DSparkError(f"{path} is damaged or no GGUF file ({error}): download it again") from None
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
