"""From rounds to a calibration that says where it comes from."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from dspark.calibrate.calibration import Calibration
from dspark.calibrate.metrics import Bins
from dspark.calibrate.report import Evaluation
from dspark.calibrate.rounds import Rounds
from dspark.calibrate.sts import fit_sts
from dspark.errors import DSparkError

__all__ = ["Labels", "fit", "with_results"]

Labels = Literal["expected", "realised"]


def fit(rounds: Rounds, bins: Bins, labels: Labels = "expected") -> Calibration:
    """Sequential temperature scaling on rounds of full verification.

    `labels="expected"` fits to the probability that the drafted prefix is accepted, prod min(1, p_t / p_d), which
    has the same mean as the outcomes ("realised") and less noise.

    Raises:
        DSparkError: too few rounds at a slot.
    """
    if labels not in ("expected", "realised"):
        raise DSparkError(f"labels are expected or realised, not {labels!r}")
    survival = rounds.expected_survival if labels == "expected" else rounds.survived
    source = rounds.source
    return Calibration(
        temperatures=fit_sts(rounds.logits, survival, rounds.observed, bins),
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
