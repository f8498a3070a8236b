"""A calibration: one temperature a slot, c_k = sigmoid(logit_k / T_k) (sequential temperature scaling).

>>> calibration = Calibration((1.4, 1.1))
>>> calibration.survival(logits)  # [R, g] -> a_{r,j} = prod_{i <= j} c_{r,i}, g <= 2

With offsets it is c_k = sigmoid(logit_k / T_k + b_k), for a head that errs the same way throughout.

Order within a slot is kept, so a schedule stays as lossless as it was: each confidence is the old one through a
fixed increasing function, and still knows nothing of the token it decides about. c_k depends on slot k's logit
alone, a_k on those of slots up to k: what a policy declares about its dependence holds with offsets or without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from dspark.errors import DSparkError
from dspark.typed import check_fields

__all__ = ["Calibration", "identity_calibration", "sigmoid"]


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) in float64, without overflow at either end; NaN stays NaN."""
    with np.errstate(invalid="ignore"):  # of NaN, which stands for slots without a draft
        return np.exp(-np.logaddexp(0.0, -np.asarray(logits, dtype=np.float64)))


@dataclass(frozen=True)
class Calibration:
    """Temperatures of gamma slots, and what they were fitted to: they hold for that and nothing else.

    `offsets` [gamma], in logits, are added after the division; without any the calibration is the paper's.
    `acceptance` [gamma]: mean conditional acceptance of the rounds it was fitted to, a policy's first guess.
    `ece_...` are held-out expected calibration errors of prefix survival, one a slot; `ece_floor` is what a
    perfectly calibrated predictor would show with as many rounds. Unknown facts are empty or 0.

    Raises:
        DSparkError: no temperature, one that is not above 0 and finite, lists of another length.
    """

    temperatures: tuple[float, ...]  # [gamma]
    acceptance_rule: str = ""
    sampling_temperatures: tuple[float, ...] = ()
    target: str = ""
    target_identity: str = ""
    drafter: str = ""
    drafter_identity: str = ""
    dataset: str = ""
    labels: str = ""
    prompts_fit: int = 0
    prompts_held_out: int = 0
    rounds_fit: int = 0
    rounds_held_out: int = 0
    bins: int = 0
    binning: str = ""
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    ece_floor: tuple[float, ...] = ()
    versions: tuple[str, ...] = ()
    created: str = ""
    offsets: tuple[float, ...] = ()  # [gamma] or none
    acceptance: tuple[float, ...] = ()  # [gamma] or none

    def __post_init__(self) -> None:
        check_fields(self, "the calibration's")
        if not self.temperatures:
            raise DSparkError("a calibration needs one temperature a slot, got none")
        for k, t in enumerate(self.temperatures):
            if not (t > 0 and math.isfinite(t)):
                raise DSparkError(f"the calibration's temperatures must be above 0, slot {k + 1} has {t}")
        if not all(0 <= c <= 1 for c in self.acceptance):
            raise DSparkError(f"the calibration's acceptance must lie between 0 and 1, got {self.acceptance}")
        for name in ("ece_before", "ece_after", "ece_floor", "offsets", "acceptance"):
            values = getattr(self, name)
            if values and len(values) != self.gamma:
                raise DSparkError(
                    f"the calibration's {name} has {len(values)} entries for {self.gamma} temperatures"
                )

    @property
    def gamma(self) -> int:
        """Slots it is for."""
        return len(self.temperatures)

    def conditional(self, logits: np.ndarray) -> np.ndarray:
        """Calibrated probability that x_k is accepted, given that x_<k was: [R, g] float64 of logits [R, g].

        What `Engine(calibrate=...)` asks for, and through it every scheduling policy.

        Raises:
            DSparkError: more slots than temperatures.
        """
        g = logits.shape[1]
        if g > self.gamma:
            raise DSparkError(
                f"a block of {g} drafts met a calibration for {self.gamma}: fit one for as many drafts"
            )
        scaled = np.asarray(logits, dtype=np.float64) / np.asarray(self.temperatures[:g])
        return sigmoid(scaled + np.asarray(self.offsets[:g]) if self.offsets else scaled)

    def survival(self, logits: np.ndarray) -> np.ndarray:
        """Calibrated prefix survival a_{r,j}: [R, g] float64, non-increasing along a row."""
        return self.conditional(logits).cumprod(axis=1)

    def without_offsets(self) -> Calibration:
        """The temperatures alone. Errors after the fit are left out: they were measured with the offsets."""
        return replace(self, offsets=(), ece_after=(), ece_floor=()) if self.offsets else self

    def check_fits(self, drafter_identity: str, target_identity: str, gamma: int) -> None:
        """Refuse to serve another drafter, target or block than it was fitted to; what is unknown passes.

        Raises:
            DSparkError: names what differs.
        """
        if gamma > self.gamma:
            raise DSparkError(
                f"the calibration is for {self.gamma} drafts, this drafter makes {gamma}: fit one for it"
            )
        for what, own, other in (
            ("drafter", self.drafter_identity, drafter_identity),
            ("target", self.target_identity, target_identity),
        ):
            if own and other and own != other:
                raise DSparkError(
                    f"the calibration was fitted to another {what} ({own}, this one is {other}): fit it again"
                )


def identity_calibration(gamma: int) -> Calibration:
    """Every temperature 1: confidences as the head gives them."""
    return Calibration((1.0,) * gamma)
