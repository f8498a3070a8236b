"""Go on from a smaller drafter: with more layers, or with a larger draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.core import DSparkError
from dspark.drafters.backbone import BlockDrafterModel
from dspark.target.decoder import Decoder
from dspark.train.warm_start import layer_state

__all__ = ["grow_layers", "grow_vocabulary"]


def grow_vocabulary(state: dict[str, Tensor], vocab: Tensor) -> dict[str, Tensor]:
    """Weights of a drafter that drafts from `vocab` [Vd] int64, in order of id, all of the old ones among them.

    The LM head's rows are the target's for every token, and fit hidden states that were trained towards the target's;
    of the sequential head a new token has none: it starts without a bias.
    """
    place = torch.searchsorted(vocab, state["vocab"])
    assert torch.equal(vocab[place], state["vocab"])
    grown = {**state, "vocab": vocab}
    if (rows := state.get("head.w2.weight")) is not None:
        grown["head.w2.weight"] = rows.new_zeros(len(vocab), rows.shape[1]).index_copy(0, place, rows)
    return grown


@torch.no_grad()
def grow_layers(state: dict[str, Tensor], model: BlockDrafterModel, target: Decoder) -> dict[str, Tensor]:
    """Weights of a block drafter with fewer layers than `model`, with new layers between that change nothing yet.

    A new layer lies before each of the old ones as far as they reach. It copies a target layer from before those
    that `copy_last_layers` gave the old ones, but its two output projections are 0: training starts where it
    stopped.

    Raises:
        DSparkError: `state` has more layers than `model`.
    """
    count = model.config.num_layers
    old = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    if old > count:
        raise DSparkError(f"the start has {old} layers, more than num_layers = {count}: raise num_layers")
    places = [round((i + 1) * count / old) - 1 for i in range(old)]  # the last stays the last
    grown = {k: v for k, v in state.items() if not k.startswith("layers.")}
    for i, place in enumerate(places):
        prefix = f"layers.{i}."
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        grown |= {f"layers.{place}.{k}": v for k, v in own.items()}
    for number, place in enumerate(sorted(set(range(count)) - set(places))):
        fresh = layer_state(model, target, number - count)
        fresh["qkv_proj.weight"] *= fresh["input_norm.weight"]
        fresh["input_norm.weight"] = torch.ones_like(fresh["input_norm.weight"])
        fresh["o_proj.weight"].zero_()
        fresh["down_proj.weight"].zero_()
        grown |= {f"layers.{place}.{k}": v for k, v in fresh.items()}
    return grown
