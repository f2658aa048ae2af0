"""The package as a user gets it: built, installed elsewhere, run outside the checkout."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from bertrain.config.recipe import recipe_names
from bertrain.config.resolve import resolve
from tests import helpers
from tests.docs.test_documents import check_command, public_commands
from tests.miniature_tasks import command_line

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel and nothing else of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True, cwd=folder)
    (wheel,) = folder.glob("bertrain-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def run_installed(site: Path, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "bertrain", *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_text_to_evaluation_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    """Recipes and vocabulary travel with the wheel: prepare, train two steps, evaluate."""
    (tmp_path / "text.txt").write_text((ROOT / "tests" / "golden" / "sample.txt").read_text())
    where = subprocess.run(
        [sys.executable, "-P", "-c", "import bertrain; print(bertrain.__file__)"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(installed))
    commands = [
        ["data", "prepare", "text.txt", "--out", "data", "--max-seq-length", 128],
        ["pretrain", "bert-tiny", "--data", "data", "--run", "run", "--train.max_steps", 2, "--batch.sequences", 4],
        ["evaluate", "run", "--data", "data"],
    ]
    for command in commands:
        done = run_installed(installed, tmp_path, *command)
        assert done.returncode == 0, done.stderr
    assert "masked words" in done.stdout


BASE_COMMANDS = """
data vocab text.txt --size 600 --out vocab.txt
data extract text.txt --hold-out 1 --sentences lines --out text
data prepare text/train --vocab vocab.txt --max-seq-length 128 --out data
pretrain bert-demo --data data --run run --model.vocab_size 600 --max-steps 2 --batch.sequences 4
evaluate run --data data
fill-mask run "he was [MASK] ."
weights export run --out exported
report run
"""
NEEDS_EXTRA = {
    "data convert data --to hdf5-fixed --shards 1 --out hdf5": "formats",
    "data extract dump.xml --out wiki": "text",
    "data stats data --plot lengths.svg": "report",
    "data pack data --algorithm nnlshp": "pack",
    "data prepare text/train --out more --engine dask --scheduler tcp://localhost:1": "dask",
    "finetune glue/sst2 --init run --data glue --run tuned": "finetune",
    "mlperf check .": "mlperf",
    "weights export run --to onnx --out onnx": "onnx",
    "pretrain bert-tiny --data data --run tracked --log.trackers mlflow": "mlflow",
    "pretrain bert-tiny --data data --run tracked --log.trackers wandb": "wandb",
}


def test_without_extras_the_demo_runs_and_other_commands_name_theirs(tmp_path: Path) -> None:
    """In one process whose imports of every extra fail, as on a machine that has none."""
    (tmp_path / "text.txt").write_text((ROOT / "tests" / "golden" / "sample.txt").read_text())
    page = "<page><title>A</title><ns>0</ns><revision><text>Some text. And more.</text></revision></page>"
    (tmp_path / "dump.xml").write_text(f'<mediawiki xml:lang="en">{page}</mediawiki>')
    (tmp_path / "glue").symlink_to(ROOT / "tests" / "data" / "glue")
    script = (
        "import shlex, sys\n"
        "from bertrain.base.extras import EXTRAS\n"
        "sys.modules.update(dict.fromkeys(EXTRAS))\n"
        "from bertrain.cli.main import main\n"
        "for line in sys.stdin:\n"
        "    sys.argv = ['bertrain', *shlex.split(line)]\n"
        "    try:\n        main()\n"
        "    except SystemExit as ended:\n        print('exit', ended.code or 0, file=sys.stderr)\n"
    )
    asked = BASE_COMMANDS.strip() + "\n" + "\n".join(NEEDS_EXTRA)
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=asked,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "BERTRAIN_PRELOADED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    codes = [line for line in done.stderr.splitlines() if line.startswith("exit ")]
    base = len(BASE_COMMANDS.strip().splitlines())
    assert codes == ["exit 0"] * base + ["exit 2"] * len(NEEDS_EXTRA), done.stderr
    named = re.findall(r"pip install 'bertrain\[(\w+)\]' \[missing-package\]", done.stderr)
    assert named == list(NEEDS_EXTRA.values())
    assert "pip install &#39;bertrain[report]&#39;" in (tmp_path / "run" / "report.html").read_text()
    assert "bertrain[tensorboard]" not in done.stdout, "nobody asked for it"


@pytest.fixture(scope="module")
def data_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """A folder that holds `data` of so many words and such a length; recipes that are alike share one."""
    from bertrain.data.prepare.prepare import prepare
    from bertrain.data.text.vocabulary import Vocabulary

    @cache
    def prepared(words: int, max_seq_length: int) -> Path:
        folder = tmp_path_factory.mktemp("data")
        (folder / "vocab.txt").write_text("\n".join(Vocabulary.load().words[:words]) + "\n")
        text = (ROOT / "tests" / "golden" / "sample.txt").read_text()
        (folder / "text.txt").write_text("\n\n".join([text] * 60))  # so that a large step is few epochs
        prepare([folder / "text.txt"], folder / "data", vocab=folder / "vocab.txt", max_seq_length=max_seq_length)
        return folder

    return prepared


TASK_RECIPES = [name for name in recipe_names() if resolve(name).task.name]


@pytest.mark.parametrize("recipe", sorted(set(recipe_names()) - set(TASK_RECIPES)))
def test_every_recipe_dry_runs(
    recipe: str, data_for: Callable[[int, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertrain.training.announce import dry_run

    helpers.allow_emulated_fp16(monkeypatch)
    settings = resolve(recipe)
    if settings.train.precision == "fp8":  # which is refused where there is no GPU that has it
        settings = resolve(recipe, [("train.precision", "bf16")])
    folder = data_for(settings.model.vocab_size or 30522, settings.data.max_seq_length or 128)
    shown = dry_run(settings, folder / "data", world=8)
    assert f"train.max_steps = {settings.train.max_steps}" in shown
    assert "memory on each rank:" in shown
    assert {path.name for path in folder.iterdir()} == {"data", "text.txt", "vocab.txt"}, "a dry run writes nothing"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to fine-tune, with positions for any recipe."""
    from bertrain.training.start import pretrain

    folder = tmp_path_factory.mktemp("weights")
    settings = helpers.tiny_settings(train__max_steps=1, schedule__warmup_steps=0, model__max_positions=512)
    pretrain(settings, helpers.make_data(folder, documents=10), folder / "run")
    return folder / "run"


