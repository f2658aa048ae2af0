"""The kernels for CPUs against their plain twins in float64, on ragged inputs, and twice with the same bits.

They need AVX-512 and a C compiler; elsewhere the tests skip with the reason. Without AMX they run with AMX emulated.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from bertrain.kernels import attention, cpu, cpu_library, gelu, layernorm
from bertrain.kernels.arguments import Dropout, EmbeddingTables
from bertrain.kernels.embedding import embed_plain, position_gradient
from bertrain.kernels.random import attention_keep_mask, rows_keep_mask
from tests import twins

needs_kernels = pytest.mark.usefixtures("c_kernels")
TOLERANCE = 1e-2  # of bf16, as on a GPU
LENGTHS = {
    "mixed": [512, 1, 130, 64, 300, 17, 0, 511, 16, 128, 33, 33, 2, 0, 65, 257],
    "longer than any recipe": [1500, 3],
    "many of length 1": [1] * 301,
    "full and empty slots": [512, 512, 0, 0, 0, 0],
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


# --- products, attention ------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(1, 16, 16), (33, 48, 80), (1024, 256, 1024), (2500, 1040, 272), (1300, 300, 50)]
)
def test_weight_gradient(tokens: int, rows: int, columns: int) -> None:
    dy, x, start = random(tokens, rows), random(tokens, columns), torch.randn(rows, columns)
    written, added = torch.full((rows, columns), torch.nan), start.clone()
    cpu.weight_gradient(dy, x, written, accumulate=False)
    cpu.weight_gradient(dy, x, added, accumulate=True)
    expected = dy.double().t() @ x.double()
    assert twins.error(written, expected) <= 1e-6
    assert twins.error(added, expected + start) <= 1e-6


def attention_error(lengths: list[int], head_dim: int = 64, p: float = 0.1, query_scale: float = 1.0) -> float:
    cu_seqlens, seed, num_tokens = twins.boundaries(lengths, "cpu"), torch.tensor([2**40 + 77]), sum(lengths)
    qkv, dout = random(num_tokens, 3, 4, head_dim), random(num_tokens, 4, head_dim)
    qkv[:, 0] *= query_scale
    dropout = Dropout(p, seed, 3)
    actual = twins.twice(lambda: twins.attention_both_ways(qkv, dout, cu_seqlens, p, seed, 3))
    expected = twins.twin_both_ways(lambda x: attention.ragged_attention_plain(x, cu_seqlens, dropout), [qkv], dout)
    return twins.attention_error(actual, expected)


@needs_kernels
@pytest.mark.parametrize("case", LENGTHS)
def test_attention_matches_twin(case: str) -> None:
    assert attention_error(LENGTHS[case]) <= TOLERANCE


@needs_kernels
@pytest.mark.parametrize("head_dim", [16, 32, 128])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_attention_head_sizes_and_rates(head_dim: int, p: float) -> None:
    assert attention_error([*twins.random_lengths(12, 400), 1], head_dim, p) <= TOLERANCE


@needs_kernels
def test_attention_survives_extreme_scores() -> None:
    assert attention_error([130, 64, 1, 300], query_scale=60.0) <= 2 * TOLERANCE


@needs_kernels
@pytest.mark.parametrize("part", [0, 1, 2])
def test_attention_hides_no_nan(part: int) -> None:
    """Of one query, its own row; of one key or value, all rows."""
    qkv, plan = random(70, 3, 2, 32), cpu.plan_attention(twins.boundaries([40, 30], "cpu"), 70)
    qkv[7, part, 1, 5] = torch.nan
    out = cpu.ragged_attention_forward(qkv, plan, Dropout(0.0, torch.tensor([1]), 0))[0]
    expected = torch.zeros(70, 2, dtype=torch.bool)
    expected[7 if part == 0 else slice(40), 1] = True
    assert torch.equal(out.isnan().any(-1), expected)


@needs_kernels
def test_cross_entropy_hides_no_nan() -> None:
    logits, labels = twins.cross_entropy_case(20, 109, 99, torch.bfloat16, "cpu")
    logits[3, 50] = torch.nan
    assert cpu.cross_entropy(logits, labels, 99, torch.tensor(1.0))[0].isnan()


@needs_kernels
def test_attention_dropout_masks_are_the_twins() -> None:
    # With zero queries the weights of a row are equal, so one-hot values show the mask in the output, and one-hot
    # gradients show it again in the gradient of the values.
    length, before, p = 200, 96, 0.1
    seed, cu_seqlens = torch.tensor([-5]), twins.boundaries([before, length], "cpu")
    expected = attention_keep_mask(seed, 9, 4, before, length, p)
    for first in range(0, length, 64):
        block = torch.arange(min(64, length - first))
        qkv = torch.zeros(before + length, 3, 4, 64, dtype=torch.bfloat16)
        qkv[before + first + block, 2, :, block] = 1
        dout = torch.zeros(before + length, 4, 64, dtype=torch.bfloat16)
        dout[before + first + block, :, block] = 1
        out, _, _, dvalues, _ = twins.attention_both_ways(qkv, dout, cu_seqlens, p, seed, 9)
        assert torch.equal(out[before:, :, block].permute(1, 0, 2) != 0, expected[:, :, first : first + 64])
        assert torch.equal(dvalues[before:, :, block].permute(1, 2, 0) != 0, expected[:, first : first + 64, :])


# --- between products ---------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("shape", [(1000, 1024), (333, 768), (1, 128)])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("is_pair", [False, True])
def test_layernorm_matches_twin(shape: tuple[int, int], p: float, is_pair: bool) -> None:
    rows, width = shape
    inputs = [random(*shape), torch.randn(width), random(*shape), torch.randn(width) + 1, torch.randn(width)]
    dy, second, seed = random(*shape), random(*shape) if is_pair else None, torch.tensor([3])
    actual = twins.twice(lambda: twins.layernorm_both_ways(inputs, dy, second, p, seed, 4))
    expected = twins.twin_both_ways(
        lambda *tensors: layernorm.dropout_add_layernorm_plain(*tensors, Dropout(p, seed, 4), twins.NORM_EPS),
        inputs,
        dy.double() + (0 if second is None else second.double()),
    )
    assert twins.largest_error(actual, expected) <= TOLERANCE
    if p > 0 and rows > 1:
        assert torch.equal(actual[1] != 0, rows_keep_mask(seed, 4, rows, width, p))


@needs_kernels
@pytest.mark.parametrize("shape", [(1000, 4096), (333, 3072), (1, 128)])
def test_gelu_matches_twin(shape: tuple[int, int]) -> None:
    x, bias, dy = 3 * random(*shape), torch.randn(shape[1]), random(*shape)
    x[0, :4] = torch.tensor([300.0, -300.0, 1e30, -1e30])
    actual = twins.twice(lambda: twins.gelu_both_ways(x, bias, dy))
    expected = twins.twin_both_ways(gelu.bias_gelu_plain, (x, bias), dy)
    assert twins.largest_error(actual[1:], expected[1:]) <= TOLERANCE
    assert torch.allclose(actual[0].double(), expected[0], rtol=TOLERANCE, atol=1e-5)


# --- both ends of the model ----------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("width", [1024, 48])
def test_embedding_matches_twin(p: float, width: int) -> None:
    lengths, seed = LENGTHS["mixed"], torch.tensor([12])
    tables, norm, ids, cu_seqlens = twins.embedding_case(lengths, 3000, 520, width, torch.bfloat16, "cpu")
    dy, second = random(sum(lengths), width), random(sum(lengths), width)
    actual = twins.twice(lambda: twins.embedding_both_ways(tables, norm, ids, dy, second, cu_seqlens, p, seed, 3))
    expected = twins.twin_both_ways(
        lambda words, positions, segments, weight, bias: embed_plain(
            EmbeddingTables(words, positions, segments), ids, weight, bias, Dropout(p, seed, 3), twins.NORM_EPS
        ),
        [*tables, *norm],
        dy.double() + second.double(),
    )
    assert (actual[2][512:] == 0).all(), "positions that no sequence reaches"
    assert twins.largest_error(actual, expected) <= TOLERANCE


@needs_kernels
def test_rows_are_added_to_what_is_there() -> None:
    lengths = LENGTHS["mixed"]
    dsum = torch.randint(-9, 9, (sum(lengths), 80)).float()  # sums of whole numbers are exact
    start = torch.randint(-9, 9, (520, 80)).float()
    expected = start.clone()
    cu_seqlens = twins.boundaries(lengths, "cpu")
    for first, length in zip(cu_seqlens.tolist(), lengths, strict=False):
        expected[:length] += dsum[first : first + length]
    position_gradient(dsum, cu_seqlens, start, accumulate=True)
    assert torch.equal(start, expected)


@needs_kernels
@pytest.mark.parametrize(("width", "vocab_size"), [(30528, 30522), (30522, 30522), (109, 99)])
def test_cross_entropy_matches_twin(width: int, vocab_size: int) -> None:
    logits, labels = twins.cross_entropy_case(211, width, vocab_size, torch.bfloat16, "cpu")
    (loss, correct, gradient), expected = twins.cross_entropy_both_ways(logits, labels, vocab_size, 1 / 209)
    assert twins.error(loss, expected[0]) <= 1e-5
    assert correct.item() == expected[1].item()
    assert twins.error(gradient, expected[2]) <= TOLERANCE


@needs_kernels
@pytest.mark.parametrize("padding", [1, 16])
def test_lamb_matches_twin(padding: int) -> None:
    state = torch.get_rng_state()
    first = twins.LambCase(padding, "cpu")
    torch.set_rng_state(state)
    second = twins.LambCase(padding, "cpu")
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


# --- memory ---------------------------------------------------------------------------------------------------------

LIMITED = """
import resource, torch
from pathlib import Path
from bertrain.kernels import cpu, cpu_library
from tests import emulated_amx
with emulated_amx.within():
    cpu_library.available()
    torch.set_num_threads(1)
    x, gradient = torch.zeros(4096, 4096, dtype=torch.bfloat16), torch.zeros(4096, 4096)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (8 << 20),) * 2)
    try:
        cpu.weight_gradient(x, x, gradient, accumulate=False)
    except MemoryError as error:
        print(error)
