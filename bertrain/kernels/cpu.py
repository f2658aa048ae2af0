"""The kernels of cpu.c, for CPUs with AMX. `backend.on_cpu` calls each in place of the Triton kernel of the same name.

They compute in bf16; FP8 (`cast`) is for GPUs. Signatures and results are those of the Triton kernels' launchers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bertrain.kernels.arguments import (
    AttentionPlan,
    Cast,
    Dropout,
    EmbeddingIds,
    EmbeddingTables,
    Fp8Copy,
    Fp8Rows,
    LambBuffers,
    LambConstants,
    LambScalars,
    NormParameters,
    Rotary,
)
from bertrain.kernels.cpu_library import DOUBLE, FLOAT, INT, LONG, SEED, UINT32, call, thread_count
from bertrain.kernels.random import attention_threshold, dropout_threshold

ROWS_PER_SUM = 256


def _partials(*shape: int) -> Tensor:
    return torch.zeros(thread_count(), *shape)


def _check(cast: Cast | None, *tensors: Tensor) -> None:
    assert cast is None, "the C kernels do not compute in FP8"
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors), "the C kernels compute in bf16"


def _dropout(dropout: Dropout, threshold: Callable[[float], int] = dropout_threshold) -> tuple[Any, Any, Any]:
    return SEED(int(dropout.seed)), LONG(dropout.site), UINT32(threshold(dropout.p))


def weight_gradient(dy: Tensor, x: Tensor, gradient: Tensor, *, accumulate: bool) -> None:
    _check(None, dy, x)
    (tokens, rows), columns = dy.shape, x.shape[1]
    sizes = LONG(rows), LONG(columns), LONG(tokens)
    call("weight_gradient", dy, LONG(rows), x, LONG(columns), gradient, *sizes, INT(accumulate))


def plan_attention(cu_seqlens: Tensor, num_tokens: int) -> AttentionPlan:
    """No tiles: a thread takes a whole sequence and head."""
    return AttentionPlan(cu_seqlens, None)


def ragged_attention_forward(
    qkv: Tensor, plan: AttentionPlan, dropout: Dropout, cast: Cast | None = None, *, window: int = 0
) -> tuple[Tensor, Tensor, Fp8Rows | None]:
    _check(cast, qkv)
    assert window == 0, "the C kernels have no windows"
    tokens, _, heads, size = qkv.shape
    out, sums = qkv.new_empty(tokens, heads, size), torch.empty(heads, tokens)
    shape = LONG(len(plan.cu_seqlens) - 1), LONG(heads), LONG(size)
    numbers = LONG(tokens), *_dropout(dropout, attention_threshold)
    call("attention_forward", qkv, plan.cu_seqlens, *shape, out, sums, *numbers)
    return out, sums, None


def ragged_attention_backward(
    qkv: Tensor,
    out: Tensor,
    sums: Tensor,
    dout: Tensor,
    plan: AttentionPlan,
    dropout: Dropout,
    cast: Cast | None = None,
    *,
    full: bool = True,
    window: int = 0,
    rotary: Rotary | None = None,
) -> tuple[Tensor, Tensor | None, Fp8Rows | None]:
    _check(cast, qkv, out, dout)
    assert window == 0, "the C kernels have no windows"
    assert rotary is None, "the C kernels rotate nothing"
    tokens, _, heads, size = qkv.shape
    num_sequences = len(plan.cu_seqlens) - 1
    dqkv, partials = torch.empty_like(qkv), torch.empty(num_sequences, 3, heads * size)
    shape = LONG(num_sequences), LONG(heads), LONG(size)
    numbers = LONG(tokens), *_dropout(dropout, attention_threshold)
    call("attention_backward", qkv, plan.cu_seqlens, *shape, out, sums, dout, dqkv, partials, *numbers)
    return dqkv, partials[:, ::2], None


def dropout_add_layernorm_forward(
    x: Tensor, residual: Tensor, parameters: NormParameters, dropout: Dropout, eps: float, cast: Cast | None = None
) -> tuple[Tensor, Tensor, Fp8Rows | None]:
    _check(cast, x, residual)
    rows, width = x.shape
    y, statistics = torch.empty_like(x), torch.empty(rows, 2)
    bias, weight, ln_bias = parameters
    shape = LONG(rows), LONG(width), FLOAT(eps)
    call("norm_forward", x, bias, residual, weight, ln_bias, y, statistics, *shape, *_dropout(dropout))
    return y, statistics, None


def dropout_add_layernorm_backward(
    dy: Tensor,
    second: Tensor | None,
    x: Tensor,
    residual: Tensor,
    parameters: NormParameters,
    statistics: Tensor,
    dropout: Dropout,
    cast: Cast | None = None,
    *,
    full: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Fp8Rows | None]:
    _check(cast, dy, x, residual)
    rows, width = x.shape
    dx, dresidual, partials = torch.empty_like(x), torch.empty_like(x), _partials(3, width)
    numbers = LONG(rows), LONG(width), *_dropout(dropout)
    bias, weight, _ = parameters
    call("norm_backward", dy, second, x, bias, residual, weight, statistics, dx, dresidual, partials, *numbers)
    return dx, dresidual, partials, None


def bias_gelu_forward(
    x: Tensor, bias: Tensor, cast: Cast | None = None, *, full: bool = True
) -> tuple[Tensor, Fp8Copy | None]:
    _check(cast, x)
    y = torch.empty_like(x)
    call("gelu_forward", x, bias, y, LONG(x.shape[0]), LONG(x.shape[1]))
    return y, None


def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor, cast: Cast | None = None, *, full: bool = True
) -> tuple[Tensor, Fp8Copy | None, Tensor]:
    _check(cast, dy, x)
    dx, partials = torch.empty_like(x), _partials(1, x.shape[1])
    call("gelu_backward", dy, x, bias, dx, partials, LONG(x.shape[0]), LONG(x.shape[1]))
    return dx, None, partials


def column_sums(partials: Tensor, outs: list[Tensor], *, accumulate: bool = False) -> None:
    """Sum partials [n, k, N] into k rows. There are few, one per thread, so PyTorch adds them."""
    for out, total in zip(outs, partials.sum(0), strict=True):
        (out.add_ if accumulate else out.copy_)(total)


def row_sum(x: Tensor) -> Tensor:
    """The sum of bf16 rows in float32. PyTorch converts its input to float32 first, so it gets a few rows at a time."""
    total = torch.zeros(x.shape[1])
    for rows in x.split(ROWS_PER_SUM):
        total += rows.sum(0, dtype=torch.float32)
    return total


def embed_forward(
    tables: EmbeddingTables, ids: EmbeddingIds, weight: Tensor, ln_bias: Tensor | None, dropout: Dropout, eps: float
) -> tuple[Tensor, Tensor]:
    _check(None, tables.words)
    rows, width = len(ids.words), tables.words.shape[1]
    y, statistics = tables.words.new_empty(rows, width), torch.empty(rows, 2)
    shape = LONG(rows), LONG(width), FLOAT(eps)
    call("embed_forward", *tables, *ids, weight, ln_bias, y, statistics, *shape, *_dropout(dropout))
    return y, statistics


def embed_backward(
    dy: Tensor,
    second: Tensor,
    tables: EmbeddingTables,
    ids: EmbeddingIds,
    weight: Tensor,
    statistics: Tensor,
    dropout: Dropout,
) -> tuple[Tensor, Tensor]:
    _check(None, dy, second, tables.words)
    rows, width = dy.shape
    dsum, partials = torch.empty(rows, width), _partials(4, width)
    numbers = LONG(rows), LONG(width), *_dropout(dropout)
    call("embed_backward", dy, second, *tables, *ids, weight, statistics, dsum, partials, *numbers)
    return dsum, partials


def position_gradient(dsum: Tensor, cu_seqlens: Tensor, out: Tensor, *, accumulate: bool) -> None:
    if not accumulate:
        out.zero_()
    starts = cu_seqlens.long()
    positions = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(starts.diff())
    word_gradient(dsum, positions, out)


def word_gradient(dsum: Tensor, ids: Tensor, out: Tensor) -> None:
    """Add float32 rows to the rows of `out` that `ids` (int64) name."""
    call("add_rows", dsum, ids, out, LONG(len(dsum)), LONG(dsum.shape[1]))


def cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, scale: Tensor) -> tuple[Tensor, Tensor]:
    _check(None, logits)
    rows, width = logits.shape
    losses, corrects = torch.empty(rows), torch.empty(rows)
    shape = LONG(rows), LONG(width), LONG(vocab_size), FLOAT(float(scale))
    call("cross_entropy", logits, labels, losses, corrects, *shape)
    return losses.sum(), corrects.sum()


def lamb_update(
    buffers: LambBuffers, chunks: Tensor, chunk_size: int, scalars: LambScalars, constants: LambConstants
) -> Tensor:
    """Update the moments and write the update over the gradient; squares [chunks, 2] of weights and updates."""
    squares = torch.empty(len(chunks), 2)
    weight_decay, beta1, beta2, eps = constants
    corrections = (FLOAT(1 / (1 - beta ** scalars.step.item())) for beta in (beta1, beta2))
    # The betas are float64, since 1 - beta loses half its digits in float32.
    numbers = FLOAT(float(scalars.clip)), FLOAT(weight_decay), DOUBLE(beta1), DOUBLE(beta2), FLOAT(eps), *corrections
    call("lamb_update", *buffers, chunks, LONG(len(chunks)), LONG(chunk_size), squares, *numbers)
    return squares


def lamb_apply(
    parameters: Tensor, updates: Tensor, copy: Tensor | None, chunks: Tensor, chunk_size: int, rates: Tensor
) -> None:
    """parameters -= rates (one per tensor) * updates; also writes them to `copy` in bf16."""
    assert copy is None or copy.dtype == torch.bfloat16
    call("lamb_apply", parameters, updates, copy, chunks, LONG(len(chunks)), LONG(chunk_size), rates)
