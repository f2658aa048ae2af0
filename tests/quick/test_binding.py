"""Cores for ranks: properties on machines made up by Hypothesis, and two machines that are known to go wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.config.settings import TrainSettings
from bertrain.ranks import parallel
from bertrain.ranks.binding import (
    Core,
    assign_cores,
    node_of_pci_device,
    parse_cpu_list,
    read_topology,
    write_cpu_list,
)


def make_sys(root: Path, nodes: list[list[int]], siblings: dict[int, list[int]]) -> Path:
    """What the kernel shows of a machine, as far as it is looked at."""
    for number, cpus in enumerate(nodes):
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(write_cpu_list(cpus) + "\n")
    for cpu, together in siblings.items():
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(write_cpu_list(together) + "\n")
    return root


def two_sockets(root: Path) -> Path:
    """2 sockets of 8 cores of 2 threads, numbered as Linux does: 0-7 and 16-23, 8-15 and 24-31."""
    nodes = [[*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]]
    return make_sys(root, nodes, {cpu: [cpu % 16, cpu % 16 + 16] for cpu in range(32)})


@st.composite
def machines(draw: st.DrawFn) -> list[Core]:
    """Some nodes of some cores of one or two threads, with any gaps between the numbers."""
    cores, number = [], 0
    for node in sorted(draw(st.sets(st.integers(0, 7), min_size=1, max_size=4))):
        for _ in range(draw(st.integers(1, 9))):
            number += draw(st.integers(1, 5))
            threads = draw(st.sampled_from([(number,), (number, number + 1000)]))
            cores.append(Core(node, threads))
    return cores


@given(machines(), st.integers(1, 20))
def test_ranks_of_cpus_share_out_all_cores_evenly(cores: list[Core], ranks: int) -> None:
    bindings = assign_cores(cores, ranks)
    usable = {cpu for core in cores for cpu in core.cpus}
    assert len(bindings) == ranks
    for binding in bindings:
        assert binding.cores
        assert set(binding.cpus) <= usable, "never out of range"
        assert set(binding.cores) <= set(cores), "threads of a core stay together"
    nodes = {core.node for core in cores}
    if ranks >= len(nodes):
        assert all(len({core.node for core in binding.cores}) == 1 for binding in bindings), "none straddles"
    shared = [binding for binding in bindings if binding.is_shared]
    own = [core for binding in bindings if not binding.is_shared for core in binding.cores]
    assert len(own) == len(set(own)), "no core is given to two ranks"
    assert not set(own) & {core for binding in shared for core in binding.cores}
    assert ranks <= len(cores) or shared
    for node in nodes:
        sizes = [len(binding.cores) for binding in bindings if {core.node for core in binding.cores} == {node}]
        assert not sizes or max(sizes) - min(sizes) <= 1
    sizes_of_nodes = {sum(core.node == node for core in cores) for node in nodes}
    if len(sizes_of_nodes) == 1 and ranks % len(nodes) == 0 and ranks <= len(cores):
        assert {core for binding in bindings for core in binding.cores} == set(cores), "none is left idle"


@given(machines(), st.lists(st.none() | st.integers(0, 7), min_size=1, max_size=16))
def test_ranks_of_gpus_keep_to_the_node_of_their_gpu(cores: list[Core], gpu_nodes: list[int | None]) -> None:
    bindings = assign_cores(cores, len(gpu_nodes), gpu_nodes)
    nodes = {core.node for core in cores}
    for binding, node in zip(bindings, gpu_nodes, strict=True):
        assert binding.cores
        assert set(binding.cores) <= set(cores)
        if node in nodes:
            assert {core.node for core in binding.cores} == {node}
    own = [core for binding in bindings if not binding.is_shared for core in binding.cores]
    assert len(own) == len(set(own))


@given(st.sets(st.integers(0, 300)))
def test_lists_of_processors_are_read_as_they_are_written(numbers: set[int]) -> None:
    assert parse_cpu_list(write_cpu_list(numbers)) == sorted(numbers)


@pytest.mark.parametrize("text", ["a", "1-", "3,,4", "-1", "0x3"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="list of processors"):
        parse_cpu_list(text)


def test_eight_gpus_on_two_sockets(tmp_path: Path) -> None:
    cores = read_topology(range(32), two_sockets(tmp_path))
    bindings = assign_cores(cores, 8, [0, 0, 0, 0, 1, 1, 1, 1])
    assert [write_cpu_list(binding.cpus) for binding in bindings] == [
        *("0-1,16-17", "2-3,18-19", "4-5,20-21", "6-7,22-23"),
        *("8-9,24-25", "10-11,26-27", "12-13,28-29", "14-15,30-31"),
    ]
    assert bindings[7].describe() == "cpus 14-15,30-31 (2 cores, NUMA node 1)"


def test_a_cpuset_with_gaps_gives_what_is_left(tmp_path: Path) -> None:
    """Cores 0 and 8 are kept for storage, and the second thread of core 3: counting cores by rank would take them."""
    usable = set(range(32)) - {0, 16, 8, 24, 19}
    cores = read_topology(usable, two_sockets(tmp_path))
    assert Core(0, (3,)) in cores
    bindings = assign_cores(cores, 8, [0, 0, 0, 0, 1, 1, 1, 1])
    assert {cpu for binding in bindings for cpu in binding.cpus} == usable
    assert [len(binding.cores) for binding in bindings] == [1, 2, 2, 2] * 2


def test_a_machine_that_says_nothing_has_one_node(tmp_path: Path) -> None:
    assert read_topology([4, 7], tmp_path) == [Core(0, (4,)), Core(0, (7,))]
    assert node_of_pci_device("0000:1B:00.0", tmp_path) is None


def test_a_device_says_its_node(tmp_path: Path) -> None:
    for address, text in (("0000:1b:00.0", "1\n"), ("0000:9a:00.0", "-1\n")):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text)
    assert node_of_pci_device("0000:1B:00.0", tmp_path) == 1
    assert node_of_pci_device("0000:9a:00.0", tmp_path) is None


def test_a_second_join_has_the_cores_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As runs that follow one another on the same ranks."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    before, cores = os.sched_getaffinity(0), []
    for _ in range(2):
        with parallel.join(TrainSettings(device="cpu")):
            cores.append(os.sched_getaffinity(0))
    assert cores[0] == cores[1]
    assert os.sched_getaffinity(0) == before


def test_cores_that_are_gone_fail_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    with parallel.join(TrainSettings(device="cpu", binding="none")):
        monkeypatch.setattr(os, "sched_setaffinity", refuse)
