"""The checks of the self-test: every kernel on a small ragged bin, against its twin. `main` is the child process."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

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
from bertrain.kernels.embedding import embed_plain
from bertrain.kernels.fp8 import LARGEST, cast_both_ways, transpose
from bertrain.kernels.geglu import geglu_backward, geglu_forward, geglu_plain
from bertrain.kernels.gelu import bias_gelu_backward, bias_gelu_forward, bias_gelu_plain
from bertrain.kernels.lamb import LambTable, Part, lamb_step, lamb_step_plain
from bertrain.kernels.layernorm import (
    dropout_add_layernorm_backward,
    dropout_add_layernorm_forward,
    dropout_add_layernorm_plain,
)
from bertrain.kernels.prenorm import add_layernorm_backward, add_layernorm_forward
from bertrain.kernels.reduction import fp8_product, fp8_weight_gradient, weight_gradient
from bertrain.kernels.self_test_twins import (
    NORM_EPS,
    Tensors,
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
    relative_error,
    rotary_attention_both_ways,
    rotary_attention_twin,
    rotary_tables,
    twin_both_ways,
    word_embedding_both_ways,
)

LENGTHS = (130, 1, 17, 64, 44)  # of a bin of 256 tokens
TOLERANCE = {torch.bfloat16: 1e-2, torch.float8_e4m3fn: 4e-2, torch.float8_e5m2: 8e-2}
"""Norm of the difference over the norm of the twin's result that rounding explains."""


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


OF_MODELS: dict[str, dict[str, Callable[[Sizes, str], tuple[float, float]]]] = {}
"""By family, what `model/fused_self_test.py` adds to the kernels' checks: error, and what it may be."""


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
    if device.startswith("cuda"):
        torch.cuda.set_device(device)  # Triton launches on the current one
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
