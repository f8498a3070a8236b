"""Profiles as files: bound to machine, model and drafter by a fingerprint, and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dspark import __version__
from dspark.cache import cache_directory
from dspark.drafters.base import Drafter
from dspark.errors import DSparkError
from dspark.profile.fit import Sample, fit_cost, flat, pooled_noise
from dspark.profile.measure import ProfileSettings, largest_pass, measure_profile
from dspark.schedule.cost import AdditiveCost, CostModel, TableCost
from dspark.target.base import Target

__all__ = ["Profile", "describe", "ensure_profile", "fingerprint"]

FORMAT, FORMAT_VERSION = "dspark-cost-profile", 3
WIDER = 4  # times the rows, where a profile is flat


@dataclass(frozen=True)
class Profile:
    """Raw samples and what they belong to; prices are fitted from them anew."""

    fingerprint: dict[str, str]
    samples: tuple[Sample, ...]
    dspark_version: str = field(default=__version__)

    def cost(self) -> TableCost | AdditiveCost:
        """Prices. Raises DSparkError where the samples are too few."""
        return fit_cost(self.samples)

    @property
    def noise(self) -> float:
        """Relative scatter of a single sample."""
        return pooled_noise(self.samples)

    @property
    def flat(self) -> str | None:
        """Says so where large passes cost no more than small ones beyond noise, else None."""
        return flat(self.samples)

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
    """What makes a profile fit here. Prices follow the shape of a drafter, not its weights.

    The temperature that it was measured at is named beside these: profiles of others are kept apart, but fit as well.
    """
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
    strict: bool = False,
    progress: Callable[[float], None] = lambda share: None,
) -> Profile:
    """The kept profile of this machine, model, drafter and temperature, or a fresh one (a few seconds), which is kept.

    One that was made for fewer requests does not reach far enough, and one of another version priced other kernels:
    they are replaced. Where passes cost alike within noise, four times as many rows are measured; if they still do,
    the profile is kept, and it is reported: further rows are free then, as far as can be told.

    Args:
        again: measure in any case.
        strict: refuse to keep what was measured flat, instead of measuring more rows.
        progress: see `measure_profile`; where more rows are measured, it starts anew.

    Raises:
        DSparkError: strict, and large passes cost no more than small ones.
    """
    settings = settings or ProfileSettings()
    belongs_to = {**fingerprint(target, drafter), "temperature": f"{settings.temperature:g}"}
    wider, more_seqs = replace(settings, max_rows=WIDER * settings.max_rows), WIDER * max_num_seqs
    reach, wide_reach = largest_pass(settings, gamma, max_num_seqs), largest_pass(wider, gamma, more_seqs)

    def measured(seqs: int, settings: ProfileSettings) -> Profile:
        samples = measure_profile(target, drafter, gamma, seqs, settings, progress=progress)
        return Profile(belongs_to, tuple(samples))

    profile = None if again else _kept(belongs_to, reach, wide_reach)
    if profile is None:
        report("measuring what a step costs here (some seconds, once for this model and machine)")
        profile = measured(max_num_seqs, settings)
        if profile.flat and strict:
            raise DSparkError(
                f"{profile.flat}: measure larger passes (--max-rows {wider.max_rows}, --max-num-seqs) or on a quieter "
                "machine; or serve with prices from elsewhere (--cost-table), or without any (--policy fixed)"
            )
        if profile.flat and wide_reach > reach:
            report(f"{profile.flat}: measuring up to {wide_reach} rows")
            profile = measured(more_seqs, wider)
        _keep(profile, report)
    if profile.flat:
        report(
            f"warning: {profile.flat}: further rows count as nearly free, and drafting is priced by the draft alone; "
            "--cost-table takes other prices, --policy fixed needs none"
        )
    return profile


def _kept(belongs_to: dict[str, str], reach: int, reach_if_flat: int) -> Profile | None:
    """The profile in the cache, if it is of this version and its passes are as large as that."""
    path = _kept_at(belongs_to)
    try:
        kept = Profile.from_dict(json.loads(path.read_text(encoding="utf-8")))
        largest = max(s.rows for s in kept.samples if s.kind == "step")
        current = kept.fingerprint == belongs_to and kept.dspark_version == __version__
        return kept if current and largest >= (reach_if_flat if kept.flat else reach) else None
    except (DSparkError, OSError, ValueError):
        return None  # measured anew, which replaces it


def _keep(profile: Profile, report: Callable[[str], None]) -> None:
    path = _kept_at(profile.fingerprint)
    text = json.dumps(profile.as_dict())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        report(f"the profile could not be kept in {path.parent} ({error}): it will be measured again")


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
