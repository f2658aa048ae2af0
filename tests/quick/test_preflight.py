"""What the pre-flight makes of what the nodes found, and what a node finds on this very machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertrain.base.formatting import GIB
from bertrain.base.machine import Gpu
from bertrain.launch import facts as look
from bertrain.launch.facts import Facts
from bertrain.launch.job import Job, JobSpec, Task, make_job, place
from bertrain.launch.preflight import Link, compare, ring_links
from tests import helpers

VERSION = {"bertrain": "0.1.0 (files 0123456789ab)", "torch": "2.13.0"}
FIT = Facts(
    rank=0, node=0, host="a", is_first_of_node=True, versions=VERSION, clock=100.0, memory_free=8 * GIB,
    disk_free=8 * GIB, run_place="/runs", data="same", gpus_seen=1,
)  # fmt: skip
OTHER = replace(FIT, rank=1, node=1, host="b", clock=100.2)


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    code = {"version": "0.1.0", "commit": "", "files": "0123456789abcdef"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertrain.launch.job.code_version", lambda: code)
        task = Task(command=("pretrain",), folder="run")
        yield make_job(place("local", JobSpec(procs_per_node=1)), [task], data=["data"], folder="job")


def judge(job: Job, *facts: Facts, links: list[Link] | None = None, **settings: object) -> tuple[list[str], list[str]]:
    return compare(facts, links or [], job, helpers.tiny_settings(**settings))


def test_nodes_that_are_alike_are_fit(job: Job) -> None:
    assert judge(job, FIT, OTHER) == ([], [])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"versions": VERSION | {"torch": "2.12.0"}}, "node 1 (b) has torch 2.12.0, but node 0 (a) has 2.13.0"),
        ({"data": "", "data_problem": "no data folder at /data"}, "node 1 (b): no data folder at /data"),
        ({"data": "another"}, "node 1 (b) has other data than node 0 (a)"),
        ({"can_write": False}, "node 1 (b) cannot write into /runs"),
    ],
)
def test_what_would_spoil_the_run_is_refused(job: Job, changed: dict[str, Any], said: str) -> None:
    (refusal,), warnings = judge(job, FIT, replace(OTHER, **changed))
    assert refusal.startswith(said)
    assert warnings == []


def test_a_disk_without_room_for_two_checkpoints_is_refused(job: Job) -> None:
    (refusal,), _ = judge(job, replace(FIT, disk_free=1000), OTHER)
    assert refusal.startswith("node 0 (a) has 0.00 GiB free at /runs")
    assert judge(job, replace(FIT, disk_free=1000), OTHER, checkpoint__enabled=False)[0] == []


def test_gpus_are_counted_and_their_errors_refused(job: Job) -> None:
    gpus = (Gpu(number=0, name="NVIDIA H200"), Gpu(number=1, name="NVIDIA H200", errors=2))
    crowded = [replace(FIT, gpus=gpus), replace(FIT, rank=1, is_first_of_node=False)]
    refusals, _ = judge(replace(job, spec=JobSpec(gpus_per_node=2)), *crowded)
    assert refusals[0].startswith("node 0 (a) has 1 GPU for 2 ranks")
    assert refusals[1] == "node 0 (a): GPU 1 has 2 uncorrected memory errors"
    assert judge(job, *crowded) == ([], []), "without GPUs nobody asks"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"clock": 102.5}, "the clocks of node 0 (a) and node 1 (b) differ by 2.5 s"),
        ({"foreign": ("vmd (7, 98% of a core)",)}, "node 1 (b): other processes are busy: vmd"),
        ({"on_gpus": ("vmd (7, 300 MB)",)}, "node 1 (b): other processes use its GPUs: vmd"),
        ({"memory_free": GIB}, "node 1 (b) has only 1.0 GiB of memory free"),
        ({"is_loopback": True}, "node 1 (b) resolves its own name to a loopback address"),
    ],
)
def test_what_may_surprise_is_warned_of(job: Job, changed: dict[str, Any], said: str) -> None:
    refusals, (warning,) = judge(job, FIT, replace(OTHER, **changed))
    assert refusals == []
    assert warning.startswith(said)


def test_code_that_changed_since_the_job_was_written_is_warned_of(job: Job) -> None:
    _, (warning,) = judge(replace(job, code=job.code | {"files": "f" * 64}), FIT)
    assert warning.startswith(
        "the job was written by bertrain 0.1.0 (files ffffffffffff), but this is 0.1.0 (files 0123"
    )


def test_the_slow_link_is_named(job: Job) -> None:
    links = [Link(("a", "b"), 9.0), Link(("b", "c"), 2.0), Link(("c", "a"), 8.0)]
    _, (warning,) = judge(job, FIT, links=links)
    assert warning == "the link b to c has 2.00 GB/s; the median is 8.00"
    assert ring_links(1) == []
    assert ring_links(2) == [(0, 1)]
    assert ring_links(3) == [(0, 1), (1, 2), (2, 0)]


def test_the_way_to_a_host_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    for name in look.NETWORK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert look.describe_network("127.0.0.1", tmp_path) == (
        "lo (127.0.0.1); mlx5_0 400 Gb/sec (4X NDR) ACTIVE; gloo and NCCL choose for themselves"
    )
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    assert look.describe_network("127.0.0.1", tmp_path).endswith("; NCCL_IB_HCA=mlx5_0")
    assert look.is_loopback("localhost")
