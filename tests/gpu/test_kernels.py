"""Every kernel against its plain-PyTorch twin in float64, on memory poisoned with NaN.

Needs a CUDA device of compute capability 8.0 or newer and Triton; skips with the reason elsewhere.
"""

from __future__ import annotations

import pytest
import torch

from bertrain.kernels import attention, cross_entropy, gelu, lamb, layernorm
from bertrain.kernels.backend import available
from bertrain.kernels.random import attention_keep_mask, rows_keep_mask

USABLE, REASON = available("cuda") if torch.cuda.is_available() else (False, "no CUDA device")
pytestmark = pytest.mark.skipif(not USABLE, reason=REASON)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
LENGTHS = {
    "mixed": [512, 1, 130, 64, 300, 17, 0, 511, 16, 128, 33, 33, 2, 0, 65, 257],
    "one sequence fills the bin": [512],
    "longer than any recipe": [1500, 3],
    "many of length 1": [1] * 301,
    "full and empty slots": [512, 512, 0, 0, 0, 0],
}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Leave NaN in the blocks the caching allocator will hand out, small and large."""
    large = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(8)]
    small = [torch.full((size,), float("nan"), device="cuda") for size in (64, 256, 1024, 4096) for _ in range(64)]
    del large, small


def fresh_generator() -> torch.Generator:
    generator = torch.Generator(device="cuda")
    generator.seed()
    return generator


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=fresh_generator()).to(dtype)


def seed_tensor(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device="cuda")


def boundaries(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    return difference.item() if torch.isfinite(actual).all() else float("nan")


def random_lengths() -> list[int]:
    return torch.randint(0, 513, (24,), generator=torch.Generator().manual_seed(torch.seed() % 2**31)).tolist()


# Attention


def check_attention(lengths, dtype, head_dim=64, dropout_p=0.1, query_scale=1.0, num_heads=4):
    cu_seqlens, seed = boundaries(lengths), seed_tensor(2**40 + 77)
    qkv, dout = (
        random(sum(lengths), 3, num_heads, head_dim, dtype=dtype),
        random(sum(lengths), num_heads, head_dim, dtype=dtype),
    )
    qkv[:, 0] *= query_scale
    exact = qkv.double().requires_grad_()
    expected = attention.ragged_attention_plain(exact, cu_seqlens, dropout_p, seed, site=3)
    expected.backward(dout.double())
    qkv.requires_grad_()
    out = attention.ragged_attention(qkv, cu_seqlens, 512, dropout_p, seed, site=3)
    out.backward(dout)
    assert torch.isfinite(qkv.grad).all()
    errors = [error(out, expected)]
    for part in range(3):
        difference = (qkv.grad[:, part].double() - exact.grad[:, part]).norm()
        norm = exact.grad[:, part].norm()
        # Query and key gradients of sequences of length 1 are zero: measure what is left against the whole.
        errors.append((difference / (norm if norm > 1e-6 * exact.grad.norm() else exact.grad.norm())).item())
    return max(errors)


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_matches_twin(case, dtype):
    assert check_attention(LENGTHS[case], dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.5])
def test_attention_head_sizes_and_rates(head_dim, dropout_p):
    assert check_attention(random_lengths(), torch.bfloat16, head_dim, dropout_p) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float32, 5e-5)])
def test_attention_survives_extreme_scores(dtype, bound):
    # Scores of hundreds leave the range of weights without a maximum; the careful loop must take over. The
    # exponential amplifies the rounding of such scores, so the bound is looser.
    assert check_attention(LENGTHS["mixed"], dtype, query_scale=60.0) <= bound


def test_attention_dropout_masks_are_the_twins():
    # With zero queries the weights of a row are equal, so one-hot values show the mask in the output, and one-hot
    # gradients show it again in the gradient of the values.
    length, before, dropout_p = 512, 96, 0.1
    seed, cu_seqlens = seed_tensor(-5), boundaries([before, length])
    expected = attention_keep_mask(seed, 9, 4, before, length, dropout_p)
    for first in range(0, length, 64):
        qkv = torch.zeros(before + length, 3, 4, 64, dtype=torch.bfloat16, device="cuda")
        block = torch.arange(64, device="cuda")
        qkv[before + first + block, 2, :, block] = 1
        dout = torch.zeros(before + length, 4, 64, dtype=torch.bfloat16, device="cuda")
        dout[before + first + block, :, block] = 1
        qkv.requires_grad_()
        out = attention.ragged_attention(qkv, cu_seqlens, 512, dropout_p, seed, site=9)
        out.backward(dout)
        shown = out[before:].permute(1, 0, 2) != 0
        assert torch.equal(shown, expected[:, :, first : first + 64])
        replayed = qkv.grad[before:, 2].permute(1, 2, 0) != 0
        assert torch.equal(replayed, expected[:, first : first + 64, :])


def test_attention_is_deterministic():
    lengths, seed = LENGTHS["mixed"], seed_tensor(1)
    qkv, cu_seqlens = random(sum(lengths), 3, 16, 64, dtype=torch.bfloat16), boundaries(lengths)
    dout = random(sum(lengths), 16, 64, dtype=torch.bfloat16)
    results = []
    for _ in range(2):
        inputs = qkv.clone().requires_grad_()
        out = attention.ragged_attention(inputs, cu_seqlens, 512, 0.1, seed)
        out.backward(dout)
        results.append((out, inputs.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_attention_plan_lists_every_tile_once_longest_first():
    lengths = LENGTHS["mixed"]
    tiles = attention.plan_attention(boundaries(lengths), sum(lengths)).tolist()
    used = [tile[:3] for tile in tiles if tile[1] > 0]
    starts = boundaries(lengths).tolist()
    expected = [
        [start, length, row]
        for start, length in zip(starts, lengths, strict=False)
        for row in range(0, length, attention.TILE)
    ]
    assert sorted(used) == sorted(expected)
    assert [tile[1] for tile in used] == sorted((tile[1] for tile in used), reverse=True)


# Row-wise kernels


def layernorm_inputs(num_rows, width, dtype, parameter_dtype):
    inputs = [random(num_rows, width, dtype=dtype), random(width, dtype=parameter_dtype)]
    inputs += [random(num_rows, width, dtype=dtype), random(width, dtype=parameter_dtype) + 1]
    return [*inputs, random(width, dtype=parameter_dtype)]


@pytest.mark.parametrize("shape", [(1000, 1024), (333, 768), (1, 128), (4097, 1024)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_layernorm_matches_twin(shape, dtype, p):
    for parameter_dtype in {dtype, torch.float32}:
        inputs, seed = layernorm_inputs(*shape, dtype, parameter_dtype), seed_tensor(3)
        dy = random(*shape, dtype=dtype)
        exact = [tensor.double().requires_grad_() for tensor in inputs]
        expected = layernorm.dropout_add_layernorm_plain(*exact, p, seed, 4, 1e-12)
        expected.backward(dy.double())
        inputs = [tensor.requires_grad_() for tensor in inputs]
        y = layernorm.dropout_add_layernorm(*inputs, p, seed, 4, 1e-12)
        y.backward(dy)
        assert error(y, expected) <= TOLERANCE[dtype]
        for tensor, reference in zip(inputs, exact, strict=True):
            assert error(tensor.grad, reference.grad) <= TOLERANCE[dtype]


def test_layernorm_mask_is_the_twins_and_runs_repeat():
    inputs, seed = layernorm_inputs(2000, 1024, torch.float32, torch.float32), seed_tensor(8)
    dy = random(2000, 1024)
    gradients = []
    for _ in range(2):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        layernorm.dropout_add_layernorm(*leaves, 0.1, seed, 7).backward(dy)
        gradients.append([leaf.grad for leaf in leaves])
    assert torch.equal(gradients[0][0] != 0, rows_keep_mask(seed, 7, 2000, 1024, 0.1))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_layernorm_pair_adds_both_gradients():
    inputs, seed = layernorm_inputs(1000, 1024, torch.bfloat16, torch.float32), seed_tensor(3)
    first, second = random(1000, 1024, dtype=torch.bfloat16), random(1000, 1024, dtype=torch.bfloat16)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    expected = layernorm.dropout_add_layernorm_plain(*exact, 0.1, seed, 4, 1e-12)
    expected.backward(first.double() + second.double())
    inputs = [tensor.requires_grad_() for tensor in inputs]
    y, again = layernorm.dropout_add_layernorm_pair(*inputs, 0.1, seed, 4)
    assert y.data_ptr() == again.data_ptr()
    torch.autograd.backward((y, again), (first, second))
    assert error(y, expected) <= 1e-2
    assert max(error(a.grad, b.grad) for a, b in zip(inputs, exact, strict=True)) <= 1e-2


@pytest.mark.parametrize("shape", [(1000, 4096), (333, 3072), (1, 128)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu_matches_twin(shape, dtype):
    x, bias, dy = 3 * random(*shape, dtype=dtype), random(shape[1], dtype=dtype), random(*shape, dtype=dtype)
    exact = [tensor.double().requires_grad_() for tensor in (x, bias)]
    expected = gelu.bias_gelu_plain(*exact)
    expected.backward(dy.double())
    x.requires_grad_(), bias.requires_grad_()
    y = gelu.bias_gelu(x, bias)
    y.backward(dy)
    assert error(y, expected) <= TOLERANCE[dtype]
    assert error(x.grad, exact[0].grad) <= TOLERANCE[dtype]
    assert error(bias.grad, exact[1].grad) <= TOLERANCE[dtype]


@pytest.mark.parametrize(("width", "vocab_size"), [(30528, 30522), (104, 99), (70016, 70001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_matches_twin(width, vocab_size, dtype):
    logits = 3 * random(211, width, dtype=dtype)
    labels = torch.randint(0, vocab_size, (211,), device="cuda")
    logits[torch.arange(100), labels[:100]] = 30.0
    logits[torch.arange(50), (labels[:50] + 1) % vocab_size] = 30.0  # ties: only the first largest counts
    logits[150, 3] = 200.0  # far from its label: the sum relative to the label would overflow
    logits[:, vocab_size:] = 90.0  # padding columns must not be seen
    labels[7], labels[208] = -100, -100
    for factor in (1.0, 2.5):
        exact = logits.double().requires_grad_()
        loss, correct = cross_entropy.cross_entropy_plain(exact, labels, vocab_size, 1 / 209)
        (factor * loss).backward()
        leaf = logits.clone().requires_grad_()
        scale = torch.tensor([1 / 209], device="cuda")
        actual, count = cross_entropy.cross_entropy(leaf * 1, labels, vocab_size, scale)
        (factor * actual).backward()
        assert error(actual, loss) <= 1e-5
        assert count.item() == correct.item()
        assert error(leaf.grad, exact.grad) <= TOLERANCE[dtype]


@pytest.mark.parametrize("padding", [1, 16])
def test_lamb_matches_twin(padding):
    sizes = [5000, 3, 1024, 123457, 16]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + (size + padding - 1) // padding * padding)
    flags = [(True, True), (False, False), (True, True), (True, True), (False, True)]
    table = lamb.LambTable.build(offsets, flags, "cuda")
    state = [random(offsets[-1]), random(offsets[-1]), random(offsets[-1]), random(offsets[-1]).square()]
    state[0][offsets[2] : offsets[3]] = 0  # a weight norm of zero: no ratio
    scalars = [torch.tensor([value], device="cuda") for value in (0.01, 0.3, 1.0, 1.0)]
    runs = [[tensor.clone() for tensor in state] for _ in range(2)]
    exact = [tensor.double() for tensor in state]
    copy = torch.full((offsets[-1],), float("nan"), dtype=torch.bfloat16, device="cuda")
    for step_number in (1.0, 2.0):
        scalars[3].fill_(step_number)
        for buffers in (*runs, exact):
            buffers[1].copy_(state[1])
        lamb.lamb_step_plain(*exact, table, *scalars)
        for buffers in runs:
            lamb.lamb_step(*buffers, table, *scalars, copy=copy)
    assert max(error(a, b) for a, b in zip(runs[0], exact, strict=True)) <= 5e-6
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert torch.equal(copy, runs[0][0].bfloat16())
    scalars[2].zero_()
    lamb.lamb_step(*runs[0], table, *scalars, copy=copy)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# Dropout as a random variable


def correlation_in_sigmas(a: torch.Tensor, b: torch.Tensor, p: float) -> float:
    product = ((a.double() - (1 - p)) * (b.double() - (1 - p))).mean() / (p * (1 - p))
    return (product.abs() * a.numel() ** 0.5).item()


def test_dropout_statistics():
    p = 0.1
    torch.seed()
    first = seed_tensor(torch.randint(-(2**62), 2**62, (1,)).item())
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


def block(qkv, bias, weight, cu_seqlens, seed, plan):
    """A cut through a layer: attention, LayerNorm and GELU, without the products between them."""
    out = attention.ragged_attention(qkv, cu_seqlens, 512, 0.1, seed, site=1, plan=plan).flatten(1)
    hidden, again = layernorm.dropout_add_layernorm_pair(out, bias, qkv[:, 0].flatten(1), weight, bias, 0.1, seed, 2)
    return layernorm.dropout_add_layernorm(gelu.bias_gelu(hidden, bias), bias, again, weight, bias, 0.1, seed, 3)


def step(tensors, cu_seqlens, seed):
    plan = attention.plan_attention(cu_seqlens, tensors[0].shape[0])
    y = block(*tensors, cu_seqlens, seed, plan)
    return y, *torch.autograd.grad(y.float().square().sum(), tensors)


def step_inputs():
    lengths = [512, 1, 0, 100, 411]
    tensors = [random(1024, 3, 4, 64, dtype=torch.bfloat16), random(256), random(256)]
    return [tensor.requires_grad_() for tensor in tensors], boundaries(lengths), seed_tensor(1)


def test_kernels_replay_in_a_cuda_graph_with_new_seeds_and_lengths():
    tensors, cu_seqlens, seed = step_inputs()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(tensors, cu_seqlens, seed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(tensors, cu_seqlens, seed)
    seed.fill_(99)
    cu_seqlens.copy_(boundaries([3, 500, 512, 9, 0]))
    graph.replay()
    for actual, expected in zip(captured, step(tensors, cu_seqlens, seed), strict=True):
        assert torch.equal(actual, expected)


def test_kernels_compile_without_graph_breaks():
    tensors, cu_seqlens, seed = step_inputs()
    plan = attention.plan_attention(cu_seqlens, 1024)
    compiled = torch.compile(block, fullgraph=True)
    actual = compiled(*tensors, cu_seqlens, seed, plan)
    expected = block(*tensors, cu_seqlens, seed, plan)
    assert error(actual, expected) <= 1e-2
    gradients = torch.autograd.grad(actual.float().sum(), tensors)
    references = torch.autograd.grad(expected.float().sum(), tensors)
    assert max(error(a, b) for a, b in zip(gradients, references, strict=True)) <= 1e-2
