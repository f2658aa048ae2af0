"""The kernels in Triton's interpreter, on the CPU: the same code a GPU runs, on small cases, in float32.

    TRITON_INTERPRET=1 python -m tests.interpreted

prints what each of CASES measures, as JSON, or those whose names have a word that follows on the command line; those of
LONG are left out, and `--long` measures them alone. `tests/numerics/test_kernels_interpreted.py` checks it. Triton
decides when it is imported whether kernels are compiled or interpreted, hence a process of its own.

What the interpreter cannot do is left to tests/gpu: bf16 through tensor descriptors, and rounding to 8 bits (it
drops the carry out of the mantissa), so that 8-bit cases here use values which need no rounding.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from bertrain.kernels import layernorm as layernorm_kernels
from bertrain.kernels import prenorm as prenorm_kernels
from bertrain.kernels.arguments import Dropout, EmbeddingIds, EmbeddingTables, Fp8Rows
from bertrain.kernels.attention import TILE, plan_attention, ragged_attention_plain
from bertrain.kernels.backend import available
from bertrain.kernels.embedding import embed_plain, position_gradient
from bertrain.kernels.fp8 import LARGEST, Scales, cast_both_ways, cast_plain, empty_both_ways, transpose
from bertrain.kernels.geglu import geglu_backward, geglu_forward, geglu_plain
from bertrain.kernels.gelu import bias_gelu_backward, bias_gelu_forward, bias_gelu_plain
from bertrain.kernels.layernorm import dropout_add_layernorm_plain
from bertrain.kernels.prenorm import add_layernorm_forward, layernorm_forward
from bertrain.kernels.random import attention_keep_mask, rows_keep_mask
from bertrain.kernels.reduction import column_sums
from bertrain.kernels.self_test_checks import Sizes
from bertrain.model import fused_modern, fused_self_test
from bertrain.optim.clipping import clip_factor, norm
from bertrain.optim.verdict import Verdict
from bertrain.ranks.parallel import Ranks
from bertrain.training.fused_engine import FusedEngine
from bertrain.training.state import TrainState
from tests import helpers, twins, whole_model

SEED = torch.tensor([2**40 + 5])
NO_DROPOUT = Dropout(0.0, SEED, 0)
FLOAT32 = 2e-6
MODERN = {"model__family": "modern", "model__local_window": 6, "model__global_every": 2}
CASES: dict[str, tuple[Callable[[], float], float]] = {}
LONG: set[str] = set()
"""Cases that take many seconds, of what others check with another head or family."""


def case(
    name: str, bound: float, *arguments: object, is_long: bool = False
) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Have a function measured with these arguments, against an inclusive bound; 0 says that it must hold exactly."""

    def add(function: Callable[..., float]) -> Callable[..., float]:
        CASES[name] = (lambda: function(*arguments)), bound
        LONG.update({name} if is_long else ())
        return function

    return add


@case("attention", FLOAT32, 0.0, 1)
@case("attention with dropout", FLOAT32, 0.1, 1)
@case("attention with extreme scores", 5e-5, 0.1, 60)
def attention(p: float, query_scale: float) -> float:
    lengths = [21, 1, 70, 0]
    cu_seqlens = twins.boundaries(lengths, "cpu")
    qkv, dout = torch.randn(sum(lengths), 3, 2, 16), torch.randn(sum(lengths), 2, 16)
    qkv[:, 0] *= query_scale
    actual = twins.attention_both_ways(qkv, dout, cu_seqlens, p, SEED, 5)
    expected = twins.twin_both_ways(lambda x: ragged_attention_plain(x, cu_seqlens, Dropout(p, SEED, 5)), [qkv], dout)
    return twins.attention_error(actual, expected)


