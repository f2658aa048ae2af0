"""A job whose ranks Debian's Open MPI starts: they find each other over torch.distributed, save at a signal, go on."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests import helpers
from tests.launched import Launched, as_job, records

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun here; Debian's package is called openmpi-bin"),
]
ROOT = Path(__file__).parents[2]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def test_ranks_of_mpirun_stopped_by_a_signal_and_started_again(tmp_path: Path) -> None:
    options = ("--job", tmp_path / "job", "--procs-per-node", 2, "--mpirun", "mpirun --oversubscribe")
    data, settings = helpers.make_data(tmp_path), {"train__max_steps": 120, "log__every_steps": 2}
    words = as_job("mpi", *options, data=data, run=tmp_path / "run", **settings)
    launched = Launched(helpers.command(*words), tmp_path, PYTHONPATH=str(ROOT), **AS_ROOT)
    try:
        launched.wait_until(lambda: len(records(tmp_path / "run")) > 4, "some steps")
        launched.process.send_signal(signal.SIGTERM)
        assert launched.wait() == 75, f"{launched.out}\n{launched.err}"
    finally:
        launched.kill()
    assert "all-reduce over 2 ranks" in launched.out
    assert "2 ranks of 1 thread" in launched.out
    assert "stopped by SIGUSR1" in launched.out + launched.err
    again = Launched(["bash", str(tmp_path / "job" / "job.sh")], tmp_path, "again", PYTHONPATH=str(ROOT), **AS_ROOT)
    try:
        assert again.wait() == 0, f"{again.out}\n{again.err}"
    finally:
        again.kill()
    assert "continuing after step" in again.out
    assert len(helpers.losses(tmp_path / "run")) == 120
    logs = sorted(path.name for path in (tmp_path / "job" / "logs" / "start-004-task").glob("rank-*"))
    assert logs == ["rank-00000.log", "rank-00001.log"]
