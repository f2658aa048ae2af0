"""Job folders and scripts: what is written, that bash and a linter take it, that paths and lists are read right."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from bertrain.config.resolve import resolve, to_toml
from bertrain.launch.job import (
    JobSpec,
    Launcher,
    Task,
    carried_environment,
    count_hosts,
    make_job,
    parse_time,
    place,
    read_hostfile,
    write_time,
)
from bertrain.launch.remote import combine_exit_codes
from bertrain.launch.rendezvous import (
    ENDPOINT,
    free_port,
    node_and_count,
    publish_endpoint,
    torchrun_variables_from_mpi,
    wait_for_endpoint,
)
from bertrain.launch.submit import is_inside_allocation
from tests import helpers


def test_a_recipe_of_all_settings_is_read_as_it_was_written() -> None:
    settings = helpers.tiny_settings(optimizer__epsilon=1e-7, data__slice="0:0.9")
    assert "epsilon = 1e-07" in to_toml(settings)


def test_a_recipe_holds_words_of_any_script(tmp_path: Path) -> None:
    """JSON writes what is beyond 16 bits as two halves, which TOML refuses."""
    settings = helpers.tiny_settings(mlperf__organization='\U0001f916 & "S\u00f6hne"\t\\')
    (tmp_path / "recipe.toml").write_text(to_toml(settings), encoding="utf-8")
    assert resolve(str(tmp_path / "recipe.toml")) == settings


@pytest.mark.parametrize(
    ("launcher", "spec", "code", "named"),
    [
        ("local", {}, "ranks-per-node", "neither"),
        ("local", {"procs_per_node": 1, "gpus_per_node": 1}, "ranks-per-node", "both"),
        ("ssh", {"procs_per_node": 1, "hostfile": ""}, "missing-hostfile", "--hostfile"),
        ("slurm", {"procs_per_node": 1, "time": "1m"}, "time-too-short", "--time 1m"),
        ("slurm", {"procs_per_node": 1, "gres": "gpu:2"}, "gpus-without-ranks", "--gpus-per-node"),
        ("slurm", {"procs_per_node": 1, "account": "a\nb"}, "control-character", "--account"),
        ("slurm", {"procs_per_node": 1, "account": 'a"b'}, "quotation-mark", '--account a"b'),
        ("mpi", {"procs_per_node": 1, "mpirun": " "}, "invalid-command", "--mpirun"),
        ("ssh", {"procs_per_node": 1, "hostfile": "hosts", "ssh": "ssh 'x"}, "invalid-command", "--ssh ssh 'x"),
        ("slurm", {"procs_per_node": 1, "mounts": "/a:/a"}, "option-without-effect", "--container"),
        ("pbs", {"gpus_per_node": 4, "nodes": 3, "select": "2:ngpus=4"}, "conflicting-options", "2 chunks"),
        ("pbs", {"gpus_per_node": 4, "select": "abc"}, "invalid-value", "'abc'"),
        ("pbs", {"gpus_per_node": 4, "select": "2:ngpus=4+0:ncpus=8"}, "invalid-value", "'0:ncpus=8'"),
        ("pbs", {"gpus_per_node": 4, "select": "2:ngpus=8:ncpus=20"}, "conflicting-options", "ngpus=8"),
        ("pbs", {"procs_per_node": 4, "select": "2:ncpus=20:ngpus=1"}, "conflicting-options", "ngpus=1"),
        ("slurm", {"gpus_per_node": 4, "nodes": 1, "nodelist": "a,b"}, "conflicting-options", "names 2 nodes"),
        ("slurm", {"gpus_per_node": 4, "nodes": 1, "nodelist": "a,b[1-2]"}, "conflicting-options", "--nodes 3"),
        ("slurm", {"gpus_per_node": 4, "nodes": 1, "nodelist": "b[x-2]"}, "invalid-value", "b[x-2]"),
    ],
)
def test_wishes_that_cannot_be(launcher: Launcher, spec: dict[str, Any], code: str, named: str) -> None:
    with helpers.refused(code, named):
        place(launcher, JobSpec(**spec))


def test_a_time_that_is_none() -> None:
    for time in ("soon", "9" * 5000 + ":00:00"):
        with helpers.refused("invalid-duration", "--time", time):
            JobSpec(procs_per_node=1, time=time).check()


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("one\none\n", "repeated-host", "one"),
        ("one\n", "too-few-hosts", "1 host"),
        ("one slot=2\ntwo\n", "damaged-hostfile", "line 1"),
        ("one\n-oProxyCommand=x\n", "damaged-hostfile", "line 2"),
        ("one\ntwo; rm\n", "damaged-hostfile", "line 2"),
    ],
)
def test_hostfiles_that_are_none(tmp_path: Path, text: str, code: str, named: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with helpers.refused(code, tmp_path / "hosts", named):
        read_hostfile(tmp_path / "hosts", 1, 2)
    (tmp_path / "hosts").write_text("# nobody\n")
    with helpers.refused("too-few-hosts", "0 host"):
        read_hostfile(tmp_path / "hosts", 1, 0)
    with helpers.refused("missing-hostfile", tmp_path / "nothing"):
        read_hostfile(tmp_path / "nothing", 1, 2)
    (tmp_path / "hosts").write_bytes(b"\xd0\x00")
    with helpers.refused("damaged-hostfile", tmp_path / "hosts"):
        read_hostfile(tmp_path / "hosts", 1, 2)


HERE = place("local", JobSpec(procs_per_node=1))


@pytest.mark.parametrize("what", ["data", "folder", "job", "word"])
def test_no_path_ends_a_line_of_the_script(what: str) -> None:
    paths = {"data": "data", "folder": "run", "job": "job", "word": "bert-tiny"} | {what: "a\ntouch here"}
    task = Task(command=("pretrain", paths["word"]), folder=paths["folder"])
    with helpers.refused("control-character"):
        make_job(HERE, [task], data=[paths["data"]], folder=paths["job"])


def test_neither_a_link_nor_the_working_directory_brings_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "x\ntouch PWNED; exit 0 #"
    odd.mkdir()
    (tmp_path / "link").symlink_to(odd)
    task = Task(command=("pretrain",), folder=str(tmp_path / "run"))
    with helpers.refused("control-character", "link"):
        make_job(HERE, [task], data=[tmp_path / "link"], folder=tmp_path / "job")
    monkeypatch.chdir(odd)
    with helpers.refused("control-character", "working directory"):
        make_job(HERE, [task], folder=tmp_path / "job")


def test_a_list_may_name_some_of_the_nodes() -> None:
    """Slurm chooses the others."""
    assert place("slurm", JobSpec(gpus_per_node=4, nodes=4, nodelist="a,b")).world == 16


def test_hosts_in_the_notation_of_slurm_are_counted() -> None:
    assert [count_hosts(text) for text in ("", "one", "a,b", "gpu[1-4,7]", "r[1-2]n[01-10],x", "./nodes")] == [
        0, 1, 2, 5, 21, 0,
    ]  # fmt: skip


def test_nodes_are_those_that_pbs_selects() -> None:
    assert place("pbs", JobSpec(gpus_per_node=4, select="2:ngpus=4+ncpus=8")).world == 12
    assert place("pbs", JobSpec(gpus_per_node=4)).world == 4


def test_an_image_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyxis takes a bare name for an image of a registry."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.sqsh").touch()

    def image(name: str) -> str:
        return place("slurm", JobSpec(procs_per_node=1, container=name)).spec.container

    assert image("here.sqsh") == str(tmp_path / "here.sqsh")
    (tmp_path / "bertrain").mkdir()
    assert image("bertrain") == "bertrain", "an image of a registry, not the folder"
    assert image("/on/the/nodes.sqsh") == "/on/the/nodes.sqsh"
    assert image("nvcr.io#nvidia/pytorch:26.01-py3") == "nvcr.io#nvidia/pytorch:26.01-py3"
    with helpers.refused("missing-image", "there.sqsh"):
        image("there.sqsh")


def test_the_environment_goes_along_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_IB_HCA", "MALLOC_CONF", "MINE", "TORCH_API_KEY", "PYTHONPATH"):
        monkeypatch.setenv(name, f"the {name}")
    carried = carried_environment(JobSpec(env=("MINE", "OTHER=a b", "EMPTY=")))
    assert {name: carried[name] for name in ("NCCL_IB_HCA", "MALLOC_CONF", "MINE", "OTHER", "EMPTY")} == {
        "NCCL_IB_HCA": "the NCCL_IB_HCA", "MALLOC_CONF": "the MALLOC_CONF", "MINE": "the MINE", "OTHER": "a b",
        "EMPTY": "",
    }  # fmt: skip
    assert "TORCH_API_KEY" not in carried
    assert "PYTHONPATH" in carried
    assert "PYTHONPATH" not in carried_environment(JobSpec(container="image")), "which has its own"
    for word, code in (("HF_TOKEN=x", "secret"), ("my_password", "secret"), ("1X=2", "invalid-value")):
        with helpers.refused(code, word.partition("=")[0]):
            carried_environment(JobSpec(env=(word,)))
    with helpers.refused("missing-variable", "NOT_SET"):
        carried_environment(JobSpec(env=("NOT_SET",)))


@pytest.mark.parametrize(("text", "seconds"), [("1h30m", 5400), ("01:30:00", 5400), ("1-00:00:01", 86401), ("90s", 90)])
def test_times_are_read_both_ways(text: str, seconds: int) -> None:
    assert parse_time(text, "--time") == seconds
    assert parse_time(write_time(seconds), "--time") == seconds


def test_ranks_that_mpirun_started_know_who_they_are() -> None:
    words = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert torchrun_variables_from_mpi({f"OMPI_COMM_WORLD_{name}": value for name, value in words.items()}) == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2",
    }  # fmt: skip
    assert torchrun_variables_from_mpi({"PMI_RANK": "0"}) == {}


def test_ranks_of_mpirun_know_their_node_if_hosts_have_unequal_slots() -> None:
    slots, nodes = (4, 1, 2), []
    for rank, ranks_here in enumerate([4, 4, 4, 4, 1, 2, 2]):
        words = {"RANK": rank, "SIZE": 7, "LOCAL_RANK": 0, "LOCAL_SIZE": ranks_here}
        mpi = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in words.items()}
        nodes.append(torchrun_variables_from_mpi(mpi, slots)["GROUP_RANK"])
    assert nodes == ["0", "0", "0", "0", "1", "2", "2"]


def test_a_node_finds_its_place() -> None:
    assert node_and_count({}) == (0, 1)
    assert node_and_count({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}) == (1, 4)
    ours = {"BERTRAIN_NODE": "0", "BERTRAIN_NODES": "2"}
    assert node_and_count({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"} | ours) == (0, 2)
    assert is_inside_allocation("pbs", {"PBS_JOBID": "7"})
    assert not is_inside_allocation("local", {"SLURM_JOB_ID": "7"})


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with helpers.refused("port-in-use", f"port {port} (--port) of localhost"):
            publish_endpoint(tmp_path, host="localhost", port=port)
    assert publish_endpoint(tmp_path, host="localhost") == wait_for_endpoint(tmp_path, 1, is_listening=False)


def test_nodes_that_cannot_meet_say_why(tmp_path: Path) -> None:
    with helpers.refused("rendezvous-timeout", tmp_path / ENDPOINT):
        wait_for_endpoint(tmp_path, 1, timeout_s=0.2)
    with helpers.refused("unresolved-host", "no-such-host.invalid"):
        publish_endpoint(tmp_path, host="no-such-host.invalid")
    (tmp_path / ENDPOINT).write_text(json.dumps({"host": "no-such-host.invalid", "port": 1}))
    with helpers.refused("unresolved-host", "node 1 ", "no-such-host.invalid"):
        wait_for_endpoint(tmp_path, 1, timeout_s=0.2)
    port = free_port()
    (tmp_path / ENDPOINT).write_text(json.dumps({"host": "localhost", "port": port}))
    with helpers.refused("unreachable-node", f"localhost:{port}"):
        wait_for_endpoint(tmp_path, 1, timeout_s=0.2)


@pytest.mark.parametrize(
    ("codes", "stage", "whole"),
    [
        ([0, 0], "task", 0),
        ([75, 75], "task", 75),
        ([69, 1], "task", 1),
        ([69, 69], "task", 69),
        ([2, 75], "task", 2),
        ([255, 75], "preflight", 2),
        ([255, 75], "task", 1),
        ([0, 127], "preflight", 2),
        ([-9, 69], "task", 137),
    ],
)
def test_the_hosts_end_in_one_code(codes: list[int], stage: str, whole: int) -> None:
    assert combine_exit_codes(codes, stage) == whole