@case("attention replays its mask", 0)
def attention_mask() -> float:
    # With zero queries all weights of a row are equal, so one-hot values show the mask in the result, and one-hot
    # gradients show it again in the gradient of the values.
    before, length = 17, 32
    cu_seqlens, places = twins.boundaries([before, length], "cpu"), torch.arange(length)
    qkv, dout = torch.zeros(before + length, 3, 2, 32), torch.zeros(before + length, 2, 32)
    qkv[before + places, 2, :, places] = 1
    dout[before + places, :, places] = 1
    out, _, _, dvalues, _ = twins.attention_both_ways(qkv, dout, cu_seqlens, 0.1, SEED, 9)
    expected = attention_keep_mask(SEED, 9, 2, before, length, 0.1)
    forward = (out[before:].permute(1, 0, 2) != 0) != expected
    backward = (dvalues[before:].permute(1, 2, 0) != 0) != expected
    return float(forward.sum() + backward.sum())


@case("attention's plan", 0)
def plan() -> float:
    lengths = [65, 0, 1, 200, 64]
    tiles = plan_attention(twins.boundaries(lengths, "cpu"), sum(lengths)).tiles
    assert tiles is not None
    used = [tile[:3] for tile in tiles.tolist() if tile[1] > 0]
    starts = twins.boundaries(lengths, "cpu").tolist()
    longest_first = sorted(zip(lengths, starts, strict=False), key=lambda pair: -pair[0])
    return float(used != [[start, length, row] for length, start in longest_first for row in range(0, length, TILE)])


@case("attention in a window", FLOAT32, [21, 1, 70, 0], 5, 0.0, 1)
@case("attention in a window, dropout", FLOAT32, [2, 150, 33], 24, 0.1, 1)
@case("attention in a window as wide as tiles", FLOAT32, [64, 200, 63, 65], 64, 0.0, 1)
@case("attention in a window that sees neighbors", FLOAT32, [130, 1], 1, 0.1, 1)
@case("attention in a window beyond the sequences", FLOAT32, [70, 3], 500, 0.0, 1)
@case("attention in a window, extreme scores", 5e-5, [140, 9], 20, 0.1, 60)
def attention_in_window(lengths: list[int], window: int, p: float, query_scale: float) -> float:
    cu_seqlens = twins.boundaries(lengths, "cpu")
    qkv, dout = torch.randn(sum(lengths), 3, 1, 16), torch.randn(sum(lengths), 1, 16)
    qkv[:, 0] *= query_scale
    actual = twins.attention_both_ways(qkv, dout, cu_seqlens, p, SEED, 5, window)
    expected = twins.twin_both_ways(
        lambda x: ragged_attention_plain(x, cu_seqlens, Dropout(p, SEED, 5), window), [qkv], dout
    )
    return twins.attention_error(actual, expected)


@case("rotary attention", FLOAT32, [21, 1, 70], 16, 0, 0.0)
@case("rotary attention in a window", FLOAT32, [5, 75], 32, 9, 0.1)
@case("rotary attention of many tiles", FLOAT32, [1100, 65], 16, 64, 0.0)
def rotary_attention(lengths: list[int], head_size: int, window: int, p: float) -> float:
    qkv, dout = torch.randn(sum(lengths), 3, 1, head_size), torch.randn(sum(lengths), 1, head_size)
    given = lengths, twins.rotary_tables(max(lengths) + 3, head_size, "cpu"), Dropout(p, SEED, 5), window
    actual, expected = (
        twins.rotary_attention_both_ways(qkv, dout, *given),
        twins.rotary_attention_twin(qkv, dout, *given),
    )
    return twins.largest_error(actual, expected)


@case("pre-norm", FLOAT32, 0.0, True)
@case("pre-norm with dropout", FLOAT32, 0.1, True)
@case("pre-norm of one gradient", FLOAT32, 0.1, False)
def prenorm(p: float, is_pair: bool) -> float:
    inputs, dy = [torch.randn(9, 96), torch.randn(9, 96), torch.randn(96)], torch.randn(9, 96)
    given = inputs, dy, torch.randn(9, 96) if is_pair else None, Dropout(p, SEED, 2)
    return twins.largest_error(twins.prenorm_both_ways(*given), twins.prenorm_twin(*given))


@case("pre-norm again", 0)
def prenorm_again() -> float:
    """LayerNorm of a stored total has the bits that it had when the total was computed."""
    x, residual, weight, dropout = torch.randn(9, 96), torch.randn(9, 96), torch.randn(96), Dropout(0.1, SEED, 2)
    total, y, _, _ = add_layernorm_forward(x, residual, weight, dropout, twins.NORM_EPS)
    return float(not torch.equal(layernorm_forward(total, weight, twins.NORM_EPS)[0], y))


