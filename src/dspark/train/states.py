"""Resume states: a drafter's weights without the target's, the optimiser, and how far the run is."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.core import DSparkError
from dspark.drafters.model import DrafterModel

__all__ = [
    "Moments",
    "load_moments",
    "load_weights",
    "mean_weights",
    "own_weights",
    "read_start",
    "read_state",
    "write_state",
]

FROZEN = ("embed.", "lm_head.")  # the target's
HEAD = "head."  # whose weights are the optimiser's second group

Moments = dict[
    str, dict[str, Tensor]
]  # parameter -> Adam's `step` [], `exp_avg` and `exp_avg_sq`, of its shape


def own_weights(model: DrafterModel) -> dict[str, Tensor]:
    """The weights that are not the target's."""
    return {k: v for k, v in model.state_dict().items() if not k.startswith(FROZEN)}


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Replaces `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    torch.save(state, part)
    part.replace(path)


def read_state(path: Path) -> dict[str, Any]:
    """On the CPU, wherever the run was.

    Raises:
        DSparkError: the file is damaged, or no resume state.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state["model"], dict):
            raise TypeError("it holds no weights")
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, KeyError, TypeError) as error:
        raise DSparkError(f"{path} is damaged, truncated or no resume state ({error!s:.60})") from None
    return state


def read_start(path: Path) -> dict[str, Any]:
    """A resume state to go on from in another run: `moments` by name take the place of the optimiser's state.

    Raises:
        DSparkError: as `read_state`.
    """
    state = read_state(path)
    optimizer = state.pop("optimizer", None)
    if optimizer is not None:
        names = _in_groups(state["model"])
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
        if len(names) != len(numbers):
            raise DSparkError(f"{path} has moments of {len(numbers)} weights, not of its {len(names)}")
        moments = {name: optimizer["state"].get(number) for name, number in zip(names, numbers, strict=True)}
        state["moments"] = {name: of for name, of in moments.items() if of}
    return state


def _in_groups(weights: Mapping[str, Tensor]) -> list[str]:
    """The names of trained weights in the optimiser's order: those of the sequential head come last."""
    trained = [name for name, weight in weights.items() if weight.is_floating_point()]
    return sorted(trained, key=lambda name: name.startswith(HEAD))


def load_moments(optimizer: torch.optim.Optimizer, model: DrafterModel, moments: Moments) -> None:
    """Give the optimiser of `model` what `moments` holds of its parameters; the others start without."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    current = optimizer.state_dict()
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    known = {number: moments[name] for number, name in enumerate(order) if name in moments}
    optimizer.load_state_dict({**current, "state": known})


def load_weights(model: DrafterModel, state: dict[str, Any], path: Path) -> None:
    """Load a resume state's weights into a model of the same shape and draft vocabulary.

    Raises:
        DSparkError: another drafter, or the same on other data: the draft vocabulary would not be the one that the
            weights were trained for.
    """
    weights, own = state["model"], own_weights(model)
    same = weights.keys() == own.keys() and all(v.shape == own[k].shape for k, v in weights.items())
    mask = state.get("mask_token_id", model.config.mask_token_id)
    same = same and torch.equal(weights["vocab"].cpu(), model.vocab.cpu())
    if not same or mask != model.config.mask_token_id:
        raise DSparkError(
            f"{path} belongs to another drafter or to other training data: use its own configuration, "
            "or another output directory"
        )
    model.load_state_dict(weights, strict=False)


def mean_weights(states: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """The mean of several states' weights; what is not a floating-point number is the first's."""
    weights = [state["model"] for state in states]
    return {k: _mean([w[k] for w in weights]) for k in weights[0]}


def _mean(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0) if tensors[0].is_floating_point() else tensors[0]
