"""The functions of `import bertrain`: the example of each is run, one after another, in a folder of a reader's own."""

from __future__ import annotations

import csv
import inspect
from pathlib import Path
from typing import Any

import pytest

import bertrain
from bertrain.run import checkpoint
from tests import helpers
from tests.training.test_train import write_articles

ROOT = Path(__file__).parents[2]
IN_ORDER = ("train", "recipe_names", "resolve", "extract", "train_vocabulary", "prepare", "pretrain", "resume",
            "evaluate", "fill_mask", "embed", "export", "report", "resolve_task", "finetune", "predict",
            "sweep")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some articles, and a table of sentences with labels."""
    folder = tmp_path_factory.mktemp("api")
    write_articles(folder / "articles")
    articles = (ROOT / "demo" / "held-out.txt").read_text().splitlines()
    (folder / "articles.txt").write_text("\n".join(articles[:400]) + "\n")
    (folder / "labels").mkdir()
    for part, count in (("train", 24), ("dev", 8), ("test", 4)):
        with open(folder / "labels" / f"{part}.csv", "w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["text", "label"])
            table.writerows([line[:60], ("short", "long")[len(line) > 80]] for line in articles[:count] if line)
    return folder


def test_every_example_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {name for name in bertrain.__all__ if inspect.isfunction(getattr(bertrain, name))}
    assert functions == set(IN_ORDER), "a new function has an example, and its place among the others"
    monkeypatch.chdir(folder)
    found: dict[str, Any] = {"bertrain": bertrain}
    for name in IN_ORDER:
        example = inspect.cleandoc(getattr(bertrain, name).__doc__).partition("Example: ")[2]
        assert f"bertrain.{name}(" in example, f"{name} has no example"
        exec(compile(example.replace("30m", "2s"), name, "exec"), found)
    assert found["settings"].train.max_steps == 20
    assert (folder / "runs" / "tiny" / "report.html").is_file()
    assert (folder / "exported" / "model.safetensors").is_file()
    assert list((folder / "predictions").iterdir())


def test_a_run_says_what_it_did(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    settings = helpers.tiny_settings(
        train__max_steps=3, evaluate__data=str(data), evaluate__max_examples=8, log__level="quiet"
    )
    done = bertrain.pretrain(settings, data, tmp_path / "run")
    assert (done.run, done.step, done.samples) == (tmp_path / "run", 3, 72)
    assert done.seconds > 0
    assert done.loss == helpers.losses(tmp_path / "run")[-1]
    assert done.evaluation["examples"] == 8
    again = bertrain.resume(tmp_path / "run")
    assert (again.step, again.samples, again.loss, again.evaluation) == (3, 72, done.loss, done.evaluation)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert again.seconds >= checkpoint.read_progress(saved).seconds > 0, "of all starts together"


def test_strings_where_lists_are_expected(folder: Path, tmp_path: Path) -> None:
    one = bertrain.prepare(str(folder / "articles.txt"), tmp_path / "one", max_seq_length=64)
    other = bertrain.prepare([folder / "articles.txt"], tmp_path / "other", max_seq_length=64)
    assert one["files"] == other["files"]
    with helpers.refused("missing-input", "none.txt"):
        bertrain.extract("none.txt", tmp_path / "text")
    with helpers.refused("no-run", tmp_path / "one"):
        bertrain.report(str(tmp_path / "one"))
    with helpers.refused("no-run", tmp_path / "none", "does not exist"):
        bertrain.report(tmp_path / "none")


def test_overrides_are_dictionaries_of_any_values_or_pairs() -> None:
    given = {"train.max_steps": 200, "model.nsp": False, "optimizer.learning_rate": 1e-5, "log.level": "quiet"}
    settings = bertrain.resolve("bert-tiny", given)
    assert (settings.train.max_steps, settings.model.nsp) == (200, False)
    assert (settings.optimizer.learning_rate, settings.log.level) == (1e-5, "quiet")
    assert bertrain.resolve("bert-tiny", list(given.items())) == settings
    assert bertrain.resolve_task("glue/sst2", {"train.max_steps": 5}).train.epochs == 0
    for wrong in (1.5, "many", None, True):
        with helpers.refused("invalid-value", "train.max_steps"):
            bertrain.resolve("bert-tiny", {"train.max_steps": wrong})
    with helpers.refused("unknown-recipe", "bert-tyni"):
        bertrain.pretrain("bert-tyni", "data", "runs/x")
