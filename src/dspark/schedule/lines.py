"""Prices by size as measured at a few probes: lines and stairs between them, and what makes a table unusable."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dspark.errors import DSparkError

__all__ = ["Line", "Staircase", "check_probes", "flatness", "refuse_negative"]

FLAT = 1.02  # a curve that rises less than this from its first probe to its last tells sizes apart by noise alone


class Line:
    """Linear between probes, the first value below them, the last slope beyond them."""

    def __init__(self, probes: tuple[int, ...], values: tuple[float, ...]) -> None:
        self.probes, self.values = np.array(probes), np.array(values)
        self.last = probes[-1]
        self.slope = (values[-1] - values[-2]) / (probes[-1] - probes[-2])
        self._whole = np.zeros(
            0
        )  # values at 0, 1, 2, ...: looking up is many times faster than interpolating

    def __call__(self, x: np.ndarray | int) -> np.ndarray:
        return self._beyond(np.interp(x, self.probes, self.values), x)

    def at(self, x: int) -> float:
        """The value at one whole number."""
        table = self._whole if x < len(self._whole) else self.whole(x + 1)
        value: float = table.item(x)
        return value

    def whole(self, count: int) -> np.ndarray:
        """The values at 0, 1, ..., `count` of them or more: to be read only."""
        if count > len(self._whole):
            self._whole = self(np.arange(2 * count))
        return self._whole

    def _beyond(self, inside: np.ndarray, x: np.ndarray | int) -> np.ndarray:
        return inside + self.slope * np.maximum(np.asarray(x) - self.last, 0)


class Staircase(Line):
    """The value at the next probe; beyond the last one nothing is padded and the last slope goes on."""

    def __call__(self, x: np.ndarray | int) -> np.ndarray:
        index = np.searchsorted(self.probes, x)
        return self._beyond(self.values.take(index, mode="clip"), x)


def check_probes(name: str, probes: Sequence[int], values: Sequence[float]) -> None:
    if len(probes) != len(values):
        raise DSparkError(f"{name}: {len(probes)} probes but {len(values)} values; give one value a probe")
    if len(probes) < 2:
        raise DSparkError(f"{name}: {len(probes)} probes give no slope; profile at least two sizes")
    if not (np.isfinite(probes).all() and np.isfinite(values).all()):
        raise DSparkError(f"{name}: holds a value that is not finite; profile the machine again")
    if probes[0] < 0 or (np.diff(probes) <= 0).any():
        raise DSparkError(f"{name}: probes must be 0 or more and increase, got {list(probes)}")
    falls = np.flatnonzero(np.diff(values) < 0)
    if len(falls):
        at = int(falls[0])
        raise DSparkError(
            f"{name}: {probes[at + 1]} costs less than {probes[at]}; repeat the profile, "
            "or clean its samples with monotone_medians"
        )


def flatness(name: str, probes: Sequence[int], values: Sequence[float]) -> str | None:
    if values[-1] <= FLAT * values[0]:
        return (
            f"{name} is flat: {probes[-1]} tokens cost as much as {probes[0]}, so every draft will be verified; "
            "profile larger sizes"
        )
    if values[-1] == values[-2]:
        return (
            f"{name} ends flat: beyond {probes[-1]} tokens it prices every size alike; profile larger sizes"
        )
    return None


def refuse_negative(name: str, values: Sequence[float]) -> None:
    if not all(np.isfinite(v) and v >= 0 for v in values):
        raise DSparkError(f"{name}: must be finite and 0 or more, got {list(values)}")