@case("GeGLU", 5e-6, 0.0)
@case("GeGLU with dropout", 5e-6, 0.1)
def geglu(p: float) -> float:
    x, dy, dropout = 3 * torch.randn(9, 112), torch.randn(9, 56), Dropout(p, SEED, 4)
    expected = twins.twin_both_ways(lambda given: geglu_plain(given, dropout), [x], dy)
    return twins.largest_error(twins.geglu_both_ways(x, dy, dropout), expected)


@case("embeddings of words alone", FLOAT32, 0.0)
@case("embeddings of words alone, dropout", FLOAT32, 0.1)
def word_embeddings(p: float) -> float:
    (words, _, _), (weight, _), ids, _ = twins.embedding_case([5, 1, 9], 40, 12, 96, torch.float32, "cpu")
    dy, second, dropout = torch.randn(15, 96), torch.randn(15, 96), Dropout(p, SEED, 3)
    ids = EmbeddingIds(ids.words)
    actual = twins.word_embedding_both_ways(words, weight, ids, dy, second, dropout)
    expected = twins.twin_both_ways(
        lambda words, weight: embed_plain(EmbeddingTables(words), ids, weight, None, dropout, twins.NORM_EPS),
        [words, weight], dy + second,
    )  # fmt: skip
    return twins.largest_error(actual, expected)


def rows_case() -> list[torch.Tensor]:
    return [torch.randn(9, 96), torch.randn(96), torch.randn(9, 96), torch.randn(96), torch.randn(96)]


@case("LayerNorm", FLOAT32, 0.0, False)
@case("LayerNorm with dropout", FLOAT32, 0.1, False)
@case("LayerNorm of two gradients", FLOAT32, 0.1, True)
def layernorm(p: float, is_pair: bool) -> float:
    inputs, dy, second = rows_case(), torch.randn(9, 96), torch.randn(9, 96) if is_pair else None
    actual = twins.layernorm_both_ways(inputs, dy, second, p, SEED, 2)
    total = dy if second is None else dy + second
    expected = twins.twin_both_ways(
        lambda *tensors: dropout_add_layernorm_plain(*tensors, Dropout(p, SEED, 2), twins.NORM_EPS), inputs, total
    )
    return twins.largest_error(actual, expected)


@case("LayerNorm replays its mask", 0)
def layernorm_mask() -> float:
    dx = twins.layernorm_both_ways(rows_case(), torch.randn(9, 96), None, 0.1, SEED, 2)[1]
    return float(((dx != 0) != rows_keep_mask(SEED, 2, 9, 96, 0.1)).sum())


@case("GELU", 5e-6)
def gelu() -> float:
    inputs, dy = [3 * torch.randn(9, 96), torch.randn(96)], torch.randn(9, 96)
    return twins.largest_error(twins.gelu_both_ways(*inputs, dy), twins.twin_both_ways(bias_gelu_plain, inputs, dy))


@case("GELU's curve", twins.GELU_ERROR[0], 0)
@case("GELU's slope", twins.GELU_ERROR[1], 1)
def gelu_curve(which: int) -> float:
    return twins.gelu_curve_error("cpu")[which]


@case("embeddings", FLOAT32, 0.0)
@case("embeddings with dropout", FLOAT32, 0.1)
def embeddings(p: float) -> float:
    lengths = [5, 1, 0, 9, 0]
    tables, norm, ids, cu_seqlens = twins.embedding_case(lengths, 40, 12, 96, torch.float32, "cpu")
    dy, second = torch.randn(15, 96), torch.randn(15, 96)
    actual = twins.embedding_both_ways(tables, norm, ids, dy, second, cu_seqlens, p, SEED, 3)
    expected = twins.twin_both_ways(
        lambda words, positions, segments, weight, bias: embed_plain(
            EmbeddingTables(words, positions, segments), ids, weight, bias, Dropout(p, SEED, 3), twins.NORM_EPS
        ),
        [*tables, *norm], dy + second,
    )  # fmt: skip
    return twins.largest_error(actual, expected)


