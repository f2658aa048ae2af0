"""`--json` of every command: stdout holds JSON alone, whatever else the command and the libraries it calls print."""

from __future__ import annotations

import ctypes
import json
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from bertrain.cli.main import app, main
from bertrain.cli.options import stdout_for_json
from bertrain.launch.job import JobSpec, Task, make_job, place, write_job
from bertrain.launch.scripts import job_script
from bertrain.weights.export import export
from tests import helpers, miniature_tasks
from tests.faults.test_download import Server, serve_wikipedia
from tests.quick.test_mlperf_data import SHARDS, write_inputs
from tests.quick.test_mlperf_logs import write_results

TESTS = Path(__file__).parents[1]
QUICK = shlex.join(word for key, value in miniature_tasks.QUICK.items() for word in (f"--{key}", value))
TINY = shlex.join(helpers.tiny_arguments(log__level="verbose", train__max_steps=3))
BENCHMARK = f"pretrain bert-tiny --data {{data}} --benchmark --benchmark-steps 2 --warm-up-steps 1 {TINY}"
TUNE = f"finetune classify --data {{table}} --init {{base}} {QUICK} --max-steps 2 --verbose"

RESULTS = " ".join(f"{{results}}/result_{number}.txt" for number in range(3))


@dataclass(frozen=True)
class Case:
    """A command, in which {name} stands for an input and {out} for a new folder."""

    words: str
    is_stream: bool = False
    """Prints JSON values one after another, each in a line of its own; --help says so."""
    own_process: bool = False
    """Starts ranks, or the process again with other libraries."""


CASES = {
    "pretrain": [Case(BENCHMARK, own_process=True), Case(f"{BENCHMARK} --nproc 2", own_process=True)],
    "evaluate": [
        Case("evaluate {base} --data {data} --device cpu"),
        Case("evaluate {tuned} --data {table} --device cpu"),
    ],
    "fill-mask": [Case("fill-mask {base} 'bato [MASK] kese'")],
    "finetune": [
        Case(f"{TUNE} --run {{out}}/run"),
        Case(f"{TUNE} --run {{out}}/run --seeds 1,2 --do predict"),
    ],
    "predict": [
        Case("predict {tuned} 'bato kese' --device cpu"),
        Case("predict {tuned} --data {table} --out {out}/predictions --device cpu"),
    ],
    "embed": [Case("embed {exported} {golden}/sample.txt --out {out}/vectors.npy --device cpu")],
    "sweep": [Case(f"sweep bert-tiny --data {{data}} --out {{out}}/sweep --seeds 1 {TINY}")],
    "score": [Case("score squad/v1.1 --data {squad}/dev-v1.1.json --predictions {predictions}")],
    "watch": [Case("watch {base} --once"), Case("watch {base}", is_stream=True)],
    "logs": [Case("logs {base}", is_stream=True)],
    "plan": [Case("plan mlperf-nvidia-1x8x48-packed --gpu h200 --count 8 --target 0.72")],
    "recipes": [Case("recipes"), Case("recipes bert-tiny")],
    "settings": [Case("settings"), Case("settings learning rate")],
    "doctor": [Case("doctor {out}"), Case("doctor --kernels")],
    "data download": [Case("data download wikipedia --language simple --mirror {mirror} --out {out}")],
    "data extract": [Case("data extract {golden}/enwik-sample.xml --out {out}/text --hold-out 1 --workers 2")],
    "data vocab": [Case("data vocab {golden}/sample.txt --size 100 --out {out}/vocab.txt")],
    "data prepare": [Case("data prepare {corpus} --vocab {vocab} --max-seq-length 64 --workers 2 --out {out}/data")],
    "data mlperf": [
        Case(f"data mlperf --packed --skip-download --shards {SHARDS} --eval-count 10 --out {{mlperf_inputs}}")
    ],
    "data convert": [Case("data convert {data} --to hdf5-varlength --out {out}/hdf5")],
    "data bin": [Case("data bin {data} --out {out}/binned")],
    "data pack": [
        Case("data pack {data} --out {out}/packed"),
        Case("data pack {data} --algorithm nnlshp"),
    ],
    "data eval-set": [Case("data eval-set {data} --count 5 --out {out}/eval")],
    "data stats": [Case("data stats {data} --sequences 32 --plot {out}/stats.svg")],
    "data inspect": [Case("data inspect {data}")],
    "data verify": [Case("data verify {data}")],
    "weights import": [Case("weights import {exported} --out {out}/imported")],
    "weights show": [Case("weights show {exported}")],
    "weights compare": [Case("weights compare {base} {exported}")],
    "mlperf check": [Case("mlperf check {results} --division open")],
    "mlperf show": [Case(f"mlperf show {RESULTS} --plot {{out}}/accuracy.svg", is_stream=True)],
    "profile report": [Case("profile report {profile}")],
    "profile roofline": [Case("profile roofline {profile}")],
    "launch preflight": [Case("launch preflight {job}")],
    "launch status": [Case("launch status {job}")],
}
"""All commands that have --json. None needs a service."""


