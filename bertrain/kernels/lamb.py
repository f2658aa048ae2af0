"""LAMB over flat float32 buffers: two passes and a small reduction for all tensors together, no host sync.

Parameters, gradients and both moments are one flat buffer each, for the whole model or a rank's shard; a tensor, or its
part in the shard, is a range. The first pass updates the moments and writes the update over the gradient, with partial
sums of squares per chunk. A small kernel adds them up per tensor in a fixed order (and ranks add theirs, where shards
cut tensors). The second pass applies the update, scaled by the tensor's trust ratio, and can write the 16-bit copy of
the weights for the next step. Learning rate, clip factor, step count and the `apply` flag are read on the device, so
that a CUDA graph can hold the whole step; apply = 0 changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bertrain.kernels import cpu
from bertrain.kernels.arguments import LambBuffers, LambConstants, LambScalars
from bertrain.kernels.backend import jit, on_cpu, tl

CHUNK = 4096  # elements per program; a chunk belongs to one tensor
DEFAULTS = LambConstants()


@dataclass(frozen=True)
class Part:
    """The elements start .. stop of the buffers, which belong to one tensor. A tensor has at most one part."""

    start: int
    stop: int
    tensor: int
    decay: bool
    adapt: bool
    rate: float = 1.0  # factor on the learning rate


@dataclass(frozen=True)
class LambTable:
    """The chunks of each tensor; built once per model."""

    parts: tuple[Part, ...]
    chunks: Tensor  # [num_chunks, 4] int64: first element, end of part, decay, tensor number
    tensors: Tensor  # [num_tensors, 4] int64: first chunk, end of chunks, adapt, unused
    rates: Tensor  # [num_tensors] float32: factor on the learning rate of each
    aligned: bool  # whether every part starts and ends at a multiple of 16 elements, so that loads can be wide

    @staticmethod
    def build(parts: list[Part], num_tensors: int, device: torch.device | str) -> LambTable:
        """Build from the parts in their order. Ends at multiples of 16 elements make the passes faster."""
        chunks: list[list[int]] = []
        tensors = [[0, 0, 0, 0] for _ in range(num_tensors)]  # tensors of other shards have no chunks
        rates = [1.0] * num_tensors
        for part in parts:
            rates[part.tensor] = part.rate
            first_chunk = len(chunks)
            starts = range(part.start, part.stop, CHUNK)
            chunks += [[start, part.stop, int(part.decay), part.tensor] for start in starts]
            tensors[part.tensor] = [first_chunk, len(chunks), int(part.adapt), 0]
        return LambTable(
            tuple(parts),
            torch.tensor(chunks, dtype=torch.int64, device=device),
            torch.tensor(tensors, dtype=torch.int64, device=device),
            torch.tensor(rates, dtype=torch.float32, device=device),
            all(part.start % 16 == 0 and part.stop % 16 == 0 for part in parts),
        )


def lamb_step_plain(
    buffers: LambBuffers, table: LambTable, scalars: LambScalars, constants: LambConstants = DEFAULTS
) -> None:
    """The specification; like the kernels, it leaves the update before the trust ratio in `buffers.gradients`."""
    if scalars.apply.item() == 0:
        return
    parameters, gradients, first_moments, second_moments = buffers
    weight_decay, beta1, beta2, eps = constants
    correction1 = 1 - beta1 ** scalars.step.item()
    correction2 = 1 - beta2 ** scalars.step.item()
    gradients.mul_(scalars.clip.to(gradients.dtype))
    first_moments.lerp_(gradients, 1 - beta1)
    second_moments.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    gradients.copy_((first_moments / correction1) / ((second_moments / correction2).sqrt() + eps))
    for part in table.parts:
        weights, update = parameters[part.start : part.stop], gradients[part.start : part.stop]
        if part.decay:
            update.add_(weights, alpha=weight_decay)
        ratio = weights.norm() / update.norm()
        if not part.adapt or weights.norm() == 0 or update.norm() == 0:
            ratio = torch.ones_like(ratio)
        weights.sub_(update * (scalars.learning_rate.to(ratio.dtype) * part.rate * ratio))


@jit
def _chunk(chunks, ALIGNED: tl.constexpr):
    """First element of this program's chunk; of its tensor: the end, whether it decays, and its number."""
    entry = chunks + tl.program_id(0) * 4
    start, end = tl.load(entry), tl.load(entry + 1)
    if ALIGNED:
        start, end = tl.multiple_of(start, 16), tl.multiple_of(end, 16)
    return start, end, tl.load(entry + 2), tl.load(entry + 3)


@jit
def _lamb_update_kernel(
    parameters, gradients, first_moments, second_moments, chunks, partials, clip, apply, step,
    WEIGHT_DECAY: tl.constexpr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(apply) == 0:
        return
    start, end, decay, _number = _chunk(chunks, ALIGNED)
    factor = tl.load(clip)
    # In float64, once per program: in float32, 1 - 0.999 ** step loses half its digits during the first steps.
    count = tl.load(step).to(tl.float64)
    correction1 = (1.0 / (1.0 - tl.exp(count * LOG_BETA1))).to(tl.float32)
    correction2 = (1.0 / (1.0 - tl.exp(count * LOG_BETA2))).to(tl.float32)
    decayed = tl.where(decay != 0, WEIGHT_DECAY, 0.0)
    weight_squares = tl.zeros([BLOCK], dtype=tl.float32)
    update_squares = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, CHUNK, BLOCK):
        places = start + first + tl.arange(0, BLOCK)
        mask = places < end
        weights = tl.load(parameters + places, mask=mask, other=0.0)
        gradient = tl.load(gradients + places, mask=mask, other=0.0) * factor
        first_moment = tl.load(first_moments + places, mask=mask, other=0.0)
        second_moment = tl.load(second_moments + places, mask=mask, other=0.0)
        first_moment = first_moment + (1.0 - BETA1) * (gradient - first_moment)
        second_moment = BETA2 * second_moment + (1.0 - BETA2) * gradient * gradient
        update = first_moment * correction1 / (tl.sqrt(second_moment * correction2) + EPS) + decayed * weights
        update = tl.where(mask, update, 0.0)
        tl.store(first_moments + places, first_moment, mask=mask)
        tl.store(second_moments + places, second_moment, mask=mask)
        tl.store(gradients + places, update, mask=mask)
        weight_squares += weights * weights
        update_squares += update * update
    tl.store(partials + tl.program_id(0) * 2, tl.sum(weight_squares, axis=0))
    tl.store(partials + tl.program_id(0) * 2 + 1, tl.sum(update_squares, axis=0))


