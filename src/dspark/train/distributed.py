"""The processes that share every step of a training run: one by default, more under `accelerate launch` or torchrun.

All hold the same weights and draw the same step. Each works through its share of the step's sequences with the
step's own weight denominators, so gradients only have to be added up: any number of processes takes the step that
one would take. The first process alone evaluates, logs and saves.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

import torch
from torch import Tensor

from dspark.core import DSparkError

__all__ = ["Processes", "join_processes"]

T = TypeVar("T")


class Processes:
    """One process of those that train together.

    Args:
        device: where this process computes.
        accelerator: an `accelerate.Accelerator` that knows the others; None for a process by itself.
    """

    def __init__(self, device: torch.device, accelerator: Any = None) -> None:
        self.device, self._accelerator = device, accelerator
        self.rank = accelerator.process_index if accelerator is not None else 0
        self.count = accelerator.num_processes if accelerator is not None else 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Seq[T]) -> Seq[T]:
        """This process's run of `items`; all processes' runs are as equal as possible."""
        size = len(items)
        return items[self.rank * size // self.count : (self.rank + 1) * size // self.count]

    def add_up(self, tensors: Seq[Tensor]) -> None:
        """Replace every tensor (float32, on the device) by its sum over the processes, in one exchange."""
        if self.count == 1 or not tensors:
            return
        total = self._accelerator.reduce(_flat(tensors), reduction="sum")
        _scatter(total, tensors)

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite every tensor with the first process's."""
        if self.count == 1:
            return
        from accelerate.utils import broadcast

        for tensor in tensors:
            tensor.copy_(broadcast(tensor.clone()))

    def agree(self, value: int) -> bool:
        """Whether all processes came with the same number."""
        if self.count == 1:
            return True
        values = self._accelerator.gather(torch.tensor([value], device=self.device))
        return bool((values == value).all())

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            self._accelerator.wait_for_everyone()

    def leave(self) -> None:
        """Close the connection to the others, once all have come to that."""
        if self.count > 1:
            self._accelerator.wait_for_everyone()
            self._accelerator.end_training()


def join_processes(device: str = "auto") -> Processes:
    """This process, joined with those that a launcher started beside it.

    Args:
        device: "auto" (a GPU where there is one), "cpu" or "cuda".

    Raises:
        DSparkError: there is no such device; several processes were launched and accelerate is not installed.
    """
    on_gpu = torch.cuda.is_available()
    if device == "cuda" and not on_gpu:
        raise DSparkError("device=cuda: PyTorch finds no GPU here; set device=cpu or install its CUDA build")
    count = os.environ.get("WORLD_SIZE", "1")
    if count == "1":
        return Processes(torch.device("cuda" if on_gpu and device != "cpu" else "cpu"))
    try:
        from accelerate import Accelerator
    except ImportError:
        raise DSparkError(
            f"{count} processes were launched, and training in several needs the package accelerate: "
            "pip install accelerate, or start one process"
        ) from None
    accelerator = Accelerator(cpu=device == "cpu" or not on_gpu)
    if accelerator.num_processes != int(count):
        raise DSparkError(
            f"WORLD_SIZE says {count} processes and {accelerator.num_processes} came together: start them with "
            "torchrun or accelerate launch"
        )
    return Processes(accelerator.device, accelerator)


def _flat(tensors: Seq[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def _scatter(flat: Tensor, tensors: Seq[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
