"""What a calibration is worth on held-out rounds: errors before and after, by slot, domain and temperature.

Outcomes are the realised ones (drafts accepted or not), whatever the fit used. "Before" is the head as it is,
every temperature 1 and no offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.calibrate.calibration import Calibration, identity_calibration
from dspark.calibrate.metrics import (
    Bins,
    Reliability,
    area_under_curve,
    brier,
    ece_floor,
    expected_calibration_error,
)
from dspark.calibrate.rounds import Rounds
from dspark.calibrate.sts import at_the_edge
from dspark.errors import DSparkError

__all__ = ["ENOUGH_ROUNDS", "Evaluation", "Group", "Side", "Slot", "evaluate"]

ENOUGH_ROUNDS = 10_000  # held-out rounds below which errors of a percent are mostly noise
_SIMULATIONS = 200
_ONE_WAY = 0.8  # share of an error that is left when its bins' gaps are added with their signs
_ABOVE_CHANCE = 1.5  # times the floor; with 15 bins a perfect predictor's error goes beyond in 1 slot of 100


@dataclass(frozen=True, eq=False)
class Side:
    """Predictions of one slot's prefix survival against outcomes."""

    ece: float
    auc: float
    brier: float
    predicted: float  # mean
    reliability: Reliability

    @staticmethod
    def of(predicted: np.ndarray, realised: np.ndarray, bins: Bins) -> Side:
        return Side(
            ece=expected_calibration_error(predicted, realised, bins),
            auc=area_under_curve(predicted, realised),
            brier=brier(predicted, realised),
            predicted=float(predicted.mean()) if len(predicted) else float("nan"),
            reliability=Reliability.of(predicted, realised, bins),
        )


@dataclass(frozen=True, eq=False)
class Slot:
    """One slot, 1-based as in the paper. `floor`, `floor_95`: mean error of a perfectly calibrated predictor, and what
    it stays below in 19 of 20 cases, by simulation."""

    slot: int
    rounds: int
    realised: float  # share of rounds whose drafts were accepted up to here
    floor: float
    floor_95: float
    before: Side
    after: Side

    @property
    def worse(self) -> bool:
        """Calibrated, it errs more than before by more than errors vary by chance, and more than chance explains."""
        after, noise = self.after.ece, self.floor_95 - self.floor
        return after > self.before.ece + noise and after > self.floor_95

    @property
    def errs_one_way(self) -> bool:
        """Calibrated, its bins still lie (nearly) all on one side of the diagonal, farther than by chance."""
        side = self.after
        gap = abs(side.predicted - self.realised)
        return side.ece > _ABOVE_CHANCE * self.floor and gap >= _ONE_WAY * side.ece


@dataclass(frozen=True, eq=False)
class Group:
    """A set of rounds. The means are over slots, each counting the same."""

    name: str  # "all", "domain chat", "temperature 0"
    prompts: int
    rounds: int
    slots: tuple[Slot, ...]
    ece_before: float
    ece_after: float
    floor: float  # mean over simulations of the mean over slots
    floor_95: float  # 95th percentile of it

    def as_dict(self) -> dict[str, Any]:
        names = ("name", "prompts", "rounds", "ece_before", "ece_after", "floor", "floor_95")
        return {**{n: getattr(self, n) for n in names}, "slots": [_slot_dict(slot) for slot in self.slots]}


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Groups (the first is "all"), how bins are made, and whether the calibration is an improvement."""

    calibration: Calibration
    bins: Bins
    groups: tuple[Group, ...]

    @property
    def all(self) -> Group:
        return self.groups[0]

    @property
    def refusal(self) -> str | None:
        """Why this calibration is no improvement; None if it is one, by more than errors vary by chance."""
        g = self.all
        for slot in g.slots:
            if not slot.rounds:
                return f"slot {slot.slot} was verified in no held-out round: collect more"
        gain, noise = g.ece_before - g.ece_after, g.floor_95 - g.floor
        figures = f"held-out ECE {g.ece_before:.2%} before, {g.ece_after:.2%} after"
        if gain > noise:
            return None
        if gain < 0:
            what = "temperatures and offsets" if self.calibration.offsets else "temperatures"
            return f"the {what} make it worse: {figures}"
        if g.ece_before <= g.floor_95:
            return (
                f"nothing to mend: {figures}, and a perfectly calibrated head shows up to {g.floor_95:.2%} with so "
                "many rounds"
            )
        return f"no improvement beyond chance ({noise:.2%}): {figures}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the figures must know, a sentence each."""
        return tuple(self._warnings())

    def _warnings(self) -> Iterator[str]:
        g = self.all
        if g.rounds < ENOUGH_ROUNDS:
            yield (
                f"only {g.rounds} held-out rounds, fewer than {ENOUGH_ROUNDS}: errors below {g.floor_95:.2%} are "
                "sampling noise; collect more"
            )
        for k, t in enumerate(self.calibration.temperatures):
            if at_the_edge(t):
                kind = "temperature, with any offset," if self.calibration.offsets else "temperature"
                yield f"slot {k + 1}: temperature {t:g} is as far as the search goes; no {kind} mends it"
        for slot in g.slots:
            if slot.worse:
                yield (
                    f"slot {slot.slot}: worse than before ({slot.before.ece:.2%}, now {slot.after.ece:.2%}; "
                    f"{slot.floor_95:.2%} could be chance)"
                )
        for group in self.groups[1:]:
            if group.ece_after > group.ece_before + (group.floor_95 - group.floor):
                yield f"{group.name}: worse than before ({group.ece_before:.2%}, now {group.ece_after:.2%})"

    def as_dict(self) -> dict[str, Any]:
        return {
            "temperatures": list(self.calibration.temperatures),
            "offsets": list(self.calibration.offsets),
            "bins": self.bins.count,
            "binning": self.bins.kind,
            "simulations": _SIMULATIONS,
            "improves": self.refusal is None,
            "refusal": self.refusal,
            "warnings": list(self.warnings),
            "groups": [group.as_dict() for group in self.groups],
        }


