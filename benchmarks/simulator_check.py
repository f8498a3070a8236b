"""Does the simulator predict the real engine? Closed loops of both, over concurrency.

    python benchmarks/simulator_check.py --rounds calibration.rounds.safetensors [--concurrency 1,2,4,8,16,32]
        [--drafts 2] [--requests 3] [--max-tokens 64] [--threads N] [--json PATH]

So many users send one request behind the other, to an engine without drafts and to one with a fixed number of them.
Every step is recorded; `dspark simulate --validate` then fits prices to the records and simulates the same traffic
with the acceptance of `--rounds` (greedy ones, from `dspark calibrate`). Prompts are cut to one length and answers
go on to `--max-tokens`, as the simulated ones do.

`prices`: error of tokens/s where prices fitted to one half of the steps predict the other half. `run`: error of the
whole simulation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dspark import LLM, SamplingParams
from dspark.data import load_prompts
from dspark.engine.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.schedule.policies import FixedLength
from dspark.simulate import StepRecorder, record_closed_loop, write_steps

SHORTEST = 40  # prompts of fewer tokens are left out; the others are cut to the shortest of them


def prompts(llm: LLM) -> list[list[int]]:
    ids = [llm.tokenizer.apply_chat_template(prompt.messages) for prompt in load_prompts()]
    ids = [prompt for prompt in ids if len(prompt) >= SHORTEST]
    return [prompt[: min(map(len, ids))] for prompt in ids]


def record(llm: LLM, users: int, drafts: int, args: argparse.Namespace, path: Path) -> None:
    """Steps of `users` users, to `path`."""
    recorder = StepRecorder(FixedLength(drafts))
    drafter = llm.engine.drafter if drafts else None
    engine = Engine(llm.engine.target, drafter, recorder, None, EngineConfig(max_num_seqs=users))
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    ids = prompts(llm)
    count = users * args.requests + 2
    requests: list[Callable[[], object]] = [
        partial(engine.add, ids[i % len(ids)], params) for i in range(count)
    ]
    write_steps(record_closed_loop(engine, recorder, requests, users), path)


def validate(
    path: Path, users: int, policy: str, prompt_tokens: int, args: argparse.Namespace
) -> dict[str, Any]:
    """What `dspark simulate --validate` says of the recorded steps."""
    command = [sys.executable, "-m", "dspark", "simulate", "--validate", str(path), "--policies", policy]
    command += ["--concurrency", str(users), "--greedy", "--acceptance", str(args.rounds), "--json"]
    command += ["--prompt-tokens", str(prompt_tokens), "--output-tokens", str(args.max_tokens)]
    command += ["--duration", "60", "--warmup", "5", "--seeds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"dspark simulate failed: {done.stderr.strip()}")
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=Path, required=True, help="recorded by dspark calibrate")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32")
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--requests", type=int, default=3, help="of each user")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    users = [int(part) for part in args.concurrency.split(",")]
    llm = LLM(args.model, speculative_config={"method": "dspark"}, max_num_seqs=max(users))
    length, cells = len(prompts(llm)[0]), []
    print("| users | policy | measured tokens/s | simulated | run | prices |\n|---|---|---|---|---|---|")
    for count in users:
        for policy, drafts in (("plain", 0), (f"fixed:{args.drafts}", args.drafts)):
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "steps.jsonl"
                record(llm, count, drafts, args, path)
                report = validate(path, count, policy, length, args)
            [run] = report["runs"].values()
            cells.append({"users": count, "policy": policy, **report})
            speeds = f"{run['measured_tokens_per_s']:.1f} | {run['simulated_tokens_per_s']['mean']:.1f}"
            errors = f"{run['error']:+.1%} | {report['prices']['error']:+.1%}"
            print(f"| {count} | {policy} | {speeds} | {errors} |", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
