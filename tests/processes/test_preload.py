"""Which allocator and OpenMP runtime are loaded first, and that a run says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertrain.ranks import preload
from tests import helpers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which libraries are looked for."""
    monkeypatch.setattr(preload, "library_folders", lambda: [tmp_path])
    for name in ("LD_PRELOAD", "MALLOC_CONF", "KMP_BLOCKTIME", preload.STARTED_AGAIN):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_first_allocator_that_is_there(folder: Path) -> None:
    assert preload.choose("auto", "auto") == {}
    tcmalloc = folder / "libtcmalloc_minimal.so.4"
    tcmalloc.touch()
    assert preload.choose("auto", "auto")["LD_PRELOAD"] == str(tcmalloc)
    jemalloc = folder / "libjemalloc.so.2"
    jemalloc.touch()
    chosen = preload.choose("auto", "auto")
    assert chosen["LD_PRELOAD"] == str(jemalloc)
    assert "dirty_decay_ms:10000" in chosen["MALLOC_CONF"]
    assert preload.choose("tcmalloc", "auto")["LD_PRELOAD"] == str(tcmalloc)
    assert preload.choose("system", "auto") == {}


def test_what_the_user_has_set_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("libjemalloc.so.2", "libiomp5.so"):
        (folder / name).touch()
    monkeypatch.setenv("MALLOC_CONF", "narenas:4")
    monkeypatch.setenv("LD_PRELOAD", "/opt/libprofiler.so")
    environment = preload.choose("auto", "intel")
    assert environment["LD_PRELOAD"].split(":")[2] == "/opt/libprofiler.so"
    assert "MALLOC_CONF" not in environment
    assert environment["KMP_BLOCKTIME"] == "1"
    monkeypatch.setenv("LD_PRELOAD", "/opt/libtcmalloc.so.4 /opt/libiomp5.so")
    assert preload.choose("auto", "intel") == {}


@pytest.mark.parametrize(
    ("allocator", "openmp", "named"),
    [
        ("jemalloc", "auto", ("train.allocator jemalloc", "libjemalloc.so.2", "libjemalloc2")),
        ("auto", "intel", ("train.openmp intel", "libiomp5.so", "--train.openmp auto")),
    ],
)
def test_what_was_asked_for_must_be_there(folder: Path, allocator: str, openmp: str, named: tuple[str, ...]) -> None:
    with helpers.refused("missing-library", *named):
        preload.choose(allocator, openmp)  # type: ignore[arg-type]


def test_a_program_that_uses_the_package_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "libjemalloc.so.2").touch()
    monkeypatch.setattr("sys.argv", ["bertrain", "pretrain"])  # as a program might that calls the command line
    preload.start_again("cpu", "auto", "auto")  # or this test would be gone


def said_by(folder: Path, *arguments: object) -> str:
    data = helpers.make_data(folder)
    run = (
        "pretrain",
        "bert-tiny",
        "--data",
        data,
        "--run",
        folder / "run",
        *helpers.tiny_arguments(train__max_steps=2),
    )
    return helpers.bertrain(*run, "--train.device", "cpu", "--verbose", *arguments).stdout


def test_a_run_says_whose_memory_it_has(tmp_path: Path) -> None:
    installed = next((name for name in ("jemalloc", "tcmalloc") if preload.find(name)), "the C library")
    assert f"memory from {installed}, threads from GNU's OpenMP" in said_by(tmp_path)


def test_the_system_s_allocator_can_be_asked_for(tmp_path: Path) -> None:
    assert "memory from the C library, threads from" in said_by(tmp_path, "--train.allocator", "system")


@pytest.mark.skipif(not preload.find("intel"), reason="neither libiomp5 nor libomp is installed")
def test_intel_s_threads_and_two_ranks(tmp_path: Path) -> None:
    said = said_by(tmp_path, "--train.openmp", "intel", "--nproc", 2)
    assert said.count("threads from Intel's OpenMP") == 1
    assert "2 ranks" in said
