"""Which calibration an engine serves with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.calibrate.formats import CALIBRATION_FILE, load_calibration
from dspark.calibrate.jobs import drafter_directory, weights_identity
from dspark.core import DSparkError
from dspark.drafters.registry import method_of
from dspark.schedule.settings import ScheduleSettings
from dspark.schedule.survival import Calibrate

__all__ = ["serving_calibration"]


def serving_calibration(
    schedule: ScheduleSettings, drafting: Mapping[str, Any] | None, target_identity: str, gamma: int
) -> tuple[Calibrate | None, tuple[float, ...]]:
    """What turns confidence logits into probabilities: a function as given, or read from a file that fits; and what it
    says of acceptance, if anything.

    Without either, the file beside the drafter's weights, for policies that read confidences.
    """
    given, config = schedule.calibration, drafting or {}
    if callable(given):
        return given, ()
    method = method_of(config)
    if given == "off" or (given is None and (schedule.policy == "fixed" or method != "dspark")):
        return None, ()
    if method in ("none", "ngram"):
        raise DSparkError(f"the method {method} has no confidences to calibrate: leave calibration out")
    directory = drafter_directory(config.get("model"), target_identity)
    path = directory / CALIBRATION_FILE if given is None else Path(given)
    if given is None and not path.is_file():
        return None, ()
    calibration = load_calibration(path)
    calibration.check_fits(weights_identity(directory), target_identity, gamma)
    return calibration.conditional, calibration.acceptance
