"""Each kernel run forward and backward beside its plain twin in float64: what the tests on a CPU and on a GPU share.

`..._both_ways` returns a result and its gradients in the order of the twin's arguments; `twin_both_ways` returns the
same from the specification under autograd.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bertrain.kernels.arguments import (
    Cast,
    Dropout,
    EmbeddingIds,
    EmbeddingTables,
    Fp8Rows,
    LambBuffers,
    LambScalars,
    NormParameters,
)
from bertrain.kernels.attention import plan_attention, ragged_attention_backward, ragged_attention_forward
from bertrain.kernels.fp8 import cast_plain
from bertrain.kernels.gelu import bias_gelu_plain
from bertrain.kernels.lamb import LambTable, Part, lamb_step, lamb_step_plain
from bertrain.kernels.layernorm import dropout_add_layernorm_backward, dropout_add_layernorm_forward
from bertrain.kernels.prenorm import add_layernorm_backward, add_layernorm_forward
from bertrain.kernels.self_test_twins import (  # noqa: F401 - tests call them as members of this module
    NORM_EPS,
    attention_both_ways,
    attention_error,
    boundaries,
    cross_entropy_both_ways,
    embedding_both_ways,
    geglu_both_ways,
    gelu_both_ways,
    largest_error,
    layernorm_both_ways,
    prenorm_both_ways,
    prenorm_twin,
    reduced,
    rotary_attention_both_ways,
    rotary_attention_twin,
    rotary_tables,
    twin_both_ways,
    word_embedding_both_ways,
)
from bertrain.kernels.self_test_twins import relative_error as error  # noqa: F401

Tensors = tuple[Tensor, ...]
GELU_ERROR = 4e-6, 8e-6
"""What the fitted curve of GELU and its slope may be off by, absolutely."""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality to the last bit, which holds for NaN too."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def twice(function: Callable[[], Tensors]) -> Tensors:
    """The result of a kernel, which must be the same bit for bit when it runs again."""
    first, second = function(), function()
    assert all(same_bits(one, other) for one, other in zip(first, second, strict=True))
    return first


def random_lengths(count: int, longest: int) -> list[int]:
    """Lengths that no run saw before, printed so that a failure can be repeated."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"lengths drawn with seed {seed}")
    return torch.randint(0, longest + 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# --- the kernels, both ways -------------------------------------------------------------------------


def gelu_curve_error(device: str) -> tuple[float, float]:
    """Largest absolute error of GELU and of its slope in float32, over all that is not flat or straight."""
    x = torch.linspace(-12, 12, 4096, device=device).view(32, 128)
    bias, ones = torch.zeros(128, device=device), torch.ones(32, 128, device=device)
    actual, expected = gelu_both_ways(x, bias, ones), twin_both_ways(bias_gelu_plain, (x, bias), ones)
    value, slope = ((actual[i].double() - expected[i]).abs().max().item() for i in (0, 1))
    return value, slope


def embedding_case(
    lengths: Sequence[int], num_words: int, num_positions: int, width: int, dtype: torch.dtype, device: str
) -> tuple[EmbeddingTables, tuple[Tensor, Tensor], EmbeddingIds, Tensor]:
    """Tables, LayerNorm's parameters, ids of words, positions and segments, and boundaries; words come in `dtype`."""
    total = sum(lengths)
    tables = tuple(torch.randn(count, width, device=device) for count in (num_words, num_positions, 2))
    norm = 1 + torch.randn(width, device=device), torch.randn(width, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    words = torch.randint(0, num_words, (total,), device=device)
    ids = EmbeddingIds(words, positions, torch.randint(0, 2, (total,), device=device))
    return EmbeddingTables(tables[0].to(dtype), tables[1], tables[2]), norm, ids, boundaries(lengths, device)


def cross_entropy_case(num_rows: int, width: int, vocab_size: int, dtype: torch.dtype, device: str) -> Tensors:
    """Logits and labels: right and wrong answers, ties, an overflow to avoid, padding and empty slots."""
    logits = 3 * torch.randn(num_rows, width, device=device).to(dtype)
    labels = torch.randint(0, vocab_size, (num_rows,), device=device)
    right, tied = torch.arange(num_rows // 2), torch.arange(num_rows // 4)
    logits[right, labels[right]] = 30.0
    logits[tied, (labels[tied] + 1) % vocab_size] = 30.0  # only the first largest counts
    logits[num_rows - 4, 3] = 200.0  # far from its label: the sum relative to the label would overflow
    logits[:, vocab_size:] = 90.0  # padding columns must not be seen
    labels[1], labels[-1] = -100, -100
    return logits, labels


class LambCase:
    """Buffers of five tensors, and what a step is told: of all kinds, one of them all zero."""

    sizes = (5000, 3, 1024, 12345, 16)
    flags = ((True, True), (False, False), (True, True), (True, True), (False, True))

    def __init__(self, padding: int, device: str) -> None:
        offsets = [0]
        for size in self.sizes:
            offsets.append(offsets[-1] + -(-size // padding) * padding)
        bounds = zip(offsets, offsets[1:], self.flags, strict=False)
        parts = [Part(start, stop, number, *flags) for number, (start, stop, flags) in enumerate(bounds)]
        self.table = LambTable.build(parts, len(parts), device)
        self.gradients = torch.randn(offsets[-1], device=device)
        moments = torch.randn(offsets[-1], device=device), torch.randn(offsets[-1], device=device).square()
        self.buffers = [torch.randn(offsets[-1], device=device), self.gradients.clone(), *moments]
        self.buffers[0][offsets[2] : offsets[3]] = 0  # a weight norm of zero: no ratio
        self.exact = [tensor.double() for tensor in self.buffers]
        self.copy = torch.full((offsets[-1],), float("nan"), dtype=torch.bfloat16, device=device)
        self.scalars = [torch.tensor([value], device=device) for value in (0.01, 0.3, 1.0, 1.0)]  # rate, clip, apply, t

    def step(self, number: int, apply: bool = True) -> None:
        self.buffers[1].copy_(self.gradients)
        self.scalars[2].fill_(float(apply))
        self.scalars[3].fill_(number)
        lamb_step(LambBuffers(*self.buffers), self.table, LambScalars(*self.scalars), copy=self.copy)

    def step_of_the_twin(self, number: int) -> None:
        self.exact[1].copy_(self.gradients)
        self.scalars[3].fill_(number)
        lamb_step_plain(LambBuffers(*self.exact), self.table, LambScalars(*self.scalars))


# --- 8 bits -----------------------------------------------------------------------------------------

MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
EXPONENTS = {torch.float8_e4m3fn: (-6, 8), torch.float8_e5m2: (-14, 15)}


def cast_at(scale: float, dtype: torch.dtype, device: str) -> Cast:
    """A cast whose peaks are zero, as they are before a kernel writes them."""
    return Cast(dtype, torch.tensor([scale], device=device), torch.zeros(4096, device=device))


def held_exactly(num_rows: int, width: int, dtype: torch.dtype, device: str, smallest: float = 0.0) -> Tensor:
    """Values, positive and negative, that the format holds without rounding, none below `smallest` in magnitude."""
    steps = 1 << MANTISSA_BITS[dtype]
    low, high = EXPONENTS[dtype]
    exponents = torch.arange(low, high, device=device).repeat_interleave(steps)
    mantissas = torch.arange(steps, device=device).repeat(high - low)
    magnitudes = (1 + mantissas / steps) * torch.exp2(exponents.float())
    magnitudes = magnitudes[magnitudes >= smallest]
    drawn = magnitudes[torch.randint(0, len(magnitudes), (num_rows, width), device=device)]
    return drawn * (torch.randint(0, 2, drawn.shape, device=device) * 2 - 1)


def is_cast_of(rows: Tensor, columns: Tensor, values: Tensor, cast: Cast) -> bool:
    """Whether the 8-bit copies, as they lie and transposed, are those of float32 values to the last byte."""
    expected = cast_plain(values, cast.scale, cast.dtype)
    return same_bits(rows, expected) and same_bits(columns, expected.t())


Written = list[tuple[Tensor, Fp8Rows, Cast]]
"""What a kernel wrote in full, the same in 8 bits, and by which scale."""


def layernorm_in_bytes(num_rows: int, width: int, dtype: torch.dtype, device: str, *, full: bool = True) -> Written:
    """LayerNorm both ways on numbers drawn anew; without `full` its gradient is written in 8 bits only."""
    rows, vectors = (torch.randn(2, num_rows, width, device=device) for _ in range(2)), torch.randn(3, width)
    (x, residual), (dy, second) = (pair.to(dtype) for pair in rows)
    bias, weight, ln_bias = vectors.to(device)
    parameters, dropout = NormParameters(bias, weight, ln_bias), Dropout(0.1, torch.tensor([7], device=device), 2)
    to_rows, to_gradient = (
        cast_at(scale, kind, device) for scale, kind in zip((3.7, 900.0), MANTISSA_BITS, strict=True)
    )
    y, statistics, y8 = dropout_add_layernorm_forward(x, residual, parameters, dropout, NORM_EPS, to_rows)
    dx, _, _, dx8 = dropout_add_layernorm_backward(
        dy, second, x, residual, parameters, statistics, dropout, to_gradient, full=full
    )
    assert y8 is not None
    assert dx8 is not None
    return [(y, y8, to_rows), (dx, dx8, to_gradient)]


def prenorm_in_bytes(num_rows: int, width: int, dtype: torch.dtype, device: str) -> Written:
    """The same of `prenorm.py`."""
    x, residual, dy, along = torch.randn(4, num_rows, width, device=device).to(dtype)
    weight, dropout = torch.randn(width, device=device), Dropout(0.1, torch.tensor([7], device=device), 2)
    to_rows, to_gradient = (
        cast_at(scale, kind, device) for scale, kind in zip((3.7, 900.0), MANTISSA_BITS, strict=True)
    )
    total, y, statistics, y8 = add_layernorm_forward(x, residual, weight, dropout, NORM_EPS, to_rows)
    _, dx, _, dx8 = add_layernorm_backward(dy, along, total, weight, statistics, dropout, to_gradient)
    assert y8 is not None
    assert dx8 is not None
    return [(y, y8, to_rows), (dx, dx8, to_gradient)]


def attention_in_bytes(
    lengths: Sequence[int], num_heads: int, head_dim: int, dtype: torch.dtype, device: str, *, full: bool = True
) -> Written:
    """Attention both ways on numbers drawn anew; without `full` its gradient is written in 8 bits only."""
    total, dropout = sum(lengths), Dropout(0.1, torch.tensor([7], device=device), 2)
    qkv = torch.randn(total, 3, num_heads, head_dim, device=device).to(dtype)
    dout = torch.randn(total, num_heads, head_dim, device=device).to(dtype)
    plan = plan_attention(boundaries(lengths, device), total)
    # Powers of two: a kernel multiplies its own factor and the scale first, and with others that product is rounded.
    to_rows, to_gradient = (
        cast_at(scale, kind, device) for scale, kind in zip((64.0, 1024.0), MANTISSA_BITS, strict=True)
    )
    out, lse, out8 = ragged_attention_forward(qkv, plan, dropout, to_rows)
    dqkv, _, dqkv8 = ragged_attention_backward(qkv, out, lse, dout, plan, dropout, to_gradient, full=full)
    assert out8 is not None
    assert dqkv8 is not None
    return [(out.flatten(1), out8, to_rows), (dqkv.flatten(1), dqkv8, to_gradient)]
