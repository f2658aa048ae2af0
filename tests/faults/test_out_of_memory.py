"""Memory runs out for real, in a process with a limit: one sentence, exit code 2, and a run that can be resumed."""

from __future__ import annotations

import contextlib
import importlib
import resource
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from bertrain.data.text.processes import process_pool
from bertrain.planning.memory_fit import oom_as_user_error
from tests import helpers

LIMITED = """
import resource, sys
from pathlib import Path
import bertrain.training.start
from bertrain.cli.main import main
status = Path("/proc/self/status").read_text()
now = int(status.split("VmSize:")[1].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_AS, (now + (100 << 20), resource.RLIM_INFINITY))
sys.argv = ["bertrain", *sys.argv[1:]]
main()
"""


def test_running_out_of_memory_is_one_sentence_and_the_run_goes_on(tmp_path: Path) -> None:
    data, run = helpers.make_data(tmp_path), tmp_path / "run"
    arguments = helpers.tiny_arguments(batch__sequences=700, batch__token_budget=40000, train__max_steps=1)
    command = [sys.executable, "-c", LIMITED, "pretrain", "bert-tiny", "--data", data, "--run", run, *arguments]
    environment = helpers.environment() | {"MALLOC_ARENA_MAX": "1"}  # a thread's arena is a large reservation
    done = subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    print(done.stderr)
    assert done.returncode == 2
    (sentence,) = [line for line in done.stderr.splitlines() if not line.startswith("warning:")]
    assert sentence.endswith("[out-of-memory]")
    assert f"`bertrain resume {run} --train.activation_checkpointing full`" in sentence
    assert "--batch.token_budget under 40000" in sentence
    resumed = helpers.bertrain("resume", run, "--train.activation_checkpointing", "full")
    assert "done:" in resumed.stdout
    assert len(helpers.losses(run)) == 1


def test_a_worker_that_cannot_import_its_task_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vanishing.py").write_text("def task():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    task = importlib.import_module("vanishing").task
    (tmp_path / "vanishing.py").unlink()
    with helpers.refused("killed-worker", "could not start (ModuleNotFoundError)", "memory"), process_pool(1) as pool:
        pool.submit(task).result()
    assert capfd.readouterr().err == ""


def take_all_memory() -> None:
    """Until nothing is left, not even for the traceback that a pool sends to its parent."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    held: list[object] = []
    for size in (1 << 20, 1 << 10, 1):
        with contextlib.suppress(MemoryError):
            while True:
                held.append(bytes(size))
    raise MemoryError


def test_a_worker_without_memory_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with helpers.refused("killed-worker", "memory ran out", "--workers"), process_pool(1) as pool:
        pool.submit(take_all_memory).result()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("limit", "most", "code"), [("RLIMIT_AS", 400 << 20, "out-of-host-memory"), ("RLIMIT_NOFILE", 3, "too-many-files")]
)
def test_a_limit_met_in_an_import_is_one_sentence(tmp_path: Path, limit: str, most: int, code: str) -> None:
    script = f"import resource, sys; from bertrain.cli.main import main; resource.setrlimit(resource.{limit}, "
    script += f"({most}, {most})); sys.argv[0] = 'bertrain'; main()"
    words = ["pretrain", "bert-tiny", "--data", str(tmp_path), "--run", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], env=helpers.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    *others, sentence = done.stderr.splitlines()
    assert sentence.startswith("bertrain: ")
    assert sentence.endswith(f" [{code}]")
    assert all("cpuinfo" in line for line in others), "which complains by itself, inside torch"
    assert not (tmp_path / "run").exists()


def test_the_memory_of_a_failed_step_is_there_to_speak_with() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        tensor = torch.zeros(1000)
        held.append(weakref.ref(tensor))
        raise MemoryError

    def train() -> None:
        with oom_as_user_error(helpers.tiny_settings(), 1, None):
            step()

    with helpers.refused("out-of-memory") as caught:
        train()
    assert held[0]() is None
    assert caught.value.__context__ is not None, "which holds the frames of the step"
