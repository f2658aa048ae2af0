"""`bertrain train`: text in, a model out, and the same again from its recipe."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from bertrain.data.text.documents import read_documents
from bertrain.data.text.extract import estimate, extract
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.pipeline import train as pipeline
from bertrain.pipeline.train import Trained, summary, train
from bertrain.run.folder import Run
from bertrain.training import loop
from bertrain.training.start import pretrain
from bertrain.weights.source import open_source
from bertrain.weights.tensors import load_tensors
from tests import helpers
from tests.miniature_tasks import command_line

DEMO = Path(__file__).parents[2] / "demo" / "train-1.txt"
SMALL = (
    ("model.hidden_size", "32"), ("model.intermediate_size", "64"), ("log.trackers", "none"),
    ("evaluate.every_samples", "500"),
)  # fmt: skip
WISHES = {"budget": "3s", "evaluation_share": 0.1, "size": "tiny", "overrides": SMALL}


def write_articles(folder: Path, count: int = 30) -> Path:
    """One file for each article, a few sentences on each line."""
    folder.mkdir()
    for number, document in enumerate(islice(read_documents([DEMO]), count)):
        (folder / f"{number:02d}.txt").write_text("\n".join(document[:60]) + "\n")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("train")
    return train(write_articles(folder / "articles"), folder / "out", **WISHES)


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    return load_tensors(open_source(run)).tensors


def test_it_leaves_a_model_a_report_and_a_card(made: Trained) -> None:
    from transformers import pipeline as transformers_pipeline

    guesses = transformers_pipeline("fill-mask", str(made.model))("the [MASK] of the city .")
    assert len(guesses) == 5
    assert "<html" in made.report.read_text()
    card = (made.model / "README.md").read_text()
    assert "pipeline_tag: fill-mask" in card
    assert f"{made.metrics['mlm_accuracy']:.2%}" in card
    text = json.loads((made.folder / "text" / "extract.json").read_text())
    assert text["counts"]["documents"] == 30
    assert text["counts"]["held_out"] == 3
    assert f"{made.metrics['examples']:,.0f} held-out examples" in card
    assert "27 documents, and 3 held out" in card
    of_nothing = summary(replace(made, metrics=made.metrics | {"mlm_accuracy": 0.05, "constant_accuracy": 0.05}))
    assert [line.partition(":")[0] for line in of_nothing] == ["made", "quality", "warning", "files", "use", "next"]
    many = {"mlm_accuracy": 0.3, "constant_accuracy": 0.05, "examples": 2000}
    much = summary(replace(made, metrics=made.metrics | many))
    assert much[1] == "quality:  30.0% of masked words predicted in 2,000 held-out examples; always the commonest: 5.0%"
    assert not any(line.startswith("warning") for line in much)
    head = (made.folder / "recipe.toml").read_text()
    assert "# train.fits" in head
    assert f"max_steps = {Run.open(made.run).settings.train.last_step()}\n" in head, "not that of the recipe"


def test_its_recipe_repeats_the_run_to_the_bit(made: Trained, tmp_path: Path) -> None:
    pretrain(str(made.folder / "recipe.toml"), made.folder / "data", tmp_path / "again")
    first, again = tensors_of(made.run), tensors_of(tmp_path / "again")
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


def test_the_same_command_changes_nothing_and_another_is_refused(made: Trained) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.folder.rglob("*.safetensors")}
    articles = made.folder.parent / "articles"
    assert train(articles, made.folder, **WISHES).metrics == made.metrics
    assert before == {path: path.stat().st_mtime_ns for path in made.folder.rglob("*.safetensors")}
    with helpers.refused("other-request", made.folder, "budget"):
        train(articles, made.folder, **WISHES | {"budget": "5s"})
    with helpers.refused("other-request", "train.seed"):
        train(articles, made.folder, **WISHES | {"overrides": (*SMALL, ("train.seed", "7"))})


def test_the_same_command_may_be_quieter(made: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    wishes = WISHES | {"overrides": (*SMALL, ("log.level", "quiet"))}
    assert train(made.folder.parent / "articles", made.folder, **wishes).metrics == made.metrics
    assert "the end, after step" not in capsys.readouterr().out
    assert train(made.folder.parent / "articles", made.folder, **WISHES).metrics == made.metrics
    assert "the end, after step" in capsys.readouterr().out


def test_a_full_disk_is_said(made: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    articles, wishes = made.folder.parent / "articles", WISHES | {"size": "auto", "init": made.model}
    with monkeypatch.context() as patch:
        patch.setattr("bertrain.pipeline.folder.write_atomically", fail)
        with helpers.refused("unwritable-file", "plan.json", "No space left", "the same command"):
            train(articles, tmp_path / "out", **wishes)
    assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Vocabulary, "save", fail)
        with helpers.refused("unwritable-file", "vocab.txt", "No space left"):
            train(articles, tmp_path / "out", **wishes)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_atomically", fail)
        with helpers.refused("unwritable-file", "recipe.toml", "No space left"):
            train(articles, made.folder, **WISHES)


def test_after_an_interruption_it_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    articles = write_articles(tmp_path / "articles")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for stage in ("_prepare", "_pretrain", "_hand_over"):
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, stage, interrupt)
            with pytest.raises(KeyboardInterrupt):
                train(articles, tmp_path / "out", **WISHES)
    plan = (tmp_path / "out" / "plan.json").read_text()
    assert train(articles, tmp_path / "out", **WISHES).metrics["examples"] > 0
    assert (tmp_path / "out" / "plan.json").read_text() == plan, "what was chosen stays"


def test_a_base_model_learns_from_the_words_of_a_smaller_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (*SMALL, ("model.num_layers", "1"), ("model.num_heads", "2"), ("train.threads", "1"))
    wishes = WISHES | {"budget": "8s", "size": "base", "overrides": overrides}
    articles, out = write_articles(tmp_path / "articles"), tmp_path / "out"
    made = train(articles, out, **wishes)
    generator, run = Run.open(out / "generator"), Run.open(out / "run")
    assert generator.settings.model.num_layers == 4, "the settings of the model are not the generator's"
    assert Path(run.settings.data.generator) == out / "generator"
    assert (run.settings.model.rtd, generator.settings.model.rtd) == (50, 0)
    assert made.seconds == pytest.approx(sum(end_of(one)["loop_seconds"] for one in (generator, run)))
    assert "| replaced words | 50% of the masked words, by out/generator; weight of the loss 50 |" in card_of(made)
    assert "generator: training bert-mini" in capsys.readouterr().out
    (out / "report.html").unlink()
    before = tensors_of(out / "run")
    train(articles, out, **wishes)
    assert "generator: training" not in capsys.readouterr().out
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(out / "run").items())
    assert (out / "report.html").exists()


def end_of(run: Run) -> dict[str, Any]:
    *_, end = (json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines())
    return end


def card_of(made: Trained) -> str:
    return (made.model / "README.md").read_text()


def test_ctrl_c_after_the_last_step_keeps_the_next_stage_from_starting(
    made: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = loop._finish

    def press_and_finish(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        finish(*given)

    articles, later = made.folder.parent / "articles", []
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_finish", press_and_finish)
        patch.setattr(pipeline, "_hand_over", lambda *given: later.append(given))
        with helpers.refused("stopped-by-signal", "SIGINT", "the same command continues"):
            train(articles, made.folder, **WISHES)
    assert not later
    assert train(articles, made.folder, **WISHES).metrics == made.metrics


def test_it_fine_tunes_and_begins_with_weights(made: Trained, tmp_path: Path) -> None:
    rows = [f"{'ship' if number % 2 else 'king'} of the sea,{'a' if number % 2 else 'b'}" for number in range(80)]
    (tmp_path / "labels.csv").write_text("words,kind\n" + "\n".join(rows) + "\n")
    again = train(
        made.folder.parent / "articles",
        tmp_path / "out",
        budget="2s",
        evaluation_share=0.1,
        init=made.model,
        task=f"classify={tmp_path / 'labels.csv'}",
        overrides=(("log.trackers", "none"), ("task.text", "words"), ("task.label", "kind")),
    )
    assert again.task_metrics["accuracy"] > 0
    poor = replace(again, task_metrics={"accuracy": 0.5, "baseline_accuracy": 0.5})
    assert any("warning" in line and "task" in line for line in summary(poor))
    said = "\n".join(summary(again))
    assert str(again.folder / "task") in said
    assert "bertrain predict" in said
    assert (again.folder / "vocab.txt").read_text() == (made.folder / "vocab.txt").read_text()


@pytest.mark.parametrize(
    ("wishes", "code"),
    [
        ({"task": "ner=labels.csv"}, "bad-task"),
        ({"task": "classify=nowhere.csv"}, "missing-data"),
        ({"evaluation_share": 0}, "option-out-of-range"),
        ({"init": "x", "size": "tiny"}, "conflicting-options"),
        ({"budget": "soon"}, "invalid-duration"),
        ({"language": "xx"}, "unknown-language"),
        ({"overrides": (("train.epochs", "0"),)}, "no-length"),
        ({"overrides": (("evaluate.data", "elsewhere"),)}, "conflicting-options"),
        ({"overrides": (("model.rtd", "50"), ("data.generator", "elsewhere"))}, "conflicting-options"),
        ({"init": "nowhere"}, "missing-weights"),
        ({"overrides": (("optimizer.learning_rat", "1"),)}, "unknown-setting"),
        ({"overrides": (("optimizer.learning_rate", "abc"),)}, "invalid-value"),
    ],
)
def test_bad_wishes_are_refused_before_anything_is_read(tmp_path: Path, wishes: dict[str, object], code: str) -> None:
    (tmp_path / "text.txt").write_text("a text\n")
    with helpers.refused(code):
        train(tmp_path / "text.txt", tmp_path / "out", **wishes)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_the_table_of_a_task_is_read_first(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("words,kind\na ship,x\na king,y\n")
    with helpers.refused("missing-column", "labels.csv", "--task.text"):
        train(write_articles(tmp_path / "articles"), tmp_path / "out", task=f"classify={tmp_path / 'labels.csv'}")
    assert not (tmp_path / "out").exists()


def test_the_text_must_not_hold_the_result(tmp_path: Path) -> None:
    articles = write_articles(tmp_path / "articles")
    with helpers.refused("output-in-input", articles):
        train(articles, articles / "out")
    assert not (articles / "out").exists()


def test_one_bad_byte_stops_it_or_is_counted(tmp_path: Path) -> None:
    articles = write_articles(tmp_path / "articles")
    with open(articles / "00.txt", "ab") as file:
        file.write("Čeština .\n".encode("cp1250") + b"\x81\n")
    command = ["train", articles, "--out", tmp_path / "out", "--dry-run"]
    stopped = command_line(*command, check=False)
    assert stopped.code == 2
    assert "--on-error skip [not-utf8]" in stopped.err
    command_line(*command, "--on-error", "skip")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_counts_what_the_run_will(tmp_path: Path) -> None:
    articles = write_articles(tmp_path / "articles")
    _, counts = estimate(articles)
    made = extract(articles, tmp_path / "text")["counts"]
    assert {name: counts[name] for name in ("documents", "sentences", "characters")} == {
        name: made[name] for name in ("documents", "sentences", "characters")
    }


def test_too_little_text_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("A short text . It ends here .\n" * 30)
    with helpers.refused("too-little-text", "kB"):
        train(tmp_path / "text.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
