"""Profiles as files: bound to machine, model and drafter by a fingerprint, kept in the cache, readable elsewhere."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dspark import __version__
from dspark.cache import cache_directory
from dspark.drafters.base import Drafter
from dspark.errors import DSparkError
from dspark.profile.fit import Sample, fit_cost, pooled_noise
from dspark.profile.measure import ProfileSettings, largest_pass, measure_profile
from dspark.schedule.cost import AdditiveCost, CostModel, TableCost
from dspark.schedule.cost_formats import from_sglang, from_tensorrt_llm, to_sglang, to_tensorrt_llm
from dspark.target.base import Target

__all__ = ["TABLE_FORMATS", "Profile", "ensure_profile", "fingerprint", "read_cost_table", "write_cost_table"]

FORMAT, FORMAT_VERSION = "dspark-cost-profile", 2
TABLE_FORMATS = ("dspark", "sglang", "tensorrt-llm")


@dataclass(frozen=True)
class Profile:
    """Raw samples and what they belong to; prices are fitted from them anew."""

    fingerprint: dict[str, str]
    samples: tuple[Sample, ...]
    dspark_version: str = field(default=__version__)

    def cost(self) -> TableCost | AdditiveCost:
        """Prices. Raises DSparkError where the samples are too few or flat."""
        return fit_cost(self.samples)

    @property
    def noise(self) -> float:
        """Relative scatter of a single sample."""
        return pooled_noise(self.samples)

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "command": "dspark profile",
            "dspark_version": self.dspark_version,
            "fingerprint": self.fingerprint,
            "noise": self.noise,
            "cost": describe(self.cost()),
            "sample_fields": list(Sample._fields),
            "samples": [list(sample) for sample in self.samples],
        }

    @staticmethod
    def from_dict(data: Any) -> Profile:
        """Raises DSparkError: no mapping, another format, a later version, or samples that are none."""
        if (
            not isinstance(data, Mapping)
            or data.get("format") != FORMAT
            or data.get("format_version") != FORMAT_VERSION
        ):
            raise DSparkError(f"this is no {FORMAT} of version {FORMAT_VERSION}: measure with dspark profile")
        try:
            samples = tuple(
                Sample(kind, int(r), int(n), int(c), float(s)) for kind, r, n, c, s in data["samples"]
            )
            return Profile(dict(data["fingerprint"]), samples, str(data["dspark_version"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DSparkError(f"this {FORMAT} is damaged ({error}): measure with dspark profile") from None


def fingerprint(target: Target, drafter: Drafter | None) -> dict[str, str]:
    """What a profile depends on. Prices follow the shape of a drafter, not its weights."""
    shape = (
        "none" if drafter is None else repr((drafter.name, drafter.max_draft, drafter.taps, drafter.kv_specs))
    )
    return {
        "cpu": _cpu_model() if target.device.type == "cpu" else torch.cuda.get_device_name(target.device),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "device": target.device.type,
        "dtype": str(target.kv_dtype).removeprefix("torch."),
        "activations": getattr(target, "activation_dtype", "float32"),
        "model": target.identity,
        "drafter": shape,
    }


def ensure_profile(
    target: Target,
    drafter: Drafter | None,
    gamma: int,
    max_num_seqs: int = 16,
    report: Callable[[str], None] = lambda message: None,
    settings: ProfileSettings | None = None,
    again: bool = False,
) -> Profile:
    """The kept profile of this machine, model and drafter, or a fresh one (a few seconds), which is kept.

    One that was made for fewer requests does not reach far enough, and one of another version priced other kernels:
    they are replaced.

    Args:
        again: measure in any case.

    Raises:
        DSparkError: the machine shows no price that rises with the size of a pass.
    """
    belongs_to = fingerprint(target, drafter)
    path = _kept_at(belongs_to)
    if not again and path.is_file():
        try:
            kept = Profile.from_dict(json.loads(path.read_text(encoding="utf-8")))
            kept.cost()
            reach = max(s.rows for s in kept.samples if s.kind == "step")
            wanted = largest_pass(settings or ProfileSettings(), gamma, max_num_seqs)
            current = kept.fingerprint == belongs_to and kept.dspark_version == __version__
            if current and reach >= wanted:
                return kept
        except (DSparkError, OSError, UnicodeError, json.JSONDecodeError):
            pass  # measured anew, which replaces it
    report("measuring what a step costs here (some seconds, once for this model and machine)")
    profile = Profile(belongs_to, tuple(measure_profile(target, drafter, gamma, max_num_seqs, settings)))
    text = json.dumps(profile.as_dict())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        report(f"the profile could not be kept in {path.parent} ({error}): it will be measured again")
    return profile


def read_cost_table(
    path: Path,
    belongs_to: Mapping[str, str] | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> TableCost | AdditiveCost:
    """Prices from a file: a profile of ours, or a table of SGLang or TensorRT-LLM.

    A profile that belongs to another machine or model than `belongs_to` is refused; a table of another engine,
    which cannot tell, is reported. Prices that look wrong have a `warning`.

    Raises:
        DSparkError: no such file, none of these formats, a profile of something else, unusable prices.
    """
    try:
        data = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeError, json.JSONDecodeError) as error:
        raise DSparkError(f"cannot read a cost table from {str(path)!r}: {error}") from None
    if not isinstance(data, Mapping):
        raise DSparkError(f"{path} holds no cost table: expected a JSON object")
    cost: TableCost | AdditiveCost
    if "format" in data:
        profile = Profile.from_dict(data)
        differs = [k for k, v in (belongs_to or {}).items() if profile.fingerprint.get(k) != v]
        if differs:
            here, there = (belongs_to or {})[differs[0]], profile.fingerprint.get(differs[0])
            raise DSparkError(
                f"{path} was measured with another {differs[0]} ({there}, here {here}): run dspark profile here"
            )
        cost = profile.cost()
    else:
        cost = from_tensorrt_llm(data) if "token_counts" in data else from_sglang(data)
        report(
            f"{path} does not say which machine and model it is for, and has no draft or context prices: drafting "
            "counts as free"
        )
    return cost


def write_cost_table(profile: Profile, path: Path, form: str) -> list[str]:
    """Write the profile as one of `TABLE_FORMATS`; returns what that format cannot hold."""
    if form not in TABLE_FORMATS:
        raise DSparkError(f"{form!r} is no format of cost tables; choose from {', '.join(TABLE_FORMATS)}")
    cost = profile.cost()
    table = {
        "dspark": profile.as_dict,
        "sglang": lambda: to_sglang(cost),
        "tensorrt-llm": lambda: to_tensorrt_llm(cost),
    }[form]()
    try:
        path.expanduser().write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise DSparkError(f"cannot write {str(path)!r}: {error}") from None
    lost = ["the price of drafting", "the price of a long context", "the fingerprint"]
    return [] if form == "dspark" else lost


def describe(cost: CostModel) -> dict[str, Any]:
    """Prices for people and other programs, seconds."""
    if isinstance(cost, AdditiveCost):
        own: dict[str, Any] = {
            "requests": list(cost.requests),
            "alpha": list(cost.alpha),
            "tokens": list(cost.tokens),
            "seconds": [cost.bias + t for t in cost.theta],
        }
    elif isinstance(cost, TableCost):
        own = {"tokens": list(cost.tokens), "seconds": list(cost.seconds)}
    else:
        return {}
    return {**own, "draft": vars(cost.draft), "context": vars(cost.context), "warning": cost.warning}


def _kept_at(belongs_to: Mapping[str, str]) -> Path:
    digest = hashlib.sha256(json.dumps(belongs_to, sort_keys=True).encode()).hexdigest()[:16]
    return cache_directory() / "profiles" / f"{digest}.json"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "unknown"
