"""Each kernel forward and backward, and its twin in plain PyTorch: what the self-test and the tests compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bertrain.kernels.arguments import (
    Dropout,
    EmbeddingIds,
    EmbeddingTables,
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
from bertrain.kernels.embedding import embed_backward, embed_forward, position_gradient
from bertrain.kernels.geglu import geglu_backward, geglu_forward
from bertrain.kernels.gelu import bias_gelu_backward, bias_gelu_forward
from bertrain.kernels.layernorm import (
    dropout_add_layernorm_backward,
    dropout_add_layernorm_forward,
)
from bertrain.kernels.prenorm import add_layernorm_backward, add_layernorm_forward, add_layernorm_plain
from bertrain.kernels.reduction import column_sums
from bertrain.kernels.rotary import rotate, rotate_plain

Tensors = tuple[Tensor, ...]
NORM_EPS = 1e-12


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
