"""Tagging as users meet it: learnt, scored, predicted, stopped, shared out, and handed over, on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertrain.data.text.tokenizer import Tokenizer
from bertrain.ranks.parallel import Ranks
from bertrain.run.folder import Run
from bertrain.run.records import to_dict
from bertrain.tasks.registry import open_task
from bertrain.tasks.tag.task import TagSplit
from bertrain.tasks.task import TaskOutputs
from bertrain.training.engine import predictor
from bertrain.training.finetune import finetune
from bertrain.training.predict import evaluate_task, predict
from bertrain.training.prediction_settings import prediction_settings
from bertrain.training.task_evaluator import TaskEvaluator
from bertrain.training.task_results import classes_of, metrics_of
from bertrain.weights.export import export, import_weights
from bertrain.weights.inspect import compare_weights, show_weights
from bertrain.weights.source import build_model, read_weights
from tests import helpers, miniature_tasks
from tests.launched import kill_when, records
from tests.miniature_tasks import Miniature, command_line, settings_for


@pytest.fixture(scope="module")
def tagger(mini: Miniature) -> Path:
    """A run that finds persons and places."""
    run = mini.base.parent / "tagger"
    finetune(settings_for("tag", train__max_steps=120), mini.names, run, init=str(mini.base))
    return run


def dev_outputs(run: Path, data: Path, **data_settings: int) -> tuple[TagSplit, TaskOutputs]:
    """The dev split, and what a run's model says of it, computed in flat bins."""
    opened, cpu = Run.open(run), torch.device("cpu")
    settings = replace(opened.settings, data=replace(opened.settings.data, **data_settings))
    task = open_task(settings, data, opened.vocabulary())
    split = task.held_out()["dev"]
    assert isinstance(split, TagSplit)
    evaluator = TaskEvaluator(task, {"dev": split}, settings, data, opened.vocabulary())
    predict_bin = predictor(build_model(read_weights(run)), settings, cpu)
    return split, evaluator.outputs(split, predict_bin, Ranks(0, 1, cpu))[0]


def test_names_are_learnt(mini: Miniature, tagger: Path, tmp_path: Path) -> None:
    metrics = metrics_of(tagger)
    assert metrics["f1"] >= 0.75
    assert metrics["accuracy"] >= 0.8 > metrics["baseline_accuracy"]
    assert metrics["baseline_f1"] == 0
    again = evaluate_task(tagger, mini.names / "dev.conll", device="cpu")
    assert [again[name] for name in ("f1", "precision", "recall")] == [
        metrics[name] for name in ("f1", "precision", "recall")
    ]
    assert [line.split()[0] for line in again["report"].splitlines()[1:]] == ["person", "place", "all"]
    assert again["by_class"] == [to_dict(one) for one in classes_of(tagger)]
    rows = [line.split() for line in again["report"].splitlines()[1:3]]
    assert rows == [
        [one["label"], *(f"{one[name]:.3f}" for name in ("precision", "recall", "f1")), str(one["support"])]
        for one in again["by_class"]
    ]
    with helpers.refused("no-examples", mini.names / "train.conll", "another name"):
        evaluate_task(tagger, mini.names / "train.conll", device="cpu")
    with helpers.refused("no-examples", mini.names / "train.conll", "another name"):
        predict(tagger, mini.names / "train.conll", tmp_path / "out", device="cpu")