@case("position gradients accumulate", 0)
def positions() -> float:
    # Whole numbers: every order of addition gives the same float32.
    lengths = [5, 0, 1, 3]
    dsum, start = torch.randint(-9, 9, (9, 300)).float(), torch.randint(-9, 9, (7, 300)).float()
    expected, row = start.clone(), 0
    for length in lengths:
        expected[:length] += dsum[row : row + length]
        row += length
    position_gradient(dsum, twins.boundaries(lengths, "cpu"), start, accumulate=True)
    return float((start != expected).sum())


@case("column sums", 0, False)
@case("column sums accumulate", 0, True)
def sums(accumulate: bool) -> float:
    wrong = 0.0
    for count in range(1, 5):
        partials = torch.randint(-9, 9, (70, count, 41)).float()
        rows = [torch.randint(-9, 9, (41,)).float() for _ in range(count)]
        expected = partials.sum(0) + (torch.stack(rows) if accumulate else 0)
        column_sums(partials, rows, accumulate=accumulate)
        wrong += float((torch.stack(rows) != expected).sum())
    return wrong


@case("cross-entropy, 104 wide", 5e-6, 104, 99)
@case("cross-entropy, several blocks wide", 5e-6, 8296, 8291)
def cross_entropy(width: int, vocab_size: int) -> float:
    logits, labels = twins.cross_entropy_case(13, width, vocab_size, torch.float32, "cpu")
    actual, expected = twins.cross_entropy_both_ways(logits, labels, vocab_size, 1 / 11)
    assert actual[1] == expected[1], "right answers are counted exactly"
    return twins.largest_error(actual, expected)


@case("LAMB, tensors anywhere", FLOAT32, 1)
@case("LAMB, tensors aligned", FLOAT32, 16)
def lamb(padding: int) -> float:
    lamb = twins.LambCase(padding, "cpu")
    lamb.step(3)
    lamb.step_of_the_twin(3)
    assert twins.error(lamb.copy, lamb.buffers[0]) <= 1e-2  # the interpreter rounds to bf16 by cutting
    before = [tensor.clone() for tensor in (*lamb.buffers, lamb.copy)]
    before[1] = lamb.gradients
    lamb.step(4, apply=False)
    assert all(map(torch.equal, (*lamb.buffers, lamb.copy), before)), "a step that is not applied leaves all as it was"
    return twins.largest_error(tuple(lamb.buffers[::2]), tuple(lamb.exact[::2]))


@case("update of an arena by lamb", FLOAT32, "lamb", 2)
@case("update of an arena by adamw", FLOAT32, "adamw", 1)
def update(name: str, num_steps: int) -> float:
    """The update of the fused path against the optimizer of the plain one."""
    settings = helpers.tiny_settings(
        optimizer__name=name, model__hidden_size=16, model__num_heads=1, model__intermediate_size=32,
        model__max_positions=64, model__num_layers=1, train__precision="bf16",
    )  # fmt: skip
    fused, twin = (TrainState.build(settings, Ranks(0, 1, torch.device("cpu"))) for _ in range(2))
    fused.engine = FusedEngine(fused.model, fused.arena, fused.optimizer, fused.exchange, fused.ranks, settings)
    arenas = [fused.arena, twin.arena]
    for number in range(num_steps):
        for name in arenas[0].places:
            gradient = torch.randn(arenas[0].places[name][1])
            for arena in arenas:
                arena.view(arena.gradients, name).copy_(gradient)
        length = norm(arenas[1].gradients)
        verdict = fused.engine.update(1e-2 * (number + 1))
        twin.optimizer.step(1e-2 * (number + 1), clip_factor(length, settings.optimizer.clip_norm), torch.tensor(1.0))
        assert Verdict.unpack(verdict) == Verdict(length.item(), True)
    assert fused.optimizer.num_applied == num_steps
    changed = tuple(arenas[0].named(arenas[0].values).values())
    return twins.largest_error(changed, tuple(arenas[1].named(arenas[1].values).values()))


# --- 8 bits -----------------------------------------------------------------------------------------


