"""Cross-entropy of masked words: loss, gradient and number of correct predictions in one pass over the logits.

    loss, correct = cross_entropy(logits, labels, vocab_size, scale)

The gradient overwrites the logits, the largest tensor of a step, which nothing else reads. `scale` (one over the number
of predictions of the whole step) is known before the pass, so the gradient needs no second pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bertrain.kernels import IGNORED, cpu
from bertrain.kernels.arithmetic import KERNEL_LOG2_E, exp2
from bertrain.kernels.backend import jit, on_cpu, tl

BLOCK, WARPS = 4096, 8  # measured on an H200


def cross_entropy_plain(
    logits: Tensor, labels: Tensor, vocab_size: int, scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """The specification: scaled sum of losses, and number of labels whose logit is the (first) largest."""
    real = logits[:, :vocab_size].float()
    total = torch.nn.functional.cross_entropy(real, labels, ignore_index=IGNORED, reduction="sum")
    correct = ((real.detach().argmax(dim=1) == labels) & (labels != IGNORED)).sum().float()
    return total * scale, correct


@jit
def _logits(row, first, BLOCK: tl.constexpr, WIDTH: tl.constexpr, VOCABULARY: tl.constexpr, MASKED: tl.constexpr):
    """A block of a row in float32, -inf past the vocabulary. The load is masked by the row's width, a multiple of the
    vector size. The vocabulary size is not one: masking by it would make every load narrow."""
    columns = first + tl.arange(0, BLOCK)
    if MASKED:
        values = tl.load(row + columns, mask=columns < WIDTH, other=float("-inf")).to(tl.float32)
        return tl.where(columns < VOCABULARY, values, float("-inf"))
    return tl.load(row + columns).to(tl.float32)


@jit
def _write_gradient(row, values, first, offset, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    gradient = exp2(values * KERNEL_LOG2_E + offset).to(row.dtype.element_ty)
    columns = first + tl.arange(0, BLOCK)
    if MASKED:
        tl.store(row + columns, gradient, mask=columns < WIDTH)
    else:
        tl.store(row + columns, gradient)


@jit
def _rows_kernel(
    logits, labels, scale, losses, corrects, pitch,
    VOCABULARY: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = logits + tl.program_id(0).to(tl.int64) * pitch
    label = tl.load(labels + tl.program_id(0)).to(tl.int32)
    factor = tl.load(scale)
    FULL: tl.constexpr = (VOCABULARY // BLOCK) * BLOCK
    if label < 0:
        # An empty slot: its gradient is zero, whatever the logits hold.
        for first in range(0, WIDTH, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            tl.store(row + columns, tl.zeros([BLOCK], dtype=logits.dtype.element_ty), mask=columns < WIDTH)
        tl.store(losses + tl.program_id(0), 0.0)
        tl.store(corrects + tl.program_id(0), 0.0)
        return
    at_label = tl.load(row + label).to(tl.float32)
    # Each lane keeps its own maximum and its own sum relative to the label's logit; both are reduced once, at the end.
    values = _logits(row, FULL, BLOCK, WIDTH, VOCABULARY, True)
    largest = values
    sums = exp2((values - at_label) * KERNEL_LOG2_E)
    for first in range(0, FULL, BLOCK):
        values = _logits(row, first, BLOCK, WIDTH, VOCABULARY, False)
        largest = tl.maximum(largest, values)
        sums += exp2((values - at_label) * KERNEL_LOG2_E)
    maximum = tl.max(largest, axis=0)
    total = tl.sum(sums, axis=0)
    reference = at_label
    if maximum - at_label > 60.0:  # the sum may overflow: compute it again, relative to the maximum
        reference = maximum
        sums = exp2((_logits(row, FULL, BLOCK, WIDTH, VOCABULARY, True) - maximum) * KERNEL_LOG2_E)
        for first in range(0, FULL, BLOCK):
            values = _logits(row, first, BLOCK, WIDTH, VOCABULARY, False)
            sums += exp2((values - maximum) * KERNEL_LOG2_E)
        total = tl.sum(sums, axis=0)
    correct = 0.0
    if at_label == maximum:  # correct, unless an earlier logit is equal
        earlier = tl.zeros([BLOCK], dtype=tl.int32)
        for first in range(0, label, BLOCK):
            values = _logits(row, first, BLOCK, WIDTH, VOCABULARY, True)
            earlier += ((values == maximum) & (first + tl.arange(0, BLOCK) < label)).to(tl.int32)
        correct = (tl.sum(earlier, axis=0) == 0).to(tl.float32)
    offset = tl.log2(factor / total) - reference * KERNEL_LOG2_E
    for first in range(0, FULL, BLOCK):
        values = _logits(row, first, BLOCK, WIDTH, VOCABULARY, False)
        _write_gradient(row, values, first, offset, BLOCK, WIDTH, False)
    values = _logits(row, FULL, BLOCK, WIDTH, VOCABULARY, True)
    _write_gradient(row, values, FULL, offset, BLOCK, WIDTH, True)
    tl.debug_barrier()  # the label's own entry is written after the block that holds it
    probability = exp2((at_label - reference) * KERNEL_LOG2_E) / total
    tl.store(row + label, ((probability - 1.0) * factor).to(logits.dtype.element_ty))
    tl.store(losses + tl.program_id(0), (reference - at_label + tl.log(total)) * factor)
    tl.store(corrects + tl.program_id(0), correct)


@on_cpu(cpu.cross_entropy)
def cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale * sum of losses, number of correct predictions) and overwrite `logits` with their gradient.

    logits [P, V] contiguous, in any float dtype; columns from vocab_size on are padding and get gradient 0.
    labels [P] int64, -100 where there is nothing to predict. `scale` is a float32 tensor of one element.
    """
    num_rows, width = logits.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    corrects = torch.empty_like(losses)
    _rows_kernel[(num_rows,)](
        logits, labels, scale, losses, corrects, logits.stride(0),
        VOCABULARY=vocab_size, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses.sum(), corrects.sum()
