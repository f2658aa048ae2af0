"""The class of each `model.family`: the one place that chooses it."""

from __future__ import annotations

from bertrain.config.settings import ModelSettings
from bertrain.model.bert import Bert
from bertrain.model.encoder import EncoderModel
from bertrain.model.modern import Modern

FAMILIES: dict[str, type[EncoderModel]] = {"bert": Bert, "modern": Modern}


def new_model(settings: ModelSettings) -> EncoderModel:
    """A new model of the settings' family, with PyTorch's initial weights."""
    return FAMILIES[settings.family](settings)
