"""An experiment of MLPerf's on a GPU: converges, and its log passes the official checker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bertrain.mlperf.check import check_results
from bertrain.mlperf.experiment import run_experiment
from bertrain.mlperf.show import show_logs
from tests.miniature import make_miniature, miniature_settings

pytest.importorskip("mlperf_logging")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_miniature_converges_on_a_gpu(tmp_path: Path, precision: str) -> None:
    miniature = make_miniature(tmp_path)
    settings = miniature_settings(
        miniature, mlperf__division="closed", train__device="cuda", train__precision=precision, train__max_steps=600
    )
    assert run_experiment(settings, miniature / "train", tmp_path / "out")
    (figures,) = show_logs([tmp_path / "out" / "result_0.txt"])
    assert figures.platform == f"1x{torch.cuda.get_device_name()}"
    assert all(one.passes for one in check_results(tmp_path / "out").compliance)
