"""Numbers of the dropout sites and of the FP8 scales of a model on the fused path.

A dropout mask is a function of its site's number, and checkpoints store scales by number: these numbers never change.
"""

from __future__ import annotations

from enum import IntEnum

PER_LAYER = 8


class LayerDropout(IntEnum):
    """Dropout within a layer."""

    ATTENTION = 0
    MIDDLE = 1  # before the LayerNorm after attention
    OUTPUT = 3

    def site(self, layer: int) -> int:
        return layer * PER_LAYER + self


class ModelDropout(IntEnum):
    """Dropout outside the layers."""

    EMBEDDINGS = 0
    HEAD = 1

    def site(self, num_layers: int) -> int:
        return num_layers * PER_LAYER + self


class LayerTensor(IntEnum):
    """Activations and gradients of a layer that have a scale."""

    ATTENDED = 0
    MIDDLE = 1
    ACTIVATED = 2
    OUTPUT = 3
    DCONTRACTED = 4
    DEXPANDED = 5
    DPROJECTED = 6
    DQKV = 7

    @property
    def is_gradient(self) -> bool:
        return self >= LayerTensor.DCONTRACTED

    def scale(self, layer: int) -> int:
        return layer * PER_LAYER + self


class LayerMatrix(IntEnum):
    """Weights of a layer that have a scale; those of all layers follow the scales of all tensors."""

    QKV = 0
    ATTENTION_OUT = 1
    EXPAND = 2
    CONTRACT = 3

    def scale(self, layer: int, num_layers: int) -> int:
        return num_layers * PER_LAYER + layer * len(LayerMatrix) + self
