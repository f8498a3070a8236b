"""From the command line's settings to scenarios, and what has to be said about them beside every result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dspark.calibrate.calibration import Calibration
from dspark.calibrate.formats import load_calibration
from dspark.errors import DSparkError
from dspark.simulate.acceptance import Acceptance, Confidence
from dspark.simulate.machines import Machine, machine
from dspark.simulate.policies import PolicyFactory, policy_factory
from dspark.simulate.presets import acceptance
from dspark.simulate.quality import SignalQuality, measure_quality
from dspark.simulate.rounds import RecordedRounds
from dspark.simulate.server import Limits
from dspark.simulate.simulation import Scenario
from dspark.simulate.trace import Trace, read_trace
from dspark.simulate.traffic import (
    ArrivalProcess,
    ClosedLoop,
    Gamma,
    OnOff,
    OpenLoop,
    Poisson,
    Replay,
    Traffic,
)
from dspark.simulate.workload import Lengths, Mix

__all__ = ["Setup", "parse_arrivals"]

DEFAULT_SEQS = 256


@dataclass(frozen=True, eq=False)
class Setup:
    """Everything checked and built; `args` are the command line's (see `dspark simulate --help`)."""

    args: Any
    machine: Machine
    beliefs: Machine  # prices that policies decide by
    acceptance: Acceptance
    acceptance_source: str
    calibration: Calibration | None
    policies: dict[str, PolicyFactory]
    mix: Mix
    limits: Limits
    trace: Trace | None

    @staticmethod
    def of(args: Any) -> Setup:
        """
        Raises:
            DSparkError: whatever the settings are refused for.
        """
        if args.seed < 0:
            raise DSparkError(f"--seed must be 0 or more, got {args.seed}")
        if args.seeds < 1 or not 0.5 <= args.confidence < 1:
            raise DSparkError("--seeds must be 1 or more, and --confidence at least 0.5 and below 1")
        quality = Confidence(args.confidence_noise, args.confidence_scale, available=not args.no_confidence)
        calibration = load_calibration(Path(args.calibration)) if args.calibration else None
        drafts, source = acceptance(args.acceptance, args.gamma, quality, args.greedy, calibration)
        prices = machine(args.machine)
        beliefs = machine(args.policy_costs) if args.policy_costs else prices
        known = () if calibration is None else calibration.acceptance
        lengths = Lengths.parse(args.prompt_tokens), Lengths.parse(args.output_tokens)
        setup = Setup(
            args,
            prices,
            beliefs,
            drafts,
            source,
            calibration,
            {
                name: policy_factory(name, drafts.gamma, beliefs.cost, known)
                for name in args.policies.split(",")
            },
            Mix.parse(args.mix or ",".join(drafts.domain_names), *lengths),
            Limits(
                max_num_seqs=DEFAULT_SEQS if args.max_num_seqs is None else args.max_num_seqs,
                max_num_batched_tokens=args.max_num_batched_tokens,
                kv_cache_tokens=args.kv_cache_tokens,
                max_model_len=args.max_model_len,
                known_end=args.known_end,
            ),
            read_trace(args.trace) if args.trace else None,
        )
        for load in setup.loads:
            setup.scenario(load)
        domains = tuple(kind.domain for kind in setup.mix.classes)
        drafts.start(
            domains, np.zeros(1, dtype=np.int64), np.random.SeedSequence(0)
        )  # refuses unknown domains
        return setup

    @property
    def closed(self) -> bool:
        return self.args.rate is None and self.trace is None

    @property
    def loads(self) -> tuple[float, ...]:
        chosen: tuple[float, ...]
        if self.trace is not None:
            chosen = self.args.speed
        elif self.args.rate is not None:
            chosen = self.args.rate
        elif self.args.concurrency is None and self.args.capacity is not None:
            chosen = (1,)
        else:
            chosen = self.args.concurrency or (1, 4, 16, 64)
        return chosen

    @property
    def load_name(self) -> str:
        return "users" if self.closed else "requests/s" if self.trace is None else "trace speed"

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.args.seed, self.args.seed + self.args.seeds))

    def scenario(self, load: float) -> Scenario:
        """At so many users, requests per second, or times the trace's speed."""
        limits = self.limits
        if self.closed and self.args.max_num_seqs is None:
            limits = replace(limits, max_num_seqs=max(DEFAULT_SEQS, int(load)))
        return Scenario(
            traffic=self._traffic(load),
            acceptance=self.acceptance,
            cost=self.machine.cost,
            limits=limits,
            warmup_s=self.args.warmup,
            duration_s=self.args.duration,
            overhead_s=1e-3 * self.args.overhead_ms,
            greedy=self.args.greedy,
        )

    def _traffic(self, load: float) -> Traffic:
        if self.trace is not None:
            return Replay(self.trace, self.mix, load)
        if self.args.rate is not None:
            return OpenLoop(parse_arrivals(self.args.arrivals, load), self.mix)
        return ClosedLoop(int(load), self.mix, self.args.think)

    @cached_property
    def quality(self) -> dict[str, SignalQuality]:
        """Of the confidences, by domain."""
        return {domain: measure_quality(self.acceptance, domain) for domain in self.acceptance.domain_names}

    def facts(self) -> dict[str, object]:
        """What the results rest on."""
        facts: dict[str, object] = {
            "machine": self.machine.name,
            "machine_source": self.machine.source,
            "machine_is_an_assumption": self.machine.assumption,
            "policy_costs": self.beliefs.name,
            "acceptance_source": self.acceptance_source,
            "gamma": self.acceptance.gamma,
            "signal": {domain: quality.as_dict() for domain, quality in self.quality.items()},
            "warnings": self.warnings(),
        }
        if self.args.rate is not None:
            facts["cv_of_arrivals"] = [parse_arrivals(self.args.arrivals, rate).cv for rate in self.loads]
        if self.trace is not None:
            facts["cv_of_arrivals"] = [self.trace.cv]
        return facts

    def warnings(self) -> list[str]:
        found = []
        if self.machine.assumption:
            found.append(f"the prices of {self.machine.name} are an assumption, not a measurement")
        if self.calibration is not None and not isinstance(self.acceptance, RecordedRounds):
            found.append(
                "synthetic confidences have no logits to calibrate: of --calibration only the mean acceptance is used"
            )
        if self.beliefs.cost.warning:
            found.append(self.beliefs.cost.warning)
        if "global" in self.policies and not self.args.greedy:
            found.append(
                "global looks at the block it decides about: at temperature above 0 it is not lossless"
            )
        if self.trace is not None:
            needed = (self.args.warmup + self.args.duration) * max(self.loads)
            if needed > self.trace.duration_s:
                found.append(
                    f"the trace ends after {self.trace.duration_s:.0f} s, before the measured time does"
                )
        return found

    def describe(self) -> str:
        """Lines of Markdown."""
        lines = [f"Machine {self.machine.name}: {self.machine.source}."]
        lines.append(f"Acceptance, {self.acceptance.gamma} drafts: {self.acceptance_source}.")
        for domain, q in self.quality.items():
            signal = "no confidences" if q.ece is None else f"AUC {_figure(q.auc)}, ECE {q.ece:.3f}"
            lines.append(f"{domain}: accepted length {q.accepted_length:.2f} verified in full; {signal}.")
        lines += [f"NOTE: {warning}." for warning in self.warnings()]
        return "\n".join(f"- {line}" for line in lines) + "\n"


def parse_arrivals(text: str, rate: float) -> ArrivalProcess:
    """`poisson`, `gamma:CV` or `on-off:ON:OFF` (seconds) at `rate` requests per second.

    Raises:
        DSparkError: another form, or a number out of range.
    """
    kind, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if kind == "poisson" and not numbers:
        return Poisson(rate)
    if kind == "gamma" and len(values) == 1:
        return Gamma(rate, values[0])
    if kind == "on-off" and len(values) == 2:
        return OnOff(rate, *values)
    raise DSparkError(f"{text!r} are no arrivals: write poisson, gamma:CV or on-off:ON:OFF (seconds)")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