@case("E4M3 both ways", 0, torch.float8_e4m3fn)
@case("E5M2 both ways", 0, torch.float8_e5m2)
def cast(dtype: torch.dtype) -> float:
    values = twins.held_exactly(80, 100, dtype, "cpu") / 4
    values[3, 7], values[79, 99], values[5, 5] = 1e9, -float("inf"), 0.0
    rule = twins.cast_at(4.0, dtype, "cpu")
    assert twins.is_cast_of(*cast_both_ways(values, rule), values, rule)
    assert rule.largest.max() == float("inf")
    values[79, 99] = 0.0
    rule, kept = twins.cast_at(4.0, dtype, "cpu"), empty_both_ways(values, rule)
    given = cast_both_ways(values, rule, kept)
    assert given is kept
    assert rule.largest.max() == 1e9
    return float(not twins.is_cast_of(*kept, values, rule))


@case("GELU in 8 bits", 0)
def gelu_eight() -> float:
    """Where GELU is straight its result needs no rounding, if its argument needs none."""
    x, bias = twins.held_exactly(48, 200, torch.float8_e4m3fn, "cpu", smallest=16.0), torch.zeros(200)
    x[7, 7] = 1000.0
    rule = twins.cast_at(1.0, torch.float8_e4m3fn, "cpu")
    y, first = bias_gelu_forward(x, bias, rule)
    assert first is not None
    assert torch.equal(y, x.clamp(min=0))
    assert twins.is_cast_of(*first, y, rule)
    assert rule.largest.max() == 1000.0
    dy = twins.held_exactly(48, 200, torch.float8_e5m2, "cpu")
    rule = twins.cast_at(1.0, torch.float8_e5m2, "cpu")
    dx, eight, partials = bias_gelu_backward(dy, x, bias, rule)
    assert eight is not None
    assert torch.equal(dx, torch.where(x > 0, dy, 0))
    assert twins.is_cast_of(*eight, dx, rule)
    assert rule.largest.max() == dx.abs().max()
    assert twins.error(twins.reduced(partials)[0], dx.double().sum(0)) <= FLOAT32
    again, only = bias_gelu_forward(x, bias, twins.cast_at(1.0, torch.float8_e4m3fn, "cpu"), full=False)
    assert only is not None
    assert again is x, "nothing else is written where only 8 bits were asked for"
    return float((only.rows.view(torch.uint8) != first.rows.view(torch.uint8)).sum())


@case("GeGLU in 8 bits", 0)
def geglu_eight() -> float:
    """The same with gates of 1 and -2, in a width of several strips; and the gradients of both halves."""
    x, dropout = torch.cat([twins.held_exactly(48, 48, torch.float8_e4m3fn, "cpu", smallest=16.0)] * 2, 1), NO_DROPOUT
    x[:, 48:] = torch.tensor([1.0, -2.0]).repeat(24)
    x[:, :48] = x[:, :48].clamp(-208, 208)
    rule = twins.cast_at(1.0, torch.float8_e4m3fn, "cpu")
    y, eight = geglu_forward(x, dropout, rule)
    assert eight is not None
    assert torch.equal(y, x[:, :48].clamp(min=0) * x[:, 48:])
    assert twins.is_cast_of(*eight, y, rule)
    assert rule.largest.max() == y.abs().max()
    dy = torch.tensor([0.25, -1.0, 2.0]).repeat(16).expand(48, 48).contiguous()
    rule = twins.cast_at(1.0, torch.float8_e5m2, "cpu")
    dx, eight = geglu_backward(dy, x, dropout, rule)
    assert eight is not None
    assert torch.equal(dx, torch.cat([torch.where(x[:, :48] > 0, dy * x[:, 48:], 0), dy * x[:, :48].clamp(min=0)], 1))
    # The gate's gradient needs more bits than E5M2 has: there, the interpreter rounds otherwise than PyTorch.
    assert twins.is_cast_of(eight.rows[:, :48], eight.columns[:48], dx[:, :48], rule)
    assert torch.equal(eight.rows.view(torch.uint8), eight.columns.t().contiguous().view(torch.uint8))
    assert rule.largest.max() == dx.abs().max()
    return float(geglu_backward(dy, x, dropout, rule, full=False)[0] is not x)


