"""A job whose ranks Debian's Open MPI starts: they find each other over torch.distributed, save at a signal, go on."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests import helpers
from tests.launched import Launched, records

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here; Debian's package is called openmpi-bin"),
]
ROOT = Path(__file__).parents[2]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def test_ranks_of_mpirun_stopped_by_a_signal_and_started_again(tmp_path: Path) -> None:
    words = ["launch", "mpi", "bert-tiny", "--data", helpers.make_data(tmp_path), "--run", tmp_path / "run"]
    words += ["--job", tmp_path / "job", "--procs-per-node", 2, "--mpirun", "mpirun --oversubscribe"]
    settings = helpers.tiny_arguments(train__max_steps=120, log__every_steps=2)
    launched = Launched(helpers.command(*words, *settings), tmp_path, PYTHONPATH=str(ROOT), **AS_ROOT)
    try:
        launched.wait_until(lambda: len(records(tmp_path / "run")) > 4, "some steps")
        launched.process.send_signal(signal.SIGTERM)
        assert launched.wait() == 75, f"{launched.out}\n{launched.err}"
    finally:
        launched.kill()
    assert "all-reduce over 2 rank(s)" in launched.out
    assert "2 rank(s) of 1 thread(s)" in launched.out
    assert "stopped by SIGUSR1" in launched.out + launched.err
    again = Launched(["bash", str(tmp_path / "job" / "job.sh")], tmp_path, "again", PYTHONPATH=str(ROOT), **AS_ROOT)
    try:
        assert again.wait() == 0, f"{again.out}\n{again.err}"
    finally:
        again.kill()
    assert "continuing after step" in again.out
    assert len(helpers.losses(tmp_path / "run")) == 120
    logs = sorted(path.name for path in (tmp_path / "job" / "logs" / "start-004-training").glob("rank-*"))
    assert logs == ["rank-00000.log", "rank-00001.log"]
