"""Muon (Jordan et al., 2024) for the matrices of the encoder's layers, AdamW for all other parameters.

    m  <- mu m + (1 - mu) g                  mu = (1 + beta1) / 2: 0.95 for a beta1 of 0.9
    u   = 0.2 sqrt(max(rows, columns)) * orthogonalized((1 - mu) g + mu m) + decay * w
    w  <- w - rate * u

The matrices are query, key and value (three matrices, though the model stacks them), the attention's output, and both
matrices of the feed-forward network. The factor of u is that of Moonlight (Liu et al., 2025): it gives an update the
usual size of AdamW's, so that one learning rate and one weight decay serve both parts.

A rank's shard may hold part of a matrix only. The ranks then add up their parts of it, which are zero elsewhere, and
each rank orthogonalizes the whole matrix for its own part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from bertrain.base.isa import emulation
from bertrain.optim.rules import Adam

LAYERS = "layers."  # how the names of the encoder's parameters begin
WINDOW = 2**24  # parameters that are orthogonalized together, to limit temporary memory
COEFFICIENTS = 3.4445, -4.7750, 2.0315
ITERATIONS = 5
SMALLEST_NORM = 1e-7
MUON, ADAM = "muon", "adam"


class Matrix(NamedTuple):
    """A whole matrix in a flat buffer."""

    start: int
    stop: int
    columns: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(-1, self.columns)


class Muon(Adam):
    BUFFERS = ("first_moment", "second_moment")  # the second is zero for matrices under Muon
    TEMPORARY_BYTES = 4

    def begin(self) -> None:
        columns = {
            segment.tensor: shape[1]
            for name, (start, shape) in self.arena.places.items()
            if name.startswith(LAYERS) and len(shape) == 2
            for segment in self.arena.segments
            if start <= segment.start < start + shape.numel()
        }
        # Adjacent segments of a kind form one range: the padding between them is zero and stays zero.
        kinds = groupby(self.segments, lambda segment: segment.rate and (MUON if segment.tensor in columns else ADAM))
        ranges = [(kind, list(segments)) for kind, segments in kinds]
        self._muon_ranges, self._adam_ranges = (
            [slice(segments[0].start, segments[-1].stop) for kind, segments in ranges if kind == wanted]
            for wanted in (MUON, ADAM)
        )
        self._dtype = product_dtype(self.values.device)
        self._whole: list[Matrix] = []  # of the shard
        self._cut: list[Matrix] = []  # of which the shard has a part, in the buffer that all ranks add up
        self._own_parts: list[tuple[slice, slice]] = []  # of the shard, and where they are in that buffer
        self._cut_size = 0
        size = len(self.span)
        for segment in self.arena.segments:
            if not segment.rate or segment.tensor not in columns:
                continue
            start, stop, width = segment.start, segment.stop, columns[segment.tensor]
            own = range(max(start, self.span.start), min(stop, self.span.stop))
            if start // size != (stop - 1) // size:
                if own:
                    self._cut.append(Matrix(self._cut_size, self._cut_size + stop - start, width))
                    self._own_parts.append((_moved(own, -self.span.start), _moved(own, self._cut_size - start)))
                self._cut_size += stop - start
            elif own:
                self._whole.append(Matrix(start - self.span.start, stop - self.span.start, width))

    def direction(self, gradient: Tensor, apply: Tensor) -> Tensor:
        self._adam(gradient, apply)
        self._muon(gradient, apply)
        return gradient

    def _adam(self, gradient: Tensor, apply: Tensor) -> None:
        if not self._adam_ranges:
            return
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        flats = gradient, self.buffers["first_moment"], self.buffers["second_moment"]
        update, first, second = ([flat[one] for one in self._adam_ranges] for flat in flats)
        # If the step is not applied, the gradient is zero.
        torch._foreach_mul_(first, 1 - apply * (1 - beta1))
        torch._foreach_add_(first, update, alpha=1 - beta1)
        torch._foreach_mul_(second, 1 - apply * (1 - beta2))
        torch._foreach_addcmul_(second, update, update, 1 - beta2)
        correction1, correction2 = self.corrections()
        torch._foreach_copy_(update, second)
        torch._foreach_div_(update, correction2)
        torch._foreach_sqrt_(update)
        torch._foreach_add_(update, self.settings.epsilon)
        torch._foreach_mul_(update, correction1)
        torch._foreach_reciprocal_(update)
        torch._foreach_mul_(update, first)

    def _muon(self, gradient: Tensor, apply: Tensor) -> None:
        momentum = (1 + self.settings.beta1) / 2
        if self._muon_ranges:
            flats = gradient, self.buffers["first_moment"]
            update, first = ([flat[one] for one in self._muon_ranges] for flat in flats)
            torch._foreach_mul_(first, 1 - apply * (1 - momentum))
            torch._foreach_add_(first, update, alpha=1 - momentum)
            torch._foreach_mul_(update, 1 - momentum)
            torch._foreach_add_(update, first, alpha=momentum)
        cut = gradient.new_zeros(self._cut_size)
        if self._cut_size:
            for own, there in self._own_parts:
                cut[there] = gradient[own]
            self.sum_over_ranks(cut)
        matrices = [matrix.view(gradient) for matrix in self._whole] + [matrix.view(cut) for matrix in self._cut]
        orthogonalize_all(matrices, self._dtype)
        for own, there in self._own_parts:
            gradient[own] = cut[there]


def orthogonalize_all(matrices: list[Tensor], dtype: torch.dtype) -> None:
    """Replace each matrix by its update, in place; those of one shape are computed together."""
    by_shape = defaultdict[torch.Size, list[Tensor]](list)
    for matrix in matrices:
        by_shape[matrix.shape].append(matrix)
    for shape, same in by_shape.items():
        count, factor = max(1, WINDOW // shape.numel()), 0.2 * math.sqrt(max(shape))
        for begin in range(0, len(same), count):
            some = same[begin : begin + count]
            updates = orthogonalize(torch.stack(some), dtype).float().mul_(factor)
            torch._foreach_copy_(some, list(updates.unbind()))


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximate U V' of U S V', for each of a batch of matrices [N, rows, columns]: singular values become about 1.

    Newton-Schulz iteration with odd polynomials of degree 5, whose coefficients raise even small singular values in few
    iterations; they end between 0.7 and 1.2. Computes in `dtype`; overwrites `matrices`.
    """
    a, b, c = COEFFICIENTS
    norms = matrices.flatten(1).norm(dim=1).clamp_(min=SMALLEST_NORM)
    x = matrices.div_(norms[:, None, None]).to(dtype)
    del matrices
    is_tall = x.shape[1] > x.shape[2]
    for _ in range(ITERATIONS):
        gram = x.mT @ x if is_tall else x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, gram, beta=a) if is_tall else torch.baddbmm(x, gram, x, beta=a)
    return x


def operations(layers: int, width: int, inner: int, expanded: int) -> float:
    """Floating-point operations of the matrix products in one update of an encoder of these sizes.

    `expanded`: outputs of the first feed-forward product, twice `inner` with a gate.
    """
    per_iteration = 0
    for count, other in ((4, width), (1, expanded), (1, inner)):
        short, long = min(width, other), max(width, other)
        per_iteration += count * 2 * short**2 * (2 * long + short)
    return float(layers * ITERATIONS * per_iteration)


def product_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device has instructions for its products, else float32."""
    is_native = device.type == "cpu" and not emulation("bf16", "auto")
    if device.type == "cuda":
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_native else torch.float32


def _moved(span: range, by: int) -> slice:
    return slice(span.start + by, span.stop + by)
