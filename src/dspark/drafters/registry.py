"""Drafters by name: from a speculative configuration to a drafter and its policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dspark.core import DSparkError
from dspark.drafters.base import Drafter
from dspark.drafters.checkpoint import load_drafter_model, read_drafter_config
from dspark.drafters.lookup import LookupFirst
from dspark.drafters.methods import METHODS, TRAINED
from dspark.drafters.models import serve
from dspark.drafters.ngram import NgramDrafter
from dspark.schedule.policies import FixedLength
from dspark.schedule.settings import ScheduleSettings
from dspark.target.base import Target

__all__ = ["build_drafter", "check_keys", "method_of", "shipped_drafters"]

_KEYS = {
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_max",
    "prompt_lookup_min",
}  # vLLM's names; prompt_lookup_num_tokens is that of Transformers
_KEYS_OF = {
    "none": {"method"},
    "ngram": _KEYS - {"model"},
    **{method: _KEYS | {"prompt_lookup_num_tokens"} for method in TRAINED},
}
_LOOKUP_MIN, _LOOKUP_MAX = 2, 4


def shipped_drafters() -> dict[str, Path]:
    """Checkpoints in the package, by directory name."""
    root = Path(__file__).parent / "shipped"
    return (
        {p.name: p for p in sorted(root.iterdir()) if (p / "config.json").is_file()} if root.is_dir() else {}
    )


def method_of(config: Mapping[str, Any]) -> Any:
    """The method that a speculative_config asks for: one that names a checkpoint alone asks for DSpark."""
    return config.get("method") or ("dspark" if "model" in config else None)


def check_keys(config: Mapping[str, Any] | None) -> None:
    """Refuse what is no configuration of a drafter, whatever its target is; scheduling's keys must be taken out before.

    Raises:
        DSparkError: no mapping, unknown method, unknown or unsupported key.
    """
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise DSparkError(
            f'speculative_config must be a mapping such as {{"method": "dspark"}}, got {config!r}'
        )
    method = method_of(config)
    if method not in METHODS:
        raise DSparkError(f"speculative method {method!r} is not known; choose from {', '.join(METHODS)}")
    unknown = sorted(set(config) - _KEYS_OF[method], key=str)
    if unknown:
        scheduling = ", ".join(field.name for field in fields(ScheduleSettings))
        raise DSparkError(
            f"speculative_config key {unknown[0]!r} is not supported for method {method}; "
            f"supported: {', '.join(sorted(_KEYS_OF[method]))}, and of scheduling {scheduling}"
        )


def build_drafter(config: Mapping[str, Any] | None, target: Target) -> tuple[Drafter | None, FixedLength]:
    """The drafter that `config` asks for, and its block as the fixed policy. Keys are vLLM's speculative_config keys;
    those about scheduling are `schedule.settings`' and must be taken out before.

    Raises:
        DSparkError: unknown or unsupported key, unknown method, unusable checkpoint, too many tokens.
    """
    check_keys(config)
    if config is None:
        return None, FixedLength(0)
    method = method_of(config)
    count = _whole(config, "num_speculative_tokens")
    if method == "none":
        return None, FixedLength(0)
    if method == "ngram":
        lookup_min, lookup_max = _lookup_sizes(config)
        return NgramDrafter(count or 5, lookup_max, lookup_min), FixedLength(count or 5)
    return _trained_drafter(config, method, target)


def _trained_drafter(config: Mapping[str, Any], method: str, target: Target) -> tuple[Drafter, FixedLength]:
    """Of a checkpoint; behind prompt lookup where `config` asks for it."""
    count, directory = _whole(config, "num_speculative_tokens"), _checkpoint(config, method, target)
    model = load_drafter_model(directory, target, served=True)
    if model.config.method != method:
        raise DSparkError(
            f"{directory} is a {model.config.method} drafter; set method to {model.config.method!r}"
        )
    if count is not None and count > model.config.block_size:
        raise DSparkError(
            f"num_speculative_tokens {count} exceeds the block of {model.config.block_size} the drafter was trained "
            "for: acceptance would collapse; ask for fewer"
        )
    block = count or model.config.num_speculative_tokens or model.config.block_size
    copies = _whole(config, "prompt_lookup_num_tokens", least=0)
    if copies:
        lookup_min, lookup_max = _lookup_sizes(config)
        drafter = LookupFirst(serve(model, quantised=True), block, copies, lookup_min, lookup_max)
        return drafter, FixedLength(drafter.max_draft)
    if {"prompt_lookup_min", "prompt_lookup_max"} & set(config):
        raise DSparkError(
            f"the sizes of a prompt lookup have no meaning for {method} without prompt_lookup_num_tokens: set that too"
        )
    return serve(model, quantised=True), FixedLength(block)


def _lookup_sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    """Least and largest n-gram that is looked up; what is not given adapts to what is."""
    smallest, largest = _whole(config, "prompt_lookup_min"), _whole(config, "prompt_lookup_max")
    lookup_max = largest or max(_LOOKUP_MAX, smallest or 0)
    return smallest or min(_LOOKUP_MIN, lookup_max), lookup_max


def _whole(config: Mapping[str, Any], key: str, least: int = 1) -> int | None:
    """A whole number of `least` or more, or None where the key is absent."""
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise DSparkError(f"{key} must be a whole number, {least} or more, got {value!r}")
    return value


def _checkpoint(config: Mapping[str, Any], method: str, target: Target) -> Path:
    """The directory that `config` names, or the shipped drafter of this target."""
    if config.get("model") is not None:
        if not isinstance(config["model"], str | Path):
            raise DSparkError(f"model must be the path of a drafter checkpoint, got {config['model']!r}")
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
