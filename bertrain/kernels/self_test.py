"""Runs every kernel once beside its twin in plain PyTorch, so that a kernel that fails here never ends a run.

A driver, a Triton or a GPU that nobody has tried can refuse a kernel, miscompile it, or end the process. So a child
process runs each kernel, forward and backward, on a small ragged bin in the sizes of the run, and prints a JSON line
before and after it; `examine` reads the lines. model/fused_self_test.py is that process, and adds a whole model.
Results are kept in the user's cache folder, by GPU, driver, versions, sources and sizes, so a machine pays once: some
seconds, most of them for compilations that the run then finds in Triton's cache.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bertrain.base.files import write_atomically
from bertrain.base.logs import note
from bertrain.base.machine import read_or_empty
from bertrain.base.schema import JsonError, check_value, load_json
from bertrain.config.choices import Family
from bertrain.kernels import backend
from bertrain.kernels.arguments import (
    Cast,
    Dropout,
    EmbeddingIds,
    EmbeddingTables,
    LambBuffers,
    LambScalars,
    NormParameters,
    Rotary,
)
from bertrain.kernels.attention import (
    plan_attention,
    ragged_attention_backward,
    ragged_attention_forward,
    ragged_attention_plain,
)
from bertrain.kernels.cross_entropy import cross_entropy, cross_entropy_plain
from bertrain.kernels.embedding import embed_backward, embed_forward, embed_plain, position_gradient
from bertrain.kernels.fp8 import LARGEST, cast_both_ways, transpose
from bertrain.kernels.geglu import geglu_backward, geglu_forward, geglu_plain
from bertrain.kernels.gelu import bias_gelu_backward, bias_gelu_forward, bias_gelu_plain
from bertrain.kernels.lamb import LambTable, Part, lamb_step, lamb_step_plain
from bertrain.kernels.layernorm import (
    dropout_add_layernorm_backward,
    dropout_add_layernorm_forward,
    dropout_add_layernorm_plain,
)
from bertrain.kernels.prenorm import add_layernorm_backward, add_layernorm_forward, add_layernorm_plain
from bertrain.kernels.reduction import column_sums, fp8_product, fp8_weight_gradient, weight_gradient
from bertrain.kernels.rotary import rotate, rotate_plain

Tensors = tuple[Tensor, ...]
NORM_EPS = 1e-12
LENGTHS = (130, 1, 17, 64, 44)  # of a bin of 256 tokens
TOLERANCE = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 4e-2, torch.float8_e5m2: 8e-2}
"""Norm of the difference over the norm of the twin's result that rounding explains."""
PATIENCE_S = 600  # for all kernels; a compiler that takes longer is taken to hang


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that its kernels are compiled for."""

    hidden: int
    heads: int
    inner: int
    vocabulary: int
    padded_vocabulary: int
    hidden_dropout: float
    attention_dropout: float
    fp8: bool
    family: Family = "bert"
    window: int = 0  # of ModernBERT's local attention, on each side


@dataclass(frozen=True)
class Result:
    """How one kernel did. `failure` is empty if it compiles, runs and agrees with its twin."""

    kernel: str
    error: float | None  # relative to the twin, the largest of all results and gradients; None if it did not end
    seconds: float  # compilation included
    failure: str


# --- a kernel and its twin, both ways; tests use these too -----------------------------------------------------------


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected; infinite where a number is not finite."""
    if not torch.isfinite(actual).all():
        return float("inf")
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def largest_error(actual: Tensors, expected: Tensors) -> float:
    return max(relative_error(one, other) for one, other in zip(actual, expected, strict=True))


