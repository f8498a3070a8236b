"""Does the simulator predict the real engine? Closed loops of both, over concurrency.

    python benchmarks/simulator_check.py [--rounds calibration.rounds.safetensors] [--concurrency 1,2,4,8,16,32]
        [--policies plain,fixed:2,auto] [--temperature 0] [--requests 3] [--max-tokens 64] [--profile-seconds 15]
        [--threads N] [--json PATH]

What the simulation rests on is measured first: how drafts fare (every second built-in prompt, all drafts verified), and
before each concurrency prices (as `dspark profile` does: a shared machine is another one a minute later). Then so many
users send the other prompts one behind the other, to an engine with each policy, and every step is recorded. `dspark
simulate --validate --machine` simulates as many tokens of the same traffic with a fresh policy. Prompts are cut to one
length and answers go on to `--max-tokens`, on all sides. With `--rounds`, rounds are those of that file (of `dspark
calibrate`) at the run's temperature, and all prompts are sent. Policies decide by the measured prices, in the engine
and in the simulation; confidences are calibrated as those of the shipped drafter are.

Errors of tokens/s, twice each: at the prices measured before, which know nothing of the run, and at prices fitted to
its own steps. `run`: of the whole simulation. `prices`: given what each recorded step held; fitted prices come from one
half of the steps and predict the other. In brackets the slowest and the fastest simulated run: `auto` may settle on the
first answers of a short run, and the engine's is one draw of these. `scatter`: step times' mean over their median,
among steps that hold the same.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dspark import LLM, SamplingParams
from dspark.calibrate.calibration import Calibration
from dspark.calibrate.collect import Job, collect
from dspark.calibrate.formats import CALIBRATION_FILE, load_calibration
from dspark.calibrate.jobs import drafter_directory, source_of
from dspark.calibrate.rounds import Answer, Rounds, load_rounds, save_rounds
from dspark.cli import main as dspark
from dspark.data import load_prompts
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.profile import Profile, ProfileSettings, fingerprint, measure_profile, write_cost_table
from dspark.schedule.settings import compile_schedulers
from dspark.simulate import StepRecorder, machine, policy_factory, record_closed_loop, write_steps

SHORTEST = 40  # prompts of fewer tokens are left out; the others are cut to the shortest of them
AT_LEAST = 24  # requests of a cell: answers differ in how well they can be drafted
TABLE = (
    "| users | policy | measured tokens/s | simulated | run | prices | run, fitted | prices, fitted | scatter |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Cut:
    """A built-in prompt, cut to the length of all."""

    id: str
    domain: str
    ids: list[int]


@dataclass(frozen=True)
class Inputs:
    """What the engine and the simulation share. Files lie in one temporary folder."""

    gamma: int
    traffic: list[Cut]
    rounds: Path  # at the temperature of the run alone
    profile: Path
    calibration_file: Path | None

    @property
    def calibration(self) -> Calibration | None:
        return None if self.calibration_file is None else load_calibration(self.calibration_file)


def prepare(llm: LLM, args: argparse.Namespace, directory: Path) -> Inputs:
    """Choose or record the rounds."""
    cut = prompts(llm)
    chosen, traffic = known_rounds(args), cut
    if chosen is None:
        chosen, traffic = record_rounds(llm, cut[::2], args), cut[1::2]
    target, source = llm.engine.target, chosen.source
    calibration = drafter_directory(None, target.identity) / CALIBRATION_FILE
    if calibration.is_file():  # refused now rather than behind a measurement
        load_calibration(calibration).check_fits(
            source.drafter_identity, source.target_identity, source.gamma
        )
    inputs = Inputs(
        source.gamma,
        traffic,
        directory / "rounds.safetensors",
        directory / "profile.json",
        calibration if calibration.is_file() else None,
    )
    save_rounds(inputs.rounds, chosen)
    return inputs


def measure_prices(llm: LLM, users: int, inputs: Inputs, args: argparse.Namespace) -> None:
    """What the machine costs right now, with up to `users` users."""
    target, drafter = llm.engine.target, llm.engine.drafter
    settings = ProfileSettings(seconds=args.profile_seconds)
    samples = measure_profile(target, drafter, inputs.gamma, users, settings)
    write_cost_table(Profile(fingerprint(target, drafter), tuple(samples)), inputs.profile, "dspark")


def known_rounds(args: argparse.Namespace) -> Rounds | None:
    """Those of `--rounds` at the temperature of the run; None: there is no file."""
    if args.rounds is None:
        return None
    recorded = load_rounds(args.rounds)
    chosen = recorded.of_answers([answer.temperature == args.temperature for answer in recorded.answers])
    if not len(chosen):
        raise SystemExit(f"{args.rounds} has no rounds at temperature {args.temperature:g}: record some")
    return chosen


def record_rounds(llm: LLM, cut: list[Cut], args: argparse.Namespace) -> Rounds:
    """Answers of the traffic's length to these prompts, every draft of the drafter verified."""
    engine = llm.engine
    source = source_of(engine, drafter_directory(None, engine.target.identity), args.model)
    jobs = [
        Job(Answer(prompt.id, prompt.domain, args.temperature), prompt.ids, params(i, args))
        for i, prompt in enumerate(cut)
    ]
    return Rounds.join(list(collect(engine, jobs, source)))