@case("bytes transposed", 0, 80, 100)
@case("bytes transposed, many tiles", 0, 304, 144)
def transposed(num_rows: int, width: int) -> float:
    values = twins.held_exactly(num_rows, width, torch.float8_e5m2, "cpu")
    rule, peaks = twins.cast_at(1.0, torch.float8_e5m2, "cpu"), torch.rand(3000)
    eight = transpose(Fp8Rows(cast_plain(values, rule.scale, rule.dtype), peaks), rule)
    assert rule.largest.max() == peaks.max()
    return float(not twins.is_cast_of(*eight, values, rule))


@case("pre-norm in 8 bits", 0.14, lambda: twins.prenorm_in_bytes(33, 96, torch.float32, "cpu"))
@case("LayerNorm in 8 bits", 0.125, lambda: twins.layernorm_in_bytes(33, 96, torch.float32, "cpu"))
@case("attention in 8 bits", 0.125, lambda: twins.attention_in_bytes([21, 1, 70, 0, 4], 2, 16, torch.float32, "cpu"))
def rows_in_bytes(run: Callable[[], twins.Written]) -> float:
    """The bytes stand for what was written in full, but for the interpreter's rounding; the peaks are exact."""
    errors = []
    for full, (rows, peaks), rule in run():
        assert peaks.max() == full.abs().max()
        errors.append(twins.error(rows.float() / rule.scale, full))
    return max(errors)


@case("scales", 0)
def scales() -> float:
    formats = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2]
    measured = Scales(formats, torch.device("cpu"))
    assert measured.inverse(0) is None, "before a measurement there is nothing to compute with"
    for first, last in ((2.0, 3.0), (8.0, 0.5)):  # two bins of a step
        measured.cast(0).largest[0], measured.cast(0).largest[-1] = first, last
        measured.cast(1).largest[17] = first
        measured.cast(2).largest[0] = float("inf")
        measured.collect()
    assert measured.cast(0).largest.abs().max() == 0, "what was collected is not collected again"
    assert measured.largest.tolist() == [8.0, 8.0, float("inf"), 0.0]
    measured.scale[2:] = torch.tensor([5.0, 7.0])
    measured.update()
    expected = [LARGEST[formats[0]] / 8, LARGEST[formats[1]] / 8, 5.0, 7.0]
    assert measured.scale.tolist() == expected, "a peak of zero or infinity keeps the scale"
    assert measured.largest.tolist() == [0.0] * 4
    continued = Scales(formats, torch.device("cpu"))
    continued.load(measured.scale)
    for site, scale in enumerate(expected):
        inverse = continued.inverse(site)
        assert inverse is not None
        assert inverse == 1 / torch.tensor(scale)
        assert inverse == measured.inverse(site)
        assert inverse.data_ptr() % 16 == 0
        assert continued.cast(site).scale == scale
    return 0.0


# --- the whole model ----------------------------------------------------------------------------------


@contextmanager
def many_rows_a_program() -> Iterator[None]:
    """The interpreter's time goes by programs, so here one takes eight rows."""
    eight = (8, 1, 1, 1)
    with (
        patch.multiple(layernorm_kernels, FORWARD=eight, FORWARD_FP8=eight, BACKWARD=eight),
        patch.multiple(prenorm_kernels, FORWARD=eight, BACKWARD=eight),
    ):
        yield


