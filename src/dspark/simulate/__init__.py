"""A discrete-event simulator of serving: the engine's rounds and its very policy objects, priced by a cost model.

    mix = Mix.parse("chat", Lengths(500, "lognormal"), Lengths(200, "geometric"))
    drafts, _ = acceptance("qwen3-4b", 7, Confidence())
    scenario = Scenario(traffic=ClosedLoop(64, mix), acceptance=drafts, cost=machine("gpu-27b").cost)
    print(summarise(run(scenario, FixedLength(7), seed=0), scenario))

Needs no model and no torch. docs/simulation.md says what is simulated and what is not.
"""

from dspark.simulate.acceptance import Confidence, Domain, SyntheticAcceptance
from dspark.simulate.capacity import Capacity, ServiceTarget, find_capacity
from dspark.simulate.machines import MACHINES, Machine, machine, read_cost
from dspark.simulate.metrics import Summary, summarise
from dspark.simulate.policies import POLICY_NAMES, policy_factory
from dspark.simulate.presets import PRESETS, acceptance
from dspark.simulate.recording import (
    StepRecorder,
    read_steps,
    record_closed_loop,
    record_steps,
    write_steps,
)
from dspark.simulate.rounds import RecordedRounds, read_rounds
from dspark.simulate.server import Limits
from dspark.simulate.simulation import Scenario, run
from dspark.simulate.sweep import Cell, sweep
from dspark.simulate.trace import Trace, read_trace
from dspark.simulate.traffic import ClosedLoop, Gamma, OnOff, OpenLoop, Poisson, Replay
from dspark.simulate.validation import cross_validate, fit_cost, predict, validate_run
from dspark.simulate.workload import Lengths, Mix, RequestClass

__all__ = [
    "MACHINES",
    "POLICY_NAMES",
    "PRESETS",
    "Capacity",
    "Cell",
    "ClosedLoop",
    "Confidence",
    "Domain",
    "Gamma",
    "Lengths",
    "Limits",
    "Machine",
    "Mix",
    "OnOff",
    "OpenLoop",
    "Poisson",
    "RecordedRounds",
    "Replay",
    "RequestClass",
    "Scenario",
    "ServiceTarget",
    "StepRecorder",
    "Summary",
    "SyntheticAcceptance",
    "Trace",
    "acceptance",
    "cross_validate",
    "find_capacity",
    "fit_cost",
    "machine",
    "policy_factory",
    "predict",
    "read_cost",
    "read_rounds",
    "read_steps",
    "read_trace",
    "record_closed_loop",
    "record_steps",
    "run",
    "summarise",
    "sweep",
    "validate_run",
    "write_steps",
]
