"""The commands of the README and of docs/commands.md are run, every one, in a folder of a reader's own.

They follow one another as they stand there, on a few of the demo's articles, with budgets of seconds: the first as a
reader types it and what starts ranks in a shell, the others in this process, which has torch loaded. `make demo` is run
on a fresh clone by a long test, and its script here; a download, against a server of our own.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
from itertools import chain
from pathlib import Path

import pytest

from tests.docs.test_documents import Action, perform, public_commands
from tests.miniature_tasks import command_line
from tests.training.test_train import write_articles

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "data"
PAGES = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/commands.md")]
RUN_ELSEWHERE = {
    "make demo": ("tests/services/test_demo.py", '["make", "demo"'),
    "make test": (".ci/run", "make test"),
    "make check": (".ci/run", "make check"),
    "pip install": ("tests/docs/test_package.py", '[*pip, "install", "--no-deps"'),
    "bertrain data download": ("tests/faults/test_download.py", 'bertrain("data", "download"'),
    "bertrain launch cancel": ("tests/services/test_slurm.py", 'launcher.bertrain("launch", "cancel"'),
    "bertrain launch ssh": ("tests/services/test_ssh.py", 'as_job("ssh"'),
    "bertrain serve": ("tests/docs/test_serve_page.py", "with started("),
    "bertrain mlperf": ("tests/faults/test_mlperf_runs.py", '("mlperf", "run"'),
    "bertrain data mlperf": ("tests/processes/test_mlperf_data.py", 'command_line("data", "mlperf"'),
}
"""Commands that the test below does not run: the file that does, and how they stand there."""
IN_A_SHELL = ("bertrain train articles/ ", "bertrain launch local ")


def commands() -> list[str]:
    """Lines of indented blocks, and the first column of tables, that are commands."""
    found = []
    for line in chain.from_iterable(page.splitlines() for page in PAGES):
        if re.match(r"    (bertrain|make|pip) ", line):
            found.append(line.strip())
        elif line.startswith("| `bertrain "):
            found += re.findall(r"`(bertrain [^`]+)`", line.split(" | ")[0])
    return found


def right_answers(squad: Path) -> dict[str, str]:
    """Predictions of whoever knows a file of SQuAD by heart."""
    paragraphs = [paragraph for article in json.loads(squad.read_text())["data"] for paragraph in article["paragraphs"]]
    return {question["id"]: question["answers"][0]["text"] for part in paragraphs for question in part["qas"]}


def test_every_command_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copy(ROOT / "demo" / "held-out.txt", tmp_path / "articles.txt")
    write_articles(tmp_path / "articles")
    rows = [
        f"{'my invoice is wrong' if row % 2 else 'thank you'},{'bill' if row % 2 else 'praise'}" for row in range(60)
    ]
    (tmp_path / "labels.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    shutil.copytree(SAMPLES / "glue", tmp_path / "glue")
    shutil.copy(SAMPLES / "squad" / "dev-v1.1.json", tmp_path)
    (tmp_path / "predictions.json").write_text(json.dumps(right_answers(tmp_path / "dev-v1.1.json")))
    ran = 0
    for command in commands():
        if any(command.startswith(prefix) for prefix in RUN_ELSEWHERE):
            continue
        short = re.sub(r"--budget \w+", "--budget 5s", command)
        for option, count in (("max-steps", 2), ("steps", 3)):
            short = re.sub(rf"--{option} \d+", f"--{option} {count}", short)
        if command.startswith("bertrain profile run "):
            short += " --warm-up-steps 3 --recorded-steps 1 --batch.token_budget 512"
        if command.startswith(IN_A_SHELL):
            perform(Action("bash", short), tmp_path)
        else:
            command_line(*shlex.split(short)[1:])
        ran += 1
    assert ran >= 20


def test_the_demo_trains_and_guesses_words(tmp_path: Path) -> None:
    """For seconds: how well it guesses is measured in two minutes, by the long test."""
    said = perform(Action("bash", f"{ROOT}/demo/run.sh out 5s"), tmp_path)
    assert re.search(r"^quality: +[\d.]+% of masked words predicted in ", said, re.M)
    assert re.search(r"united \[MASK\] \.\n +\S+ [\d.]+%", said)
    for made in ("report.html", "model/model.safetensors", "model/README.md", "recipe.toml"):
        assert (tmp_path / "out" / made).is_file()


def test_every_command_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert not [name for name, _ in public_commands() if f"### bertrain {name}\n" not in reference]


@pytest.mark.parametrize("command", RUN_ELSEWHERE)
def test_the_others_are_run_elsewhere(command: str) -> None:
    file, call = RUN_ELSEWHERE[command]
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if call in line and not line.lstrip().startswith("#")], f"{file} runs no {command}"
    assert not file.endswith(".py") or [line for line in lines if line.startswith("def test_")]


def test_a_recorded_terminal_is_what_stood_on_the_screen() -> None:
    specification = importlib.util.spec_from_file_location("make_picture", ROOT / "docs" / "make_picture.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    recorded = "$ go\r\n\x1b[32m1/2\x1b[0m half\r\x1b[2K\x1b[32m2/2\x1b[0m whole\r\nup\r\n\x1b[1A\x1b[2Kdone\r\n"
    assert module.screen_of(recorded) == ["$ go", "\x1b[32m2/2\x1b[0m whole", "done", ""]
