"""Drafters by name: from a speculative configuration to a drafter and its policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.core import DSparkError
from dspark.drafters.base import Drafter
from dspark.drafters.block import BlockDrafter
from dspark.drafters.checkpoint import load_drafter_model, read_drafter_config
from dspark.drafters.ngram import NgramDrafter
from dspark.schedule.policies import FixedLength, Policy
from dspark.target.base import Target

__all__ = ["METHODS", "build_drafter", "shipped_drafters"]

METHODS = ("none", "ngram", "dspark", "dflash")
_KEYS = {
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
}  # vLLM's names
_KEYS_OF = {
    "none": {"method"},
    "ngram": _KEYS - {"model"},
    "dspark": {"method", "model", "num_speculative_tokens"},
    "dflash": {"method", "model", "num_speculative_tokens"},
}


def shipped_drafters() -> dict[str, Path]:
    """Checkpoints in the package, by directory name."""
    root = Path(__file__).parent / "shipped"
    return (
        {p.name: p for p in sorted(root.iterdir()) if (p / "config.json").is_file()} if root.is_dir() else {}
    )


def build_drafter(config: Mapping[str, Any] | None, target: Target) -> tuple[Drafter | None, Policy]:
    """The drafter and policy that `config` asks for. Keys are vLLM's speculative_config keys.

    Raises:
        DSparkError: unknown or unsupported key, unknown method, unusable checkpoint, too many tokens.
    """
    if config is None:
        return None, FixedLength(0)
    method = config.get("method") or ("dspark" if "model" in config else None)
    if method not in METHODS:
        raise DSparkError(f"speculative method {method!r} is not known; choose from {', '.join(METHODS)}")
    unknown = sorted(set(config) - _KEYS_OF[method])
    if unknown:
        raise DSparkError(
            f"speculative_config key {unknown[0]!r} is not supported for method {method}; "
            f"supported: {', '.join(sorted(_KEYS_OF[method]))}"
        )
    count = config.get("num_speculative_tokens")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise DSparkError(f"num_speculative_tokens must be a whole number, 1 or more, got {count!r}")
    if method == "none":
        return None, FixedLength(0)
    if method == "ngram":
        lookup_max = config.get("prompt_lookup_max") or max(4, config.get("prompt_lookup_min") or 0)
        lookup_min = config.get("prompt_lookup_min") or min(2, lookup_max)
        return NgramDrafter(count or 5, lookup_max, lookup_min), FixedLength(count or 5)
    directory = _checkpoint(config, method, target)
    model = load_drafter_model(directory, target)
    if model.config.method != method:
        raise DSparkError(
            f"{directory} is a {model.config.method} drafter; set method to {model.config.method!r}"
        )
    if count is not None and count > model.config.block_size:
        raise DSparkError(
            f"num_speculative_tokens {count} exceeds the block of {model.config.block_size} the drafter was trained "
            "for: acceptance would collapse; ask for fewer"
        )
    return BlockDrafter(model, int8=True), FixedLength(
        count or model.config.num_speculative_tokens or model.config.block_size
    )


def _checkpoint(config: Mapping[str, Any], method: str, target: Target) -> Path:
    """The directory that `config` names, or the shipped drafter of this target."""
    if config.get("model") is not None:
        directory = Path(config["model"]).expanduser()
        if not directory.is_dir():
            raise DSparkError(
                f"drafter {str(directory)!r} is not a directory; give one with config.json and model.safetensors"
            )
        return directory
    for directory in shipped_drafters().values():
        drafter = read_drafter_config(directory)
        if drafter.method == method and drafter.target_identity == target.identity:
            return directory
    raise DSparkError(
        f'no {method} drafter is shipped for this model; give a checkpoint with "model" (--drafter PATH)'
    )
