"""Calibration files: our own JSON, SGLang's and TensorRT-LLM's, in and out.

The other engines' files hold temperatures and little else; `dataset`, the number of rounds and the errors are kept.
A calibration with offsets fits none of them. Ours is of version 1 without offsets and of version 2 with them, so
that a reader which knows no offsets refuses the file instead of leaving them out.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from dspark.calibrate.calibration import Calibration
from dspark.errors import DSparkError

__all__ = [
    "CALIBRATION_FILE",
    "FORMATS",
    "from_sglang",
    "from_tensorrt_llm",
    "load_calibration",
    "save_calibration",
    "to_sglang",
    "to_tensorrt_llm",
]

FORMATS = ("dspark", "sglang", "tensorrt-llm")
CALIBRATION_FILE = "calibration.json"  # beside a drafter's weights: used where no other is given
_NAME, _PLAIN, _WITH_OFFSETS = "dspark-calibration", 1, 2  # the latter two: versions
_SGLANG = ("temperatures", "dataset", "num_samples", "ece_before", "ece_after")


def from_sglang(table: Mapping[str, Any]) -> Calibration:
    """SGLang's calibration. Only `temperatures` must be there.

    Raises:
        DSparkError: a key that is missing, unknown or of the wrong type; temperatures that are not above 0.
    """
    return _foreign(table, "temperatures", _SGLANG, "SGLang")


def from_tensorrt_llm(table: Mapping[str, Any]) -> Calibration:
    """TensorRT-LLM's calibration: SGLang's keys, or `sts_temperatures` in place of `temperatures`.

    Raises:
        DSparkError: as `from_sglang`, or both keys at once.
    """
    if "sts_temperatures" not in table:
        return _foreign(table, "temperatures", _SGLANG, "TensorRT-LLM")
    if "temperatures" in table:
        raise DSparkError(
            "TensorRT-LLM calibration: temperatures and sts_temperatures say the same; keep one"
        )
    return _foreign(table, "sts_temperatures", ("sts_temperatures", *_SGLANG[1:]), "TensorRT-LLM")


def to_sglang(calibration: Calibration) -> dict[str, Any]:
    """The dictionary of SGLang's JSON file; `num_samples` counts the rounds fitted to.

    Raises:
        DSparkError: the calibration has offsets, and would not be the same without them.
    """
    if calibration.offsets:
        raise DSparkError(
            "this calibration has offsets, which SGLang's and TensorRT-LLM's files cannot hold: best fit one without "
            "--offsets on the kept rounds (dspark calibrate --no-collect --rounds PATH, which needs no model); or "
            "convert it with --drop-offsets, or save it in the format dspark"
        )
    return {
        "temperatures": list(calibration.temperatures),
        "dataset": calibration.dataset,
        "num_samples": calibration.rounds_fit,
        "ece_before": list(calibration.ece_before),
        "ece_after": list(calibration.ece_after),
    }


def to_tensorrt_llm(calibration: Calibration) -> dict[str, Any]:
    """The dictionary of TensorRT-LLM's JSON file, which reads SGLang's keys."""
    return to_sglang(calibration)


def load_calibration(path: Path) -> Calibration:
    """Read a calibration file of any of the three formats, told apart by its keys.

    Raises:
        DSparkError: the file cannot be read, or its contents are not strictly one of the formats.
    """
    try:
        table = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeError) as error:
        raise DSparkError(f"cannot read the calibration {str(path)!r}: {error}") from None
    except json.JSONDecodeError as error:
        raise DSparkError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(table, dict):
        raise DSparkError(f"{path} must hold a JSON object")
    try:
        if "format" in table:
            return _own(table)
        return from_tensorrt_llm(table)  # which reads all that SGLang's holds
    except DSparkError as error:
        raise DSparkError(f"{path}: {error}") from None


def save_calibration(path: Path, calibration: Calibration, format: str = "dspark") -> None:
    """Write the file, or replace it, in one of `FORMATS`.

    Raises:
        DSparkError: unknown format, one that cannot hold the calibration, or the file cannot be written.
    """
    if format not in FORMATS:
        raise DSparkError(f"calibration format {format!r} is not known; choose from {', '.join(FORMATS)}")
    if format == "dspark":
        table = _own_table(calibration)
    else:
        table = to_sglang(calibration) if format == "sglang" else to_tensorrt_llm(calibration)
    beside = path.with_name(path.name + ".part")
    try:
        beside.write_text(json.dumps(table, indent=1, allow_nan=False) + "\n", "utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise DSparkError(f"cannot write the calibration to {str(path)!r}: {error}") from None


def _own_table(calibration: Calibration) -> dict[str, Any]:
    values = dataclasses.asdict(calibration)
    for name in ("offsets", "acceptance"):
        if not values[name]:
            del values[name]
    version = _WITH_OFFSETS if calibration.offsets else _PLAIN
    return {"format": _NAME, "format_version": version, **values}


def _own(table: Mapping[str, Any]) -> Calibration:
    if table["format"] != _NAME:
        raise DSparkError(f"format is {table['format']!r}, expected {_NAME!r}")
    version = table.get("format_version")
    if version not in (_PLAIN, _WITH_OFFSETS):
        raise DSparkError(f"format_version is {version!r}, this version reads {_PLAIN} and {_WITH_OFFSETS}")
    hints = get_type_hints(Calibration)
    needed = ("temperatures", "offsets") if version == _WITH_OFFSETS else ("temperatures",)
    known = tuple(name for name in hints if name != "offsets" or name in needed)
    values = {name: value for name, value in table.items() if name not in ("format", "format_version")}
    _check_keys(values, needed, known, "calibration")
    lists = {name for name, hint in hints.items() if get_origin(hint) is tuple}
    fields: dict[str, Any] = {n: _tuple(n, v) if n in lists else v for n, v in values.items()}
    return Calibration(**fields)


def _foreign(table: Mapping[str, Any], key: str, known: tuple[str, ...], engine: str) -> Calibration:
    _check_keys(table, (key,), known, f"{engine} calibration")
    return Calibration(
        temperatures=_tuple(key, table[key]),
        dataset=table.get("dataset", ""),
        rounds_fit=table.get("num_samples", 0),
        ece_before=_tuple("ece_before", table.get("ece_before", [])),
        ece_after=_tuple("ece_after", table.get("ece_after", [])),
    )


def _check_keys(table: Mapping[str, Any], needed: tuple[str, ...], known: tuple[str, ...], what: str) -> None:
    for key in needed:
        if key not in table:
            raise DSparkError(f"{what}: key {key!r} is missing; it needs {', '.join(needed)}")
    for key in sorted(set(table) - set(known)):
        raise DSparkError(f"{what}: key {key!r} is not known; known are {', '.join(known)}")


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise DSparkError(f"{name} must be a list, got {value!r:.60}")
    return tuple(value)
