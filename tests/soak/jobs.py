"""The commands that the soak disturbs, what they come to undisturbed, and how to compare."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bertrain.mlperf.log import read_log
from tests import helpers, miniature, miniature_tasks
from tests.faults.test_orphans import MARK, marked
from tests.launched import PATIENCE_S, Launched, as_job

TESTS, PLOT = Path(__file__).parents[1], "out.svg"
STEPS = 30
SETTINGS = {
    "train__max_steps": STEPS,
    "checkpoint__every_steps": 5,
    "log__every_steps": 1,
    "log__trackers": "tensorboard",
    "train__deterministic": True,
}
SENTENCE = re.compile(r"bertrain: .+ \[[a-z0-9-]+\]")
PASSING = {"tensorboard", "logs", ".lock", "telemetry.csv"}
"""Entries of a run that depend on how often it was started."""


@dataclass(frozen=True)
class Job:
    """A command that ends in a folder, and continues when it is started again."""

    words: Callable[[Scene, Path], list[object]]
    """The command line, which writes into the folder given."""
    result: Callable[[Path], dict[str, str]]
    """The hashes of all that must be equal, however often it was disturbed."""
    ranks: int = 1


@dataclass
class Scene:
    """A folder with small inputs for all jobs, and the undisturbed results of those that were asked for."""

    folder: Path
    references: dict[str, dict[str, str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @cached_property
    def inputs(self) -> Path:
        """Prepared data and its text, a vocabulary, weights, and the tables of tasks."""
        place = self.folder / "inputs"
        place.mkdir()

        def fill() -> None:
            miniature_tasks.make_miniature(place)
            helpers.write_corpus(place / "corpus.txt", documents=400)
            (place / "mlperf").mkdir()
            miniature.make_miniature(place / "mlperf")

        in_child(fill, self.folder / "inputs.log")
        return place

    def place_of(self, name: str) -> Path:
        """The undisturbed result of a job."""
        place = self.folder / "undisturbed" / name
        if name not in self.references:
            shutil.rmtree(place, ignore_errors=True)  # of an undisturbed run that failed
            place.mkdir(parents=True)
            words = JOBS[name].words(self, place)
            began = time.monotonic()
            ended = run(words, place)
            assert ended.code == 0, ended
            self.seconds[name] = time.monotonic() - began
            self.references[name] = JOBS[name].result(place)
        return place

    def check(self, name: str, place: Path) -> None:
        """Compare what a disturbed job came to with the undisturbed one."""
        self.place_of(name)
        found, expected = JOBS[name].result(place), self.references[name]
        differing = [path for path in sorted(found.keys() | expected.keys()) if found.get(path) != expected.get(path)]
        assert not differing, f"{name} differs from the undisturbed one in {differing}"

    def finish(self, name: str, place: Path, code: int) -> None:
        """Start a job again unless it ended well; now it must end well, and equal to the undisturbed one."""
        if code == 0:
            return self.check(name, place)
        ended = run(JOBS[name].words(self, place), place)
        if ended.code == 2 and "[occupied-folder]" in ended.err:  # killed after its last file: it must be whole
            return self.check(name, place)
        assert ended.code == 0, f"started again, {name} ended with {ended.code}:\n{ended.err[-2000:]}"
        assert "Traceback" not in ended.err, ended.err[-3000:]
        return self.check(name, place)


@dataclass(frozen=True)
class Ended:
    code: int
    err: str

    @property
    def sentences(self) -> list[str]:
        """The user errors among the lines, without warnings."""
        return [line for line in self.err.splitlines() if SENTENCE.fullmatch(line)]


def run(words: list[object], place: Path) -> Ended:
    """Run the command line to its end."""
    launched = Launched(helpers.command(*words), place.parent, f"{place.name}-command")
    try:
        code = launched.wait()
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end after {PATIENCE_S} s: {words}") from None
    finally:
        launched.kill()
    return Ended(code, launched.err)


def mark() -> str:
    """A value of the variable that all processes of one launch inherit."""
    mark.number = getattr(mark, "number", 0) + 1  # type: ignore[attr-defined]
    return f"{os.getpid()}-{mark.number}"  # type: ignore[attr-defined]


def start(words: list[object], place: Path, marked_as: str, **environment: str) -> Launched:
    path = os.environ.get("PYTHONPATH", "")
    variables = {MARK: marked_as, "PYTHONPATH": path} | environment
    return Launched(helpers.command(*words), place.parent, f"{place.name}-disturbed", **variables)


def assert_all_ended(marked_as: str, patience_s: float = PATIENCE_S / 4) -> None:
    """Wait until no process of a launch is left; end those that stay, which is a failure."""
    deadline = time.monotonic() + patience_s
    while left := marked(marked_as):
        if time.monotonic() > deadline:
            named = [Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")[:200] for process in left]
            for process in left:
                os.kill(process, signal.SIGKILL)
            raise AssertionError(f"processes are left: {named}")
        time.sleep(0.1)


def in_child(function: Callable[[], Any], log: Path, patience_s: float = PATIENCE_S) -> Any:
    """Call a function in a forked process, where it may crash, hang or use up memory, and return its JSON."""
    answer = log.with_suffix(".json")
    answer.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            answer.write_text(json.dumps({"value": function()}))
        except BaseException:
            answer.write_text(json.dumps({"failure": traceback.format_exc(limit=-6)}))
        finally:
            os._exit(0)
    deadline = time.monotonic() + patience_s
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"no end after {patience_s} s")
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(ended[1])
    assert code == 0, f"crashed with {code}: {log.read_text(errors='replace')[-2000:]}"
    given = json.loads(answer.read_text())
    if "failure" in given:
        raise AssertionError(given["failure"])
    return given["value"]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def files_of(folder: Path) -> dict[str, str]:
    """The hash of every file of a folder."""
    return {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def result_of_run(folder: Path) -> dict[str, str]:
    """The losses, all tensors of the newest checkpoint, and the names of all files: nothing is left half-made."""
    newest = max((folder / "checkpoints").glob("step-*"))
    # A run that stops saves a checkpoint, so the older ones that are kept may be others.
    older = {path.name for path in newest.parent.glob("step-*")} - {newest.name}
    names = [path.relative_to(folder) for path in folder.rglob("*")]
    found = {str(name): "there" for name in names if not (PASSING | older) & set(name.parts)}
    tensors = {path.name: digest(path) for path in newest.glob("*.safetensors")}
    losses = repr(helpers.losses(folder, first=None))  # an annealed run begins later
    return found | tensors | {"losses": hashlib.sha256(losses.encode()).hexdigest()[:16]}


def _pretrain(scene: Scene, place: Path, ranks: int = 1, **settings: object) -> list[object]:
    ends = ["--data", scene.inputs / "data", "--run", place / "run", "--nproc", ranks]
    return ["pretrain", "bert-tiny", *ends, *helpers.tiny_arguments(**SETTINGS, **settings)]


def _prepare(scene: Scene, place: Path) -> list[object]:
    small = ["--max-seq-length", 64, "--unit-mb", 0.01, "--rows-per-shard", 100, "--dupe-factor", 5, "--workers", 2]
    ends = [scene.inputs / "corpus.txt", "--out", place / "data", "--vocab", scene.inputs / "vocab.txt"]
    return ["data", "prepare", *ends, *small]


def _finetune(scene: Scene, place: Path) -> list[object]:
    ends = ["--data", scene.inputs / "table", "--init", scene.inputs / "base", "--run", place / "run"]
    return ["finetune", "classify", *ends, *miniature_tasks.arguments(**SETTINGS)]


def _train(scene: Scene, place: Path) -> list[object]:
    # With what is chosen by the speed and the free memory of the machine, which vary.
    settings = {"--train.threads": 1, "--checkpoint.every_steps": 5, "--batch.sequences": 16, "--max-steps": 10,
                "--batch.auto": "false", "--batch.token_budget": 2048, "--model.hidden_dropout": 0.1,
                "--model.attention_dropout": 0.1, "--evaluate.every_samples": 64}  # fmt: skip
    words = [word for pair in settings.items() for word in pair]
    return ["train", scene.inputs / "corpus.txt", "--out", place / "out", "--size", "tiny", *words, "--deterministic"]


def _result_of_train(place: Path) -> dict[str, str]:
    exported = place / "out" / "model"
    return {path.name: digest(path) for path in sorted(exported.iterdir()) if path.suffix != ".md"}


def _launch(scene: Scene, place: Path) -> list[object]:
    job = place / f"job-{len(list(place.glob('job-*')))}"  # each start is a job of its own
    options = ["--job", job, "--procs-per-node", 2, "--no-preflight"]
    return as_job("local", *options, data=scene.inputs / "data", run=place / "run", **SETTINGS)


def _resume(scene: Scene, place: Path) -> list[object]:
    """A run that has lost its newest checkpoint, and goes on from the one before."""
    run = place / "run"
    if not run.exists():
        shutil.copytree(scene.place_of("pretrain on 1") / "run", run)
        shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    return ["resume", run]


def _anneal(scene: Scene, place: Path) -> list[object]:
    whole = scene.place_of("pretrain on constant rate") / "run"
    return ["anneal", whole, "--checkpoint", STEPS - 5, "--run", place / "run", "--steps", 20]


def _sweep(scene: Scene, place: Path) -> list[object]:
    ends = ["--data", scene.inputs / "data", "--out", place / "out", "--at-once", 2]
    grid = ["--grid", "optimizer.learning_rate=1e-3,2e-3"]
    return ["sweep", "bert-tiny", *ends, *grid, *helpers.tiny_arguments(**SETTINGS)]


def _result_of_sweep(place: Path) -> dict[str, str]:
    runs = [path.parent for path in (place / "out").glob("*/checkpoints")]
    return {f"{run.name}/{name}": value for run in runs for name, value in result_of_run(run).items()}


def _mlperf_run(scene: Scene, place: Path) -> list[object]:
    inputs = scene.inputs / "mlperf"
    ends = ["--data", inputs / "train", "--out", place / "out", "--nexp", 2]
    return ["mlperf", "run", "bert-tiny", *ends, *miniature.miniature_arguments(inputs)]


def _result_of_experiments(place: Path) -> dict[str, str]:
    """Each has a seed of its own, so only how they ended is compared."""
    return {path.name: read_log(path).status for path in sorted((place / "out").glob("result_*.txt"))}


def _profile(_scene: Scene, place: Path) -> list[object]:
    small = ["--steps", 20, "--warm-up-steps", 3, "--recorded-steps", 1]
    return ["profile", "run", "bert-tiny", "--out", place / "out", *small, *helpers.tiny_arguments()]


def _predict(scene: Scene, place: Path) -> list[object]:
    run = scene.place_of("finetune") / "run"
    return ["predict", run, "--data", scene.inputs / "table", "--out", place / "out"]


def _out(place: Path) -> dict[str, str]:
    out = place / "out"
    return files_of(out) if out.is_dir() else {path.name: digest(path) for path in place.glob("out.*")}


def _names_of_out(place: Path) -> dict[str, str]:
    """Which files there are: plots have random names inside, profiles times."""
    return dict.fromkeys(_out(place), "there")


def _files(*words: object, out: str = "out") -> Job:
    """A command that writes equal files each time; a word @NAME is that input of the scene."""

    def command(scene: Scene, place: Path) -> list[object]:
        given = [scene.inputs / str(word)[1:] if str(word).startswith("@") else word for word in words]
        return [*given, "--plot" if out == PLOT else "--out", place / out]

    return Job(command, _names_of_out if out == PLOT else _out)


def _run_in(place: Path) -> dict[str, str]:
    return result_of_run(place / "run")


JOBS = {
    **{f"pretrain on {ranks}": Job(lambda scene, place, ranks=ranks: _pretrain(scene, place, ranks), _run_in, ranks)
       for ranks in (1, 2, 3)},
    "pretrain on constant rate": Job(lambda scene, place: _pretrain(scene, place, schedule__decay="constant"), _run_in),
    "data prepare": Job(_prepare, lambda place: files_of(place / "data")),
    "finetune": Job(_finetune, _run_in),
    "train": Job(_train, _result_of_train),
    "launch local": Job(_launch, _run_in, 2),
    "resume": Job(_resume, _run_in),
    "anneal": Job(_anneal, _run_in),
    "sweep": Job(_sweep, _result_of_sweep),
    "mlperf run": Job(_mlperf_run, _result_of_experiments),
    "profile run": Job(_profile, _names_of_out),
    "predict": Job(_predict, _out),
    "data extract": _files("data", "extract", "@corpus.txt"),
    "data vocab": _files("data", "vocab", TESTS / "golden" / "sample.txt", "--size", 100, out="out.txt"),
    "data convert": _files("data", "convert", "@data", "--to", "hdf5-varlength", "--shards", 3),
    "data bin": _files("data", "bin", "@data"),
    "data pack": _files("data", "pack", "@data"),
    "data eval-set": _files("data", "eval-set", "@data", "--count", 5),
    "embed": _files("embed", "@base", "@table/train.csv", out="out.npy"),
    "weights import": _files("weights", "import", "@base"),
    "weights export": _files("weights", "export", "@base"),
    "report": _files("report", "@base", out="out.html"),
    "profile report": _files("profile", "report", TESTS / "data" / "profile-h200", out="out.html"),
    "mlperf show": _files("mlperf", "show", TESTS / "golden" / "mlperf-h200-result_3.txt", out=PLOT),
    "plan": _files("plan", "bert-base", "--gpu", "h100", out=PLOT),
}  # fmt: skip
