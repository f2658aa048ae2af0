"""Precisions of a GPU round as they should and are followed in training; batch.auto tries its bins out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bertrain.training.precision import check_precision, set_precision
from bertrain.training.start import pretrain
from tests import helpers

HAS_GPU = torch.cuda.is_available()
HAS_TF32 = HAS_GPU and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = pytest.mark.skipif(not HAS_GPU, reason="torch sees no GPU")
needs_tf32 = pytest.mark.skipif(not HAS_TF32, reason="this GPU multiplies no TF32")


@needs_tf32
def test_tf32_rounds_the_operands_of_products_and_fp32_does_not() -> None:
    """Two operands of 10-bit mantissas: about sqrt(2) * 2^-10 / sqrt(12) = 4e-4."""
    a, b = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    exact = a.double() @ b.double()
    errors = {}
    for precision in ("tf32", "fp32"):
        set_precision(helpers.tiny_settings(train__precision=precision).train)
        errors[precision] = helpers.relative_error((a @ b).double(), exact)
    assert 1e-4 < errors["tf32"] < 1e-3
    assert errors["fp32"] < 1e-6


def test_bf32_and_a_cap_on_instructions_are_a_cpus() -> None:
    device = torch.device("cuda", 0)
    with helpers.refused("precision-not-possible", "train.precision bf32", "--train.precision tf32"):
        check_precision(helpers.tiny_settings(train__precision="bf32").train, device)
    with helpers.refused("isa-on-gpu", "avx2"):
        check_precision(helpers.tiny_settings(train__isa="avx2").train, device)


@pytest.mark.parametrize("precision", ["fp16", pytest.param("tf32", marks=needs_tf32)])
@pytest.mark.parametrize("kept", ["none", "selective", "full"])
def test_narrow_products_follow_fp32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str, kept: str
) -> None:
    data = helpers.make_data(tmp_path)
    for run in ("fp32", precision):
        settings = helpers.tiny_settings(
            train__device="cuda",
            train__kernels="plain",
            train__precision=run,
            train__activation_checkpointing=kept if run != "fp32" else "none",
        )
        pretrain(settings, data, tmp_path / run)
        assert f"computing with plain PyTorch, {run}" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / precision / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if line["kind"] == "step"]
    assert sum(record["applied"] for record in records) >= len(records) - 4, "a few overflows find the scale"
    rounded, exact = helpers.losses(tmp_path / precision), helpers.losses(tmp_path / "fp32")
    assert rounded != exact
    for one, other in zip(rounded, exact, strict=True):
        assert abs(one - other) <= 0.02 * other


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_largest_bins_are_tried_out(tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    settings = helpers.tiny_settings(
        train__device="cuda", train__precision=precision, train__max_steps=2, batch__auto=True, batch__token_budget=64
    )
    pretrain(settings, data, run)
    budget = json.loads((run / "config.json").read_text())["settings"]["batch"]["token_budget"]
    assert budget > 64
    assert budget % 64 == 0
    assert f"batch.auto: bins of up to {budget:,} tokens" in capsys.readouterr().out