@case("whole model", 3e-5, {"model__pad_vocab_to": 8, "model__num_segments": 3, "model__num_layers": 2}, True)
@case("whole model of one layer, no next sentences", 3e-5, {"model__nsp": False}, False, is_long=True)
@case("whole model of one segment", 3e-5, {"model__nsp": False, "model__num_segments": 1}, True, is_long=True)
@case("whole model that classifies", 3e-5, {"model__head": "classify", "model__num_labels": 3}, True)
@case(
    "whole model of several weighted labels",
    3e-5,
    {"model__head": "multilabel", "model__num_labels": 5},
    True,
    is_long=True,
)
@case("whole model that regresses", 3e-5, {"model__head": "regress"}, False, is_long=True)
@case("whole model that finds spans", 3e-5, {"model__head": "span"}, True, is_long=True)
@case("whole model that labels words", 3e-5, {"model__head": "tag", "model__num_labels": 3}, True, is_long=True)
@case("whole model that embeds by mean", 3e-5, {"model__head": "embed"}, True)
@case(
    "whole model that embeds by maximum", 3e-5, {"model__head": "embed", "model__pooling": "max"}, False, is_long=True
)
@case("whole model that embeds by [CLS]", 3e-5, {"model__head": "embed", "model__pooling": "cls"}, True, is_long=True)
@case("whole modern model", 3e-5, MODERN | {"model__pad_vocab_to": 8, "model__num_layers": 3}, True)
@case("whole modern model of one layer", 3e-5, MODERN, False, is_long=True)
@case("whole modern model that embeds by mean", 3e-5, MODERN | {"model__head": "embed"}, True, is_long=True)
def whole(overrides: dict[str, object], accumulates: bool) -> float:
    """Sequences of lengths 1 to the longest, padding, and empty slots; more positions than any sequence has."""
    settings = helpers.tiny_settings(
        model__vocab_size=50, model__hidden_size=32, model__num_heads=2, model__intermediate_size=48,
        model__max_positions=14, data__max_seq_length=12, data__max_predictions=5,
        model__hidden_dropout=0, model__attention_dropout=0, model__head_dropout=0,
        task__name="glue/mnli" if "model__head" in overrides else "", **({"model__num_layers": 1} | overrides),
    ).model  # fmt: skip
    batch = whole_model.random_batch([7, 1, 12, 2], 25, 6, 7, 12, 50)
    if settings.num_segments == 1:
        batch = replace(batch, segment_ids=torch.zeros_like(batch.segment_ids))
    if settings.head != "pretrain":
        is_weighted = settings.head == "multilabel"
        batch = whole_model.with_answers(
            batch, settings.head, settings.num_labels, settings.hidden_size, is_weighted=is_weighted
        )
    model = whole_model.BothWays(settings, batch, "cpu", dtype=torch.float32)
    with many_rows_a_program():
        sums = model.run()
        errors, once = model.errors(), model.gradients()
        assert model.output_error() <= 3e-5
        if settings.head == "embed":  # without dropout, training and prediction pool the same vectors
            vectors = model.fused.embeddings(model.batch, torch.tensor([7]))
            assert torch.equal(vectors, model.fused.outputs(model.batch).answers)
        if accumulates:
            model.run(accumulate=True)
            check_doubled(model.gradients(), once)
    assert torch.allclose(sums[:2], model.expected_sums[:2], rtol=3e-5)
    assert torch.equal(sums[2:], model.expected_sums[2:])
    return max(errors.values())


@case("whole model in 8 bits", 0.35, {})
@case("whole modern model in 8 bits", 0.35, MODERN, is_long=True)
def whole_in_eight_bits(family: dict[str, object]) -> float:
    """8 bits throughout, the first layer's input apart; the interpreter rounds to them more coarsely than a GPU."""
    settings = helpers.tiny_settings(
        model__vocab_size=50, model__hidden_size=32, model__num_heads=2, model__intermediate_size=48,
        model__max_positions=14, data__max_seq_length=12, data__max_predictions=5,
        model__hidden_dropout=0, model__attention_dropout=0, **family,
    ).model  # fmt: skip
    batch = whole_model.random_batch([7, 1, 12, 2], 32, 6, 7, 12, 50)
    model = whole_model.BothWays(settings, batch, "cpu", dtype=torch.float32, fp8=True)
    with many_rows_a_program():
        model.measure_scales()
        for gradient in model.gradients_in_place():
            gradient.fill_(float("nan"))
        sums, errors = model.run(), model.errors()
    assert torch.allclose(sums[:2], model.expected_sums[:2], rtol=5e-2)
    assert min(errors.values()) > 0
    return max(errors.values())


