"""The rounds that `dspark calibrate` works on: read from their file, or collected and kept there."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.cli.options import load_llm, speculative_config

if TYPE_CHECKING:
    from dspark.calibrate import Rounds
    from dspark.calibrate.collect import Job
    from dspark.calibrate.jobs import CalibrationPrompt
    from dspark.calibrate.rounds import Source

__all__ = ["chosen_rounds", "rounds_path"]

_SAVE_EVERY = 8  # finished answers
_TEMPERATURES = (0.0, 1.0)


def rounds_path(args: argparse.Namespace) -> Path:
    if args.rounds is not None:
        return Path(args.rounds)
    out = Path(args.out)
    return out.with_name(f"{out.stem}.rounds.safetensors")


def chosen_rounds(args: argparse.Namespace) -> Rounds:
    """The rounds to work on: at --temperatures, where these are given."""
    from dspark.calibrate import load_rounds
    from dspark.core import DSparkError

    path = rounds_path(args)
    rounds = load_rounds(path) if args.no_collect else _collected(args, path)
    if args.temperatures is not None:
        rounds = rounds.of_answers([a.temperature in args.temperatures for a in rounds.answers])
    if not len(rounds):
        raise DSparkError(f"{path} holds no rounds at these temperatures: collect some first")
    return rounds


def _collected(args: argparse.Namespace, path: Path) -> Rounds:
    """Load the model and add to the file at `path` what it lacks."""
    from dspark.calibrate import load_rounds
    from dspark.calibrate.jobs import drafter_directory, plan_jobs, source_of
    from dspark.core import DSparkError

    prompts = _prompts(args.prompts)
    if args.concurrency < 1:
        raise DSparkError(f"--concurrency must be 1 or more, got {args.concurrency}")
    config = speculative_config("dspark", args.drafter, args.num_speculative_tokens)
    llm = load_llm(args, config, max_num_seqs=args.concurrency)
    directory = drafter_directory(args.drafter, llm.engine.target.identity)
    source = source_of(llm.engine, directory, args.model, args.num_speculative_tokens)
    jobs = plan_jobs(
        prompts,
        llm.tokenizer.apply_chat_template,
        args.temperatures or _TEMPERATURES,
        samples=args.samples,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    known = [load_rounds(path)] if path.exists() else []
    for part in known:
        part.source.check_same(source, str(path))
    done = {answer for part in known for answer in part.answers}
    missing = [job for job in jobs if job.answer not in done]
    return _collect(args, llm.engine, missing, source, known, path)


def _collect(
    args: argparse.Namespace, engine: Any, jobs: list[Job], source: Source, known: list[Rounds], path: Path
) -> Rounds:
    """Save as answers end; what is cut short goes on where it was."""
    from dspark.calibrate import Rounds, save_rounds
    from dspark.calibrate.collect import collect
    from dspark.cli.progress import StatusLine

    parts, saved = list(known), len(known)
    ended, rounds = 0, sum(map(len, known))
    try:
        with StatusLine(lambda: f"calibrate: {ended} of {len(jobs)} answers, {rounds} rounds") as status:
            for part in collect(engine, jobs, source, args.concurrency):
                parts.append(part)
                ended, rounds = ended + 1, rounds + len(part)
                status.tick()
                if len(parts) - saved >= _SAVE_EVERY:
                    parts = [Rounds.join(parts)]
                    save_rounds(path, parts[0])
                    saved = 1
    finally:
        if len(parts) > saved:
            save_rounds(path, Rounds.join(parts))
    return Rounds.join(parts)


def _prompts(prompts: str) -> list[CalibrationPrompt]:
    """Built-in prompts, or those of a file, which are told apart by what they say."""
    from dspark.calibrate.jobs import CalibrationPrompt
    from dspark.core import DSparkError
    from dspark.evaluate.conversations import load_conversations

    if prompts.isdecimal() and int(prompts) < 2:
        raise DSparkError(f"--prompts must be 2 or more, one to fit to and one to judge by, got {prompts}")
    conversations = load_conversations(prompts)
    if prompts.isdecimal():
        return [CalibrationPrompt(c.id, c.domain, c.messages) for c in conversations]
    found = {}
    for c in conversations:
        key = hashlib.sha256(json.dumps(c.messages, sort_keys=True).encode()).hexdigest()[:16]
        found[key] = CalibrationPrompt(key, c.domain, c.messages)
    return list(found.values())