def twin_both_ways(function: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> Tensors:
    """Result and gradients of a plain function, in float64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y = function(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy.double())


def boundaries(lengths: Sequence[int], device: str | torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def reduced(partials: Tensor) -> Tensors:
    """Partial sums [n, k, N] as k rows."""
    rows = [torch.full((partials.shape[2],), float("nan"), device=partials.device) for _ in range(partials.shape[1])]
    column_sums(partials, rows)
    return tuple(rows)


def attention_both_ways(
    qkv: Tensor, dout: Tensor, cu_seqlens: Tensor, p: float, seed: Tensor, site: int, window: int = 0
) -> Tensors:
    """The result, the gradients of queries, keys and values, and those of a bias added to each of the three."""
    plan, dropout = plan_attention(cu_seqlens, len(qkv)), Dropout(p, seed, site)
    out, lse, _ = ragged_attention_forward(qkv, plan, dropout, window=window)
    dqkv, partials, _ = ragged_attention_backward(qkv, out, lse, dout, plan, dropout, window=window)
    assert partials is not None
    dquery_bias, dvalue_bias = reduced(partials)
    return out, *dqkv.unbind(1), torch.stack([dquery_bias, torch.zeros_like(dquery_bias), dvalue_bias])


def rotary_tables(num_positions: int, head_size: int, device: str | torch.device, theta: float = 10_000.0) -> Rotary:
    exponents = torch.arange(0, head_size, 2, device=device) / head_size
    angles = torch.arange(num_positions, device=device)[:, None] * theta**-exponents
    return Rotary(angles.cos(), angles.sin())


def rotary_attention_both_ways(
    qkv: Tensor, dout: Tensor, lengths: Sequence[int], rotary: Rotary, dropout: Dropout, window: int
) -> Tensors:
    """The result of attention to rotated keys, and the gradients of queries, keys and values before the rotation."""
    plan, rotated = plan_attention(boundaries(lengths, qkv.device), len(qkv)), qkv.clone()
    rotate(rotated, positions_of(lengths, qkv.device), rotary)
    out, lse, _ = ragged_attention_forward(rotated, plan, dropout, window=window)
    dqkv, _, _ = ragged_attention_backward(rotated, out, lse, dout, plan, dropout, window=window, rotary=rotary)
    return out, dqkv


def rotary_attention_twin(
    qkv: Tensor, dout: Tensor, lengths: Sequence[int], rotary: Rotary, dropout: Dropout, window: int
) -> Tensors:
    bounds, positions = boundaries(lengths, qkv.device), positions_of(lengths, qkv.device)
    return twin_both_ways(
        lambda x: ragged_attention_plain(rotate_plain(x, positions, rotary), bounds, dropout, window), (qkv,), dout
    )


def positions_of(lengths: Sequence[int], device: str | torch.device) -> Tensor:
    return torch.cat([torch.arange(length, device=device) for length in lengths])


def prenorm_both_ways(inputs: Sequence[Tensor], dy: Tensor, along: Tensor | None, dropout: Dropout) -> Tensors:
    """Total and LayerNorm, one above the other; gradients of x, residual and weight."""
    x, residual, weight = inputs
    total, y, statistics, _ = add_layernorm_forward(x, residual, weight, dropout, NORM_EPS)
    dresidual, dx, partials, _ = add_layernorm_backward(dy, along, total, weight, statistics, dropout)
    return torch.cat([total, y]), dx, dresidual, *reduced(partials)


def prenorm_twin(inputs: Sequence[Tensor], dy: Tensor, along: Tensor | None, dropout: Dropout) -> Tensors:
    gradient = torch.cat([torch.zeros_like(dy) if along is None else along, dy])

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(add_layernorm_plain(x, residual, weight, dropout, NORM_EPS))

    return twin_both_ways(plain, inputs, gradient)


def geglu_both_ways(x: Tensor, dy: Tensor, dropout: Dropout) -> Tensors:
    return geglu_forward(x, dropout)[0], geglu_backward(dy, x, dropout)[0]


def attention_error(actual: Tensors, expected: Tensors) -> float:
    """The largest error, where the twin gives the gradient as one tensor.

    Queries and keys of sequences of length 1 have no gradient, nor has a bias of keys: what rounding leaves of them is
    measured against the whole, and against the terms of the sum.
    """
    out, *gradients, biases = actual
    whole = expected[1].norm()
    errors = [relative_error(out, expected[0])]
    for gradient, bias, reference in zip(gradients, biases, expected[1].unbind(1), strict=True):
        norm = reference.norm() if reference.norm() > 1e-6 * whole else whole
        errors.append(((gradient.double() - reference).norm() / norm).item())
        total = reference.sum(0).flatten()
        errors.append(((bias.double() - total).norm() / total.norm().maximum(norm)).item())
    return max(errors) if all(torch.isfinite(tensor).all() for tensor in actual) else float("inf")


def layernorm_both_ways(
    inputs: Sequence[Tensor], dy: Tensor, second: Tensor | None, p: float, seed: Tensor, site: int
) -> Tensors:
    x, bias, residual, weight, ln_bias = inputs
    parameters, dropout = NormParameters(bias, weight, ln_bias), Dropout(p, seed, site)
    y, statistics, _ = dropout_add_layernorm_forward(x, residual, parameters, dropout, NORM_EPS)
    dx, dresidual, partials, _ = dropout_add_layernorm_backward(
        dy, second, x, residual, parameters, statistics, dropout
    )
    dbias, dweight, dln_bias = reduced(partials)
    return y, dx, dbias, dresidual, dweight, dln_bias


def gelu_both_ways(x: Tensor, bias: Tensor, dy: Tensor) -> Tensors:
    y, _ = bias_gelu_forward(x, bias)
    dx, _, partials = bias_gelu_backward(dy, x, bias)
    return y, dx, *reduced(partials)


def embedding_both_ways(
    tables: EmbeddingTables,
    norm: tuple[Tensor, Tensor],
    ids: EmbeddingIds,
    dy: Tensor,
    second: Tensor,
    cu_seqlens: Tensor,
    p: float,
    seed: Tensor,
    site: int,
) -> Tensors:
    """Result, and gradients of words, positions, segments, and LayerNorm's weight and bias."""
    dropout = Dropout(p, seed, site)
    y, statistics = embed_forward(tables, ids, *norm, dropout, NORM_EPS)
    dsum, partials = embed_backward(dy, second, tables, ids, norm[0], statistics, dropout)
    dweight, dln_bias, *dsegments = reduced(partials)
    assert tables.positions is not None
    dpositions = torch.full(tables.positions.shape, float("nan"), device=dy.device)
    position_gradient(dsum, cu_seqlens, dpositions, accumulate=False)
    dwords = torch.ops.aten.embedding_dense_backward(dsum, ids[0], len(tables[0]), -1, False)
    return y, dwords, dpositions, torch.stack(dsegments), dweight, dln_bias


def word_embedding_both_ways(
    words: Tensor, weight: Tensor, ids: EmbeddingIds, dy: Tensor, second: Tensor, dropout: Dropout
) -> Tensors:
    """The same of words alone: result, and gradients of words and of LayerNorm's weight."""
    tables = EmbeddingTables(words)
    y, statistics = embed_forward(tables, ids, weight, None, dropout, NORM_EPS)
    dsum, partials = embed_backward(dy, second, tables, ids, weight, statistics, dropout)
    dwords = torch.ops.aten.embedding_dense_backward(dsum, ids.words, len(words), -1, False)
    return y, dwords, *reduced(partials)


def cross_entropy_both_ways(logits: Tensor, labels: Tensor, vocab_size: int, scale: float) -> tuple[Tensors, Tensors]:
    """(loss, right answers, gradient) of the kernel and of the twin."""
    written = logits.clone()
    loss, correct = cross_entropy(written, labels, vocab_size, torch.tensor([scale], device=logits.device))
    exact = logits.double().requires_grad_()
    expected, expected_correct = cross_entropy_plain(exact, labels, vocab_size, scale)
    (gradient,) = torch.autograd.grad(expected, exact)
    return (loss, correct, written), (expected.detach(), expected_correct, gradient)


OF_MODELS: dict[str, dict[str, Callable[[Sizes, str], tuple[float, float]]]] = {}
"""By family, what `model/fused_self_test.py` adds to the kernels' checks: error, and what it may be."""


# --- the child ------------------------------------------------------------------------------------------------------


class Checks:
    """One method for each kernel: the error, and what it may be."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes, self.device = sizes, device
        self.seed = torch.tensor([2**40 + 77], dtype=torch.int64, device=device)

    def all(self) -> dict[str, Callable[[], tuple[float, float]]]:
        kernels = {
            "bert": {
                "attention": self.attention, "LayerNorm": self.layernorm, "GELU": self.gelu,
                "embedding": self.embedding,
            },
            "modern": {
                "rotary attention": self.rotary_attention, "attention in a window": self.attention_in_window,
                "pre-norm": self.prenorm, "GeGLU": self.geglu, "embedding": self.word_embedding,
            },
        }[self.sizes.family]  # fmt: skip
        kernels |= {
            "cross-entropy": self.cross_entropy, "LAMB": self.lamb, "weight gradient": self.weight_gradient,
        }  # fmt: skip
        if self.sizes.fp8:
            kernels |= {
                "bert": {
                    "attention, FP8": self.attention_fp8, "LayerNorm, FP8": self.layernorm_fp8,
                    "GELU, FP8": self.gelu_fp8,
                },
                "modern": {
                    "attention in a window, FP8": self.attention_in_window_fp8, "pre-norm, FP8": self.prenorm_fp8,
                    "GeGLU, FP8": self.geglu_fp8,
                },
            }[self.sizes.family]  # fmt: skip
            kernels |= {"cast to FP8": self.cast, "products, FP8": self.products_fp8}
        models = OF_MODELS.get(self.sizes.family, {})
        return kernels | {name: functools.partial(check, self.sizes, self.device) for name, check in models.items()}

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        # Triton's interpreter has no bf16 of its own.
        sixteen_bits = torch.float32 if backend.INTERPRETED else torch.bfloat16
        return torch.randn(*shape, device=self.device).to(dtype or sixteen_bits)

    def fp8(self, dtype: torch.dtype, largest: float) -> Cast:
        scale = torch.tensor([LARGEST[dtype] / largest], device=self.device)
        return Cast(dtype, scale, torch.zeros(4096, device=self.device))

    def _attention_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        head_size = self.sizes.hidden // self.sizes.heads
        qkv = self.normal(sum(LENGTHS), 3, self.sizes.heads, head_size)
        return qkv, self.normal(sum(LENGTHS), self.sizes.heads, head_size), boundaries(LENGTHS, self.device)

    def attention(self) -> tuple[float, float]:
        (qkv, dout, bounds), p = self._attention_inputs(), self.sizes.attention_dropout
        actual = attention_both_ways(qkv, dout, bounds, p, self.seed, 3)
        dropout = Dropout(p, self.seed, 3)
        expected = twin_both_ways(lambda x: ragged_attention_plain(x, bounds, dropout), (qkv,), dout)
        return attention_error(actual, expected), TOLERANCE[torch.bfloat16]

    def rotary_attention(self) -> tuple[float, float]:
        return self._rotary_attention(0)

    def attention_in_window(self) -> tuple[float, float]:
        return self._rotary_attention(self.sizes.window)

    def _rotary_attention(self, window: int) -> tuple[float, float]:
        (qkv, dout, _), dropout = self._attention_inputs(), Dropout(self.sizes.attention_dropout, self.seed, 3)
        given = qkv, dout, LENGTHS, rotary_tables(max(LENGTHS), qkv.shape[3], self.device), dropout, window
        return largest_error(rotary_attention_both_ways(*given), rotary_attention_twin(*given)), TOLERANCE[
            torch.bfloat16
        ]

    def attention_in_window_fp8(self) -> tuple[float, float]:
        head_size = self.sizes.hidden // self.sizes.heads
        return self.attention_fp8(self.sizes.window, rotary_tables(max(LENGTHS), head_size, self.device))

    def attention_fp8(self, window: int = 0, rotary: Rotary | None = None) -> tuple[float, float]:
        qkv, dout, bounds = self._attention_inputs()
        plan, dropout = plan_attention(bounds, len(qkv)), Dropout(self.sizes.attention_dropout, self.seed, 3)
        out, sums, _ = ragged_attention_forward(qkv, plan, dropout, window=window)
        given = (qkv, out, sums, dout, plan, dropout)
        dqkv, *_ = ragged_attention_backward(*given, window=window, rotary=rotary)
        forward = self.fp8(torch.float8_e4m3fn, out.abs().max().item())
        backward = self.fp8(torch.float8_e5m2, dqkv.abs().max().item())
        _, _, out8 = ragged_attention_forward(qkv, plan, dropout, forward, window=window)
        _, _, dqkv8 = ragged_attention_backward(*given, backward, full=False, window=window, rotary=rotary)
        assert out8 is not None
        assert dqkv8 is not None
        pairs = (out8.rows, forward, out.flatten(1)), (dqkv8.rows, backward, dqkv.flatten(1))
        return max(self._widened_error(*pair) for pair in pairs), TOLERANCE[torch.float8_e5m2]

    def _widened_error(self, narrow: Tensor, cast: Cast, expected: Tensor) -> float:
        return relative_error(narrow.float() / cast.scale, expected)

    def _norm_inputs(self) -> tuple[list[Tensor], Tensor, Tensor]:
        num_rows, width = sum(LENGTHS), self.sizes.hidden
        x, residual, dy, second = (self.normal(num_rows, width) for _ in range(4))
        bias, weight, ln_bias = (self.normal(width, dtype=torch.float32) for _ in range(3))
        return [x, bias, residual, weight, ln_bias], dy, second

    def layernorm(self) -> tuple[float, float]:
        (inputs, dy, second), p = self._norm_inputs(), self.sizes.hidden_dropout
        actual = layernorm_both_ways(inputs, dy, second, p, self.seed, 2)
        dropout = Dropout(p, self.seed, 2)
        expected = twin_both_ways(
            functools.partial(dropout_add_layernorm_plain, dropout=dropout, eps=NORM_EPS), inputs, dy.double() + second
        )
        return largest_error(actual, expected), TOLERANCE[torch.bfloat16]

    def layernorm_fp8(self) -> tuple[float, float]:
        (x, bias, residual, weight, ln_bias), dy, second = self._norm_inputs()
        parameters, dropout = NormParameters(bias, weight, ln_bias), Dropout(self.sizes.hidden_dropout, self.seed, 2)
        y, statistics, _ = dropout_add_layernorm_forward(x, residual, parameters, dropout, NORM_EPS)
        given = (dy, second, x, residual, parameters, statistics, dropout)
        dx, *_ = dropout_add_layernorm_backward(*given)
        forward = self.fp8(torch.float8_e4m3fn, y.abs().max().item())
        backward = self.fp8(torch.float8_e5m2, dx.abs().max().item())
        _, _, y8 = dropout_add_layernorm_forward(x, residual, parameters, dropout, NORM_EPS, forward)
        *_, dx8 = dropout_add_layernorm_backward(*given, backward, full=False)
        assert y8 is not None
        assert dx8 is not None
        both = transpose(y8, forward)
        pairs = (both.rows, forward, y), (both.columns.t(), forward, y), (dx8.rows, backward, dx)
        return max(self._widened_error(*pair) for pair in pairs), TOLERANCE[torch.float8_e5m2]

    def _prenorm_inputs(self) -> tuple[list[Tensor], Tensor, Tensor, Dropout]:
        (x, _, residual, weight, _), dy, along = self._norm_inputs()
        return [x, residual, weight], dy, along, Dropout(self.sizes.attention_dropout, self.seed, 2)

    def prenorm(self) -> tuple[float, float]:
        given = self._prenorm_inputs()
        return largest_error(prenorm_both_ways(*given), prenorm_twin(*given)), TOLERANCE[torch.bfloat16]

    def prenorm_fp8(self) -> tuple[float, float]:
        (x, residual, weight), dy, along, dropout = self._prenorm_inputs()
        total, y, statistics, _ = add_layernorm_forward(x, residual, weight, dropout, NORM_EPS)
        _, dx, *_ = add_layernorm_backward(dy, along, total, weight, statistics, dropout)
        forward = self.fp8(torch.float8_e4m3fn, y.abs().max().item())
        backward = self.fp8(torch.float8_e5m2, dx.abs().max().item())
        *_, y8 = add_layernorm_forward(x, residual, weight, dropout, NORM_EPS, forward, full=False)
        *_, dx8 = add_layernorm_backward(dy, along, total, weight, statistics, dropout, backward, full=False)
        assert y8 is not None
        assert dx8 is not None
        both = transpose(y8, forward)
        pairs = (both.rows, forward, y), (both.columns.t(), forward, y), (dx8.rows, backward, dx)
        return max(self._widened_error(*pair) for pair in pairs), TOLERANCE[torch.float8_e5m2]

    def _geglu_inputs(self) -> tuple[Tensor, Tensor, Dropout]:
        num_rows, width = sum(LENGTHS), self.sizes.inner
        dropout = Dropout(self.sizes.hidden_dropout, self.seed, 4)
        return self.normal(num_rows, 2 * width), self.normal(num_rows, width), dropout

    def geglu(self) -> tuple[float, float]:
        x, dy, dropout = self._geglu_inputs()
        expected = twin_both_ways(lambda given: geglu_plain(given, dropout), (x,), dy)
        return largest_error(geglu_both_ways(x, dy, dropout), expected), TOLERANCE[torch.bfloat16]

    def geglu_fp8(self) -> tuple[float, float]:
        x, dy, dropout = self._geglu_inputs()
        y, dx = twin_both_ways(lambda given: geglu_plain(given, dropout), (x,), dy)
        forward = self.fp8(torch.float8_e4m3fn, y.abs().max().item())
        backward = self.fp8(torch.float8_e5m2, dx.abs().max().item())
        _, y8 = geglu_forward(x, dropout, forward, full=False)
        _, dx8 = geglu_backward(dy, x, dropout, backward, full=False)
        assert y8 is not None
        assert dx8 is not None
        pairs = (
            (y8.rows, forward, y), (y8.columns.t(), forward, y), (dx8.rows, backward, dx),
            (dx8.columns.t(), backward, dx),
        )  # fmt: skip
        return max(self._widened_error(*pair) for pair in pairs), TOLERANCE[torch.float8_e5m2]

    def word_embedding(self) -> tuple[float, float]:
        width, total = self.sizes.hidden, sum(LENGTHS)
        words, weight = self.normal(1000, width), self.normal(width, dtype=torch.float32)
        ids = EmbeddingIds(torch.randint(0, 1000, (total,), device=self.device))
        dy, second = self.normal(total, width), self.normal(total, width)
        dropout = Dropout(self.sizes.hidden_dropout, self.seed, 5)
        actual = word_embedding_both_ways(words, weight, ids, dy, second, dropout)

        def plain(words: Tensor, weight: Tensor) -> Tensor:
            return embed_plain(EmbeddingTables(words), ids, weight, None, dropout, NORM_EPS)

        expected = twin_both_ways(plain, (words, weight), dy.double() + second.double())
        return largest_error(actual, expected), TOLERANCE[torch.bfloat16]

    def _gelu_inputs(self) -> Tensors:
        num_rows, width = sum(LENGTHS), self.sizes.inner
        return self.normal(num_rows, width), self.normal(width, dtype=torch.float32), self.normal(num_rows, width)

    def gelu(self) -> tuple[float, float]:
        x, bias, dy = self._gelu_inputs()
        actual, expected = gelu_both_ways(x, bias, dy), twin_both_ways(bias_gelu_plain, (x, bias), dy)
        return largest_error(actual, expected), TOLERANCE[torch.bfloat16]

    def gelu_fp8(self) -> tuple[float, float]:
        x, bias, dy = self._gelu_inputs()
        y, dx, _ = twin_both_ways(bias_gelu_plain, (x, bias), dy)
        forward = self.fp8(torch.float8_e4m3fn, y.abs().max().item())
        backward = self.fp8(torch.float8_e5m2, dx.abs().max().item())
        _, y8 = bias_gelu_forward(x, bias, forward, full=False)
        _, dx8, _ = bias_gelu_backward(dy, x, bias, backward, full=False)
        assert y8 is not None
        assert dx8 is not None
        pairs = (y8.rows, forward, y), (y8.columns.t(), forward, y), (dx8.rows, backward, dx)
        return max(self._widened_error(*pair) for pair in pairs), TOLERANCE[torch.float8_e5m2]

    def embedding(self) -> tuple[float, float]:
        width, total, p = self.sizes.hidden, sum(LENGTHS), self.sizes.hidden_dropout
        leaves = [
            self.normal(1000, width), *(self.normal(count, width, dtype=torch.float32) for count in (max(LENGTHS), 2))
        ]  # fmt: skip
        tables = EmbeddingTables(*leaves)
        norm = self.normal(width, dtype=torch.float32), self.normal(width, dtype=torch.float32)
        positions = torch.cat([torch.arange(length, device=self.device) for length in LENGTHS])
        words, segments = (torch.randint(0, count, (total,), device=self.device) for count in (1000, 2))
        ids = EmbeddingIds(words, positions, segments)
        dy, second = self.normal(total, width), self.normal(total, width)
        bounds, dropout = boundaries(LENGTHS, self.device), Dropout(p, self.seed, 5)
        actual = embedding_both_ways(tables, norm, ids, dy, second, bounds, p, self.seed, 5)

        def plain(words: Tensor, positions: Tensor, segments: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return embed_plain(EmbeddingTables(words, positions, segments), ids, weight, bias, dropout, NORM_EPS)

        expected = twin_both_ways(plain, (*leaves, *norm), dy.double() + second.double())
        return largest_error(actual, expected), TOLERANCE[torch.bfloat16]

    def cross_entropy(self) -> tuple[float, float]:
        logits = 3 * self.normal(64, self.sizes.padded_vocabulary)
        labels = torch.randint(0, self.sizes.vocabulary, (64,), device=self.device)
        labels[[1, -1]] = -100
        actual, expected = cross_entropy_both_ways(logits, labels, self.sizes.vocabulary, 1 / 62)
        return largest_error(actual, expected), TOLERANCE[torch.bfloat16]

    def lamb(self) -> tuple[float, float]:
        parts = [Part(0, 4096, 0, True, True), Part(4096, 4160, 1, False, False)]
        table = LambTable.build(parts, len(parts), self.device)
        buffers = [self.normal(4160, dtype=torch.float32) for _ in range(4)]
        buffers[3].square_()
        exact = [tensor.double() for tensor in buffers]
        scalars = LambScalars(*(torch.tensor([value], device=self.device) for value in (0.01, 0.3, 1.0, 2.0)))
        copy = torch.zeros(4160, dtype=torch.bfloat16, device=self.device)
        lamb_step(LambBuffers(*buffers), table, scalars, copy=copy)
        lamb_step_plain(LambBuffers(*exact), table, scalars)
        return largest_error((*buffers, copy), (*exact, exact[0])), TOLERANCE[torch.bfloat16]

    def weight_gradient(self) -> tuple[float, float]:
        x, dy = self.normal(sum(LENGTHS), self.sizes.hidden), self.normal(sum(LENGTHS), self.sizes.inner)
        gradient = torch.zeros(self.sizes.inner, self.sizes.hidden, device=self.device)
        weight_gradient(dy, x, gradient, accumulate=False)
        weight_gradient(dy, x, gradient, accumulate=True)
        return relative_error(gradient, 2 * dy.double().t() @ x.double()), TOLERANCE[torch.bfloat16]

    def cast(self) -> tuple[float, float]:
        values = self.normal(sum(LENGTHS), self.sizes.hidden)
        cast = self.fp8(torch.float8_e4m3fn, values.abs().max().item())
        rows, columns = cast_both_ways(values, cast)
        errors = [self._widened_error(narrow, cast, values) for narrow in (rows, columns.t())]
        return max(errors), TOLERANCE[torch.float8_e4m3fn]

    def products_fp8(self) -> tuple[float, float]:
        x, matrix = self.normal(sum(LENGTHS), self.sizes.hidden), self.normal(self.sizes.inner, self.sizes.hidden)
        dy = self.normal(sum(LENGTHS), self.sizes.inner)
        casts = [
            self.fp8(torch.float8_e4m3fn, 8.0),
            self.fp8(torch.float8_e4m3fn, 8.0),
            self.fp8(torch.float8_e5m2, 8.0),
        ]
        x8, matrix8, dy8 = (cast_both_ways(value, cast) for value, cast in zip((x, matrix, dy), casts, strict=True))
        inverse = [1 / cast.scale for cast in casts]
        y = fp8_product(x8.rows, inverse[0], matrix8.rows, inverse[1])
        gradient = torch.zeros(self.sizes.inner, self.sizes.hidden, device=self.device)
        fp8_weight_gradient(dy8.columns, inverse[2], x8.columns, inverse[0], gradient, accumulate=False)
        expected = x.double() @ matrix.double().t(), dy.double().t() @ x.double()
        return largest_error((y, gradient), expected), TOLERANCE[torch.float8_e5m2]


def main() -> None:
    """Run every kernel for the sizes on standard input; prints a JSON line before and after each."""
    given = json.load(sys.stdin)
    device = given.pop("device")
    torch.manual_seed(1)
    checks = Checks(Sizes(**given), device)  # takes the GPU, so another process that keeps it ends this one here
    for kernel, check in checks.all().items():
        print(json.dumps({"begin": kernel}), flush=True)
        begin, error, failure = time.perf_counter(), None, ""
        try:
            error, bound = check()
            if not error <= bound:
                failure = f"differs from plain PyTorch by {error:.2g}, which rounding does not explain"
        except torch.OutOfMemoryError:
            print(json.dumps({"full": device}), flush=True)
            return
        except Exception as raised:  # of a compiler or a driver; the other kernels are tried
            failure = (str(raised).splitlines() or [type(raised).__name__])[0][:200]
            print(raised, file=sys.stderr)
        result = Result(kernel, error, round(time.perf_counter() - begin, 2), failure)
        print(json.dumps(asdict(result)), flush=True)


# --- the parent -----------------------------------------------------------------------------------------------------


def child_command() -> list[str]:
    return [sys.executable, "-m", "bertrain.model.fused_self_test"]


def examine(sizes: Sizes, device: str) -> tuple[list[Result], str]:
    """Run the child: a result for each kernel that it reached, and what it printed to standard error.

    A child that does not get the GPU, or not enough of its memory, says nothing about kernels.
    """
    given = json.dumps(asdict(sizes) | {"device": device})
    try:
        ended = subprocess.run(
            child_command(), input=given, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        output, errors, ending = ended.stdout, ended.stderr, f"ended its process with code {ended.returncode}"
    except subprocess.TimeoutExpired as slow:
        output, errors = (os.fsdecode(part or b"") for part in (slow.stdout, slow.stderr))
        ending = f"was not ready after {PATIENCE_S} seconds"
    except OSError as error:  # no process could be started
        return [], str(error)
    results, begun = [], ""
    for line in output.splitlines():
        if not line.startswith('{"'):  # a library's word
            continue
        record = json.loads(line)
        begun = record.get("begin", "")
        if "kernel" in record:
            results.append(check_value(record, Result))
    if begun:
        results.append(Result(begun, None, 0.0, ending))
    return results, errors


def cache_file(sizes: Sizes, device: torch.device) -> Path:
    """Where the results for these sizes on this machine are kept."""
    sources = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted([*package.glob("kernels/*.py"), *package.glob("model/*.py")]):
        sources.update(path.read_bytes())
    versions = [torch.__version__, backend.triton.__version__ if backend.triton else "", platform.python_version()]
    gpu: list[str] = []
    if device.type == "cuda":
        gpu = [torch.cuda.get_device_name(device), read_or_empty(Path("/proc/driver/nvidia/version"))]
    key = hashlib.sha256(json.dumps([asdict(sizes), versions, gpu, sources.hexdigest()]).encode()).hexdigest()[:24]
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "bertrain" / "kernels" / f"{key}.json"


@functools.cache
def results_here(sizes: Sizes, device: torch.device) -> tuple[Result, ...]:
    """The kernels' results on this machine: those kept, or those of a child process started now."""
    place = cache_file(sizes, device)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a node wait for the one that runs the kernels
            try:
                return tuple(load_json(place, [Result]))
            except (OSError, JsonError):
                results, is_whole = _examined(sizes, device)
                if is_whole:
                    write_atomically(place, json.dumps([asdict(result) for result in results], indent=1) + "\n")
                return results
    except OSError:  # no folder to keep results in
        return _examined(sizes, device)[0]


def _examined(sizes: Sizes, device: torch.device) -> tuple[tuple[Result, ...], bool]:
    """The results, and whether they tell of every kernel."""
    note("info", "kernels", f"running every kernel once on {device} before the first step")
    results, errors = examine(sizes, str(device))
    has_failed = any(result.failure for result in results)
    is_whole = has_failed or len(results) == len(Checks(sizes, "cpu").all())
    if has_failed or not is_whole:
        note("warning", "kernels", errors[-20_000:] or "the kernels could not be run before the first step")
    return tuple(results), is_whole


def why_failed(sizes: Sizes, device: torch.device) -> str:
    """The first kernel that does not work on this machine, and why; empty if all do."""
    failed = [result for result in results_here(sizes, device) if result.failure]
    return f"the kernel {failed[0].kernel} failed here: {failed[0].failure}" if failed else ""
