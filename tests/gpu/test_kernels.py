"""Every kernel against its plain-PyTorch twin in float64, on memory poisoned with NaN, and twice with the same bits.

Needs a CUDA device of compute capability 8.0 or newer and Triton; skips with the reason elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from bertrain.kernels import attention, fp8, gelu, layernorm
from bertrain.kernels.arguments import Dropout, EmbeddingTables, Fp8Rows
from bertrain.kernels.backend import available
from bertrain.kernels.embedding import embed_plain, position_gradient
from bertrain.kernels.random import attention_keep_mask, rows_keep_mask
from bertrain.kernels.reduction import column_sums
from tests import twins

USABLE, REASON = available("cuda") if torch.cuda.is_available() else (False, "no CUDA device")
pytestmark = pytest.mark.skipif(not USABLE, reason=REASON)
HAS_FP8 = USABLE and torch.cuda.get_device_capability() >= (8, 9)
needs_fp8 = pytest.mark.skipif(not HAS_FP8, reason="this GPU has no FP8")

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LENGTHS = {
    "mixed": [512, 1, 130, 64, 300, 17, 0, 511, 16, 128, 33, 33, 2, 0, 65, 257],
    "one sequence fills the bin": [512],
    "longer than any recipe": [1500, 3],
    "many of length 1": [1] * 301,
    "full and empty slots": [512, 512, 0, 0, 0, 0],
}
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def seed_tensor(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device="cuda")


# Attention


def attention_error(
    lengths: list[int],
    dtype: torch.dtype,
    head_dim: int = 64,
    p: float = 0.1,
    query_scale: float = 1.0,
    num_heads: int = 4,
) -> float:
    cu_seqlens, seed, num_tokens = twins.boundaries(lengths, "cuda"), seed_tensor(2**40 + 77), sum(lengths)
    qkv = random(num_tokens, 3, num_heads, head_dim, dtype=dtype)
    dout = random(num_tokens, num_heads, head_dim, dtype=dtype)
    qkv[:, 0] *= query_scale
    actual = twins.twice(lambda: twins.attention_both_ways(qkv, dout, cu_seqlens, p, seed, 3))
    dropout = Dropout(p, seed, 3)
    expected = twins.twin_both_ways(lambda x: attention.ragged_attention_plain(x, cu_seqlens, dropout), [qkv], dout)
    return twins.attention_error(actual, expected)


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_matches_twin(case: str, dtype: torch.dtype) -> None:
    assert attention_error(LENGTHS[case], dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("p", [0.0, 0.02, 0.1, 0.5])  # below 1/32 weights are not dropped in pairs
def test_attention_head_sizes_and_rates(head_dim: int, p: float) -> None:
    lengths = [*twins.random_lengths(24, 512), 1]
    assert attention_error(lengths, torch.bfloat16, head_dim, p) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 5e-5)])
def test_attention_survives_extreme_scores(dtype: torch.dtype, bound: float) -> None:
    # Scores of hundreds leave the range of weights without a maximum; the careful loop must take over. The
    # exponential amplifies the rounding of such scores, so the bound is looser.
    assert attention_error(LENGTHS["mixed"], dtype, query_scale=60.0) <= bound


def test_attention_dropout_masks_are_the_twins() -> None:
    # With zero queries the weights of a row are equal, so one-hot values show the mask in the output, and one-hot
    # gradients show it again in the gradient of the values.
    length, before, p = 512, 96, 0.1
    seed, cu_seqlens = seed_tensor(-5), twins.boundaries([before, length], "cuda")
    expected = attention_keep_mask(seed, 9, 4, before, length, p)
    block = torch.arange(64, device="cuda")
    for first in range(0, length, 64):
        qkv = torch.zeros(before + length, 3, 4, 64, dtype=torch.bfloat16, device="cuda")
        qkv[before + first + block, 2, :, block] = 1
        dout = torch.zeros(before + length, 4, 64, dtype=torch.bfloat16, device="cuda")
        dout[before + first + block, :, block] = 1
        out, _, _, dvalues, _ = twins.attention_both_ways(qkv, dout, cu_seqlens, p, seed, 9)
        shown = out[before:].permute(1, 0, 2) != 0
        assert torch.equal(shown, expected[:, :, first : first + 64])
        replayed = dvalues[before:].permute(1, 2, 0) != 0
        assert torch.equal(replayed, expected[:, first : first + 64, :])


def test_attention_plan_lists_every_tile_once_longest_first() -> None:
    lengths = LENGTHS["mixed"]
    tiles = attention.plan_attention(twins.boundaries(lengths, "cuda"), sum(lengths)).tiles
    assert tiles is not None
    used = [tile[:3] for tile in tiles.tolist() if tile[1] > 0]
    starts = twins.boundaries(lengths, "cuda").tolist()
    expected = [
        [start, length, row]
        for start, length in zip(starts, lengths, strict=False)
        for row in range(0, length, attention.TILE)
    ]
    assert sorted(used) == sorted(expected)
    assert [tile[1] for tile in used] == sorted((tile[1] for tile in used), reverse=True)


# Row-wise kernels


def layernorm_inputs(num_rows: int, width: int, dtype: torch.dtype, parameter_dtype: torch.dtype) -> list[torch.Tensor]:
    inputs = [random(num_rows, width, dtype=dtype), random(width, dtype=parameter_dtype)]
    inputs += [random(num_rows, width, dtype=dtype), random(width, dtype=parameter_dtype) + 1]
    return [*inputs, random(width, dtype=parameter_dtype)]


@pytest.mark.parametrize("shape", [(1000, 1024), (333, 768), (1, 128), (4097, 1024)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("is_pair", [False, True])
def test_layernorm_matches_twin(shape: tuple[int, int], dtype: torch.dtype, p: float, is_pair: bool) -> None:
    for parameter_dtype in {dtype, torch.float32}:
        inputs, seed = layernorm_inputs(*shape, dtype, parameter_dtype), seed_tensor(3)
        dy, second = random(*shape, dtype=dtype), random(*shape, dtype=dtype) if is_pair else None
        actual = twins.twice(partial(twins.layernorm_both_ways, inputs, dy, second, p, seed, 4))
        expected = twins.twin_both_ways(
            partial(layernorm.dropout_add_layernorm_plain, dropout=Dropout(p, seed, 4), eps=twins.NORM_EPS),
            inputs,
            dy.double() + (0 if second is None else second.double()),
        )
        assert twins.largest_error(actual, expected) <= TOLERANCE[dtype]


def test_layernorm_mask_is_the_twins() -> None:
    inputs, seed = layernorm_inputs(2000, 1024, torch.float32, torch.float32), seed_tensor(8)
    dx = twins.layernorm_both_ways(inputs, random(2000, 1024), None, 0.1, seed, 7)[1]
    assert torch.equal(dx != 0, rows_keep_mask(seed, 7, 2000, 1024, 0.1))


@pytest.mark.parametrize("shape", [(1000, 4096), (333, 3072), (1, 128)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu_matches_twin(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, bias, dy = 3 * random(*shape, dtype=dtype), random(shape[1], dtype=dtype), random(*shape, dtype=dtype)
    actual = twins.twice(lambda: twins.gelu_both_ways(x, bias, dy))
    expected = twins.twin_both_ways(gelu.bias_gelu_plain, (x, bias), dy)
    assert twins.largest_error(actual, expected) <= max(TOLERANCE[dtype], 1e-5)


def test_gelu_curve_is_within_its_error() -> None:
    value, slope = twins.gelu_curve_error("cuda")
    assert value <= twins.GELU_ERROR[0]
    assert slope <= twins.GELU_ERROR[1]


@pytest.mark.parametrize(("width", "vocab_size"), [(30528, 30522), (104, 99), (70016, 70001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_matches_twin(width: int, vocab_size: int, dtype: torch.dtype) -> None:
    logits, labels = twins.cross_entropy_case(211, width, vocab_size, dtype, "cuda")
    (loss, correct, gradient), expected = twins.cross_entropy_both_ways(logits, labels, vocab_size, 1 / 209)
    assert twins.error(loss, expected[0]) <= 1e-5
    assert correct.item() == expected[1].item()
    assert twins.error(gradient, expected[2]) <= max(TOLERANCE[dtype], 5e-6)  # a logit of 200 costs digits


@pytest.mark.parametrize("padding", [1, 16])
def test_lamb_matches_twin(padding: int) -> None:
    state = torch.cuda.get_rng_state()
    first = twins.LambCase(padding, "cuda")
    torch.cuda.set_rng_state(state)
    second = twins.LambCase(padding, "cuda")
    for number in (1, 2):
        first.step(number)
        second.step(number)
        first.step_of_the_twin(number)
    assert twins.largest_error(tuple(first.buffers), tuple(first.exact)) <= 5e-6
    assert all(map(torch.equal, first.buffers, second.buffers))
    assert torch.equal(first.copy, first.buffers[0].bfloat16())
    first.step(3, apply=False)
    for one, other in zip(first.buffers[::2], second.buffers[::2], strict=True):
        assert torch.equal(one, other), "a step that is not applied leaves all as it was"
    assert torch.equal(first.copy, second.copy)


# Embeddings and column sums


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1024, 768])
def test_embedding_matches_twin(p: float, dtype: torch.dtype, width: int) -> None:
    lengths, seed = LENGTHS["mixed"], seed_tensor(12)
    tables, norm, ids, cu_seqlens = twins.embedding_case(lengths, 3000, 520, width, dtype, "cuda")
    dy, second = random(sum(lengths), width, dtype=dtype), random(sum(lengths), width, dtype=dtype)
    actual = twins.twice(lambda: twins.embedding_both_ways(tables, norm, ids, dy, second, cu_seqlens, p, seed, 3))
    expected = twins.twin_both_ways(
        lambda words, positions, segments, weight, bias: embed_plain(
            EmbeddingTables(words, positions, segments), ids, weight, bias, Dropout(p, seed, 3), twins.NORM_EPS
        ),
        [tensor for tensor in (*tables, *norm) if tensor is not None],
        dy.double() + second.double(),
    )
    assert (actual[2][512:] == 0).all(), "positions that no sequence reaches"
    assert twins.largest_error(actual, expected) <= TOLERANCE[dtype]


def test_position_gradient_accumulates() -> None:
    lengths = LENGTHS["mixed"]
    cu_seqlens = twins.boundaries(lengths, "cuda")
    dsum = torch.randint(-9, 9, (sum(lengths), 1024), device="cuda").float()  # sums of whole numbers are exact
    start = torch.randint(-9, 9, (520, 1024), device="cuda").float()
    expected = start.clone()
    for first, length in zip(cu_seqlens.tolist(), lengths, strict=False):
        expected[:length] += dsum[first : first + length]
    position_gradient(dsum, cu_seqlens, start, accumulate=True)
    assert torch.equal(start, expected)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("num_partials", "width"), [(1, 1024), (528, 4096), (77, 1001)])
def test_column_sums(count: int, accumulate: bool, num_partials: int, width: int) -> None:
    partials = torch.randint(-9, 9, (num_partials, count, width), device="cuda").float()
    rows = [torch.randint(-9, 9, (width,), device="cuda").float() for _ in range(count)]
    expected = partials.sum(0) + (torch.stack(rows) if accumulate else 0)
    if not accumulate:
        for row in rows:
            row.fill_(float("nan"))
    column_sums(partials, rows, accumulate=accumulate)
    assert torch.equal(torch.stack(rows), expected)


# 8 bits


def spread(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes that FP8 can tell apart, and some beyond either end."""
    return (random(num_rows, width) * torch.exp2(18 * random(1, width))).to(dtype)