def commands_with_json(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_with_json(command, (*path, name))
        elif any("--json" in option.opts for option in command.params):
            yield " ".join((*path, name)), command


COMMANDS = dict(commands_with_json(typer.main.get_command(app)))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    folder = tmp_path_factory.mktemp("inputs")
    mini = miniature_tasks.make_miniature(folder)
    tuned = folder / "tuned"
    miniature_tasks.command_line(
        "finetune", "classify", "--data", mini.table, "--init", mini.base, "--run", tuned, *shlex.split(QUICK),
        "--max-steps", 2,
    )  # fmt: skip
    articles = json.loads((TESTS / "data" / "squad" / "dev-v1.1.json").read_text())["data"]
    questions = [one for article in articles for paragraph in article["paragraphs"] for one in paragraph["qas"]]
    predictions = folder / "predictions.json"
    predictions.write_text(json.dumps({one["id"]: one["answers"][0]["text"] for one in questions[1:]}))
    write_inputs(folder / "mlperf")
    (folder / "results").mkdir()
    settings = helpers.tiny_settings()
    spec = JobSpec(procs_per_node=1)
    words = ("pretrain", "bert-tiny", "--data", str(folder / "data"), "--run", str(folder / "job-run"))
    task = Task(command=words, folder=str(folder / "job-run"))
    job = make_job(place("local", spec), [task], data=[folder / "data"], folder=folder / "job")
    write_job(job, settings, job_script(job))
    server = Server()
    serve_wikipedia(server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {
        "data": folder / "data",
        "corpus": folder / "corpus.txt",
        "vocab": folder / "vocab.txt",
        "base": mini.base,
        "tuned": tuned,
        "table": mini.table,
        "exported": export(mini.base, folder / "exported"),
        "golden": TESTS / "golden",
        "squad": TESTS / "data" / "squad",
        "predictions": predictions,
        "mlperf_inputs": folder / "mlperf",
        "results": write_results(folder / "results"),
        "profile": shutil.copytree(TESTS / "data" / "profile-h200", folder / "profile"),
        "job": folder / "job",
        "mirror": server.url,
    }
    server.shutdown()
    server.server_close()


def refuse_constant(name: str) -> None:
    pytest.fail(f"{name} is no JSON")


def test_every_command_has_a_case() -> None:
    assert CASES.keys() == COMMANDS.keys()


@pytest.mark.parametrize(
    ("command", "case"),
    [pytest.param(command, case, id=case.words[:40]) for command, cases in CASES.items() for case in cases],
)
def test_stdout_holds_json_alone(
    command: str,
    case: Case,
    inputs: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = [word.format(**inputs, out=tmp_path) for word in shlex.split(case.words)] + ["--json"]
    assert words[: len(command.split())] == command.split()
    if case.own_process:
        printed = helpers.bertrain(*words).stdout
    else:
        monkeypatch.setattr(sys, "argv", ["bertrain", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.flush()
        printed, err = capfd.readouterr()
        assert not ended.value.code, err
    assert printed
    for value in printed.splitlines() if case.is_stream else [printed]:
        json.loads(value, parse_constant=refuse_constant)
    assert not case.is_stream or "line" in COMMANDS[command].help.partition("With --json, ")[2]


def test_prints_of_libraries_go_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """C libraries write to file descriptor 1 by a buffer of their own."""
    with stdout_for_json(True):
        ctypes.CDLL(None).puts(b"of a library")
        print("of Python")
    print("{}")
    printed, err = capfd.readouterr()
    assert printed == "{}\n"
    assert sorted(err.splitlines()) == ["of Python", "of a library"]


@pytest.mark.parametrize(("words", "code"), [
    (f"pretrain bert-tiny --run {{out}}/run --data {{data}} {TINY}", "option-without-effect"),
    (f"{BENCHMARK} --dry-run", "conflicting-options"), (f"{TUNE} --run {{out}}/run --dry-run", "conflicting-options"),
])  # fmt: skip
def test_json_is_refused_where_there_is_none(words: str, code: str, inputs: dict[str, object], tmp_path: Path) -> None:
    done = miniature_tasks.command_line(*shlex.split(words.format(**inputs, out=tmp_path)), "--json", check=False)
    assert (done.code, done.out) == (2, "")
    assert f"[{code}]" in done.err
    assert not list(tmp_path.iterdir())
