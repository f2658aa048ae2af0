"""The common part of BERT's and ModernBERT's encoder layers on the kernels; the rest is in fused_bert.py and
fused_modern.py.

Letters as in bert.py. The gradient of a tensor `x` is called `dx`; `x8` is `x` in FP8.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from bertrain.config.settings import ModelSettings
from bertrain.kernels.arguments import Cast, Dropout, Fp8Copy, Fp8Rows
from bertrain.kernels.fp8 import Scales, cast_both_ways, transpose
from bertrain.model.fused_operands import (
    LayerDropout,
    LayerMatrix,
    LayerTensor,
    Matrix,
    Operand,
    ParameterViews,
    PassContext,
)

Recompute = Literal["none", "selective", "full"]


class FusedLayer:
    """One layer: its four matrices, and how its tensors become operands of their products."""

    def __init__(
        self, settings: ModelSettings, views: ParameterViews, number: int, scales: Scales | None, recompute: Recompute
    ) -> None:
        self.prefix = f"layers.{number}."

        def matrix(which: LayerMatrix) -> Matrix:
            name = f"{self.prefix}{which.name.lower()}.weight"
            return Matrix(views, name, scales, which.scale(number, settings.num_layers))

        self.number, self.recompute = number, recompute
        self.is_last = number == settings.num_layers - 1
        self.heads, self.head_size, self.eps = settings.num_heads, settings.head_size, settings.layer_norm_eps
        self.matrices = {which: matrix(which) for which in LayerMatrix}
        self.qkv, self.expand = self.matrices[LayerMatrix.QKV], self.matrices[LayerMatrix.EXPAND]

    def forward(self, x: Any, context: PassContext, rows: Tensor | None = None) -> tuple[Any, Any]:
        """The layer's output for all rows, or for `rows`, and the tensors for `backward`."""
        raise NotImplementedError

    def backward(self, dy: Tensor, second: Tensor | None, saved: Any, context: PassContext) -> tuple[Tensor, Tensor]:
        """Write the parameters' gradients, given two gradients of the output; return two of the input."""
        raise NotImplementedError

    def _rate(self, context: PassContext, which: LayerDropout) -> float:
        raise NotImplementedError

    def _dropout(self, context: PassContext, which: LayerDropout) -> Dropout:
        return Dropout(self._rate(context, which), context.seed, which.site(self.number))

    def _cast(self, context: PassContext, tensor: LayerTensor) -> Cast | None:
        return None if context.scales is None else context.scales.cast(tensor.scale(self.number))

    def _operand(
        self,
        context: PassContext,
        tensor: LayerTensor,
        full: Tensor | None,
        fp8: Fp8Copy | Fp8Rows | None = None,
        *,
        layer: int | None = None,
    ) -> Operand:
        """A tensor of this layer, or of another, as an operand; cast or transposed here if its kernel did not."""
        if context.scales is None:
            return Operand(full)
        number = tensor.scale(self.number if layer is None else layer)
        cast = context.scales.cast(number)
        if fp8 is None:
            assert full is not None
            fp8 = cast_both_ways(full, cast)
        elif isinstance(fp8, Fp8Rows):
            fp8 = transpose(fp8, cast)
        if not context.uses_fp8:  # the cast only measured the scale
            return Operand(full)
        return Operand(full, *fp8, context.scales.inverse(number))


def pick(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values[rows]


def scatter(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """`values` at `rows` of `num_rows` rows, zero elsewhere. Only empty slots, whose gradient is zero, share a row."""
    out = torch.zeros(num_rows, values.shape[1], dtype=values.dtype, device=values.device)
    return out.index_add_(0, rows, values)
