"""Jobs on a real Slurm: submitted, on two nodes, warned and requeued, resumed, finished; cancelled; in place."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bertrain.training.start import pretrain
from tests import helpers, systems
from tests.launched import PATIENCE_S, as_job, records
from tests.miniature import make_miniature, miniature_arguments
from tests.miniature_tasks import command_line
from tests.services.slurm import Slurm, running_slurm, why_not
from tests.training.test_headers import TASK, options

pytestmark = [pytest.mark.services, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can run")]
ROOT = Path(__file__).parents[2]
ENDLESS = 100000
TWO_NODES = ("--nodes", 2, "--procs-per-node", 1)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with running_slurm() as cluster:
        yield cluster


class Launcher:
    """A folder with data, from which jobs are launched."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.data, self.run, self.job = helpers.make_data(folder), folder / "run", folder / "job"

    def bertrain(self, *words: object, before: tuple[str, ...] = (), check: bool = True) -> str:
        done = subprocess.run(
            [*before, *helpers.command(*words)],
            env=helpers.environment() | self.slurm.environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            timeout=PATIENCE_S,
        )
        assert not check or done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout + done.stderr

    def submit(self, *options: object, before: tuple[str, ...] = (), **settings: Any) -> str:
        words = as_job("slurm", "--job", self.job, *options, data=self.data, run=self.run, **settings)
        return self.bertrain(*words, before=before)

    def status(self) -> dict[str, Any]:
        """Asked again and again, so in this process: another for each would take the cores from the ranks."""
        with mock.patch.dict(os.environ, self.slurm.environment):
            return json.loads(command_line("launch", "status", self.job, "--json").out)

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.job.rglob("logs/job-*.log")))

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"no end of waiting for {what}:\n{self.logs()}\n{self.slurm.logs()}"
            time.sleep(0.2)


def test_two_nodes_warned_requeued_resumed_and_finished(slurm: Slurm, tmp_path: Path) -> None:
    settings = {"train__max_steps": 200, "checkpoint__every_steps": 50, "log__every_steps": 5}
    launcher = Launcher(slurm, tmp_path)
    said = launcher.submit(*TWO_NODES, "--time", "1h", "--gres", "token:1", **settings)
    number = said.split()[-1]
    assert number.isdigit()
    launcher.wait_until(lambda: len(records(launcher.run)) > 8, "some steps on two nodes")
    assert launcher.status()["state"] == "RUNNING"

    slurm.ask("scancel", "--batch", "--signal=USR1", number)  # just what --signal=B:USR1@120 sends before the end
    launcher.wait_until(lambda: "requeued" in (launcher.job / "events").read_text(), "the requeue")
    saved = len(records(launcher.run))
    assert saved < 200
    launcher.wait_until(lambda: launcher.status()["state"] == "DONE", "the end")

    events = [line.partition(" ")[2] for line in (launcher.job / "events").read_text().splitlines()]
    assert [event.split(" on ")[0] for event in events] == [
        "started", "ended with exit code 75", f"requeued as job {number}", "started", "ended with exit code 0",
    ]  # fmt: skip
    output = launcher.logs()
    assert "2 ranks" in output
    assert f"stopped by SIGUSR1 after step {saved}, which is saved" in output
    assert f"continuing after step {saved}" in output
    assert output.count("pre-flight: fit to train") == 2
    assert "node 1" in output
    assert "all-reduce over 2 ranks" in output
    starts = sorted(path.name for path in (launcher.job / "logs").glob("start-*"))
    assert starts == ["start-001-preflight", "start-002-task", "start-003-preflight", "start-004-task"]
    assert (launcher.job / "logs" / "start-004-task" / "rank-00001.log").is_file()
    assert "[0] done:" in launcher.bertrain("launch", "logs", launcher.job)

    calm = tmp_path / "calm"
    pretrain(helpers.tiny_settings(**settings), launcher.data, calm)
    for step, (loss, expected) in enumerate(zip(helpers.losses(launcher.run), helpers.losses(calm), strict=True), 1):
        assert loss == pytest.approx(expected, rel=1e-4), f"step {step}"


def test_slurm_takes_the_nodes_back_and_the_job_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """`scontrol requeue` is what preemption does: SIGTERM to all, and back into the queue."""
    launcher = Launcher(slurm, tmp_path)
    number = launcher.submit(*TWO_NODES, "--no-preflight", train__max_steps=ENDLESS, log__every_steps=5).split()[-1]
    launcher.wait_until(lambda: len(records(launcher.run)) > 8, "some steps")
    slurm.ask("scontrol", "requeue", number)
    launcher.wait_until(lambda: "continuing after step" in launcher.logs(), "going on")
    cancel_before_it_begins(Launcher(slurm, tmp_path / "waiting"))
    elsewhere = ("env", f"SLURM_CONF={tmp_path}/nothing")
    nowhere = launcher.bertrain("launch", "status", launcher.job, before=elsewhere, check=False)
    assert "[unknown-job-state]" in nowhere, "which may well be running"
    assert launcher.logs().count("stopped by SIGTERM") == 1
    assert number in launcher.bertrain("launch", "cancel", launcher.job)
    launcher.wait_until(lambda: not slurm.ask("squeue", "--noheader"), "an empty queue")
    assert "requeued as" not in (launcher.job / "events").read_text(), "a cancelled job stays away"
    helpers.losses(launcher.run)  # each step once, in order