@case("self-test of a whole model", 5e-5)
def self_tested() -> float:
    """It passes, and notices an order of operations that is not the model's."""
    sizes = Sizes(
        hidden=16, heads=1, inner=16, vocabulary=30, padded_vocabulary=32, hidden_dropout=0.1, attention_dropout=0.1,
        fp8=False, family="modern", window=4,
    )  # fmt: skip
    with patch.object(fused_self_test, "LENGTHS", (11, 1, 4)), many_rows_a_program():
        with patch.object(fused_modern, "rotate", lambda *_: None):
            error, bound = fused_self_test.whole_model(sizes, "cpu")
            assert error > bound
        return fused_self_test.whole_model(sizes, "cpu")[0]


@case("layers computed again", 0, {"model__num_layers": 2})
@case("modern layers computed again", 0, MODERN | {"model__num_layers": 3}, is_long=True)
def recomputed(family: dict[str, object]) -> float:
    """Keeping less of a pass changes nothing, with dropout on."""
    settings = helpers.tiny_settings(
        model__vocab_size=30, model__hidden_size=16, model__num_heads=1, model__intermediate_size=24,
        model__max_positions=9, data__max_seq_length=9, data__max_predictions=2, model__hidden_dropout=0.1,
        model__attention_dropout=0.1, **family,
    ).model  # fmt: skip
    batch = whole_model.random_batch([5, 3], 10, 4, 3, 9, 30)
    model = whole_model.BothWays(settings, batch, "cpu", dtype=torch.float32)
    found = []
    with many_rows_a_program():
        for what in ("none", "selective", "full"):
            for layer in model.fused.layers:
                layer.recompute = what
            for gradient in model.gradients_in_place():
                gradient.fill_(float("nan"))
            found.append([model.run(), *model.gradients().values()])
    return float(sum(not torch.equal(*pair) for less in found[1:] for pair in zip(found[0], less, strict=True)))


@case("gradients complete at a pause", 0, {})
@case("modern gradients complete at a pause", 0, MODERN, is_long=True)
def complete_at_pauses(family: dict[str, object]) -> float:
    """Buckets are sent during the backward pass: what lies above the offset of a pause changes no more."""
    settings = helpers.tiny_settings(
        model__vocab_size=30, model__hidden_size=16, model__num_heads=1, model__intermediate_size=24,
        model__max_positions=9, data__max_seq_length=9, data__max_predictions=2, model__num_layers=3, **family,
    ).model  # fmt: skip
    model = whole_model.BothWays(
        settings, whole_model.random_batch([5, 3], 10, 4, 3, 9, 30), "cpu", dtype=torch.float32
    )
    one, gradients, sent = torch.ones(1), model.arena.gradients, []
    gradients.fill_(float("nan"))
    with many_rows_a_program():
        for offset in model.fused.forward_backward(
            model.batch, torch.tensor([7]), one, one, accumulate=False, pauses=frozenset(range(3))
        ):
            sent.append((offset, gradients[offset:].clone()))
    assert [offset for offset, _ in sent] == sorted((offset for offset, _ in sent), reverse=True)
    assert len({offset for offset, _ in sent}) == 3
    return float(sum(not twins.same_bits(above, gradients[offset:]) for offset, above in sent))


def check_doubled(gradients: dict[str, torch.Tensor], once: dict[str, torch.Tensor]) -> None:
    for name, gradient in gradients.items():
        if name == "embeddings.words.weight":  # two sums meet here, so the order of addition differs
            assert twins.error(gradient, 2 * once[name]) <= 1e-6
        else:
            assert torch.equal(gradient, 2 * once[name]), name


def main() -> None:
    print(available("cpu")[1], file=sys.stderr)
    # Fresh memory is filled with NaN under this switch: whatever reads a row that was never written shows it.
    torch.use_deterministic_algorithms(True)
    figures = {}
    words = [word for word in sys.argv[1:] if word != "--long"]
    for number, (name, (measure, _)) in enumerate(CASES.items()):
        if (name in LONG) != ("--long" in sys.argv) or not any(part in name for part in words or [""]):
            continue
        torch.manual_seed(number)
        begin = time.perf_counter()
        figures[name] = measure()
        print(f"{name}: {figures[name]:.2e} ({time.perf_counter() - begin:.1f} s)", file=sys.stderr)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
