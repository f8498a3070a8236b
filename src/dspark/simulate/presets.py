"""Acceptance models by name, with where their numbers come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dspark.calibrate.calibration import Calibration
from dspark.errors import DSparkError
from dspark.simulate.acceptance import Acceptance, Confidence, Domain, SyntheticAcceptance
from dspark.simulate.rounds import read_rounds, recorded_temperatures

__all__ = ["PRESETS", "Preset", "acceptance"]


@dataclass(frozen=True)
class Preset:
    """`lengths`: accepted length by domain with `measured_gamma` drafts verified in full, bonus included.

    Every slot gets the same conditional acceptance (DSpark starts high and stays, in the paper's position-wise
    curves); with another gamma it is kept.
    """

    lengths: Mapping[str, float]
    measured_gamma: int
    source: str
    slot_spread: float = 1.5
    request_spread: float = 0.5
    passage_spread: float = 0.5

    def model(self, gamma: int, confidence: Confidence) -> SyntheticAcceptance:
        domains = {}
        for name, length in self.lengths.items():
            domain = Domain.of_accepted_length(
                length,
                self.measured_gamma,
                slot_spread=self.slot_spread,
                request_spread=self.request_spread,
                passage_spread=self.passage_spread,
            )
            domains[name] = replace(domain, conditional=domain.conditional[:1] * gamma)
        return SyntheticAcceptance(domains, confidence)


PRESETS: Mapping[str, Preset] = {
    "qwen3-4b": Preset(
        {"chat": 3.64, "math": 6.11, "code": 5.38},
        7,
        "the DSpark paper: Qwen3-4B, T = 1, 7 drafts, on MT-Bench, GSM8K and HumanEval. The spreads are assumed; they "
        "put the confidences' AUC into the paper's range of 0.81 to 0.91",
    ),
    "smollm2-135m": Preset(
        {"mixed": 1.58},
        7,
        "the shipped drafter of SmolLM2-135M-Instruct, greedy, 72 built-in prompts (docs/log.md); spreads are assumed",
    ),
}


def acceptance(
    name: str,
    gamma: int | None,
    confidence: Confidence,
    greedy: bool = False,
    calibration: Calibration | None = None,
) -> tuple[Acceptance, str]:
    """A preset with `gamma` slots (None: as measured), or the recorded rounds of a file; and where it comes from.

    `greedy`: of a file that tells temperatures, the rounds at temperature 0 alone. `calibration`: of their logits; a
    preset has none, and its confidences stay as `confidence` says.

    Raises:
        DSparkError: no such preset or file, or an option that recorded rounds cannot honour.
    """
    if gamma is not None and gamma < 1:
        raise DSparkError(f"gamma must be at least 1, got {gamma}: for no drafts use the policy plain")
    if name in PRESETS:
        preset = PRESETS[name]
        return preset.model(gamma or preset.measured_gamma, confidence), preset.source
    if not Path(name).is_file():
        raise DSparkError(
            f"no acceptance {name!r}: choose {', '.join(PRESETS)}, or give a file of recorded rounds"
        )
    temperature = 0.0 if greedy and 0.0 in recorded_temperatures(name) else None
    rounds = read_rounds(name, temperature, calibration)
    if gamma not in (None, rounds.gamma):
        raise DSparkError(f"{name} holds blocks of {rounds.gamma} drafts: leave --gamma out, or record again")
    if not confidence.perfect or not confidence.available:
        raise DSparkError("recorded rounds bring their own confidences: leave the confidence options out")
    told = "as the head gave them" if calibration is None else "calibrated"
    confidences = "" if rounds.confidence is None else f", confidences {told}"
    return rounds, f"{len(rounds.accepted)} rounds recorded in {Path(name).name}{confidences}"
