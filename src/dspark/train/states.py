"""Resume states: a drafter's weights without the target's, the optimiser, and how far the run is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.core import DSparkError
from dspark.drafters.model import DrafterModel

__all__ = ["load_weights", "mean_weights", "own_weights", "read_state", "write_state"]

FROZEN = ("embed.", "lm_head.")  # the target's


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
    """On the CPU, wherever the run was."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


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
