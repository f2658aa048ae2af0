"""Ranks on a GPU: one over NCCL, and two that share it over gloo. They train what a rank alone trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import helpers
from tests.gpu.test_training import WIDE, needs_fp8, needs_kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

BINS = {"batch__token_budget": 512, "batch__sequences": 48}  # several bins to a step, so that gradients accumulate


def train(run: Path, data: Path, world: int, **overrides: object) -> list[float]:
    """Losses of a run of `world` ranks under torchrun, or of one that no launcher started (0)."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", "--", "bertrain"]
    arguments = helpers.tiny_arguments(
        train__device="cuda", train__max_steps=20, train__bucket_mb=1, **{**WIDE, **BINS, **overrides}
    )
    command = [
        sys.executable, *(launcher if world else ["-m", "bertrain"]), "pretrain", "bert-tiny", "--data", data,
        "--run", run, "--deterministic", *arguments,
    ]  # fmt: skip
    done = subprocess.run(
        list(map(str, command)), env=helpers.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return helpers.losses(run)


CASES = [
    ({"train__precision": "fp32", "train__kernels": "plain"}, 1e-5),
    pytest.param({"train__precision": "bf16"}, 2e-3, marks=needs_kernels),
    pytest.param({"train__precision": "bf16", "optimizer__sharded": True}, 2e-3, marks=needs_kernels),
    pytest.param({"train__precision": "fp8"}, 2e-2, marks=needs_fp8),
    pytest.param({"train__precision": "fp8", "optimizer__sharded": True}, 2e-2, marks=needs_fp8),
]


@pytest.mark.parametrize(("overrides", "tolerance"), CASES)
def test_ranks_train_alike(tmp_path: Path, overrides: dict[str, object], tolerance: float) -> None:
    """One rank over NCCL adds nothing, so it is bitwise the same; two ranks add up in another order."""
    data = helpers.make_data(tmp_path)
    alone = train(tmp_path / "alone", data, 0, **overrides)
    assert train(tmp_path / "nccl", data, 1, **overrides) == alone
    pair = train(tmp_path / "pair", data, 2, **overrides)
    assert alone[-1] < alone[0]
    distances = [abs(one - other) / other for one, other in zip(pair, alone, strict=True)]
    print(f"largest distance of two ranks' losses {max(distances):.2e}")
    assert max(distances) <= tolerance


@needs_kernels
@pytest.mark.parametrize("clipping", ["local", "bucket"])
def test_clipping_on_the_way(tmp_path: Path, clipping: str) -> None:
    """Of buckets that leave between CUDA graphs: with a limit that nothing reaches, nothing changes."""
    data = helpers.make_data(tmp_path)
    common = {"train__precision": "bf16", "optimizer__clip_norm": 1e4}
    free = train(tmp_path / "free", data, 1, **common)
    assert train(tmp_path / "clipped", data, 1, **common, optimizer__clipping=clipping) == free
    tight = train(
        tmp_path / "tight", data, 1, **common | {"optimizer__clip_norm": 1e-2, "optimizer__clipping": clipping}
    )
    assert tight != free