@jit
def _lamb_squares_kernel(partials, tensors, squares, BLOCK: tl.constexpr):
    entry = tensors + tl.program_id(0) * 4
    start, end = tl.load(entry), tl.load(entry + 1)
    weight_squares = tl.zeros([BLOCK], dtype=tl.float32)
    update_squares = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(start, end, BLOCK):
        places = first + tl.arange(0, BLOCK)
        weight_squares += tl.load(partials + places * 2, mask=places < end, other=0.0)
        update_squares += tl.load(partials + places * 2 + 1, mask=places < end, other=0.0)
    tl.store(squares + tl.program_id(0) * 2, tl.sum(weight_squares, axis=0))
    tl.store(squares + tl.program_id(0) * 2 + 1, tl.sum(update_squares, axis=0))


@jit
def _lamb_apply_kernel(
    parameters, updates, copy, chunks, tensors, rates, squares, learning_rate, apply,
    COPY: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(apply) == 0:
        return
    start, end, _decay, number = _chunk(chunks, ALIGNED)
    adapt = tl.load(tensors + number * 4 + 2)
    weight_norm = tl.sqrt(tl.load(squares + number * 2))
    update_norm = tl.sqrt(tl.load(squares + number * 2 + 1))
    usable = (adapt != 0) & (weight_norm > 0) & (update_norm > 0)
    rate = tl.load(learning_rate) * tl.load(rates + number)
    rate *= tl.where(usable, weight_norm / tl.where(usable, update_norm, 1.0), 1.0)
    for first in range(0, CHUNK, BLOCK):
        places = start + first + tl.arange(0, BLOCK)
        mask = places < end
        weights = tl.load(parameters + places, mask=mask, other=0.0)
        weights -= rate * tl.load(updates + places, mask=mask, other=0.0)
        tl.store(parameters + places, weights, mask=mask)
        if COPY:
            tl.store(copy + places, weights.to(copy.dtype.element_ty), mask=mask)


def _lamb_step_in_c(
    buffers: LambBuffers,
    table: LambTable,
    scalars: LambScalars,
    constants: LambConstants = DEFAULTS,
    *,
    copy: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], None] = lambda squares: None,
) -> None:
    if scalars.apply.item() == 0:
        return
    partials = cpu.lamb_update(buffers, table.chunks, CHUNK, scalars, constants)
    squares = torch.zeros(table.tensors.shape[0], 2).index_add_(0, table.chunks[:, 3], partials)
    sum_over_ranks(squares)
    norms = squares.sqrt()
    usable = (table.tensors[:, 2] != 0) & (norms > 0).all(1)
    rates = scalars.learning_rate * table.rates * torch.where(usable, norms[:, 0] / norms[:, 1], 1.0)
    cpu.lamb_apply(buffers.parameters, buffers.gradients, copy, table.chunks, CHUNK, rates)


@on_cpu(_lamb_step_in_c)
def lamb_step(
    buffers: LambBuffers,
    table: LambTable,
    scalars: LambScalars,
    constants: LambConstants = DEFAULTS,
    *,
    copy: Tensor | None = None,
    sum_over_ranks: Callable[[Tensor], None] = lambda squares: None,
) -> None:
    """One LAMB step in place, which also writes the weights to `copy`; the update overwrites `buffers.gradients`."""
    parameters = buffers.parameters
    learning_rate, clip, apply, step = scalars
    weight_decay, beta1, beta2, eps = constants
    num_chunks, num_tensors = table.chunks.shape[0], table.tensors.shape[0]
    # Zero if the step is not applied or a tensor has no part here, since ranks add these sums.
    partials = torch.zeros(num_chunks, 2, dtype=torch.float32, device=parameters.device)
    squares = torch.empty(num_tensors, 2, dtype=torch.float32, device=parameters.device)
    _lamb_update_kernel[(num_chunks,)](
        *buffers, table.chunks, partials, clip, apply, step,
        WEIGHT_DECAY=weight_decay, BETA1=beta1, BETA2=beta2, EPS=eps, LOG_BETA1=_logarithm(beta1),
        LOG_BETA2=_logarithm(beta2), ALIGNED=table.aligned, CHUNK=CHUNK, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    _lamb_squares_kernel[(num_tensors,)](partials, table.tensors, squares, BLOCK=1024, num_warps=4)
    sum_over_ranks(squares)
    _lamb_apply_kernel[(num_chunks,)](
        parameters, buffers.gradients, parameters if copy is None else copy, table.chunks, table.tensors, table.rates,
        squares, learning_rate, apply,
        COPY=copy is not None, ALIGNED=table.aligned, CHUNK=CHUNK, BLOCK=1024, num_warps=4,
    )  # fmt: skip


def _logarithm(beta: float) -> float:
    """log(beta); for 0, a finite number so small that every power of beta is 0."""
    return math.log(beta) if beta else -1e30
