"""From rounds to a calibration that says where it comes from."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from dspark.calibrate.calibration import Calibration
from dspark.calibrate.metrics import Bins
from dspark.calibrate.report import Evaluation, evaluate
from dspark.calibrate.rounds import Rounds
from dspark.calibrate.sts import fit_sts, fit_sts_with_offsets
from dspark.errors import DSparkError

__all__ = ["Labels", "fit", "offsets_hint", "with_results"]

Labels = Literal["expected", "realised"]


def fit(rounds: Rounds, bins: Bins, labels: Labels = "expected", offsets: bool = False) -> Calibration:
    """Sequential temperature scaling on rounds of full verification, with an offset a slot if asked for.

    `labels="expected"` fits to the probability that the drafted prefix is accepted, prod min(1, p_t / p_d), which
    has the same mean as the outcomes ("realised") and less noise.

    Raises:
        DSparkError: too few rounds at a slot.
    """
    if labels not in ("expected", "realised"):
        raise DSparkError(f"labels are expected or realised, not {labels!r}")
    survival = rounds.expected_survival if labels == "expected" else rounds.survived
    source, data = rounds.source, (rounds.logits, survival, rounds.observed, bins)
    temperatures, shifts = fit_sts_with_offsets(*data) if offsets else (fit_sts(*data), ())
    return Calibration(
        temperatures=temperatures,
        offsets=shifts,
        acceptance=mean_acceptance(survival, rounds.observed),
        acceptance_rule=source.acceptance_rule,
        sampling_temperatures=tuple(sorted({a.temperature for a in rounds.answers})),
        target=source.target,
        target_identity=source.target_identity,
        drafter=source.drafter,
        drafter_identity=source.drafter_identity,
        labels=labels,
        prompts_fit=len({a.prompt_id for a in rounds.answers}),
        rounds_fit=len(rounds),
        bins=bins.count,
        binning=bins.kind,
    )


def mean_acceptance(survival: np.ndarray, observed: np.ndarray) -> tuple[float, ...]:
    """Mean conditional acceptance by slot of [n, gamma] prefix survivals, of those `observed`; 0 where none was."""
    before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
    reached, passed = (before * observed).sum(0), (survival * observed).sum(0)
    return tuple((passed / np.maximum(reached, 1e-9)).tolist())


def offsets_hint(rounds: Rounds, evaluation: Evaluation) -> str | None:
    """A sentence on what offsets may mend where temperatures did not; None where there is nothing to be said.

    `evaluation` is of a calibration without offsets on held-out rounds: refused, or with a slot that errs one way.
    `rounds` are those it was fitted to: they decide, so that held-out ones judge no more than one fit.
    """
    plain, bins = evaluation.calibration, evaluation.bins
    one_way = [str(slot.slot) for slot in evaluation.all.slots if slot.errs_one_way]
    if evaluation.refusal is None and not one_way:
        return None
    labels: Labels = "realised" if plain.labels == "realised" else "expected"
    without, tried = (evaluate(rounds, c, bins).all for c in (plain, fit(rounds, bins, labels, offsets=True)))
    if without.ece_after - tried.ece_after <= tried.floor_95 - tried.floor:
        return None
    which = f"slots {', '.join(one_way)} err all one way" if len(one_way) > 1 else ""
    which = f"slot {one_way[0]} errs all one way" if len(one_way) == 1 else which
    figures = f"{without.ece_after:.2%} to {tried.ece_after:.2%}"
    return (
        f"--offsets may help: {which}{', and ' if which else ''}ECE of the fitting rounds goes from {figures}"
    )


def with_results(calibration: Calibration, evaluation: Evaluation) -> Calibration:
    """The calibration with its held-out figures; every slot must have some (else `evaluation.refusal` says so)."""
    group = evaluation.all
    return replace(
        calibration,
        prompts_held_out=group.prompts,
        rounds_held_out=group.rounds,
        ece_before=tuple(slot.before.ece for slot in group.slots),
        ece_after=tuple(slot.after.ece for slot in group.slots),
        ece_floor=tuple(slot.floor for slot in group.slots),
    )