def test_scores_are_seqevals_of_the_predictions_written(mini: Miniature, tagger: Path, tmp_path: Path) -> None:
    metrics = pytest.importorskip("seqeval.metrics")
    written = predict(tagger, mini.names, tmp_path / "out", device="cpu")["dev"]["files"]
    assert [Path(file).name for file in written] == ["dev.conll", "dev.jsonl"]
    blocks = (tmp_path / "out" / "dev.conll").read_text().split("\n\n")
    rows = [[line.split("\t") for line in block.splitlines()] for block in blocks]
    true, predicted = ([[row[column] for row in block] for block in rows] for column in (1, 2))
    assert metrics.f1_score(true, predicted) == pytest.approx(metrics_of(tagger)["f1"], abs=1e-12)
    answers = [json.loads(line) for line in (tmp_path / "out" / "dev.jsonl").read_text().splitlines()]
    assert sum(len(answer["entities"]) for answer in answers) == sum(
        tag.startswith("B-") for tags in predicted for tag in tags
    )
    for answer in answers:
        for entity in answer["entities"]:
            assert answer["text"][entity["start"] : entity["end"]] == entity["text"]
            assert 1 / 5 <= entity["score"] <= 1
    with helpers.refused("occupied-folder", mini.names):
        predict(tagger, mini.names, mini.names, device="cpu")


def test_texts_are_predicted_without_a_file(tagger: Path) -> None:
    person, other = miniature_tasks.TOPICS[0][0], miniature_tasks.TOPICS[2][0]
    done = command_line("predict", tagger, f"{other} {person}, {other}", "--device", "cpu")
    assert done.out.splitlines()[0] == f"{other} {person}, {other}"
    (answer,) = predict(tagger, texts=f"{other} {person}, {other}", device="cpu")
    assert Run.open(tagger).settings.task.text_split == "spaces"
    (whole,) = predict(tagger, texts=f"{other} {person}-{person} {other}", device="cpu")
    assert {(entity["label"], entity["text"]) for entity in whole["entities"]} >= {("person", f"{person}-{person}")}
    # No text to train on has a comma, so whether it belongs to the name is not known.
    assert ("person", person) in {(entity["label"], entity["text"].rstrip(",")) for entity in answer["entities"]}


def test_windows_of_long_texts_are_joined_again(mini: Miniature, tagger: Path, tmp_path: Path) -> None:
    """All sentences of dev as one text: each word is predicted once, in order."""
    text = (mini.names / "dev.conll").read_text().replace("\n\n", "\n")
    (tmp_path / "train.conll").write_text((mini.names / "train.conll").read_text())
    (tmp_path / "dev.conll").write_text(text)
    split, outputs = dev_outputs(tagger, tmp_path)
    assert len(split.block) > 10
    assert len(outputs) == len(split.sentences[0].words) == len(text.splitlines())
    assert split.metrics(outputs)["f1"] >= 0.5, "the texts it learnt from are short"