def evaluate(rounds: Rounds, calibration: Calibration, bins: Bins, seed: int = 0) -> Evaluation:
    """Hold a calibration to rounds it was not fitted to. `seed` is of the floor's simulation.

    Raises:
        DSparkError: the calibration has another number of slots.
    """
    if calibration.gamma != rounds.source.gamma:
        raise DSparkError(
            f"the calibration is for {calibration.gamma} drafts, the rounds have {rounds.source.gamma}: use rounds "
            "of as many"
        )
    rng = np.random.default_rng(seed)
    groups = [_group(name, part, calibration, bins, rng) for name, part in _parts(rounds)]
    return Evaluation(calibration, bins, tuple(groups))


def _parts(rounds: Rounds) -> Iterator[tuple[str, Rounds]]:
    """All rounds, those of each domain, those of each temperature; the latter two where there are several."""
    yield "all", rounds
    for field in ("domain", "temperature"):
        values = sorted({getattr(a, field) for a in rounds.answers})
        for value in values if len(values) > 1 else ():
            name = f"{field} {value:g}" if field == "temperature" else f"{field} {value}"
            yield name, rounds.of_answers([getattr(a, field) == value for a in rounds.answers])


def _group(
    name: str, rounds: Rounds, calibration: Calibration, bins: Bins, rng: np.random.Generator
) -> Group:
    before = identity_calibration(calibration.gamma).survival(rounds.logits)
    conditional = calibration.conditional(rounds.logits)
    after = conditional.cumprod(axis=1)
    observed, survived = rounds.observed, rounds.survived
    floors = ece_floor(conditional, rounds.lengths, bins, _SIMULATIONS, rng)
    slots = []
    for k in range(rounds.source.gamma):
        rows = observed[:, k]
        y = survived[rows, k]
        sides = [Side.of(a[rows, k], y, bins) for a in (before, after)]
        realised = float(y.mean()) if len(y) else float("nan")
        chance = float(floors[:, k].mean()), float(np.quantile(floors[:, k], 0.95))
        slots.append(Slot(k + 1, int(rows.sum()), realised, *chance, *sides))
    seen = [k for k, slot in enumerate(slots) if slot.rounds]
    over_slots = floors[:, seen].mean(axis=1) if seen else np.array([np.nan])
    return Group(
        name=name,
        prompts=len({a.prompt_id for a in rounds.answers}),
        rounds=len(rounds),
        slots=tuple(slots),
        ece_before=_mean([slots[k].before.ece for k in seen]),
        ece_after=_mean([slots[k].after.ece for k in seen]),
        floor=float(over_slots.mean()),
        floor_95=float(np.quantile(over_slots, 0.95)),
    )


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _slot_dict(slot: Slot) -> dict[str, Any]:
    sides = {}
    for name in ("before", "after"):
        side: Side = getattr(slot, name)
        points = {key: getattr(side.reliability, key).tolist() for key in ("predicted", "realised", "count")}
        figures = {key: getattr(side, key) for key in ("ece", "auc", "brier", "predicted")}
        sides[name] = {**figures, "reliability": points}
    plain = {key: getattr(slot, key) for key in ("slot", "rounds", "realised", "floor", "floor_95", "worse")}
    return {**plain, **sides}
