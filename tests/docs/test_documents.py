"""The documents are true: the tutorial runs as written, the reference is the code's, links and commands lead on."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet
import pytest
import typer

from bertrain.base.errors import UserError
from bertrain.cli.main import app
from bertrain.config import resolve as config
from bertrain.config.recipe import recipe_names
from bertrain.config.resolve import parse_overrides
from tests import helpers
from tests.miniature_tasks import command_line
from tests.training.test_embed import encoder as encoder

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = {DOCS / "reference.md", DOCS / "errors.md"}
SKIPPED_FOLDERS = {"build", "dist", "runs", "node_modules"}
NUMBER = r"[-+]?\d[\d,.:]*(?:e[-+]?\d+)?\+?\w*"


def documents() -> list[Path]:
    """Every Markdown file of the repository."""
    found = []
    for folder, inside, files in os.walk(ROOT):
        inside[:] = [name for name in inside if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        found += [Path(folder) / name for name in files if name.endswith(".md")]
    return sorted(found)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- the tutorial ------------------------------------------------------------------------------------


@dataclass
class Action:
    """A command of the tutorial, in bash or Python, and the lines it is said to print."""

    language: str
    text: str
    shown: list[str] = field(default_factory=list)


def actions_of(document: str) -> Iterator[Action]:
    """The commands of ```console blocks (after `$ `) and ```python blocks; a ```text block shows what Python prints."""
    last: Action | None = None
    for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", document, re.MULTILINE | re.DOTALL):
        if language == "python":
            last = Action(language, body)
            yield last
        elif language == "text" and last is not None:
            last.shown += body.splitlines()
        elif language == "console":
            joined = re.sub(r"\\\n\s*", " ", body)
            for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                yield Action(language, command, shown.splitlines())


def perform(action: Action, folder: Path) -> str:
    """Run it in `folder` and return what it printed; a line `^C` among those shown is a key pressed on the way."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    program = [sys.executable, "-c"] if action.language == "python" else ["bash", "-c"]
    is_interrupted = "^C" in action.shown
    with subprocess.Popen(
        [*program, action.text],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        printed = []
        has_pressed = not is_interrupted
        for line in process.stdout:
            printed.append(line)
            if not has_pressed and line.startswith("step "):
                os.killpg(process.pid, signal.SIGINT)
                has_pressed = True
    output = "".join(printed)
    expected = 130 if is_interrupted else 0
    assert process.returncode == expected, f"{action.text}\nexit code {process.returncode}\n{output}"
    return output


def perform_here(action: Action, folder: Path) -> str:
    """The same in this process, which has torch loaded, if it is a command of bertrain and no more."""
    words = shlex.split(action.text)
    if action.language != "console" or words[0] != "bertrain" or set(words) & {"|", ">", ">>", "&&"}:
        return perform(action, folder)
    with contextlib.chdir(folder), mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        return command_line(*words[1:], as_on_terminal=True).out


def assert_shows(action: Action, output: str) -> None:
    """Each line shown occurs in the output, in order; numbers may differ, `...` is anything."""
    position, output = 0, helpers.unwrapped(output)
    for line in action.shown:
        if line.strip() in ("...", "^C", ""):
            continue
        found = re.compile(pattern_of(line)).search(output, position)
        assert found, f"{action.text}\nis shown to print\n{line}\nbut printed\n{output}"
        position = found.end()


def pattern_of(line: str) -> str:
    """A shown line as an expression: its words as they are, any number for a number, any space for space."""
    parts = []
    for part in re.split(rf"({NUMBER}|\.\.\.|\s+)", line.strip()):
        if re.fullmatch(NUMBER, part):
            parts.append(NUMBER)
        elif part == "...":
            parts.append(r"[^\n]*")
        elif part.isspace():
            parts.append(r"[ \t]+")
        else:
            parts.append(re.escape(part))
    return "".join(parts)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader who has followed the whole tutorial."""
    folder = tmp_path_factory.mktemp("tutorial")
    for name in ("demo", "models"):
        (folder / name).symlink_to(ROOT / name)
    actions = list(actions_of((DOCS / "tutorial.md").read_text()))
    assert len(actions) > 12
    for action in actions:
        output = perform(action, folder)
        print(f"$ {action.text}\n{output}")
        assert_shows(action, output)
    return folder


def test_the_tutorial_runs_as_written(followed: Path) -> None:
    assert (followed / "runs" / "first" / "report.html").is_file()
    lines = [json.loads(line) for line in (followed / "runs" / "first" / "metrics.jsonl").open()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == list(range(1, 61)), "stopped and resumed, each step stands there once"


def test_the_reference_names_what_folders_hold(generator: ModuleType, followed: Path) -> None:
    """The lists of files and fields are those of the folders that the tutorial made.

    It stands beside the tutorial, as does the next, so that one worker has all that needs it.
    """
    data, run = followed / "data", followed / "runs" / "first"
    assert {path.name for path in data.iterdir()} == set(generator.DATA_FOLDER)
    assert list(read_json(data / "manifest.json")) == list(generator.MANIFEST_FIELDS)
    with pa.memory_map(str(data / "shard-00000.arrow")) as source:
        assert pa.ipc.open_file(source).schema.names == list(generator.SHARD_COLUMNS)
    assert {path.name for path in run.iterdir()} == generator.RUN_FOLDER.keys() - {"generator"}  # of model.rtd
    for entry in read_json(run / "environment.json"):
        assert list(entry) == list(generator.ENVIRONMENT_FIELDS)
    checkpoint = run / "checkpoints" / "step-00000060"
    assert {path.name for path in checkpoint.iterdir()} == set(generator.CHECKPOINT)
    assert list(read_json(checkpoint / "state.json")) == list(generator.STATE_FIELDS)


def test_the_reference_names_every_field_of_the_metrics(generator: ModuleType, followed: Path) -> None:
    """The fields are those of the records, all documented; the metrics are those that an evaluation returns."""
    from dataclasses import fields

    from bertrain.run import records
    from bertrain.training.evaluate import evaluate

    for kind in (*generator.RECORDS, records.RankMeans):
        assert list(generator.record_fields(kind)) == [field.name for field in fields(kind)]
    for line in map(json.loads, (followed / "runs" / "first" / "metrics.jsonl").open()):
        assert line == records.to_dict(records.from_dict(line))

    result = evaluate(followed / "runs" / "first", followed / "held-out", max_examples=4, device="cpu")
    assert set(result) == {"step", *records.PRETRAINING_METRICS}


def test_the_how_to_about_tags_runs_as_written(tmp_path: Path) -> None:
    for name in ("demo", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    actions = list(actions_of((DOCS / "how-to-tag.md").read_text()))
    assert len(actions) == 5
    for action in actions:
        assert_shows(action, perform_here(action, tmp_path))
    assert {path.name for path in (tmp_path / "predictions").iterdir()} == {"dev.conll", "dev.jsonl"}


def test_how_to_embed_runs_as_written(encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(encoder, tmp_path / "weights")
    actions = list(actions_of((DOCS / "how-to-embed.md").read_text()))
    assert len(actions) >= 5
    for action in actions:
        assert_shows(action, perform_here(action, tmp_path))


@pytest.mark.parametrize(
    ("title", "count"), [("### Warm-up, stable, decay", 2), ("## Batch ramp", 1), ("## Try several values", 1)]
)
def test_sections_of_how_to_optimizers_run_as_written(title: str, count: int, tmp_path: Path) -> None:
    helpers.make_data(tmp_path)
    section = (DOCS / "how-to-optimizers.md").read_text().partition(f"\n{title}\n")[2].partition("\n## ")[0]
    actions = list(actions_of(section))
    assert len(actions) == count
    for action in actions:
        assert_shows(action, perform_here(action, tmp_path))


def test_the_section_about_data_sets_runs_as_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "data" / "datasets" / "saved" / "cola", tmp_path / "saved")
    (tmp_path / "hub" / "data").mkdir(parents=True)
    for split in ("train", "test"):
        table = pa.table({"text": [f"A sentence of {split} number {number}." for number in range(9)]})
        pyarrow.parquet.write_table(table, tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet")
    actions = list(actions_of((DOCS / "how-to-own-text.md").read_text()))
    assert len(actions) == 2
    for action in actions:
        assert_shows(action, perform_here(action, tmp_path))
    (part,) = (tmp_path / "text-hub" / "train").iterdir()
    assert "of train" in part.read_text()
    assert "of test" not in part.read_text()


def test_the_section_about_trackers_runs_as_written(tmp_path: Path) -> None:
    helpers.make_data(tmp_path)
    section = (DOCS / "how-to-watch.md").read_text().partition("## Trackers")[2]
    actions = list(actions_of(section))
    assert len(actions) == 2
    for action in actions:
        assert "left out" not in perform_here(action, tmp_path)
    assert (tmp_path / "mlflow.db").is_file()
    assert {path.name for path in (tmp_path / "runs").glob("*/trackers/*")} == {"mlflow", "wandb"}
    assert list((tmp_path / "runs" / "tracked" / "tensorboard").iterdir())
    assert list((tmp_path / "runs" / "offline" / "wandb").glob("offline-run-*"))


def test_a_shown_line_is_compared_by_its_words() -> None:
    line = "step 10/60  loss 8.8131  lr 1.35e-03  10,102 tokens/s  ...  10 s left"
    assert re.search(pattern_of(line), "step 20/60 loss 7.1  lr 1.00e-04  9 tokens/s  data 7%  1:05 s left")
    assert not re.search(pattern_of(line), "step 20/60 mean 7.1  lr 1.00e-04  9 tokens/s  data 7%  5 s left")


# --- the reference -----------------------------------------------------------------------------------


@cache
def load_script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    specification = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # where a dataclass looks for its annotations
    specification.loader.exec_module(module)
    return module


def public_commands() -> Iterator[tuple[str, Any]]:
    """Every command that people use, by its name."""
    return load_script("make_reference").commands()


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script("make_reference")


def test_the_reference_is_the_codes(generator: ModuleType) -> None:
    written = (DOCS / "reference.md").read_text(encoding="utf-8")
    assert written == generator.reference(), "docs/reference.md is out of date: run python docs/make_reference.py"


def test_the_reference_names_every_column_of_a_profile(generator: ModuleType) -> None:
    from bertrain.profiling.sets import ITERATION_COLUMNS, LAUNCH_COLUMNS
    from bertrain.run.sensors import sensors_for
    from tests.training.test_profile import FILES

    assert list(generator.ITERATION_FIELDS) == list(ITERATION_COLUMNS)
    assert list(generator.LAUNCH_FIELDS) == list(LAUNCH_COLUMNS)
    assert set(generator.SET_FILES) == FILES
    sensors = sensors_for(None)
    named = {re.sub(r"^core\d+_", "core0_", column) for column in [*sensors.columns, *sensors.missing]}
    assert named <= set(generator.TELEMETRY_COLUMNS)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


# --- errors ------------------------------------------------------------------------------------------


@cache
def errors_raised() -> list[Any]:
    """Those of the whole package, which takes seconds to read."""
    return list(load_script("make_errors").raised())


def test_every_error_has_a_code() -> None:
    """A literal in kebab-case, before the sentence."""
    without = [one.place for one in errors_raised() if one.code is None]
    assert not without, f"{len(without)} errors without a code: {' '.join(without[:20])}"


def test_the_table_of_errors_is_the_codes() -> None:
    written = (DOCS / "errors.md").read_text(encoding="utf-8")
    assert written == load_script("make_errors").errors(), "docs/errors.md is out of date: run docs/make_errors.py"


def test_causes_belong_to_codes() -> None:
    """Every code with several sentences has one line for all, and no line is about a code that is gone."""
    script = load_script("make_errors")
    sentences, causes = script.sentences(errors_raised()), script.causes()
    assert not causes.keys() - sentences.keys()
    assert not {code for code, texts in sentences.items() if len(texts) > 2} - causes.keys()
    assert all(cause.endswith(".") and "\n" not in cause for cause in causes.values())


def test_sentences_are_read_off_the_code(tmp_path: Path) -> None:
    package = tmp_path / "bertrain"
    package.mkdir()
    (package / "one.py").write_text(
        "class UserError(Exception): ...\nclass LateError(UserError): ...\n"
        "UserError('no-file', f'no file at {self.path}, line {number + 1}' + tail)\n"
        "errors.LateError('Bad Code', 'text')\nUserError(f'{code}', 'text')\nUserError('text alone')\nValueError('x')\n"
    )
    found = load_script("make_errors").raised(package)
    assert [(one.code, one.sentence, one.line) for one in found] == [
        ("no-file", "no file at {path}, line {number}{tail}", 3),
        (None, "text", 4),
        (None, "text", 5),
        (None, "text alone", 6),
    ]


# --- links, paths, commands --------------------------------------------------------------------------


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(path: Path) -> set[str]:
    """The anchors that a Markdown viewer makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    """docs/README.md links to every page that somebody wrote."""
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in set(DOCS.rglob("*.md")) - GENERATED - {DOCS / "README.md"}:
        assert f"({page.relative_to(DOCS)})" in index, f"docs/README.md does not link to {page.relative_to(DOCS)}"


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_relative_links_lead_somewhere(document: Path) -> None:
    text = without_code(document.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        link = "".join(target)
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        path = (document.parent / file).resolve() if file else document
        assert path.exists(), f"{name_of(document)} links to {link}, which is not there"
        assert not anchor or anchor in anchors_of(path), f"{name_of(document)} links to {link}: no such heading"


OWN_PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted(set(DOCS.rglob("*.md")) - GENERATED),
]


@pytest.mark.parametrize("document", OWN_PAGES, ids=name_of)
def test_paths_named_are_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:bertrain|tests|docs|benchmarks|demo)/[\w./-]*)`", text):
        assert (ROOT / path).exists(), f"{name_of(document)} names {path}, which is not there"
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert name in tests, f"{name_of(document)} names {name}, which is not there"


