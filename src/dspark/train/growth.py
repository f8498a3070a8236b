"""Go on from a smaller drafter: with more layers, or with a larger draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from dspark.core import DSparkError
from dspark.drafters.backbone import BlockDrafterModel
from dspark.target.decoder import Decoder
from dspark.train.states import Moments
from dspark.train.warm_start import layer_state

__all__ = ["grow_layers", "grow_vocabulary", "grow_vocabulary_moments", "layer_places", "move_layers"]

BIAS = "head.w2.weight"  # of the sequential head: a row a draft token, [Vd, r]
T = TypeVar("T")


def grow_vocabulary(state: dict[str, Tensor], vocab: Tensor) -> dict[str, Tensor]:
    """Weights of a drafter that drafts from `vocab` [Vd] int64, in order of id, all of the old ones among them.

    The LM head's rows are the target's for every token, and fit hidden states that were trained towards the target's;
    of the sequential head a new token has none: it starts without a bias.
    """
    grown = {**state, "vocab": vocab}
    if BIAS in state:
        grown[BIAS] = _among_zeros(state[BIAS], state["vocab"], vocab)
    return grown


def grow_vocabulary_moments(moments: Moments, old: Tensor, vocab: Tensor) -> Moments:
    """The optimiser's moments for `grow_vocabulary` from the tokens `old` [V_old]: those of new rows are 0.

    NOTE: Adam counts steps by parameter, not by row. A new row begins behind all the steps of the old ones, without
    the correction for young moments: its first update is 0.7 of what that would make it (betas 0.9 and 0.98).
    """
    if BIAS not in moments:
        return moments
    grown = {k: _among_zeros(v, old, vocab) if v.ndim else v for k, v in moments[BIAS].items()}
    return {**moments, BIAS: grown}


def _among_zeros(rows: Tensor, old: Tensor, vocab: Tensor) -> Tensor:
    """Rows [V_old, r] of the tokens `old` at their places in `vocab`, zeros for the others: [V, r]."""
    place = torch.searchsorted(vocab, old)
    assert torch.equal(vocab[place], old)
    return rows.new_zeros(len(vocab), rows.shape[1]).index_copy(0, place, rows)


def move_layers(named: Mapping[str, T], places: list[int]) -> dict[str, T]:
    """Weights, or moments, under the names that they have when the layers are at `places`."""
    moved = {}
    for name, value in named.items():
        match name.split(".", 2):
            case ["layers", layer, rest]:
                moved[f"layers.{places[int(layer)]}.{rest}"] = value
            case _:
                moved[name] = value
    return moved


def layer_places(state: Mapping[str, Tensor], count: int) -> list[int]:
    """Where each layer of `state` lies among `count`; the last stays the last.

    Raises:
        DSparkError: `state` has more layers.
    """
    old = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    if old > count:
        raise DSparkError(f"the start has {old} layers, more than num_layers = {count}: raise num_layers")
    return [round((i + 1) * count / old) - 1 for i in range(old)]


@torch.no_grad()
def grow_layers(state: dict[str, Tensor], model: BlockDrafterModel, target: Decoder) -> dict[str, Tensor]:
    """Weights of a block drafter with fewer layers than `model`, with new layers between that change nothing yet.

    A new layer lies before each of the old ones as far as they reach. It copies a target layer from before those
    that `copy_last_layers` gave the old ones, but its two output projections are 0: training starts where it
    stopped.

    Raises:
        DSparkError: `state` has more layers than `model`, or `model` more than the target.
    """
    count = model.config.num_layers
    if count > len(target.layers):
        raise DSparkError(f"num_layers = {count}, but the target has {len(target.layers)}: lower num_layers")
    places = layer_places(state, count)
    grown = move_layers(state, places)
    for number, place in enumerate(sorted(set(range(count)) - set(places))):
        fresh = layer_state(model, target, number - count)
        fresh["qkv_proj.weight"] *= fresh["input_norm.weight"]
        fresh["input_norm.weight"] = torch.ones_like(fresh["input_norm.weight"])
        fresh["o_proj.weight"].zero_()
        fresh["down_proj.weight"].zero_()
        grown |= {f"layers.{place}.{k}": v for k, v in fresh.items()}
    return grown
