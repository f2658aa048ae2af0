"""One encoder layer on the kernels, forward and backward by hand, and what it computes with.

Letters as in bert.py. A tensor's gradient is called d and its name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from bertrain.kernels import cpu
from bertrain.kernels.attention import ragged_attention_backward, ragged_attention_forward
from bertrain.kernels.fp8 import Bytes, Cast, Eight, Scales, cast_both_ways, empty_both_ways, turn
from bertrain.kernels.gelu import bias_gelu_backward, bias_gelu_forward
from bertrain.kernels.layernorm import dropout_add_layernorm_backward, dropout_add_layernorm_forward
from bertrain.kernels.reduction import column_sums
from bertrain.model.arena import Arena
from bertrain.model.bert import Bert


class Operand(NamedTuple):
    """One side of a product: in 16 bits, or in 8 with what to multiply it by, or both; None where it was not made.

    Of the 8-bit copies, rows [T, N] are for the product and for the gradient of its input, columns [N, T] for the
    gradient of its weight.
    """

    full: Tensor | None
    rows8: Tensor | None = None
    columns8: Tensor | None = None
    inverse_scale: Tensor | None = None

    @property
    def whole(self) -> Tensor:
        """It in 16 bits; whoever reads it must have had it made."""
        assert self.full is not None, "a tensor was made in 8 bits only, and is read in 16"
        return self.full

    @property
    def without_rows8(self) -> Operand:
        """What the gradient of a weight needs."""
        return self._replace(rows8=None)


class Matrix:
    """The weight of a linear layer: its copies to compute with, and where its gradient goes."""

    def __init__(self, value: Tensor, gradient: Tensor, scales: Scales | None = None, site: int = 0) -> None:
        self.value, self.gradient = value, gradient  # [N, K] bf16, [N, K] float32
        self._scales, self._site = scales, site
        self._eight = None if scales is None else empty_both_ways(value, scales.cast(site))

    def requantize(self) -> None:
        """Make the 8-bit copies anew."""
        if self._scales is not None:
            cast_both_ways(self.value, self._scales.cast(self._site), self._eight)

    def product(self, x: Operand, bias: Tensor | None = None) -> Tensor:
        """x W' + bias: [T, K] -> [T, N]."""
        if self._eight is not None and x.inverse_scale is not None and x.rows8 is not None:
            return self._product8(x.rows8, x.inverse_scale, self._eight.rows, bias)
        if bias is None:
            return torch.mm(x.whole, self.value.t())
        return torch.addmm(bias, x.whole, self.value.t())

    def input_gradient(self, dy: Operand) -> Tensor:
        """dy W: [T, N] -> [T, K]."""
        if self._eight is not None and dy.inverse_scale is not None and dy.rows8 is not None:
            return self._product8(dy.rows8, dy.inverse_scale, self._eight.columns)
        return torch.mm(dy.whole, self.value)

    def _product8(self, x: Tensor, inverse_scale: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        assert self._scales is not None
        of_matrix = self._scales.inverse(self._site)
        assert of_matrix is not None
        if not x.is_cuda:
            product = _widened(x, inverse_scale) @ _widened(matrix, of_matrix).t()
            return (product if bias is None else product + bias).to(self.value.dtype)
        return torch._scaled_mm(
            x, matrix.t(), inverse_scale, of_matrix, bias, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def weight_gradient(self, dy: Operand, x: Operand, accumulate: bool) -> None:
        """dy' x, into the arena in float32."""
        if (
            dy.columns8 is not None
            and x.columns8 is not None
            and dy.inverse_scale is not None
            and x.inverse_scale is not None
        ):
            if not self.gradient.is_cuda:
                wide = _widened(dy.columns8, dy.inverse_scale), _widened(x.columns8, x.inverse_scale)
                add(self.gradient, wide[0] @ wide[1].t(), accumulate)
                return
            # A sum over all tokens is long: it is kept in float32 throughout, not in the tensor cores' shorter one.
            out = torch.empty_like(self.gradient) if accumulate else self.gradient
            torch._scaled_mm(
                dy.columns8, x.columns8.t(), dy.inverse_scale, x.inverse_scale,
                out_dtype=torch.float32, use_fast_accum=False, out=out,
            )  # fmt: skip
            if accumulate:
                self.gradient.add_(out)
        elif cpu.computes(self.gradient):
            cpu.weight_gradient(dy.whole, x.whole, self.gradient, accumulate=accumulate)
        elif not self.gradient.is_cuda:
            add(self.gradient, dy.whole.t().float() @ x.whole.float(), accumulate)
        elif accumulate:
            torch.addmm(self.gradient, dy.whole.t(), x.whole, out_dtype=torch.float32, out=self.gradient)
        else:
            torch.mm(dy.whole.t(), x.whole, out_dtype=torch.float32, out=self.gradient)


def _widened(eight: Tensor, inverse_scale: Tensor) -> Tensor:
    """8 bits as float32: a CPU, on which the interpreter runs, has no product of 8 bits, nor of 16 into 32."""
    return eight.float() * inverse_scale


@dataclass
class Run:
    """What every layer of one pass needs to know."""

    tiles: Tensor
    seed: Tensor  # int64 [1]
    accumulate: bool
    scales: Scales | None
    hidden_dropout: float
    attention_dropout: float

    @property
    def in_eight_bits(self) -> bool:
        """Whether products take 8 bits; FP8 measures its scales in 16."""
        return self.scales is not None and self.scales.ready


@dataclass
class Input:
    """What a layer keeps under activation checkpointing `full`."""

    x: Tensor
    rows: Tensor | None


@dataclass
class Products:
    """What it keeps under `selective`: what products made, attention's included, and two numbers a row.

    The input is kept too, which the layer before could only compute again from its own: in 16 bits alone.
    """

    x: Tensor
    rows: Tensor | None
    qkv: Tensor
    attended: Tensor
    lse: Tensor
    projected: Tensor
    expanded: Tensor
    contracted: Tensor
    output_statistics: Tensor


@dataclass
class Saved:
    """What a layer keeps of its forward pass for its backward pass, where nothing is to be computed again."""

    x: Operand
    rows: Tensor | None
    residual: Tensor
    qkv: Tensor
    attended: Tensor
    lse: Tensor
    picked: Operand
    projected: Tensor
    middle: Operand
    middle_statistics: Tensor
    expanded: Tensor
    activated: Operand
    contracted: Tensor
    output_statistics: Tensor


Kept = Input | Products | Saved
Recompute = Literal["none", "selective", "full"]


class FusedLayer:
    """One encoder layer, forward and backward."""

    SITES = 8  # dropout sites and 8-bit tensors have numbers of their own in each layer: four forward, four backward
    MATRICES = ("qkv", "attention_out", "expand", "contract")

    def __init__(
        self, model: Bert, arena: Arena, copy: Tensor, number: int, scales: Scales | None, recompute: Recompute
    ) -> None:
        def value(name: str) -> Tensor:
            return arena.view(arena.values, f"layers.{number}.{name}")

        def gradient(name: str) -> Tensor:
            return arena.view(arena.gradients, f"layers.{number}.{name}")

        settings = model.settings
        first_site = settings.num_layers * self.SITES + number * len(self.MATRICES)

        def matrix(name: str) -> Matrix:
            full = f"layers.{number}.{name}.weight"
            site = first_site + self.MATRICES.index(name)
            return Matrix(arena.view(copy, full), arena.view(arena.gradients, full), scales, site)

        self.number, self.recompute = number, recompute
        self.heads, self.head_size, self.eps = settings.num_heads, settings.head_size, settings.layer_norm_eps
        self.qkv, self.attention_out = matrix("qkv"), matrix("attention_out")
        self.expand, self.contract = matrix("expand"), matrix("contract")
        self.qkv_bias = arena.view(copy, f"layers.{number}.qkv.bias")  # the product adds it, in its own 16 bits
        self.qkv_bias_gradient = gradient("qkv.bias")
        self.expand_bias, self.expand_bias_gradient = value("expand.bias"), gradient("expand.bias")
        middle = ("attention_out.bias", "attention_norm.weight", "attention_norm.bias")
        output = ("contract.bias", "output_norm.weight", "output_norm.bias")
        self.middle_norm, self.middle_gradients = [value(n) for n in middle], [gradient(n) for n in middle]
        self.output_norm, self.output_gradients = [value(n) for n in output], [gradient(n) for n in output]

    def _site(self, place: int) -> int:
        return self.number * self.SITES + place

    def _cast(self, run: Run, place: int) -> Cast | None:
        return None if run.scales is None else run.scales.cast(self._site(place))

    def _operand(self, run: Run, place: int, full: Tensor | None, eight: Eight | Bytes | None = None) -> Operand:
        """A tensor as a product takes it; cast or transposed here if the kernel that made it did not."""
        if run.scales is None:
            return Operand(full)
        cast = run.scales.cast(self._site(place))
        if eight is None:
            assert full is not None
            eight = cast_both_ways(full, cast)
        elif isinstance(eight, Bytes):
            eight = turn(eight, cast)
        if not run.in_eight_bits:  # they were made to be measured
            return Operand(full)
        return Operand(full, *eight, run.scales.inverse(self._site(place)))

    def forward(self, x: Operand, run: Run, rows: Tensor | None = None) -> tuple[Operand, Kept]:
        """The layer's output for all rows, or for `rows`, and what `backward` is to be given."""
        output, eight, saved = self._forward(x, run, rows)
        is_last = rows is not None
        return Operand(output) if is_last else self._operand(run, 3, output, eight), self._keep(saved)

    def _forward(self, x: Operand, run: Run, rows: Tensor | None) -> tuple[Tensor, Bytes, Saved]:
        qkv = self.qkv.product(x, self.qkv_bias).unflatten(-1, (3, self.heads, self.head_size))
        is_last = rows is not None
        attended, lse, attended8 = ragged_attention_forward(
            qkv, run.tiles, run.attention_dropout, run.seed, self._site(0), None if is_last else self._cast(run, 0)
        )
        residual = _picked(x.whole, rows)
        picked = self._operand(run, 0, _picked(attended.flatten(1), rows), None if is_last else attended8)
        projected = self.attention_out.product(picked)
        middle, middle_statistics = self._norm_in_the_middle(projected, residual, run)
        expanded = self.expand.product(middle)
        activated = self._activate(expanded, run)
        contracted = self.contract.product(activated)
        output, output_statistics, output8 = dropout_add_layernorm_forward(
            contracted, self.output_norm[0], middle.whole, self.output_norm[1], self.output_norm[2],
            run.hidden_dropout, run.seed, self._site(3), self.eps, None if is_last else self._cast(run, 3),
        )  # fmt: skip
        saved = Saved(
            x, rows, residual, qkv, attended, lse, picked, projected, middle, middle_statistics,
            expanded, activated, contracted, output_statistics,
        )  # fmt: skip
        return output, output8, saved

    def _norm_in_the_middle(self, projected: Tensor, residual: Tensor, run: Run) -> tuple[Operand, Tensor]:
        middle, statistics, eight = dropout_add_layernorm_forward(
            projected, self.middle_norm[0], residual, self.middle_norm[1], self.middle_norm[2], run.hidden_dropout,
            run.seed, self._site(1), self.eps, self._cast(run, 1),
        )  # fmt: skip
        return self._operand(run, 1, middle, eight), statistics

    def _activate(self, expanded: Tensor, run: Run) -> Operand:
        full = not run.in_eight_bits
        activated, eight = bias_gelu_forward(expanded, self.expand_bias, self._cast(run, 2), full=full)
        return self._operand(run, 2, activated if full else None, eight)

    def _keep(self, saved: Saved) -> Kept:
        """What stays in memory until the backward pass. The forward products were the only ones to read 8-bit rows."""
        if self.recompute == "full":
            return Input(saved.x.whole, saved.rows)
        if self.recompute == "selective":
            return Products(
                saved.x.whole, saved.rows, saved.qkv, saved.attended, saved.lse, saved.projected, saved.expanded,
                saved.contracted, saved.output_statistics,
            )  # fmt: skip
        return replace(
            saved, x=saved.x.without_rows8, picked=saved.picked.without_rows8, middle=saved.middle.without_rows8,
            activated=saved.activated.without_rows8,
        )  # fmt: skip

    def _compute_again(self, kept: Kept, run: Run) -> Saved:
        """What the forward pass had, bit for bit: dropout is a function of its place, scales change between steps."""
        if isinstance(kept, Saved):
            return kept
        # What the layer before handed over was cast at its last site; the first layer's input is in 16 bits only.
        x = self._operand(run, 3 - self.SITES, kept.x) if self.number > 0 else Operand(kept.x)
        if isinstance(kept, Input):
            return self._forward(x, run, kept.rows)[2]
        residual = _picked(kept.x, kept.rows)
        picked = self._operand(run, 0, _picked(kept.attended.flatten(1), kept.rows))
        middle, middle_statistics = self._norm_in_the_middle(kept.projected, residual, run)
        return Saved(
            x, kept.rows, residual, kept.qkv, kept.attended, kept.lse, picked, kept.projected, middle,
            middle_statistics, kept.expanded, self._activate(kept.expanded, run), kept.contracted,
            kept.output_statistics,
        )  # fmt: skip

    def backward(self, dy: Tensor, second: Tensor | None, kept: Kept, run: Run) -> tuple[Tensor, Tensor]:
        """Writes the gradients of the parameters; returns two gradients of the input, still to be added."""
        saved = self._compute_again(kept, run)
        accumulate, full = run.accumulate, not run.in_eight_bits
        dcontracted, dmiddle_residual, sums, dcontracted8 = dropout_add_layernorm_backward(
            dy, second, saved.contracted, self.output_norm[0], saved.middle.whole, self.output_norm[1],
            saved.output_statistics, run.hidden_dropout, run.seed, self._site(3), self._cast(run, 4), full=full,
        )  # fmt: skip
        column_sums(sums, self.output_gradients, accumulate=accumulate)
        dcontracted_operand = self._operand(run, 4, dcontracted if full else None, dcontracted8)
        self.contract.weight_gradient(dcontracted_operand, saved.activated, accumulate)
        dactivated = self.contract.input_gradient(dcontracted_operand)

        dexpanded, dexpanded8, sums = bias_gelu_backward(
            dactivated, saved.expanded, self.expand_bias, self._cast(run, 5), full=full
        )
        column_sums(sums, [self.expand_bias_gradient], accumulate=accumulate)
        dexpanded_operand = self._operand(run, 5, dexpanded if full else None, dexpanded8)
        self.expand.weight_gradient(dexpanded_operand, saved.middle, accumulate)
        dmiddle = self.expand.input_gradient(dexpanded_operand)

        dprojected, dresidual, sums, dprojected8 = dropout_add_layernorm_backward(
            dmiddle, dmiddle_residual, saved.projected, self.middle_norm[0], saved.residual, self.middle_norm[1],
            saved.middle_statistics, run.hidden_dropout, run.seed, self._site(1), self._cast(run, 6), full=full,
        )  # fmt: skip
        column_sums(sums, self.middle_gradients, accumulate=accumulate)
        dprojected_operand = self._operand(run, 6, dprojected if full else None, dprojected8)
        self.attention_out.weight_gradient(dprojected_operand, saved.picked, accumulate)
        dattended = self.attention_out.input_gradient(dprojected_operand)
        if saved.rows is not None:  # rows that nobody read have no gradient
            dattended = _spread(dattended, saved.rows, len(saved.qkv))
            dresidual = _spread(dresidual, saved.rows, len(saved.qkv))

        full = full or saved.x.columns8 is None  # the first layer's input is in 16 bits, and so its weights' gradient
        dqkv, sums, dqkv8 = ragged_attention_backward(
            saved.qkv, saved.attended, saved.lse, dattended.view_as(saved.attended), run.tiles, run.attention_dropout,
            run.seed, self._site(0), self._cast(run, 7), full=full,
        )  # fmt: skip
        dquery_bias, dkey_bias, dvalue_bias = self.qkv_bias_gradient.chunk(3)
        column_sums(sums, [dquery_bias, dvalue_bias], accumulate=accumulate)
        if not accumulate:
            dkey_bias.zero_()  # the softmax does not see it
        dqkv_operand = self._operand(run, 7, dqkv.flatten(1) if full else None, dqkv8)
        self.qkv.weight_gradient(dqkv_operand, saved.x, accumulate)
        return self.qkv.input_gradient(dqkv_operand), dresidual


def _picked(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values[rows]


def _spread(values: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Rows back to their places among `num_rows`, zero elsewhere; what is named twice are empty slots, with zeros."""
    out = torch.zeros(num_rows, values.shape[1], dtype=values.dtype, device=values.device)
    return out.index_add_(0, rows, values)


def add(into: Tensor, value: Tensor, accumulate: bool) -> None:
    """Write a gradient, or add it to what is there."""
    if accumulate:
        into.add_(value)
    else:
        into.copy_(value)