def test_a_tagger_is_transformers_too(mini: Miniature, tagger: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    done = command_line("weights", "export", tagger, "--out", tmp_path / "out")
    assert "AutoModelForTokenClassification" in done.out
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out").eval()
    split, ours = dev_outputs(tagger, mini.names, max_seq_length=64)
    assert len(split.block) == len(split.sentences), "no windows, which Transformers does not have"
    assert type(theirs).__name__ == "BertForTokenClassification"
    assert theirs.config.id2label == dict(enumerate(split.labels))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    place = 0
    for sentence in split.sentences[:20]:
        read = tokenizer(sentence.words, is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            logits = theirs(**read).logits[0]
        words = read.word_ids()
        first = [words.index(number) for number in range(len(sentence.words))]
        there = torch.from_numpy(ours[place : place + len(first)])
        place += len(first)
        assert helpers.relative_error(there, logits[first]) <= 1e-5
    assert any(len(one) > 1 for one in Tokenizer(Run.open(tagger).vocabulary()).encode(split.sentences[0].words))


def test_a_tagger_of_transformers_comes_in(mini: Miniature, tagger: Path, tmp_path: Path) -> None:
    export(tagger, tmp_path / "theirs")
    assert prediction_settings(tmp_path / "theirs").task.text_split == "spaces", "as the run"
    imported = import_weights(tmp_path / "theirs", tmp_path / "in")
    assert not imported.missing
    assert not imported.left_over
    assert {one.verdict for one in compare_weights(tagger, tmp_path / "in")} == {"equal"}
    shown = show_weights(tmp_path / "theirs")
    assert (shown.head, shown.missing) == ("tag", ())
    assert shown.labels == ("O", "B-person", "I-person", "B-place", "I-place")
    assert "head: tag, of O, B-person" in command_line("weights", "show", tmp_path / "theirs").out
    begun = tmp_path / "further"
    finetune(settings_for("tag", train__max_steps=1), mini.names, begun, init=str(tmp_path / "theirs"))
    assert helpers.relative_error(
        helpers.final_weights(begun)["answer.classify.weight"],
        helpers.final_weights(tagger)["answer.classify.weight"],
    ) < 0.1, "the head for the same tags is kept"  # fmt: skip


def test_a_head_for_texts_is_no_head_for_words(
    mini: Miniature, tagger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though both have a `classifier` of the same shape in Transformers."""
    rows = ["text,label", *(f"bato {number},{number % 5}" for number in range(20))]
    (tmp_path / "train.csv").write_text("\n".join(rows) + "\n")
    settings = settings_for("classify", train__max_steps=1, log__level="normal", task__hold_out=0)
    finetune(settings, tmp_path / "train.csv", tmp_path / "texts", init=str(tagger))
    said = " ".join(capsys.readouterr().out.split())
    fresh = said.split("newly initialized: ")[1].split(" left over: ")[0]
    assert "answer.classify.weight, answer.classify.bias" in fresh
    settings = settings_for("tag", train__max_steps=1, log__level="normal")
    finetune(settings, mini.names, tmp_path / "words", init=str(tmp_path / "texts"))
    said = capsys.readouterr().out
    assert "newly initialized: answer.classify.weight, answer.classify.bias" in said


def test_killed_and_resumed_is_bitwise_undisturbed(mini: Miniature, tmp_path: Path) -> None:
    words = ["finetune", "tag", "--init", mini.base, "--data", mini.names, "--deterministic", "--max-steps", 30,
             *miniature_tasks.arguments(checkpoint__every_steps=3, log__every_steps=1)]  # fmt: skip
    run, calm = tmp_path / "run", tmp_path / "calm"
    kill_when(lambda: len(records(run)) >= 8, *words, "--run", run)
    assert 8 <= len(records(run)) < 30
    command_line("resume", run)
    command_line(*words, "--run", calm)
    assert helpers.losses(run) == helpers.losses(calm)
    assert metrics_of(run)["f1"] == metrics_of(calm)["f1"]
    expected = helpers.final_weights(calm)
    for name, tensor in helpers.final_weights(run).items():
        assert torch.equal(tensor, expected[name]), name


def test_two_ranks_are_as_one(mini: Miniature, tmp_path: Path) -> None:
    """Bins of different numbers of words included, whose losses share one denominator."""
    changes = {name.replace(".", "__"): value for name, value in miniature_tasks.NO_DROPOUT.items()}
    words = ["finetune", "tag", "--init", mini.base, "--data", mini.names, "--max-steps", 6,
             *miniature_tasks.arguments(batch__token_budget=128, **changes)]  # fmt: skip
    command_line(*words, "--run", tmp_path / "two", "--nproc", 2)
    command_line(*words, "--run", tmp_path / "one")
    assert helpers.losses(tmp_path / "two") == pytest.approx(helpers.losses(tmp_path / "one"), rel=1e-5)
    assert metrics_of(tmp_path / "two")["f1"] == metrics_of(tmp_path / "one")["f1"]
    expected = helpers.final_weights(tmp_path / "one")
    for name, tensor in helpers.final_weights(tmp_path / "two").items():
        # Adam makes rounding as large as a gradient where there is none: the bias of a key.
        tolerance = 1e-2 if name.endswith("qkv.bias") else 1e-5
        assert helpers.relative_error(tensor, expected[name]) <= tolerance, name
