"""`dspark train`: train a drafter for a target, as a TOML file says. The same command resumes.

Started by `torchrun` or `accelerate launch`, several processes share every step.

The output directory gets log.jsonl, a resume state, and at the end the checkpoint `drafter`, which `--drafter` loads.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dspark.cli.destination import check_directory

if TYPE_CHECKING:
    from dspark.train.trainer import Trainer

__all__ = ["add_parser"]


def add_parser(verbs: Any) -> None:
    """Add the verb to the `add_subparsers` object of `dspark`."""
    parser = verbs.add_parser("train", help="train a drafter", description=__doc__)
    parser.add_argument("config", type=Path, help="TOML file; docs/training.md has the keys that matter")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key (repeatable)"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--export", action="store_true", help="write the checkpoint of the saved state and stop"
    )
    instead.add_argument(
        "--average",
        nargs="+",
        type=Path,
        metavar="STATE",
        help="write the checkpoint of the mean of these resume states' weights and stop",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end; the rest on stderr"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build the trainer, train, export, report."""
    from dspark.cli.terminal import write_json
    from dspark.train.config import TrainConfig
    from dspark.train.distributed import join_processes
    from dspark.train.export import average_states, check_states, export_drafter
    from dspark.train.setup import build_trainer

    started = time.perf_counter()
    config = TrainConfig.load(args.config, args.set)
    check_directory(config.output)
    if config.feature_dir:
        check_directory(config.feature_dir)
    if args.average:
        check_states(args.average)
    processes = join_processes(config.device)
    say = functools.partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    trainer = build_trainer(config, say if processes.is_first else lambda message: None, processes)
    if args.average:
        average_states(trainer, args.average)
    elif not args.export:
        try:
            _train(trainer, say)
        except KeyboardInterrupt:
            if processes.is_first:
                print(_stopped(trainer), file=sys.stderr)
            return 130
        if trainer.step < config.steps:  # as `_saved_on_interrupt` had it
            done = f"stopped at step {trainer.step} and saved"
            print(f"{done}; the same command goes on from {trainer.output}", file=sys.stderr)
            return 130
    processes.leave()
    if not processes.is_first:
        return 0
    directory, provenance = export_drafter(trainer)
    say(f"drafter written to {directory}")
    if args.json:
        facts = {k: provenance[k] for k in ("steps", "blocks", "averaged_steps", "held_out")}
        log = str(trainer.output / "log.jsonl")
        write_json({"drafter": str(directory), "log": log, "seconds": time.perf_counter() - started, **facts})
    return 0


def _train(trainer: Trainer, say: Any) -> None:
    """Train to the end, a line for every evaluation; in between, on a terminal, the step and the time left."""
    from dspark.cli.progress import StatusLine, duration

    first, started = trainer.step, time.perf_counter()
    steps = trainer.config.steps

    def left() -> str:
        done = trainer.step - first
        if not done:
            return "estimating the time left"
        return f"{duration((steps - trainer.step) * (time.perf_counter() - started) / done)} left"

    if not trainer.processes.is_first:
        for _ in trainer.run():
            raise AssertionError("the first process alone reports")
        return
    if first < steps:
        say(f"training from step {first} to {steps}, evaluating every {trainer.config.eval_every} steps")

    def now() -> str:
        then = "stopping behind this step" if trainer.stop_requested else left()
        return f"step {trainer.step} of {steps}, {trainer.blocks} blocks, {then}"

    with _saved_on_interrupt(trainer), StatusLine(now):
        for record in trainer.run():
            slots = " ".join(f"{overlap:.2f}" for overlap in record["overlap"])
            say(
                f"step {record['step']} of {steps}, blocks {record['blocks']} ({record['blocks_per_s']:.0f}/s), "
                f"loss {record['loss']:.3f}, accepted length {record['tau_greedy']:.3f} greedy "
                f"{record['tau_sampled']:.3f} sampled, overlap by slot {slots}, {left()}"
            )


@contextmanager
def _saved_on_interrupt(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C lets the step end and saves it; a second one leaves at once.

    Not with several processes, which would have to stop behind the same step: there the last state has to do.
    """
    if trainer.processes.count > 1:
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if trainer.stop_requested:
            raise KeyboardInterrupt
        trainer.stop_requested = (
            True  # no message from here: the signal may come in the middle of another one
        )

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _stopped(trainer: Trainer) -> str:
    saved = (trainer.output / "state.pt").exists()
    where = (
        f"goes on from the last state in {trainer.output}"
        if saved
        else "starts again: no state was saved yet"
    )
    return f"stopped at step {trainer.step}; the same command {where}"