def commands_of(text: str) -> Iterator[tuple[str, bool]]:
    """The `bertrain ...` commands of a page, and whether each is whole: on a line of code, not within a sentence."""
    joined = re.sub(r"\\\n\s*", " ", text)
    is_fenced = False
    for line in joined.splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            found = re.match(r"\s*(?:\$ )?(?:torchrun .* -m (?:-- )?)?(bertrain [^`]*)$", line)
            if found:
                yield found[1], "[OPTIONS]" not in line
        else:
            yield from ((command, False) for command in re.findall(r"`(bertrain [^`]+)`", line))


def words_of(command: str) -> list[str]:
    """The words of the first command of a shell line, `bertrain` itself left off."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words = []
    for word in lexer:
        if set(word) <= set("|&;<>"):
            break
        words.append(word)
    return words[1:]


@cache
def all_commands() -> Any:
    return typer.main.get_command(app)


@cache
def setting_names() -> set[str]:
    return {entry["name"] for entry in config.describe()}


def check_command(command: str, *, is_whole: bool) -> None:
    """Raise for a command, an option, a setting or a recipe that does not exist; nothing is run."""
    node: Any = all_commands()
    words = words_of(command)
    if words[:1] == ["launch"] and "--" in words:
        place = words.index("--")
        check_command(" ".join(["bertrain", *map(shlex.quote, words[place + 1 :])]), is_whole=is_whole)
        words = words[:place]
    words = [*words[1:], "--help"] if words[:1] == ["help"] else words
    while hasattr(node, "commands") and words and not words[0].startswith("-"):
        if words[0].isupper() or words[0].startswith(("{", "...")):
            return  # a stand-in for any command
        assert words[0] in node.commands, f"there is no command {words[0]}"
        node = node.commands[words.pop(0)]
    if hasattr(node, "commands") or not is_whole:
        known = {name for one in node.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
        settings = {f"--{name}" for name in setting_names()}
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= known | settings, f"there is no {options - known - settings}"
        assert {word for word in words if word.startswith("bert-")} <= set(recipe_names())
        return
    if "--help" in words:
        return
    context = node.make_context(node.name, words)
    recipe = context.params.get("recipe") or (context.params.get("name") if node.name == "recipes" else None)
    overrides = parse_overrides(context.args) if context.args else []
    if recipe in recipe_names() and "model.config" not in dict(overrides):
        config.resolve(recipe, overrides)
    else:
        assert recipe is None or recipe.isupper() or recipe.endswith(".toml") or "model.config" in dict(overrides), (
            recipe
        )
        unknown = {name for name, _ in overrides} - setting_names()
        assert not unknown, f"there is no setting {unknown}"


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_commands_could_be_run(document: Path) -> None:
    """Commands, options, settings and recipes exist, and the values given to settings are such as they take."""
    for command, is_whole in commands_of(document.read_text(encoding="utf-8")):
        try:
            check_command(command.replace("…", ""), is_whole=is_whole)
        except Exception as error:
            raise AssertionError(f"{name_of(document)}: {command}: {error}") from error


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_python_and_settings_shown_are_sound(document: Path, tmp_path: Path) -> None:
    """Python compiles (the tutorial's is run), and settings files are taken."""
    text = document.read_text(encoding="utf-8")
    for language, body in re.findall(r"^```(python|toml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            compile(body, str(document), "exec")
        else:
            (tmp_path / "shown.toml").write_text(body)
            config.resolve("bert-tiny", settings_file=tmp_path / "shown.toml")


def test_commands_that_could_not_be_run_are_found() -> None:
    wrong = {
        "bertrain pretrian bert-tiny --data data": (AssertionError, "no command pretrian"),
        "bertrain pretrain bert-huge --data data --run runs/x": (AssertionError, "bert-huge"),
        "bertrain pretrain bert-tiny --data data --run runs/x --train.steps 5": (UserError, "train.steps"),
        "bertrain pretrain bert-tiny --data data --run runs/x --train.max_steps many": (UserError, "many"),
        "bertrain score squad/v1.1 --data dev-v1.1.json": (typer.BadParameter.__base__, "--predictions"),
        "bertrain evaluate runs/x --data data --most 5": (UserError, "most"),
    }
    for command, (kind, named) in wrong.items():
        assert list(commands_of(f"    {command}\n")) == [(command, True)]
        with pytest.raises(kind) as caught:
            check_command(command, is_whole=True)
        message = getattr(caught.value, "format_message", lambda caught=caught: str(caught.value))()
        assert named in message, command


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_recipes_named_exist(document: Path) -> None:
    named = re.findall(r"`(bert-[a-z]+(?:-phase\d)?)`", document.read_text(encoding="utf-8"))
    assert set(named) <= set(recipe_names())
