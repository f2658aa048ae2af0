"""The trainer on a GPU: the same losses as on the CPU, and bitwise resume."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
import torch

from bertrain.train.pretrain import pretrain
from tests import helpers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def test_gpu_and_cpu_train_alike(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    for device in ("cpu", "cuda"):
        settings = helpers.tiny_settings(train__device=device, model__hidden_dropout=0, model__attention_dropout=0)
        pretrain(settings, data, tmp_path / device)
    for one, other in zip(helpers.losses(tmp_path / "cuda"), helpers.losses(tmp_path / "cpu"), strict=True):
        assert abs(one - other) <= 1e-4 * other


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_killed_and_resumed_is_bitwise_undisturbed(tmp_path: Path, precision: str) -> None:
    data = helpers.make_data(tmp_path)
    arguments = helpers.tiny_arguments(
        train__device="cuda", train__precision=precision, train__max_steps=60, checkpoint__every_steps=4
    )

    def start(run: Path) -> list[str]:
        return helpers.command("pretrain", "bert-tiny", "--data", data, "--run", run, "--deterministic", *arguments)

    subprocess.run(start(tmp_path / "calm"), check=True, env=helpers.environment(), stdout=subprocess.DEVNULL)
    run = tmp_path / "disturbed"
    process = subprocess.Popen(start(run), env=helpers.environment(), stdout=subprocess.DEVNULL)
    while len(list((run / "checkpoints").glob("step-*"))) < 2 and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()
    subprocess.run(start(run), check=True, env=helpers.environment(), stdout=subprocess.DEVNULL)
    assert helpers.losses(run) == helpers.losses(tmp_path / "calm")
    weights, expected = helpers.final_weights(run), helpers.final_weights(tmp_path / "calm")
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
