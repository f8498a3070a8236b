"""A trained method's model, and the drafter that serves it."""

from __future__ import annotations

from dspark.drafters.autoregressive import AutoregressiveModel
from dspark.drafters.backbone import BlockDrafterModel
from dspark.drafters.base import Drafter
from dspark.drafters.block import BlockDrafter
from dspark.drafters.chain import ChainDrafter
from dspark.drafters.config import DrafterConfig
from dspark.drafters.eagle3 import Eagle3Model
from dspark.drafters.model import DrafterModel
from dspark.drafters.mtp import MTPModel

__all__ = ["build_model", "serve"]

_MODELS: dict[str, type[BlockDrafterModel] | type[Eagle3Model] | type[MTPModel]] = {
    "dspark": BlockDrafterModel,
    "dflash": BlockDrafterModel,
    "eagle3": Eagle3Model,
    "mtp": MTPModel,
}


def build_model(config: DrafterConfig) -> DrafterModel:
    """An untrained model of the configuration's method."""
    return _MODELS[config.method](config)


def serve(model: DrafterModel, quantised: bool = False) -> Drafter:
    """The drafter that serves `model`; takes it over (weights are laid out for serving, `quantised`: in few bits)."""
    if isinstance(model, AutoregressiveModel):
        return ChainDrafter(model, quantised)
    assert isinstance(model, BlockDrafterModel)
    return BlockDrafter(model, quantised)
