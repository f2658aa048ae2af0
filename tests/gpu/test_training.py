"""The same training on a GPU: the same losses as on the CPU and on either path, and bitwise resume."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
import torch

from bertrain.kernels.backend import available
from bertrain.planning.devices import gpu_like
from bertrain.reports.report import report
from bertrain.training.fill_mask import fill_mask
from bertrain.training.start import pretrain
from tests import helpers

USABLE, REASON = available("cuda") if torch.cuda.is_available() else (False, "no CUDA device")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
needs_kernels = pytest.mark.skipif(not USABLE, reason=REASON)
needs_fp8 = pytest.mark.skipif(not USABLE or torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no FP8")

WIDE = {"model__hidden_size": 128, "model__intermediate_size": 256, "model__pad_vocab_to": 64}
NO_DROPOUT = {"model__hidden_dropout": 0, "model__attention_dropout": 0}


def test_masks_are_filled_alike_on_gpu_and_cpu(tmp_path: Path) -> None:
    pretrain(helpers.tiny_settings(train__device="cuda"), helpers.make_data(tmp_path), tmp_path / "run")
    sentences = ["bato [MASK] kese", "[MASK] [MASK] livi moda nufu"] * 40
    cpu = fill_mask(tmp_path / "run", sentences, top=3, device="cpu")
    gpu = fill_mask(tmp_path / "run", sentences, top=3, device="cuda")
    for one, other in zip(cpu, gpu, strict=True):
        for guesses, others in zip(one, other, strict=True):
            shares = [guess.probability for guess in guesses]
            assert [guess.probability for guess in others] == pytest.approx(shares, rel=1e-4)


def test_gpu_and_cpu_train_alike(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    for device in ("cpu", "cuda"):
        pretrain(helpers.tiny_settings(train__device=device, **NO_DROPOUT), data, tmp_path / device)
    for one, other in zip(helpers.losses(tmp_path / "cuda"), helpers.losses(tmp_path / "cpu"), strict=True):
        assert abs(one - other) <= 1e-4 * other


@needs_kernels
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp8", marks=needs_fp8)])
def test_kernels_and_plain_fp32_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str) -> None:
    data, common = helpers.make_data(tmp_path), {**WIDE, **NO_DROPOUT, "train__max_steps": 60}
    for run in (precision, "fp32"):
        settings = helpers.tiny_settings(**common, train__device="cuda", train__precision=run)
        pretrain(settings, data, tmp_path / run)
        path = "compiled PyTorch" if run == "fp32" else "fused kernels"
        assert f"computing with {path}, {run}" in capsys.readouterr().out
    rounded, exact = helpers.losses(tmp_path / precision), helpers.losses(tmp_path / "fp32")
    distances = [abs(one - other) / other for one, other in zip(rounded, exact, strict=True)]
    print(f"largest distance of losses {max(distances):.2%}")
    assert exact[-1] < 0.9 * exact[0], "something is learnt"
    assert 0 < max(distances) <= 0.02


@needs_kernels
def test_a_run_records_its_prediction(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    pretrain(helpers.tiny_settings(**WIDE, train__device="cuda", train__precision="bf16"), data, tmp_path / "run")
    (start,) = json.loads((tmp_path / "run" / "environment.json").read_text())
    is_known = gpu_like(torch.cuda.get_device_name()) is not None
    assert (start["predicted_step_ms"] is not None) == is_known
    assert ("by `bertrain plan` at the start" in report(tmp_path / "run").read_text()) == is_known


def test_what_the_kernels_cannot_compute_is_compiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = helpers.make_data(tmp_path)
    common = {"train__device": "cuda", "train__max_steps": 2}
    pretrain(helpers.tiny_settings(model__hidden_size=48, train__precision="bf16", **common), data, tmp_path / "run")
    assert "computing with compiled PyTorch, bf16 (flash attention" in capsys.readouterr().out
    odd = helpers.tiny_settings(batch__token_budget=250, train__precision="fp8", **common)
    with helpers.refused("precision-not-possible", "fp8"):
        pretrain(odd, data, tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


@pytest.mark.parametrize(
    ("precision", "kernels"),
    [
        ("fp32", "plain"),
        ("fp32", "compiled"),
        ("bf16", "plain"),
        ("bf16", "compiled"),
        ("bf16", "auto"),
        pytest.param("fp8", "auto", marks=needs_fp8),
    ],
)
def test_killed_and_resumed_is_bitwise_undisturbed(tmp_path: Path, precision: str, kernels: str) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "disturbed"
    arguments = helpers.tiny_arguments(
        train__device="cuda", train__precision=precision, train__kernels=kernels, train__max_steps=200,
        checkpoint__every_steps=4, **WIDE,
    )  # fmt: skip

    def start(run: Path) -> list[str]:
        return helpers.command("pretrain", "bert-tiny", "--data", data, "--run", run, "--deterministic", *arguments)

    def to_the_end(run: Path) -> str:
        done = subprocess.run(start(run), env=helpers.environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    expected_path = {"auto": "fused kernels" if USABLE else "compiled PyTorch", "compiled": "compiled PyTorch"}.get(
        kernels, "plain PyTorch"
    )
    assert f"computing with {expected_path}, {precision}" in to_the_end(tmp_path / "calm")
    process = subprocess.Popen(start(run), env=helpers.environment(), stdout=subprocess.DEVNULL)
    while len(list((run / "checkpoints").glob("step-*"))) < 2 and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    assert process.wait() < 0, "the run ended before it could be killed"
    assert "continuing after step" in to_the_end(run)
    assert helpers.losses(run) == helpers.losses(tmp_path / "calm")
    weights, expected = helpers.final_weights(run), helpers.final_weights(tmp_path / "calm")
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
