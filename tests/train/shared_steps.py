"""A trainer on a tiny model whose sequences differ in length; as a script, one of several processes that share it.

python shared_steps.py DIRECTORY METHOD ...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from dspark.drafters.models import build_model
from dspark.testing import tiny_decoder
from dspark.train.config import TrainConfig
from dspark.train.data import Sequence
from dspark.train.distributed import Processes, join_processes
from dspark.train.setup import drafter_config
from dspark.train.trainer import Trainer
from dspark.train.warm_start import share_embeddings

STEPS = 2


def shared_trainer(
    directory: Path, method: str, processes: Processes, seed: int = 0, **changes: object
) -> Trainer:
    """Three sequences a step, of 3 to 12 anchors: no two processes have the same number of either."""
    g = torch.Generator().manual_seed(3)
    lengths = (10, 24, 12, 20, 16)
    sequences = [Sequence(torch.randint(0, 60, (n,), generator=g).tolist(), 6) for n in lengths]
    target = tiny_decoder(dtype=torch.float32)
    values: dict[str, object] = {
        "method": method, "output": str(directory), "block_size": 4, "markov_rank": 8, "steps": STEPS,
        "sequences_per_step": 3, "anchors_per_sequence": 12, "eval_every": 2, "save_every": 2,
        "dtype": "float32", "regression": 0.5, "features": "disk", "taps": (2,) if method == "mtp" else (0, 2),
    }  # fmt: skip
    config = TrainConfig.of(values | changes)
    torch.manual_seed(seed)
    model = build_model(drafter_config(config, target, 63, 64))
    share_embeddings(model, target)
    return Trainer(config, model, target, sequences, sequences[:2], processes)


def main(directory: Path, methods: list[str]) -> None:
    """Train each method from step 0, then go on from the state that the first process saved."""
    torch.set_num_threads(1)
    processes = join_processes("cpu")
    for method in methods:
        # Other weights in every process: those of the first count.
        trainer = shared_trainer(directory / method, method, processes, seed=processes.rank)
        records = list(trainer.run())
        assert len(records) == (1 if processes.is_first else 0)
        again = shared_trainer(directory / method, method, processes, seed=7, steps=STEPS + 1)
        assert again.resume()
        again.train_step()
        torch.save(
            {"trained": trainer.model.state_dict(), "resumed": again.model.state_dict(), "records": records},
            directory / f"{method}-{processes.rank}.pt",
        )
    processes.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