def cancel_before_it_begins(launcher: Launcher) -> None:
    """While another has both nodes; whoever follows its logs is told that there will be none."""
    launcher.submit(*TWO_NODES)
    assert launcher.status()["state"] == "PENDING"
    launcher.bertrain("launch", "cancel", launcher.job)
    launcher.wait_until(lambda: launcher.status()["state"].startswith("GONE"), "its end")
    assert "[missing-log]" in launcher.bertrain("launch", "logs", launcher.job, "--follow", check=False)


def test_a_killed_rank_is_named_and_all_are_started_again(slurm: Slurm, tmp_path: Path) -> None:
    launcher = Launcher(slurm, tmp_path)
    launcher.submit(
        *TWO_NODES, "--no-preflight", restarts=1,
        train__max_steps=200, checkpoint__every_steps=10, log__every_steps=5,
    )  # fmt: skip
    launcher.wait_until(lambda: len(records(launcher.run)) > 8, "some steps")
    kill_rank(launcher.run, 1)
    launcher.wait_until(lambda: launcher.status()["state"].startswith(("DONE", "ENDED")), "the end")
    output = launcher.logs()
    assert launcher.status()["state"] == "DONE", output
    assert "rank 1 was killed by SIGKILL" in output
    assert "starting all ranks again (1 of 1 without a new checkpoint)" in output
    assert "training continued at step" in output


def kill_rank(run: Path, rank: int) -> None:
    """Kill the process of a rank, wherever on this machine it is."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(run).encode() in words and f"RANK={rank}".encode() in variables:
                os.kill(int(entry.name), 9)


def test_inside_an_allocation_it_runs_in_place(slurm: Slurm, tmp_path: Path) -> None:
    launcher = Launcher(slurm, tmp_path)
    said = launcher.submit(
        *TWO_NODES, "--no-preflight", before=("salloc", "--nodes=2", "--exclusive"), train__max_steps=4
    )
    assert "inside an allocation (SLURM_JOB_ID is set)" in said
    assert len(records(launcher.run)) == 4
    assert launcher.status()["state"] == "DONE"


def test_repeats_are_a_job_array_of_runs_with_seeds_of_their_own(slurm: Slurm, tmp_path: Path) -> None:
    launcher = Launcher(slurm, tmp_path)
    launcher.submit(
        "--procs-per-node", 1, "--no-preflight", "--repeats", 2, "--array", train__max_steps=4, train__seed=7
    )
    launcher.wait_until(lambda: launcher.status()["state"] == "DONE", "both")
    configs = [json.loads((tmp_path / f"run-{one}" / "config.json").read_text()) for one in (1, 2)]
    assert [one["settings"]["train"]["seed"] for one in configs] == [7, 8]
    assert [one["step"] for one in launcher.status()["tasks"]] == [4, 4]


def test_what_slurm_refuses_is_said_in_a_sentence(slurm: Slurm, tmp_path: Path) -> None:
    launcher = Launcher(slurm, tmp_path)
    options = ("--procs-per-node", 1, "--partition", "nowhere")
    said = launcher.bertrain(*as_job("slurm", *options, data=launcher.data, run=launcher.run), check=False)
    assert "[job-refused]" in said
    assert "invalid partition" in said


def test_the_systems_own_verbs_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    """MLPerf's experiments, the contest's fine-tuning and the study's profile, each as a job in miniature."""
    launcher = Launcher(slurm, tmp_path)

    def job(name: str, *words: object) -> None:
        launcher.job = tmp_path / "jobs" / name
        launcher.bertrain("launch", "slurm", "--job", launcher.job, *TWO_NODES, "--no-preflight", "--", *words)
        launcher.wait_until(lambda: launcher.status()["state"].startswith(("DONE", "ENDED")), "the end")
        assert launcher.status()["state"] == "DONE", launcher.logs()

    make_miniature(tmp_path)
    experiments = ["--data", tmp_path / "train", "--out", tmp_path / "results", "--nexp", 2]
    job("mlperf", "mlperf", "run", "bert-tiny", *experiments, *miniature_arguments(tmp_path, train__max_steps=40))
    for number in range(2):
        log = (tmp_path / "results" / f"result_{number}.txt").read_text()
        assert log.count('"key": "run_start"') == log.count('"key": "run_stop"') == 1
    assert "seeds: one for each run, all different" in launcher.logs()

    systems.write_phase1(tmp_path / "bert_dir", "bert_model.ckpt")
    task = TASK | {"train.max_steps": "2", "train.budget": ""}
    contest = ["--init", tmp_path / "bert_dir", "--data", systems.write_glue(tmp_path / "glue"), *options(task)]
    job("contest", "finetune", "glue/mnli", "--recipe", "contest-mnli-2x4", *contest, "--run", tmp_path / "submission")
    assert len(records(tmp_path / "submission")) == 2

    profile = ["--steps", 4, "--warm-up-steps", 3, "--recorded-steps", 1, "--out", tmp_path / "profile"]
    job("profile", "profile", "run", "gpu-variability-4x16", *profile, *helpers.tiny_arguments(batch__policy="padded"))
    assert len(list((tmp_path / "profile").rglob("iterations.csv"))) == 2
    assert "median" in launcher.bertrain("profile", "report", tmp_path / "profile")
