"""Train a drafter: `python -m dspark.train CONFIG.toml [--set key=value ...]`.

The output directory gets log.jsonl, a resume state, and at the end (or with `--export`, now) the checkpoint
`drafter/` that `LLM(speculative_config={"method": "dspark", "model": ...})` loads. Running the same command
again resumes.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import sys
from pathlib import Path

import torch

from dspark import __version__
from dspark.core import DSparkError
from dspark.drafters.checkpoint import save_drafter_model
from dspark.train.config import TrainConfig
from dspark.train.setup import build_trainer
from dspark.train.trainer import Trainer


def export(trainer: Trainer) -> Path:
    """Write the checkpoint of the trainer's current weights."""
    directory = trainer.output / "drafter"
    config = trainer.config.as_dict()
    config["data"] = [Path(p).name for p in trainer.config.data]
    del config["output"], config["init_from"]
    provenance = {
        "steps": trainer.step,
        "blocks": trainer.blocks,
        "averaged_steps": trainer.averaged_steps,
        "config": config,
        "held_out": trainer.evaluate(),
        "versions": {"dspark": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    save_drafter_model(trainer.model, directory, provenance)
    return directory


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dspark.train", description="Train a drafter for a target."
    )
    parser.add_argument("config", type=Path, help="TOML file; see TrainConfig for the keys")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    parser.add_argument(
        "--export", action="store_true", help="write the checkpoint of the saved state and stop"
    )
    parser.add_argument(
        "--average",
        nargs="+",
        type=Path,
        metavar="STATE",
        help="export the mean of these resume states' weights",
    )
    args = parser.parse_args(argv)
    try:
        trainer = build_trainer(TrainConfig.load(args.config, args.set))
        if args.average:
            trainer.average(args.average)
        for record in () if args.export or args.average else trainer.run():
            slots = " ".join(f"{c:.2f}" for c in record["overlap"])
            print(
                f"step {record['step']} blocks {record['blocks']} ({record['blocks_per_s']:.0f}/s) "
                f"loss {record['loss']:.3f} accepted length {record['tau_greedy']:.3f} greedy "
                f"{record['tau_sampled']:.3f} sampled, overlap by slot {slots}",
                flush=True,
            )
        print(f"drafter written to {export(trainer)}")
    except DSparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        command = shlex.join(["python", "-m", "dspark.train", *(argv if argv is not None else sys.argv[1:])])
        print(f"stopped; continue with: {command}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
