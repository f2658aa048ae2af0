"""Fine-tuning: which weights a run begins with, and what Transformers makes of those it hands over."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertrain.data.formats.frequencies import word_shares
from bertrain.data.formats.source import open_data
from bertrain.run.folder import Run
from bertrain.tasks.registry import open_task
from bertrain.training.finetune import finetune
from bertrain.training.start import pretrain
from bertrain.training.task_results import metrics_of
from bertrain.training.task_settings import resolve_task
from bertrain.weights.export import export
from bertrain.weights.source import read_weights
from tests import helpers, miniature_tasks
from tests.miniature_tasks import Miniature, command_line, outputs_of, settings_for


def test_a_classifier_is_transformers_too(mini: Miniature, colours: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    done = command_line("weights", "export", colours, "--out", tmp_path / "out")
    assert "AutoModelForSequenceClassification" in done.out
    card = (tmp_path / "out" / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert f"| accuracy | {metrics_of(colours)['accuracy']:.2%} |" in card
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.id2label == dict(enumerate(sorted(miniature_tasks.COLOURS)))
    texts = [line.split(",")[0] for line in (mini.table / "dev.csv").read_text().splitlines()[1:]]
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**read).logits
    words = Run.open(colours).vocabulary()
    split = open_task(Run.open(colours).settings, mini.table, words).held_out()["dev"]
    assert helpers.relative_error(torch.from_numpy(outputs_of(colours, split, words)), logits) <= 1e-5

    export(tmp_path / "out", tmp_path / "again")
    for name in ("config.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name
    once, twice = (helpers.load_weights(tmp_path / name) for name in ("out", "again"))
    assert list(once) == list(twice)
    assert all(torch.equal(once[name], twice[name]) for name in once)
    assert "33 of 33 tensors are equal" in command_line("weights", "compare", colours, tmp_path / "again").out
    assert command_line("weights", "compare", colours, mini.base, check=False).code == 1
    assert "answer.classify.weight  3x32" in command_line("weights", "show", colours).out
    refused = command_line("weights", "export", colours, "--to", "nvidia", "--out", tmp_path / "pt", check=False)
    assert "[no-pretraining-head]" in refused.err


def test_a_finder_of_answers_is_transformers_too(mini: Miniature, answers: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    export(answers, tmp_path / "out")
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    words = Run.open(answers).vocabulary()
    split = open_task(Run.open(answers).settings, mini.questions, words).held_out()["dev"]
    ours, place = outputs_of(answers, split, words), 0
    asked = json.loads((mini.questions / "dev-v1.1.json").read_text())["data"][0]["paragraphs"]
    for paragraph in asked[:10]:
        read = tokenizer(paragraph["qas"][0]["question"], paragraph["context"], return_tensors="pt")
        with torch.no_grad():
            said = theirs(**read)
        expected = torch.stack([said.start_logits[0], said.end_logits[0]], 1)
        there = ours[place : place + len(expected)]
        place += len(expected)
        assert helpers.relative_error(torch.from_numpy(there), expected) <= 1e-5


def test_a_head_is_taken_where_it_fits_and_said_where_it_does_not(
    mini: Miniature, colours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(colours, tmp_path / "out")
    said = {"log__level": "normal", "train__max_steps": 1}

    def begun(name: str, data: Path, task: str = "classify") -> str:
        finetune(settings_for(task, **said), data, tmp_path / name, init=str(tmp_path / "out"))
        return capsys.readouterr().out

    kept = begun("same", mini.table)
    assert "33 tensors taken" in kept
    assert "newly initialized" not in kept
    rows = (mini.table / "train.csv").read_text().splitlines()
    for name, lines in (
        ("two", [row for row in rows if not row.endswith("blue")]),
        ("renamed", [row.replace("blue", "azure") for row in rows]),
    ):
        (tmp_path / f"{name}-data").mkdir()
        (tmp_path / f"{name}-data" / "train.csv").write_text("\n".join(lines) + "\n")
    assert "newly initialized: answer.classify.weight, answer.classify.bias" in begun("two", tmp_path / "two-data")
    assert "though its classes were blue, green, red" in begun("renamed", tmp_path / "renamed-data")
    other = begun("other", mini.questions, "squad/v1.1")
    assert "newly initialized: answer.score.weight, answer.score.bias" in other
    assert "left over: answer.pool.weight" in other

    settings = helpers.tiny_settings(train__max_steps=1, model__initial_bias="frequencies")
    data = mini.base.parent / "data"
    pretrain(settings, data, tmp_path / "further", init=str(tmp_path / "out"))
    further = capsys.readouterr().out
    assert "31 tensors taken" in further
    assert "newly initialized: masked_words.bias" in further
    weights = helpers.final_weights(tmp_path / "further")
    opened = open_data(data)
    shares = torch.from_numpy(word_shares(opened, range(len(opened)))).float()
    torch.testing.assert_close(weights["masked_words.bias"].exp(), shares)
    trained = weights["next_sentence.pool.weight"]
    assert helpers.relative_error(trained, read_weights(colours).tensors["answer.pool.weight"]) < 0.1


def test_words_come_with_the_weights_or_by_name(mini: Miniature, colours: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    export(colours, bare)
    vocabulary = (bare / "vocab.txt").read_text()
    for name in ("vocab.txt", "tokenizer.json"):
        (bare / name).unlink()
    (tmp_path / "cased.txt").write_text(vocabulary.replace("bato\n", "Bato\n"))
    settings = settings_for(train__max_steps=1)
    with helpers.refused("missing-vocabulary", bare, "--data.vocab"):
        finetune(settings, mini.table, tmp_path / "run", init=str(bare))
    named = replace(settings, data=replace(settings.data, vocab=str(tmp_path / "cased.txt")))
    finetune(named, mini.table, tmp_path / "run", init=str(bare))
    assert Run.open(tmp_path / "run").vocabulary().lower_case is False, "it has capitals"


def test_the_contests_recipes_are_its_settings() -> None:
    baseline = resolve_task("glue/mnli", recipe="contest-mnli-1x1")
    assert (baseline.batch.sequences, baseline.train.activation_checkpointing) == (24, "none")
    optimised = resolve_task("glue/mnli", recipe="contest-mnli-2x4")
    assert (optimised.batch.sequences, optimised.train.activation_checkpointing) == (48 * 8, "selective")
    assert baseline.train.budget == optimised.train.budget == "20m"
