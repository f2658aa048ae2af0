"""MLPerf's benchmark in miniature, in real processes: experiments one after another, one of them killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bertrain.mlperf.check import check_results
from bertrain.mlperf.log import read_log
from bertrain.mlperf.run import run_experiments
from bertrain.mlperf.show import show_logs
from tests import helpers
from tests.launched import Launched, children
from tests.miniature import make_miniature, miniature_arguments, miniature_settings
from tests.miniature_tasks import command_line


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_miniature(tmp_path_factory.mktemp("miniature"))


def experiments(miniature: Path, out: Path, *more: object, **settings: object) -> list[str]:
    return helpers.command(
        *("mlperf", "run", "bert-tiny", "--data", miniature / "train", "--out", out, *more),
        *miniature_arguments(miniature, **settings),
    )


def has_started(log: Path) -> bool:
    return log.is_file() and '"key": "eval_start"' in log.read_text()


def test_a_killed_experiment_is_not_counted_and_begun_again(
    miniature: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three results, all whole, under seeds of their own; the one that was killed is not among them."""
    out = tmp_path / "results"
    launched = Launched(experiments(miniature, out, "--nexp", 3, mlperf__division="closed"), tmp_path)
    killed = out / "experiments" / "1-1" / "result.txt"
    try:
        launched.wait_until(lambda: has_started(killed), "the second experiment")
        (experiment,) = children(launched.process.pid)
        os.kill(experiment, signal.SIGKILL)
        assert launched.wait() == 0, launched.err
    finally:
        launched.kill()
    assert "experiment 1, attempt 1, ended with SIGKILL" in launched.out
    assert read_log(killed).status == "unfinished"
    logs = show_logs([out / f"result_{number}.txt" for number in range(3)])
    assert all(log.has_converged and log.final_accuracy >= 0.72 for log in logs)
    assert len({log.seed for log in logs} | {read_log(killed).value("seed")}) == 4
    checked = check_results(out)
    assert all(one.passes for one in checked.compliance), checked.compliance
    assert checked.seeds_pass
    assert checked.score.converged == 3
    assert checked.score.minutes is not None
    assert "verdict: checks failed, closed division:" in launched.out
    assert "the reference's" in launched.out, "so easy a text converges too fast to be the benchmark"

    run_experiments(miniature_settings(miniature, mlperf__division="closed"), miniature / "train", out, nexp=3)
    assert capsys.readouterr().out.count("exists and is kept") == 3


def test_experiments_on_two_ranks(miniature: Path, tmp_path: Path) -> None:
    done = command_line(*experiments(miniature, tmp_path / "out", "--nexp", 1, "--nproc", 2)[3:])
    assert "experiment 0: converged" in done.out
    (figures,) = show_logs([tmp_path / "out" / "result_0.txt"])
    assert figures.ranks == 2
    assert figures.has_converged
    assert read_log(tmp_path / "out" / "result_0.txt").value("d_batch_size") == 16


def test_a_stopped_experiment_stops_the_rest(miniature: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    launched = Launched(experiments(miniature, out, "--nexp", 2, evaluate__target_accuracy=0.99), tmp_path)
    try:
        launched.wait_until(lambda: has_started(out / "experiments" / "0-1" / "result.txt"), "the first experiment")
        (experiment,) = children(launched.process.pid)
        launched.process.send_signal(signal.SIGINT)
        assert launched.wait() == 130
    finally:
        launched.kill()
    assert not Path(f"/proc/{experiment}").exists()
    assert "stopped by SIGINT" in launched.err
    assert not list(out.glob("result_*.txt"))
    assert not (out / "experiments" / "1-1").exists()
