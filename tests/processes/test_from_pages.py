"""The pages for users of the five systems: every command of their right column, in order, on files in that system's
own layout. Only the model, the data and the number of steps are small; jobs for other machines run on this one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bertrain.run.folder import Run
from bertrain.run.records import EndRecord, last_record
from tests import helpers, systems
from tests.miniature_tasks import command_line
from tests.training.test_headers import EXPERIMENT, TASK, options

DOCS = Path(__file__).parents[2] / "docs"
MODEL = {key: value for key, value in helpers.TINY.items() if key.startswith("model.")} | {
    "model.vocab_size": str(helpers.vocab_size()),
    "model.max_positions": "512",
}
SMALL = MODEL | {
    "batch.sequences": "48", "batch.tokens": "0", "batch.token_budget": "2048", "batch.group_size": "0",
    "train.max_steps": "2", "train.precision": "fp32", "train.exchange_precision": "fp32", "train.threads": "1",
    "log.trackers": "none", "log.level": "quiet",
}  # fmt: skip
TASK_OPTIONS = TASK | {"data.max_seq_length": "32", "train.max_steps": "2", "train.budget": ""}
FEWER = {"--shards": "2", "--count": "10", "--workers": "1", "--nexp": "1", "--steps": "4"}


class Reader:
    """Types the commands of a page, one after another, each with so many ranks where it has several."""

    def __init__(self, page: str, ranks: int = 1, **small: str) -> None:
        self.ranks, self.fewer = ranks, FEWER | {"--nproc": str(ranks)}
        self.small = {key.replace("__", "."): value for key, value in small.items()}
        text = (DOCS / page).read_text(encoding="utf-8")
        found = re.findall(r"`((?:bertrain|torchrun) (?!plan)\S+ [^`]+)`", text)  # plans: tests/docs/test_plan_pages.py
        self.commands = [command.replace("2048", "2") for command in found if command != "bertrain data mlperf"]

    def type(self, command: str) -> str:
        program, *words = shlex.split(command)
        words = [self.fewer.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        if program == "torchrun":
            return self.torchrun(words)
        if words[0] == "launch" and "--" in words:
            return self.launch(words)
        ended = command_line(*words, *self.options_of(words), check=False)
        assert ended.code == (1 if words[:2] == ["mlperf", "check"] else 0), ended  # one short experiment is no result
        return ended.out

    def options_of(self, words: list[str]) -> list[str]:
        settings: dict[str, str] = {}
        if words[:2] == ["mlperf", "run"]:
            settings = SMALL | EXPERIMENT | {"evaluate.every_samples": "96"}
        elif words[0] == "pretrain" or words[:2] == ["profile", "run"]:
            settings = SMALL
        elif words[0] == "finetune":
            settings = TASK_OPTIONS | ({"task.max_query_length": "8"} if words[1].startswith("squad") else {})
            if "literal" in " ".join(words):
                del settings["train.max_steps"], settings["train.budget"]
        elif words[:2] == ["data", "mlperf"]:
            text = [] if "--skip-download" in words else ["--skip-download"]
            return ["--eval-count", "5", "--shards", "2", *text]
        more = ["--warm-up-steps", "3", "--recorded-steps", "1"] if words[:2] == ["profile", "run"] else []
        return [*options(settings | self.small if settings else {}), *more]

    def launch(self, words: list[str]) -> str:
        """The script as it stands; then the same command as a job on this machine."""
        place = words.index("--")
        verb = [*words[place + 1 :], *self.options_of(words[place + 1 :])]
        script = command_line(*words[:2], "--dry-run", *words[2:place], "--", *verb).out
        assert words[place + 2] in script
        helpers.bertrain("launch", "local", "--procs-per-node", self.ranks, "--no-preflight", "--", *verb)
        return script

    def torchrun(self, words: list[str]) -> str:
        behind = words[words.index("-m") :]
        behind = [word.replace("runs/submission", "runs/torchrun") for word in behind]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *behind]
        done = subprocess.run([*torchrun, *self.options_of(behind[2:])], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def all(self, *left_out: str) -> dict[str, str]:
        """What each command printed; those that begin with one of `left_out` are not typed."""
        typed = [command for command in self.commands if not any(command.startswith(start) for start in left_out)]
        return {command: self.type(command) for command in typed}


def assert_ended(*runs: str) -> None:
    for run in runs:
        assert last_record(Run.open(run).folder / "metrics.jsonl", EndRecord), run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")]))
    Path("hosts").write_text("192.168.16.1\n192.168.16.2\n")
    return tmp_path


def test_from_samsung(folder: Path) -> None:
    systems.write_download(folder / "download-all", documents=200)
    (folder / "download-all" / "download" / "results4").rename("results4")
    (folder / "download-all" / "phase1").rename("checkpointdir_phase1")
    Reader("from-samsung-mlperf.md").all()
    assert sorted(path.name for path in (folder / "4bins").glob("[0-9]*")) == ["128", "256", "384", "512"]
    assert ":::MLLOG" in (folder / "results" / "result_0.txt").read_text()


def test_from_nvidia(folder: Path) -> None:
    systems.write_download(folder / "bert_data")
    (folder / "bertrain.sqsh").touch()
    said = Reader("from-nvidia-mlperf.md").all()
    script = next(text for command, text in said.items() if command.startswith("bertrain launch slurm"))
    for part in ("--nodelist=compute-h100-1", "--time=02:00:00", str(folder / "bertrain.sqsh"), "--only 0"):
        assert part in script
    assert (folder / "bert_data" / "phase1" / "model.ckpt-28252.pt").is_file()
    assert (folder / "results" / "result_0.txt").is_file()


def test_from_intel(folder: Path) -> None:
    systems.write_download(folder / "dataset", documents=40)
    systems.write_squad(folder / "squad")
    Reader("from-intel-cpu.md").all("bertrain doctor")
    assert_ended("runs/phase1", "runs/phase2", "runs/phase1-ddp", "runs/squad")
    assert Run.open(Path("runs/phase2")).settings.data.slice == "0.9:1"
    assert (folder / "model_save" / "config.json").is_file()
    assert (folder / "results" / "result_0.txt").is_file()


def test_from_gpu_variability(folder: Path) -> None:
    (folder / "dumps").mkdir()
    shutil.copy(DOCS.parent / "tests" / "golden" / "enwik-sample.xml", folder / "dumps")
    reader = Reader("from-gpu-variability.md", ranks=2, model__vocab_size="30522", batch__sequences="8")
    said = reader.all("bertrain data download")
    assert_ended("runs/variability")
    assert len(list((folder / "runs" / "variability").glob("telemetry*.csv"))) == 2, "one for each rank"
    assert len(list((folder / "profiles" / "node1").rglob("iterations.csv"))) == 2
    assert len(list((folder / "profiles" / "all").rglob("iterations.csv"))) == 2
    assert "median" in said["bertrain profile report profiles/node1"]


def test_from_the_contest(folder: Path) -> None:
    systems.write_phase1(folder / "bert_dir", "bert_model.ckpt")
    systems.write_glue(folder / "glue")
    said = Reader("from-hpc-ai-contest.md").all()
    script = next(text for command, text in said.items() if command.startswith("bertrain launch pbs"))
    for part in ("-q dgx", "-P 1234", "select=2:ngpus=4:ncpus=20:mpiprocs=4", "place=scatter", "walltime=01:00:00"):
        assert part in script
    assert_ended("runs/baseline", "runs/submission", "runs/torchrun", "runs/literal")
    assert (folder / "comparison.html").is_file()
    assert list((folder / "predictions").iterdir())