@pytest.mark.parametrize("recipe", TASK_RECIPES)
def test_every_recipe_of_a_task_dry_runs(
    recipe: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertrain.training.announce import dry_run

    helpers.allow_emulated_fp16(monkeypatch)
    asked = resolve(recipe)
    data = ROOT / "tests" / "data" / ("squad" if asked.task.name.startswith("squad/") else "glue")
    data = ROOT / "demo" / "names" if asked.task.name == "tag" else data
    shown = dry_run(asked, data, run=tmp_path / "run", world=8, init=str(weights))
    assert f"batch.sequences = {asked.batch.sequences}" in shown
    assert "memory on each rank:" in shown
    assert not list(tmp_path.iterdir())


def test_dry_run_numbers_are_true(tmp_path: Path) -> None:
    """Parameters as worked out by hand; memory is held to measurements elsewhere."""
    data = helpers.make_data(tmp_path)
    done = command_line("pretrain", "bert-tiny", "--data", data, "--dry-run", "--nproc", 3, *helpers.tiny_arguments())
    width, vocab = 32, helpers.vocab_size()
    layer = 4 * width * width + 4 * width + 2 * width * 64 + 64 + width + 4 * width
    heads = (width * width + width) + 2 * width + vocab + (width * width + width) + 2 * width + 2
    total = (vocab + 64 + 2) * width + 2 * width + 2 * layer + heads
    assert f"parameters: {total:,}" in done.out
    assert "memory on each rank: about " in done.out
    assert "for 3 ranks" in done.out
    assert "24 sequences" in done.out


def test_help_imports_nothing_heavy() -> None:
    """No clock here (benchmarks/loader.py has it): --help answers at once because it loads neither torch nor arrow."""
    script = (
        "import sys, bertrain.cli.main as cli\n"
        "sys.argv = ['bertrain', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'numpy', 'pyarrow', 'tokenizers', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    assert "pretrain" in done.stdout


COMMANDS = dict(public_commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example(name: str) -> None:
    """In its help, which is also what --help prints; the command in it could be run."""
    help = inspect.cleandoc(COMMANDS[name].help)
    command = " ".join(help.partition("Example: ")[2].split())
    assert command.startswith(f"bertrain {name} ") or command == f"bertrain {name}"
    check_command(command, is_whole=True)
    for parameter in COMMANDS[name].params:
        assert parameter.help or parameter.name == "help", f"{name}: {parameter.name} has no help"


def test_help_prints_the_example() -> None:
    assert "Example: bertrain data prepare" in helpers.bertrain("data", "prepare", "--help").stdout


def test_nothing_runs_a_pickle() -> None:
    """No pickle, no eval, no shell, anywhere in the package: looked for in the code, not in the words about it.

    The one exception reads other people's tensors with torch's interpreter that knows nothing else.
    """
    forbidden_calls = {"eval", "exec", "pickle.load", "pickle.loads", "dist.broadcast_object_list"}
    readers = []
    for path in (ROOT / "bertrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "dill", "cloudpickle", "shelve"} & set(names), path
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in forbidden_calls, f"{path}:{node.lineno}"
                if ast.unparse(node.func).endswith("torch.load"):
                    readers.append(path.name)
                    assert "weights_only=True" in ast.unparse(node), f"{path}:{node.lineno}"
                for keyword in node.keywords:
                    assert keyword.arg not in ("allow_pickle", "trust_remote_code", "shell"), f"{path}:{node.lineno}"
    assert readers == ["torch_files.py"]


def test_a_type_checker_refuses_a_misspelt_name(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text('import bertrain\nbertrain.pretrain("bert-tiny", "data", "runs/x").loss + 1.0\n')
    (tmp_path / "wrong.py").write_text('import bertrain\nbertrain.pretrian("bert-tiny", "data", "runs/x")\n')
    for name, named in (("right", ""), ("wrong", 'has no attribute "pretrian"')):
        mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), tmp_path / f"{name}.py"]
        done = subprocess.run(mypy, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (not named), done.stdout
        assert named in done.stdout