@needs_fp8
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1024, 1024), (336, 3072), (16, 72), (5008, 1000)])
def test_cast_both_ways_is_the_twins_to_the_byte(
    format: torch.dtype, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    values = spread(*shape, dtype)
    values[0, :3] = torch.tensor([float("inf"), -float("inf"), 0.0], dtype=dtype)
    cast = twins.cast_at(3.7, format, "cuda")
    assert twins.is_cast_of(*fp8.cast_both_ways(values, cast), values, cast)
    assert cast.largest.max() == float("inf")
    values[0, :2] = 0.0
    cast = twins.cast_at(3.7, format, "cuda")
    kept = fp8.empty_both_ways(values, cast)
    assert fp8.cast_both_ways(values, cast, kept) is kept
    assert twins.is_cast_of(*kept, values, cast)
    assert cast.largest.max() == values.abs().max()


def eight_bit_gelu_case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Argument, a bias whose own GELU is not the largest result, and a gradient."""
    return 30 * random(1008, 1000, dtype=dtype), 0.1 * random(1000), random(1008, 1000, dtype=dtype)


@needs_fp8
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale", [4.0, 4096.0])
def test_gelu_in_8_bits_is_the_twins_to_the_byte(format: torch.dtype, scale: float) -> None:
    # In float32 the kernel's own result shows what it has cast, if going from one to the other rounds nothing, which is
    # why scales are powers of two: of a million results scaled by 3.7, about one rounds to another byte.
    # The larger scale drives both formats to their limits.
    x, bias, dy = eight_bit_gelu_case(torch.float32)
    cast = twins.cast_at(scale, format, "cuda")
    y, eight = gelu.bias_gelu_forward(x, bias, cast)
    assert eight is not None
    assert twins.is_cast_of(*eight, y, cast)
    assert cast.largest.max() == y.abs().max()
    assert twins.error(y, gelu.bias_gelu_plain(x.double(), bias.double())) <= 1e-5

    cast = twins.cast_at(scale, format, "cuda")
    dx, eight, partials = gelu.bias_gelu_backward(dy, x, bias, cast)
    assert eight is not None
    assert twins.is_cast_of(*eight, dx, cast)
    assert cast.largest.max() == dx.abs().max()
    expected = twins.twin_both_ways(gelu.bias_gelu_plain, (x, bias), dy)
    assert twins.error(dx, expected[1]) <= 1e-5
    assert twins.error(twins.reduced(partials)[0], expected[2]) <= 1e-5


@needs_fp8
def test_gelu_in_8_bits_alone_is_the_same() -> None:
    """What training asks for: 16-bit arguments, 8-bit results and nothing else."""
    x, bias, dy = eight_bit_gelu_case(torch.bfloat16)
    for format in FORMATS:
        wide = gelu.bias_gelu_forward(x.float(), bias, twins.cast_at(3.7, format, "cuda"))[1]
        same, alone = gelu.bias_gelu_forward(x, bias, twins.cast_at(3.7, format, "cuda"), full=False)
        assert same is x
        assert alone is not None
        assert wide is not None
        assert all(map(twins.same_bits, alone, wide))
        wide = gelu.bias_gelu_backward(dy.float(), x.float(), bias, twins.cast_at(3.7, format, "cuda"))[1]
        same, alone, _ = gelu.bias_gelu_backward(dy, x, bias, twins.cast_at(3.7, format, "cuda"), full=False)
        assert same is x
        assert alone is not None
        assert wide is not None
        assert all(map(twins.same_bits, alone, wide))


@needs_fp8
@pytest.mark.parametrize("shape", [(1024, 1024), (336, 3072), (16, 72), (5008, 1000)])
def test_transposed_bytes_are_the_same(shape: tuple[int, int]) -> None:
    cast, peaks = twins.cast_at(3.7, torch.float8_e5m2, "cuda"), torch.rand(30000, device="cuda")
    rows = fp8.cast_plain(random(*shape), cast.scale, cast.dtype)
    eight = fp8.transpose(Fp8Rows(rows, peaks), cast)
    assert eight.rows is rows
    assert twins.same_bits(eight.columns, rows.t())
    assert cast.largest.max() == peaks.max()


def bytes_of_layernorm(dtype: torch.dtype, full: bool) -> twins.Written:
    return twins.layernorm_in_bytes(1000, 1024, dtype, "cuda", full=full)


def bytes_of_attention(dtype: torch.dtype, full: bool) -> twins.Written:
    return twins.attention_in_bytes(LENGTHS["mixed"], 4, 64, dtype, "cuda", full=full)


@needs_fp8
@pytest.mark.parametrize("run", [bytes_of_layernorm, bytes_of_attention])
def test_rows_in_8_bits_are_those_in_full_to_the_byte(run: Callable[[torch.dtype, bool], twins.Written]) -> None:
    # In float32 the kernel's own result shows what it has cast.
    for full, (rows, peaks), cast in run(torch.float32, True):
        assert twins.same_bits(rows, fp8.cast_plain(full, cast.scale, cast.dtype))
        assert peaks.max() == full.abs().max()
    state = torch.cuda.get_rng_state(), torch.get_rng_state()
    both = run(torch.bfloat16, True)
    torch.cuda.set_rng_state(state[0])
    torch.set_rng_state(state[1])
    for (_, one, _), (_, other, _) in zip(both, run(torch.bfloat16, False), strict=True):
        assert all(map(twins.same_bits, one, other)), "what training asks for: 8-bit gradients and nothing else"


def test_scales_follow_the_peaks() -> None:
    formats = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2]
    scales = fp8.Scales(formats, torch.device("cuda"))
    assert scales.inverse(0) is None
    for peak in (2.0, 8.0, 0.5):  # three bins of a step
        for site in (0, 1):
            scales.cast(site).largest[17] = peak
        scales.cast(2).largest[4095] = float("inf")
        scales.collect()
    assert scales.largest.tolist() == [8.0, 8.0, float("inf"), 0.0, 0.0]
    scales.largest[4] = float("nan")
    scales.scale[2:] = torch.tensor([5.0, 7.0, 9.0], device="cuda")
    scales.update()
    assert scales.scale.tolist() == [56.0, 7168.0, 5.0, 7.0, 9.0], "without a usable peak a scale stays"
    assert scales.largest.tolist() == [0.0] * 5
    continued = fp8.Scales(formats, torch.device("cuda"))
    continued.load(scales.scale.cpu())
    for site in range(5):
        assert continued.inverse(site) == scales.inverse(site)
        assert continued.cast(site).scale == scales.cast(site).scale


# Dropout as a random variable


def correlation_in_sigmas(a: torch.Tensor, b: torch.Tensor, p: float) -> float:
    product = ((a.double() - (1 - p)) * (b.double() - (1 - p))).mean() / (p * (1 - p))
    return (product.abs() * a.numel() ** 0.5).item()


def test_dropout_statistics() -> None:
    p = 0.1
    first = torch.randint(-(2**62), 2**62, (1,)).cuda()
    second = first + 1
    masks = attention_keep_mask(first, 0, 16, 1000, 512, p)
    rows = rows_keep_mask(first, 0, 4096, 1024, p)
    for mask in (masks, rows):
        sigma = (p * (1 - p) / mask.numel()) ** 0.5
        assert abs(mask.double().mean().item() - (1 - p)) < 4 * sigma
    pairs = [
        (masks[0], masks[1]),  # heads
        (masks, attention_keep_mask(first, 1, 16, 1000, 512, p)),  # layers
        (masks, attention_keep_mask(second, 0, 16, 1000, 512, p)),  # steps
        (masks, attention_keep_mask(first, 0, 16, 1512, 512, p)),  # sequences
        (masks[:, 1:], masks[:, :-1]),  # rows
        (masks[:, :, 1:], masks[:, :, :-1]),  # columns
        (masks[:, 8:], masks[:, :-8]),  # elements that share a counter
        (masks[:, :, 8:], masks[:, :, :-8]),
        (rows, rows_keep_mask(first, 1, 4096, 1024, p)),
        (rows, rows_keep_mask(second, 0, 4096, 1024, p)),
        (rows[:, 1:], rows[:, :-1]),
        (rows[:, 2:], rows[:, :-2]),
        (rows[1:], rows[:-1]),
    ]
    assert max(correlation_in_sigmas(a, b, p) for a, b in pairs) < 5


# How a training step uses them


def test_kernels_replay_in_a_cuda_graph_with_new_seeds_and_lengths() -> None:
    cu_seqlens, seed = twins.boundaries([512, 1, 0, 100, 411], "cuda"), seed_tensor(1)
    qkv, dy = random(1024, 3, 4, 64, dtype=torch.bfloat16), random(1024, 256, dtype=torch.bfloat16)
    vector = random(256)

    def step() -> tuple[torch.Tensor, ...]:
        """A cut through a layer: attention, GELU and LayerNorm, without the products between them."""
        attended = twins.attention_both_ways(qkv, dy.view(1024, 4, 64), cu_seqlens, 0.1, seed, 1)
        activated = twins.gelu_both_ways(attended[0].flatten(1), vector, dy)
        inputs = (activated[0], vector, qkv[:, 0].flatten(1), vector, vector)
        return *attended, *activated, *twins.layernorm_both_ways(inputs, activated[1], dy, 0.1, seed, 3)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    seed.fill_(99)
    cu_seqlens.copy_(twins.boundaries([3, 500, 512, 9, 0], "cuda"))
    graph.replay()
    for actual, expected in zip(captured, step(), strict=True):
        assert torch.equal(actual, expected)
