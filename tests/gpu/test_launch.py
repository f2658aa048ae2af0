"""A job on this machine's GPU: what the pre-flight sees of it, cores next to it, and more ranks than GPUs refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from bertrain.base.formatting import counted
from bertrain.ranks.binding import read_topology, usable_cpus
from bertrain.ranks.parallel import gpu_nodes
from tests import helpers
from tests.launched import as_job

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")


def launch(folder: Path, gpus: int) -> subprocess.CompletedProcess[str]:
    options = ("--job", folder / "job", "--gpus-per-node", gpus)
    words = as_job("local", *options, data=helpers.make_data(folder), run=folder / "run", train__max_steps=4)
    return helpers.bertrain(*words, check=False)


def test_a_job_on_one_gpu(tmp_path: Path) -> None:
    done = launch(tmp_path, 1)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert counted(torch.cuda.device_count(), "GPU") + ": " in done.stdout
    assert "device cuda:0 " in done.stdout
    assert "pre-flight: fit to train" in done.stdout
    found = json.loads(helpers.bertrain("launch", "preflight", tmp_path / "job", "--json").stdout)
    (mine,) = found["facts"]
    assert mine["gpus_seen"] == torch.cuda.device_count()
    assert mine["gpus"], "nvidia-smi was asked, and understood"
    (node,) = gpu_nodes(1)
    nodes = {core.node for core in read_topology(usable_cpus())}
    if node in nodes:
        assert f"NUMA node {node})" in mine["binding"]


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    done = launch(tmp_path, torch.cuda.device_count() + 1)
    assert done.returncode == 2, done.stdout
    count = torch.cuda.device_count()
    assert f"has {counted(count, 'GPU')} for {counted(count + 1, 'rank')}" in done.stdout
    assert not (tmp_path / "run").exists()