def prompts(llm: LLM) -> list[Cut]:
    """The built-in prompts of `SHORTEST` tokens or more, cut to the shortest of these; domains take turns."""
    encoded = [(prompt, llm.tokenizer.apply_chat_template(prompt.messages)) for prompt in load_prompts()]
    encoded = [(prompt, ids) for prompt, ids in encoded if len(ids) >= SHORTEST]
    length = min(len(ids) for _, ids in encoded)
    return [Cut(prompt.id, prompt.domain, ids[:length]) for prompt, ids in encoded]


def params(seed: int, args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=seed
    )


def record(llm: LLM, users: int, policy: str, inputs: Inputs, args: argparse.Namespace, path: Path) -> None:
    """Steps of `users` users, to `path`."""
    calibration = inputs.calibration
    known = () if calibration is None else calibration.acceptance
    make = policy_factory(policy, inputs.gamma, machine(str(inputs.profile)).cost, known)
    recorder = StepRecorder(make())
    engine = Engine(
        llm.engine.target,
        None if policy == "plain" else llm.engine.drafter,
        recorder,
        None,
        EngineConfig(max_num_seqs=users),
        calibrate=None if calibration is None else calibration.conditional,
    )
    requests: list[Callable[[], object]] = []
    for i in range(max(users * args.requests, AT_LEAST)):
        prompt = inputs.traffic[i % len(inputs.traffic)]
        requests.append(partial(engine.add, prompt.ids, params(i, args)))
    write_steps(record_closed_loop(engine, recorder, requests, users), path)


def validate(path: Path, users: int, policy: str, inputs: Inputs, args: argparse.Namespace) -> dict[str, Any]:
    """What `dspark simulate --validate` says of the recorded steps."""
    command = [
        "simulate",
        "--validate",
        str(path),
        "--policies",
        policy,
        "--concurrency",
        str(users),
        "--json",
    ]
    command += ["--acceptance", str(inputs.rounds), "--machine", str(inputs.profile)]
    if inputs.calibration_file is not None:
        command += ["--calibration", str(inputs.calibration_file)]
    if args.temperature == 0:
        command.append("--greedy")
    command += ["--prompt-tokens", str(len(inputs.traffic[0].ids)), "--output-tokens", str(args.max_tokens)]
    command += ["--known-end", "--seeds", "8"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = dspark(command)
    if code not in (0, 1):  # 1: further off than the tolerance, which the report says too
        raise SystemExit(code)
    return dict(json.loads(out.getvalue()))


def row(users: int, policy: str, report: dict[str, Any]) -> str:
    """A line of the table."""
    before = report["beforehand"]
    [run], [fitted] = before["runs"].values(), report["runs"].values()
    simulated = f"{run['simulated_tokens_per_s']['mean']:.1f} ({run['slowest']:.1f} to {run['fastest']:.1f})"
    speeds = f"{run['measured_tokens_per_s']:.1f} | {simulated}"
    errors = (run["error"], before["prices"]["error"], fitted["error"], report["prices"]["error"])
    found = report["step_times"]
    scatter = "-" if found is None else f"{found['mean_over_median']:.2f}"
    figures = " | ".join(f"{error:+.1%}" for error in errors)
    return f"| {users} | {policy} | {speeds} | {figures} | {scatter} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=Path, help="recorded by dspark calibrate; default: of half of the prompts, here"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32")
    parser.add_argument("--policies", default="plain,fixed:2,auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--requests", type=int, default=3, help="of each user")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--profile-seconds", type=float, default=15.0, help="about how long to measure prices"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    users = [int(part) for part in args.concurrency.split(",")]
    drafting = {"method": "dspark", "policy": "fixed"}
    llm = LLM(args.model, speculative_config=drafting, max_num_seqs=max(users))
    compile_schedulers()  # not under a recorded step
    cells = []
    with tempfile.TemporaryDirectory() as directory:
        inputs = prepare(llm, args, Path(directory))
        path = Path(directory) / "steps.jsonl"
        print(TABLE)
        for count in users:
            measure_prices(llm, max(users), inputs, args)
            for policy in args.policies.split(","):
                record(llm, count, policy, inputs, args, path)
                report = validate(path, count, policy, inputs, args)
                cells.append({"users": count, "policy": policy, **report})
                print(row(count, policy, report), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
