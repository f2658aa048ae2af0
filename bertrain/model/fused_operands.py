"""Operands and weights of the fused path's matrix products, in 16 bits and in FP8; numbers of dropout sites and scales.

A dropout mask is a function of its site's number, and checkpoints store FP8 scales by number: these never change.
Letters as in bert.py. The gradient of a tensor `x` is called `dx`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from bertrain.kernels.arguments import AttentionPlan
from bertrain.kernels.fp8 import Scales, cast_both_ways, empty_both_ways
from bertrain.kernels.reduction import fp8_product, fp8_weight_gradient, weight_gradient
from bertrain.model.arena import Arena

PER_LAYER = 8


class LayerDropout(IntEnum):
    ATTENTION = 0
    MIDDLE = 1  # before the LayerNorm after attention
    ACTIVATED = 2  # of ModernBERT, before the last product
    OUTPUT = 3  # of BERT, after it

    def site(self, layer: int) -> int:
        return layer * PER_LAYER + self


class ModelDropout(IntEnum):
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


class ParameterViews:
    """Parameters and gradients by name, as views of an arena and of the 16-bit copy of its values.

    The copy is made here; `dtype` float32 is for tests, which show that only rounding differs.
    """

    def __init__(self, arena: Arena, dtype: torch.dtype) -> None:
        self.arena = arena
        self.values16 = arena.values.to(dtype, copy=True)

    def value(self, name: str) -> Tensor:
        return self.arena.view(self.arena.values, name)

    def value16(self, name: str) -> Tensor:
        return self.arena.view(self.values16, name)

    def bias16(self, name: str) -> Tensor | None:
        """A bias, or None in a model that has none by this name."""
        return self.value16(name) if name in self.arena.places else None

    def gradient(self, name: str) -> Tensor:
        return self.arena.view(self.arena.gradients, name)


@dataclass
class PassContext:
    """One forward and backward pass over a bin: arguments that every layer shares."""

    plan: AttentionPlan
    positions: Tensor  # int64 [T], of each token in its sequence
    seed: Tensor  # int64 [1]
    accumulate: bool  # add to the gradients, or overwrite them
    scales: Scales | None
    hidden_dropout: float
    attention_dropout: float

    @property
    def uses_fp8(self) -> bool:
        """Whether products take FP8 operands; the first step computes in 16 bits and measures the scales."""
        return self.scales is not None and self.scales.ready


class Operand(NamedTuple):
    """One operand of a product: in 16 bits, in FP8 with the inverse of its scale, or both; None if not computed.

    Of the FP8 copies, rows [T, N] are for the product and for the gradient of its input, columns [N, T] for the
    gradient of its weight.
    """

    full: Tensor | None
    rows8: Tensor | None = None
    columns8: Tensor | None = None
    inverse_scale: Tensor | None = None

    @property
    def in_16_bits(self) -> Tensor:
        assert self.full is not None, "this operand exists in FP8 only"
        return self.full

    @property
    def without_rows8(self) -> Operand:
        """The part that the gradient of a weight needs."""
        return self._replace(rows8=None)


class Matrix:
    """The weight of a linear layer: its 16-bit and FP8 copies, and its gradient in the arena."""

    def __init__(self, views: ParameterViews, name: str, scales: Scales | None = None, scale_number: int = 0) -> None:
        self.value, self.gradient = views.value16(name), views.gradient(name)  # [N, K] bf16, [N, K] float32
        self._scales, self._scale_number = scales, scale_number
        self._fp8 = None if scales is None else empty_both_ways(self.value, scales.cast(scale_number))

    def requantize(self) -> None:
        if self._scales is not None:
            cast_both_ways(self.value, self._scales.cast(self._scale_number), self._fp8)

    def product(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        """x W' + bias: [T, K] -> [T, N]."""
        if self._fp8 is not None and x.inverse_scale is not None and x.rows8 is not None:
            return fp8_product(x.rows8, x.inverse_scale, self._fp8.rows, self._inverse_scale, bias)
        if bias is None:
            return torch.mm(x.in_16_bits, self.value.t())
        return torch.addmm(bias, x.in_16_bits, self.value.t())

    def input_gradient(self, dy: Operand) -> Tensor:
        """dy W: [T, N] -> [T, K]."""
        if self._fp8 is not None and dy.inverse_scale is not None and dy.rows8 is not None:
            return fp8_product(dy.rows8, dy.inverse_scale, self._fp8.columns, self._inverse_scale)
        return torch.mm(dy.in_16_bits, self.value)

    @property
    def _inverse_scale(self) -> Tensor:
        assert self._scales is not None
        inverse = self._scales.inverse(self._scale_number)
        assert inverse is not None
        return inverse

    def weight_gradient(self, dy: Operand, x: Operand, accumulate: bool) -> None:
        """dy' x, into the arena in float32."""
        dy8, x8 = dy.columns8, x.columns8
        if dy8 is None or x8 is None or dy.inverse_scale is None or x.inverse_scale is None:
            weight_gradient(dy.in_16_bits, x.in_16_bits, self.gradient, accumulate=accumulate)
        else:
            fp8_weight_gradient(dy8, dy.inverse_scale, x8, x.inverse_scale, self.gradient, accumulate=accumulate)
