"""What the training loop needs of a drafter method; one small class a method.

A new method is a model (`drafters.models`) and a class here: data, features, losses, loop, evaluation and
checkpoints are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

from dspark.core import DSparkError
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.eagle3 import Eagle3Model
from dspark.drafters.model import DrafterModel
from dspark.drafters.mtp import MTPModel
from dspark.target.decoder import Decoder
from dspark.train.blocks import BlockBatch, BlockOutput, block_forward
from dspark.train.chains import chain_forward
from dspark.train.data import Sequence
from dspark.train.warm_start import copy_into_eagle3, copy_into_mtp, copy_last_layers

__all__ = ["TrainableDrafter", "trainable"]


class TrainableDrafter(Protocol):
    """A drafter's model as the loop sees it.

    `slots`: how many slots of a block are trained; evaluation looks at all `block_size`.
    """

    @property
    def slots(self) -> int: ...

    def forward(self, batch: BlockBatch) -> BlockOutput:
        """Teacher-forced pass over the anchored blocks of `batch`, of any number of slots.

        Slot k predicts tokens[:, k + 1] from features strictly before the anchor and tokens[:, :k + 1]: exactly
        what serving sees.
        """
        ...

    def warm_start(self, target: Decoder, sequences: Seq[Sequence]) -> None:
        """Start from the target's weights; `sequences` show what it computes with them.

        Raises:
            DSparkError: the layers have another shape.
        """


class _Block:
    """DSpark and DFlash: a block in one pass."""

    def __init__(self, model: BlockDrafterModel) -> None:
        self.model, self.slots = model, model.config.block_size

    def forward(self, batch: BlockBatch) -> BlockOutput:
        return block_forward(self.model, batch)

    def warm_start(self, target: Decoder, sequences: Seq[Sequence]) -> None:
        del sequences
        copy_last_layers(self.model, target)


class _Eagle3:
    """EAGLE-3: trained over the whole chain, on its own states."""

    def __init__(self, model: Eagle3Model) -> None:
        self.model, self.slots = model, model.config.block_size

    def forward(self, batch: BlockBatch) -> BlockOutput:
        return chain_forward(self.model, batch)

    def warm_start(self, target: Decoder, sequences: Seq[Sequence]) -> None:
        del sequences
        copy_into_eagle3(self.model, target)


class _MTP:
    """MTP-1: trained for the first slot alone; the chain behind it is what becomes of that."""

    slots = 1

    def __init__(self, model: MTPModel) -> None:
        self.model = model

    def forward(self, batch: BlockBatch) -> BlockOutput:
        return chain_forward(self.model, batch)

    def warm_start(self, target: Decoder, sequences: Seq[Sequence]) -> None:
        copy_into_mtp(self.model, target, sequences)


_FORMS: dict[type[Any], Callable[[Any], TrainableDrafter]] = {
    BlockDrafterModel: _Block,
    Eagle3Model: _Eagle3,
    MTPModel: _MTP,
}


def trainable(model: DrafterModel) -> TrainableDrafter:
    """The training form of a model.

    Raises:
        DSparkError: there is none for its class.
    """
    form = _FORMS.get(type(model))
    if form is None:
        raise DSparkError(f"{type(model).__name__} has no training form: add one to dspark.train.trainable")
    return form(model)
