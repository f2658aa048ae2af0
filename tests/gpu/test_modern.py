"""ModernBERT on the kernels: each kernel against its twin, and steps of training; test_fused.py has the whole model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from bertrain.config.settings import Settings
from bertrain.data.formats.shards import Shards
from bertrain.kernels.arguments import Cast, Dropout
from bertrain.kernels.fp8 import transpose
from bertrain.kernels.geglu import geglu_backward, geglu_forward, geglu_plain
from bertrain.kernels.prenorm import add_layernorm_backward, add_layernorm_forward, layernorm_forward
from bertrain.training.fused_engine import FusedEngine
from bertrain.training.start import pretrain
from tests import helpers, twins
from tests.gpu.test_fused import MODERN, PRECISIONS, REASON, USABLE, Trainer, make_steps, needs_fp8

pytestmark = pytest.mark.skipif(not USABLE, reason=REASON)
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(BF16)


def dropout_of(p: float) -> Dropout:
    return Dropout(p, torch.tensor([2**40 + 5], device="cuda"), 5)


# Kernels


@pytest.mark.parametrize(
    ("lengths", "heads", "head_size", "window", "p"),
    [
        ([300, 1, 512, 64, 5, 129, 63], 12, 64, 0, 0.0),
        ([300, 1, 512, 64, 5, 129, 63], 12, 64, 64, 0.0),
        ([300, 1, 512, 64, 5, 129, 63], 4, 64, 64, 0.1),
        ([33, 700, 2, 65], 3, 32, 1, 0.0),
        ([33, 700, 2, 65], 3, 128, 37, 0.1),
        ([200, 15], 2, 16, 4000, 0.0),
        ([8192, 77], 1, 64, 64, 0.0),
        ([8192], 1, 64, 0, 0.1),
    ],
)
def test_rotary_attention(lengths: list[int], heads: int, head_size: int, window: int, p: float) -> None:
    qkv, dout = normal(sum(lengths), 3, heads, head_size), normal(sum(lengths), heads, head_size)
    given = lengths, twins.rotary_tables(max(lengths), head_size, "cuda"), dropout_of(p), window
    out, dqkv = twins.twice(lambda: twins.rotary_attention_both_ways(qkv, dout, *given))
    expected, gradient = twins.rotary_attention_twin(qkv, dout, *given)
    assert twins.error(out, expected) <= 1e-2
    for which in range(3):
        assert twins.error(dqkv[:, which], gradient[:, which]) <= 1.5e-2, which


def test_lengths_that_no_run_saw_before() -> None:
    lengths = [max(1, length) for length in twins.random_lengths(40, 400)]
    qkv, dout = normal(sum(lengths), 3, 2, 64), normal(sum(lengths), 2, 64)
    given = lengths, twins.rotary_tables(400, 64, "cuda"), dropout_of(0.0), 64
    actual, expected = (
        twins.rotary_attention_both_ways(qkv, dout, *given),
        twins.rotary_attention_twin(qkv, dout, *given),
    )
    assert twins.largest_error(actual, expected) <= 1.5e-2


@pytest.mark.parametrize("width", [768, 1024, 200])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_prenorm(width: int, p: float) -> None:
    inputs, dy, along = (
        [normal(777, width), normal(777, width), 1 + torch.randn(width, device="cuda")],
        *normal(2, 777, width),
    )
    for other in (along, None):
        actual = twins.twice(partial(twins.prenorm_both_ways, inputs, dy, other, dropout_of(p)))
        assert twins.largest_error(actual, twins.prenorm_twin(inputs, dy, other, dropout_of(p))) <= 1e-2
    x, residual, weight = inputs
    total, y, _, _ = add_layernorm_forward(x, residual, weight, dropout_of(p), 1e-5)
    assert torch.equal(layernorm_forward(total, weight, 1e-5)[0], y), "the same bits when it is computed again"


@pytest.mark.parametrize("width", [1152, 2624, 40])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_geglu(width: int, p: float) -> None:
    x, dy, dropout = 2 * normal(777, 2 * width), normal(777, width), dropout_of(p)
    actual = twins.twice(lambda: twins.geglu_both_ways(x, dy, dropout))
    assert twins.largest_error(actual, twins.twin_both_ways(lambda x: geglu_plain(x, dropout), [x], dy)) <= 1e-2


def cast_for(full: torch.Tensor, dtype: torch.dtype) -> Cast:
    largest = {E4M3: 448.0, E5M2: 57344.0}[dtype]
    return twins.cast_at(largest / full.abs().max().item(), dtype, "cuda")


@needs_fp8
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_fp8_copies(p: float) -> None:
    """Both layouts of both kernels; the peaks are those of the values."""
    dropout = dropout_of(p)
    x, dy = normal(784, 2 * 2624), normal(784, 2624)
    y, dx = twins.geglu_both_ways(x, dy, dropout)
    forward, backward = cast_for(y, E4M3), cast_for(dx, E5M2)
    _, y8 = geglu_forward(x, dropout, forward, full=False)
    _, dx8 = geglu_backward(dy, x, dropout, backward, full=False)
    for copy, cast, full in ((y8, forward, y), (dx8, backward, dx)):
        assert copy is not None
        assert torch.equal(copy.rows.view(torch.uint8), copy.columns.t().contiguous().view(torch.uint8))
        assert twins.error(copy.rows.float() / cast.scale, full) <= 8e-2
        assert cast.largest.max().item() == pytest.approx(full.abs().max().item(), rel=1e-2)
    residual, branch, dnormed, along = normal(4, 784, 768)
    weight = 1 + torch.randn(768, device="cuda")
    total, y, statistics, _ = add_layernorm_forward(branch, residual, weight, dropout, 1e-5)
    given = dnormed, along, total, weight, statistics, dropout
    _, dx, *_ = add_layernorm_backward(*given)
    forward, backward = cast_for(y, E4M3), cast_for(dx, E5M2)
    *_, y_rows = add_layernorm_forward(branch, residual, weight, dropout, 1e-5, forward, full=False)
    *_, dx_rows = add_layernorm_backward(*given, backward, full=False)
    _, again = layernorm_forward(total, weight, 1e-5, forward, full=False)
    assert y_rows is not None
    assert again is not None
    assert torch.equal(y_rows.rows.view(torch.uint8), again.rows.view(torch.uint8))
    for rows, cast, full in ((y_rows, forward, y), (dx_rows, backward, dx)):
        assert rows is not None
        both = transpose(rows, cast)
        assert torch.equal(both.rows.view(torch.uint8), both.columns.t().contiguous().view(torch.uint8))
        assert twins.error(both.rows.float() / cast.scale, full) <= 8e-2


# Steps of training


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    return Shards.open(helpers.make_data(tmp_path_factory.mktemp("data")))


def training_settings(precision: str, **overrides: object) -> Settings:
    shape = {
        "model__hidden_size": 128, "model__num_heads": 2, "model__intermediate_size": 192, "model__pad_vocab_to": 64,
        "model__hidden_dropout": 0.1, "model__attention_dropout": 0.1, "model__local_window": 16,
        "optimizer__name": "adamw", "model__num_layers": 3, "train__device": "cuda",
    }  # fmt: skip
    return helpers.tiny_settings(train__precision=precision, **(MODERN | shape | overrides))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_graphs_repeat_what_was_run_eagerly_and_a_resumed_run_its_rest(shards: Shards, precision: str) -> None:
    settings = training_settings(precision)
    replayed, eager = Trainer(settings), Trainer(settings, graphs=False)
    steps, resumed = make_steps(shards, settings, 8), None
    for number, step in enumerate(steps):
        if number == 5:
            resumed = Trainer(settings)
            resumed.arena.values.copy_(eager.arena.values)
            for name, buffer in resumed.optimizer.buffers.items():
                buffer.copy_(eager.optimizer.buffers[name])
            resumed.optimizer.num_applied.copy_(eager.optimizer.num_applied)
            resumed.engine.restore({name: tensor.clone() for name, tensor in eager.engine.state().items()})
        expected = eager.step(step)
        for trainer in (replayed, resumed):
            assert trainer is None or all(map(torch.equal, trainer.step(step), expected))
    assert resumed is not None
    for trainer in (replayed, resumed):
        assert all(map(torch.equal, trainer.state(), eager.state()))
    assert isinstance(replayed.engine, FusedEngine)
    assert any(captured.graphs for captured in replayed.engine._captured.values())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_kernels_and_plain_fp32_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str) -> None:
    """From the self-test of the kernels to the last step of a run."""
    data = helpers.make_data(tmp_path)
    common = {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0, "train__max_steps": 60}
    for run in (precision, "fp32"):
        kernels = "plain" if run == "fp32" else "auto"
        pretrain(training_settings(run, train__kernels=kernels, **common), data, tmp_path / run)
        path = "plain PyTorch" if run == "fp32" else "fused kernels"
        assert f"computing with {path}, {run}" in capsys.readouterr().out
    rounded, exact = helpers.losses(tmp_path / precision), helpers.losses(tmp_path / "fp32")
    distances = [abs(one - other) / other for one, other in zip(rounded, exact, strict=True)]
    print(f"largest distance of losses {max(distances):.2%}")
    assert exact[-1] < 0.9 * exact[0], "something is learnt"
    assert 0 < max(distances) <= 0.02
