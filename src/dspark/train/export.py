"""From a trainer's weights to a drafter checkpoint that serving loads."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dspark import __version__
from dspark.core import DSparkError
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.checkpoint import save_drafter_model
from dspark.train.trainer import Trainer

__all__ = ["Exported", "average_states", "check_states", "export_drafter"]

Exported = tuple[Path, dict[str, Any]]


def export_drafter(trainer: Trainer, directory: Path | None = None) -> Exported:
    """Write the checkpoint of the trainer's current weights; returns its directory and provenance.

    `directory` is by default `drafter` in the run's output. The provenance (configuration without the names of
    local directories and devices, steps, measures on held-out answers, versions) is kept in the checkpoint's
    config.json. Of several processes the first does this.
    """
    directory = directory or trainer.output / "drafter"
    config = trainer.config.as_dict()
    config["target"] = Path(trainer.config.target).name
    config["data"] = [Path(p).name for p in trainer.config.data]
    for local in ("output", "init_from", "feature_dir", "device"):
        config.pop(local, None)
    provenance = {
        "steps": trainer.step,
        "blocks": trainer.blocks,
        "averaged_steps": trainer.averaged_steps,
        "config": config,
        "held_out": trainer.evaluate(),
        "versions": {"dspark": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    # As serving rounds it, where that is defined; training can go on from the state, which is in full precision.
    storage = "blocks" if isinstance(trainer.model, BlockDrafterModel) else "int8"
    save_drafter_model(trainer.model, directory, provenance, storage)
    return directory, provenance


def check_states(paths: Sequence[Path]) -> None:
    """Refuse paths without a resume state, before anything large is read.

    Raises:
        DSparkError: there is no such file.
    """
    for path in paths:
        if not path.is_file():
            raise DSparkError(f"no resume state at {path}: name state.pt files of this run")


def average_states(trainer: Trainer, paths: Sequence[Path]) -> None:
    """Give the trainer the mean of the weights in several resume states.

    Raises:
        DSparkError: a state is missing or belongs to another drafter.
    """
    check_states(paths)
    trainer.average(paths)