"""


@needs_kernels
def test_want_of_memory_is_an_error_of_python() -> None:
    told = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    assert "weight_gradient" in told.stdout


@needs_kernels
def test_empty_bins() -> None:
    empty, dropout = random(0, 3, 4, 64), Dropout(0.1, torch.tensor([1]), 0)
    plan = cpu.plan_attention(torch.zeros(3, dtype=torch.int32), 0)
    out, sums, _ = cpu.ragged_attention_forward(empty, plan, dropout)
    dqkv, partials, _ = cpu.ragged_attention_backward(empty, out, sums, out, plan, dropout)
    assert len(dqkv) == 0
    assert not partials.any()
    gradient = torch.ones(64, 32)
    cpu.weight_gradient(random(0, 64), random(0, 32), gradient, accumulate=False)
    assert not gradient.any()


# --- compiling ------------------------------------------------------------------------------------------------------


@needs_kernels
def test_compiled_once_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler, version = cpu_library.find_compiler()
    made = cpu_library.compile_source(compiler, version)
    assert made.parent == tmp_path / "bertrain"
    made_at = made.stat().st_mtime_ns
    assert cpu_library.compile_source(compiler, version) == made
    assert made.stat().st_mtime_ns == made_at
    assert os.listdir(made.parent) == [made.name], "nothing half-written is left"
    told = subprocess.run(
        [compiler, *cpu_library.FLAGS, "-Wall", "-Wextra", "-fsyntax-only", str(cpu_library.SOURCE)],
        capture_output=True,
        text=True,
    )
    assert told.stderr == ""


def test_without_a_compiler_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(cpu_library.UnavailableError, match="gcc"):
        cpu_library.find_compiler()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\necho 'cpu.c:1: error: no such flag -mamx-bf16' >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(cpu_library.UnavailableError, match=r"gcc .*no such flag -mamx-bf16"):
        cpu_library.compile_source(str(broken), "old")
    assert os.listdir(tmp_path / "bertrain") == []


def test_without_space_or_a_compiler_that_starts_the_kernels_are_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_library, "NEEDED", ())
    monkeypatch.setattr(cpu_library, "_load", cpu_library._load.__wrapped__)  # without its cache
    damaged = tmp_path / "gcc"
    damaged.write_bytes(b"\x7fELF")
    damaged.chmod(0o755)
    monkeypatch.setenv("CC", str(damaged))
    reason = "the C kernels cannot be compiled: "
    assert cpu_library.available.__wrapped__() == (False, f"{reason}[Errno 8] Exec format error: '{damaged}'")
    monkeypatch.setattr(cpu_library, "find_compiler", lambda: (str(damaged), "some version"))
    monkeypatch.setattr(tempfile, "TemporaryDirectory", Mock(side_effect=OSError(28, "No space left on device")))
    assert cpu_library.available.__wrapped__() == (False, f"{reason}[Errno 28] No space left on device")
