"""Tasks on texts: examples, metrics, GLUE and XNLI."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.config.resolve import resolve
from bertrain.config.settings import DataSettings, ModelSettings, Settings, TaskSettings
from bertrain.data.text.tokenizer import Tokenizer
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks import metrics
from bertrain.tasks.encode import CHUNK_ROWS, encode_texts, truncate_pairs
from bertrain.tasks.glue import TASKS
from bertrain.tasks.registry import open_task, task_names
from bertrain.training.task_settings import resolve_task, usual_rate
from tests.helpers import refused

SAMPLES = Path(__file__).parents[1] / "data"
GLUE = SAMPLES / "glue"
VOCABULARY = Vocabulary.load()


def open_named(name: str, folder: Path, *, saved: dict[str, Any] | None = None, **task: Any) -> Any:
    return open_task(Settings(task=TaskSettings(name=name, **task)), folder, VOCABULARY, saved=saved)


def said_for_sure(answers: Any, num_classes: int) -> np.ndarray:
    """Outputs of a model that is certain of these classes."""
    return np.eye(num_classes, dtype=np.float32)[np.asarray(answers).reshape(-1)] * 10


# --- what the model reads ----------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 50))
def test_pairs_are_cut_from_the_longer_one(length_a: int, length_b: int, room: int) -> None:
    expected = [length_a, length_b]
    while sum(expected) > room:
        expected[0 if expected[0] > expected[1] else 1] -= 1
    kept = truncate_pairs(np.array([length_a]), np.array([length_b]), room)
    assert [int(each[0]) for each in kept] == expected


@pytest.mark.parametrize("longest", [128, 24])
def test_examples_are_those_of_transformers(longest: int) -> None:
    pytest.importorskip("transformers")
    from transformers import BertTokenizer

    theirs = BertTokenizer(vocab={word: number for number, word in enumerate(VOCABULARY.words)})
    rows = [json.loads(line) for line in (GLUE / "MNLI/dev_matched.jsonl").read_text().splitlines()]
    pairs = [(row["premise"], row["hypothesis"]) for row in rows]
    pairs = [(a, b) for a, b in pairs if len(theirs(a, b).input_ids) <= longest or longest < 128]
    single, _ = encode_texts(VOCABULARY, [a for a, _ in pairs], None, longest)
    both, num_cut = encode_texts(VOCABULARY, [a for a, _ in pairs], [b for _, b in pairs], longest)
    assert num_cut == sum(len(theirs(a, b).input_ids) > longest for a, b in pairs)
    assert (num_cut > 0) == (longest < 128)
    for number, (a, b) in enumerate(pairs):
        alone = theirs(a, truncation=True, max_length=longest)
        tokens = single.tokens[single.offsets[number] : single.offsets[number + 1]]
        assert tokens.tolist() == alone.input_ids
        assert single.segment_b[number] == single.lengths[number] == len(tokens)
        if len(theirs(a, b).input_ids) <= longest:  # theirs gives the odd token to the other text when both are cut
            together = theirs(a, b)
            tokens = both.tokens[both.offsets[number] : both.offsets[number + 1]]
            assert tokens.tolist() == together.input_ids
            assert both.segment_b[number] == together.token_type_ids.index(1)


def test_many_examples_are_as_few() -> None:
    words = ["a", "the house", "some more words", "unbelievable"]
    count = CHUNK_ROWS + 3
    first, second = [words[i % 4] for i in range(count)], [words[i % 3] for i in range(count)]
    block, num_cut = encode_texts(VOCABULARY, first, second, 5)
    tokens = Tokenizer(VOCABULARY).encode(words)
    assert len(block) == count
    assert block.is_random.sum() == 0
    assert num_cut == sum(len(tokens[i % 4]) + len(tokens[i % 3]) > 2 for i in range(count))
    few, _ = encode_texts(VOCABULARY, first[-12:], second[-12:], 5)
    assert np.array_equal(block.tokens[block.offsets[-13] :], few.tokens)
    assert np.array_equal(block.segment_b[-12:], few.segment_b)


# --- figures -----------------------------------------------------------------------------------------------


def test_figures_by_hand() -> None:
    answers, predictions = np.array([1, 1, 1, 0, 0, 1]), np.array([1, 0, 1, 0, 1, 1])
    hits, misses, alarms, rejects = 3, 1, 1, 1
    found = metrics.compute_metrics(["accuracy", "f1", "matthews", "f1_macro"], answers, predictions)
    f1 = 2 * hits / (2 * hits + misses + alarms)
    other = 2 * rejects / (2 * rejects + misses + alarms)
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert found["f1"] == pytest.approx(f1)
    assert found["f1_macro"] == pytest.approx((f1 + other) / 2)
    product = (hits + alarms) * (hits + misses) * (rejects + alarms) * (rejects + misses)
    assert found["matthews"] == pytest.approx((hits * rejects - alarms * misses) / product**0.5)


def test_correlations_by_hand() -> None:
    answers, predictions = np.array([0.0, 1.0, 2.0, 5.0]), np.array([1.0, 2.0, 9.0, 4.0], dtype=np.float32)
    found = metrics.compute_metrics(["pearson", "spearmanr"], answers, predictions)
    assert found["pearson"] == pytest.approx(np.corrcoef(answers, predictions)[0, 1])
    ranks = np.array([1, 2, 4, 3])
    assert found["spearmanr"] == pytest.approx(1 - 6 * ((np.array([1, 2, 3, 4]) - ranks) ** 2).sum() / (4 * 15))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("predicted", [0, 1])
def test_figures_of_a_model_that_always_says_the_same(predicted: int) -> None:
    answers = np.array([0, 1, 1, 0])
    found = metrics.compute_metrics(list(metrics.METRICS), answers, np.full(4, predicted))
    assert all(np.isfinite(value) for value in found.values())
    assert found["matthews"] == found["pearson"] == found["spearmanr"] == 0
    assert metrics.compute_metrics(["pearson"], np.array([1.0]), np.array([2.0])) == {"pearson": 0}
    same = np.full(4, predicted)
    assert all(map(np.isfinite, metrics.compute_metrics(list(metrics.METRICS), same, same).values()))
    nearly = 1e8 + np.array([0.0, 0.0, 1e-8, 0.0])
    assert all(map(np.isfinite, metrics.compute_metrics(["pearson", "spearmanr"], answers, nearly).values()))


def test_a_library_that_is_not_installed_is_named_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sklearn", "sklearn.metrics"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [])
    with refused("missing-package", "sklearn", "bertrain[finetune]"):
        open_named("glue/sst2", GLUE)
    task = open_named("glue/sst2", GLUE, saved={})  # to predict, it is not needed
    assert task.to_predict()["test"].num_examples == 8
    with refused("missing-package", "sklearn"):
        task.held_out()["dev"].metrics(said_for_sure([0] * 12, 2))


# --- GLUE --------------------------------------------------------------------------------------------------

SAMPLED = [name for name in TASKS if name != "qqp"]


@pytest.mark.parametrize("name", SAMPLED)
def test_tasks_of_glue_read_their_samples(name: str) -> None:
    task = open_named(f"glue/{name}", GLUE)
    assert task.main_metric == TASKS[name].metric_names[0]
    assert (task.head == "regress") == (task.labels == ())
    main, *_ = task.held_out().values()
    assert main.block.answers is not None
    answers = main.block.answers[:, 0]
    if task.head == "classify":
        outputs = said_for_sure(answers, len(task.labels))
        assert answers.dtype.kind == "i"
    else:
        outputs = answers[:, None]
        assert answers.dtype.kind == "f"
    assert main.metrics(outputs)[task.main_metric] == pytest.approx(1)
    assert any("published" in note for note in task.notes)  # a sample is not what was published
    for split_name, split in task.to_predict().items():
        assert (split.block.answers is None) == (split_name not in task.held_out())
    by_folder = open_named(f"glue/{name}", GLUE / TASKS[name].folder)
    same, *_ = by_folder.held_out().values()
    assert np.array_equal(same.block.tokens, main.block.tokens)


def test_labels_of_published_rows() -> None:
    """The first rows of each published file, looked at by eye."""
    firsts = {"cola": [1, 1, 1], "sst2": [0, 0, 1], "mrpc": [1, 0, 1], "rte": [1, 0, 0], "wnli": [1, 1, 1]}
    for name, expected in firsts.items():
        answers = open_named(f"glue/{name}", GLUE).training().block.answers
        assert answers is not None
        assert answers[:3, 0].tolist() == expected
    scores = open_named("glue/stsb", GLUE).training().block.answers
    assert scores is not None
    assert scores[:3, 0].tolist() == pytest.approx([5.0, 3.8, 3.8])


@pytest.mark.parametrize("way", ["saved", "parquet", "json"])
def test_cola_as_datasets_saves_it_is_cola(way: str) -> None:
    ours, theirs = open_named("glue/cola", GLUE), open_named("glue/cola", SAMPLES / "datasets" / way)
    for a, b in (
        (ours.training(), theirs.training()),
        (ours.held_out()["dev"], theirs.held_out()["dev"]),
        (ours.to_predict()["test"], theirs.to_predict()["test"]),
    ):
        assert np.array_equal(a.block.tokens, b.block.tokens)
        assert (a.block.answers is None) == (b.block.answers is None)
        assert a.block.answers is None or np.array_equal(a.block.answers, b.block.answers)


def test_a_short_file_of_glue_is_noted(tmp_path: Path) -> None:
    task = open_named("glue/mnli", GLUE)
    assert task.training().num_examples == 24
    assert any("train_subset_10k.tsv" in note and "392,702" in note for note in task.notes)
    assert any("dev_mismatched" in note for note in task.notes)
    with refused("missing-split", "train", "glue/qnli", GLUE / "QNLI"):
        open_named("glue/qnli", GLUE).training()


def test_files_of_the_authors_are_read_too(tmp_path: Path) -> None:
    multinli, mrpc = tmp_path / "multinli_1.0", tmp_path / "MRPC"
    multinli.mkdir()
    mrpc.mkdir()
    rows = [("entailment", "A dog runs.", "An animal moves."), ("-", "A cat.", "A dog."), ("neutral", "It is.", "So.")]
    for split in ("train", "dev_matched", "dev_mismatched"):
        lines = [json.dumps(dict(zip(("gold_label", "sentence1", "sentence2"), row, strict=True))) for row in rows]
        (multinli / f"multinli_1.0_{split}.jsonl").write_text("\n".join(lines))
    task = open_named("glue/mnli", multinli)
    assert list(task.held_out()) == ["dev_matched", "dev_mismatched"]
    answers = task.training().block.answers
    assert answers is not None
    assert answers[:, 0].tolist() == [0, 1]
    assert any("train: " in note and " 1 row " in note for note in task.notes)
    for part in ("train", "test"):
        shutil.copy(GLUE / "MRPC/train.tsv", mrpc / f"msr_paraphrase_{part}.txt")
    task = open_named("glue/mrpc", mrpc)
    assert (task.training().num_examples, task.held_out()["dev"].num_examples) == (24, 24)


def test_quora_is_read_as_everybody_does(tmp_path: Path) -> None:
    """Its files have questions with a line feed in them, and empty ones."""
    lines = [
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "7\t1\t2\tHow is it?\tHow are things?\t1",
        "8\t3\t4\tWhat is a",
        "line?\tWhat is it?\t0",
        "9\t5\t6\tWhere is it?\t\t0",
    ]
    (tmp_path / "train.tsv").write_text("\n".join(lines) + "\n")
    task = open_named("glue/qqp", tmp_path)
    assert task.training().num_examples == 2
    assert any(" 2 rows " in note for note in task.notes)


SUBMITTED = {
    "cola": ("CoLA.tsv", "1"),
    "sst2": ("SST-2.tsv", "1"),
    "mrpc": ("MRPC.tsv", "1"),
    "stsb": ("STS-B.tsv", "5.000"),
    "qnli": ("QNLI.tsv", "not_entailment"),
    "rte": ("RTE.tsv", "not_entailment"),
    "wnli": ("WNLI.tsv", "1"),
}


@pytest.mark.parametrize("name", SUBMITTED)
def test_submissions_have_glues_form(name: str, tmp_path: Path) -> None:
    split = open_named(f"glue/{name}", GLUE).to_predict()["test"]
    outputs = np.full((8, 1), 7.5, np.float32) if name == "stsb" else said_for_sure([1] * 8, 2)
    (path,) = split.write_predictions(outputs, tmp_path)
    file, label = SUBMITTED[name]
    assert path == tmp_path / file
    assert path.read_text() == "index\tprediction\n" + "".join(f"{number}\t{label}\n" for number in range(8))


def test_submissions_of_mnli_and_predictions_with_answers(tmp_path: Path) -> None:
    folder = tmp_path / "glue" / "MNLI"
    folder.mkdir(parents=True)
    (tmp_path / "glue" / "diagnostic").mkdir()
    rows = "index\tsentence1\tsentence2\n5\tA dog.\tA cat.\n"
    for place in ("MNLI/test_matched", "MNLI/test_mismatched", "diagnostic/diagnostic"):
        (tmp_path / "glue" / f"{place}.tsv").write_text(rows)
    task = open_named("glue/mnli", tmp_path / "glue")
    written = [split.write_predictions(said_for_sure([2], 3), tmp_path)[0] for split in task.to_predict().values()]
    assert [path.name for path in written] == ["MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"]
    assert written[0].read_text() == "index\tprediction\n5\tcontradiction\n"
    (dev,) = open_named("glue/sst2", GLUE).held_out().values()
    (path,) = dev.write_predictions(said_for_sure([0] * 12, 2), tmp_path)
    assert path.name == "SST-2-dev.tsv"


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    for name in ("ner", "token_classification", "pos"):
        with refused("unknown-task", name, "finetune tag"):
            resolve_task(name)
    with refused("unknown-task", "multiple_choice", "weights export", "Transformers"):
        resolve_task("multiple_choice")
    with refused("unknown-task", "'glu/mnly'", *task_names()):
        resolve_task("glu/mnly")
    with refused("unknown-task", "'glue/mnl'", "did you mean 'glue/mnli'?"):
        open_named("glue/mnl", GLUE)
    with refused("other-task", GLUE / "SST-2", "CoLA"):
        open_named("glue/cola", GLUE / "SST-2")
    with refused("missing-data", tmp_path, "glue/rte", "RTE"):
        open_named("glue/rte", tmp_path)
    with refused("missing-data", "--data", tmp_path / "absent"):
        open_named("glue/rte", tmp_path / "absent")
    with refused("not-a-folder", "dev.tsv"):
        open_named("glue/rte", GLUE / "RTE/dev.tsv")
    shutil.copy(GLUE / "SST-2/train.tsv", tmp_path / "train.tsv")
    with refused("missing-column", "train.tsv", "'sentence1'", "'sentence', 'label'"):
        open_named("glue/rte", tmp_path).training()
    assert len(set(task_names())) == len(task_names()) == 15


def test_wrong_rows_of_glue_stop_or_are_counted(tmp_path: Path) -> None:
    rows = ["sentence\tlabel", "good film\t1", "bad film\t7", "\t1", "worse\t0", "no label\t"]
    (tmp_path / "train.tsv").write_text("\n".join(rows))
    with refused("bad-row", f"line 3 of {tmp_path / 'train.tsv'}", "'7'", "--on-error skip"):
        open_named("glue/sst2", tmp_path).training()
    task = open_named("glue/sst2", tmp_path, on_error="skip")
    assert task.training().num_examples == 2
    assert task.training().ids == ["0", "3"]  # rows keep their number in the file
    assert any("3 rows" in note and "line 3 of" in note for note in task.notes)


def test_texts_that_were_cut_are_counted() -> None:
    settings = Settings(task=TaskSettings(name="glue/rte"), data=DataSettings(max_seq_length=40))
    task = open_task(settings, GLUE, VOCABULARY)
    block = task.training().block
    assert block.lengths.max() == 40
    assert any("24" in note and "40" in note and "--data.max_seq_length" in note for note in task.notes)


# --- XNLI --------------------------------------------------------------------------------------------------


def write_xnli(folder: Path) -> None:
    header = "language\tgold_label\tsentence1\tsentence2\tpairID"
    rows = [f"{language}\t{label}\ta {label}\tb\t{language}{label}" for language in ("de", "en") for label in LABELS]
    for split in ("dev", "test"):
        (folder / f"xnli.{split}.tsv").write_text("\n".join([header, *rows]) + "\n")
    (folder / "multinli").mkdir()
    training = ["premise\thypo\tlabel", "a\tb\tcontradictory", 'it "is\tso\tentailment']
    (folder / "multinli" / "multinli.train.en.tsv").write_text("\n".join(training))


LABELS = ("entailment", "neutral", "contradiction")


def test_xnli_is_scored_by_language(tmp_path: Path) -> None:
    write_xnli(tmp_path)
    task = open_named("xnli", tmp_path)
    assert task.labels == LABELS
    assert task.training().block.answers[:, 0].tolist() == [2, 0]
    dev = task.held_out()["dev"]
    figures = dev.metrics(said_for_sure([0, 1, 2, 0, 0, 0], 3))
    languages = {"accuracy_de": 1.0, "accuracy_en": 1 / 3}
    assert figures == pytest.approx({"accuracy": 2 / 3, "baseline_accuracy": 1 / 3, **languages})
    (path,) = dev.write_predictions(said_for_sure([0, 1, 2, 0, 0, 0], 3), tmp_path)
    last = json.loads(path.read_text().splitlines()[-1])
    assert (last["id"], last["language"], last["label"]) == ("encontradiction", "en", "entailment")
    only = open_named("xnli", tmp_path, languages="de").held_out()["test"]
    assert set(only.metrics(said_for_sure([0, 1, 2], 3))) == {"accuracy", "accuracy_de", "baseline_accuracy"}
    with refused("missing-language", "fr"):
        open_named("xnli", tmp_path, languages="de,fr").held_out()
    with refused("unknown-language", "task.languages", "did you mean 'de'?"):
        open_named("xnli", tmp_path, languages="dee")


def test_xnli_as_datasets_has_it_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    write_xnli(tmp_path / "archive")
    for language in ("de", "en"):
        (tmp_path / language).mkdir()
        table = pa.table({"premise": [f"a {label}" for label in LABELS], "hypothesis": ["b"] * 3, "label": [0, 1, 2]})
        pyarrow.parquet.write_table(table, tmp_path / language / "validation-00000-of-00001.parquet")
        pyarrow.parquet.write_table(table, tmp_path / language / "train-00000-of-00001.parquet")
    ours, theirs = open_named("xnli", tmp_path / "archive"), open_named("xnli", tmp_path)
    assert list(theirs.held_out()) == ["dev"]
    a, b = ours.held_out()["dev"], theirs.held_out()["dev"]
    assert np.array_equal(a.block.tokens, b.block.tokens)
    outputs = said_for_sure([0, 1, 2, 0, 0, 0], 3)
    assert a.metrics(outputs) == b.metrics(outputs)
    assert theirs.training().num_examples == 3


def test_xnli_trains_on_mnli_where_that_is_what_there_is(tmp_path: Path) -> None:
    with refused("missing-split", tmp_path, "multinli.train.en.tsv", "train.tsv"):
        open_named("xnli", tmp_path).training()
    task = open_named("xnli", GLUE)
    assert task.training().num_examples == 24
    assert any("xnli.dev.tsv" in note for note in task.notes)


# --- the learning rate --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "head", "rate"),
    [(1024, "classify", 3e-5), (768, "classify", 3e-5), (768, "span", 5e-5), (384, "classify", 1e-4),
     (256, "regress", 3e-4), (128, "classify", 1e-3), (32, "classify", 1e-3)],
)  # fmt: skip
def test_narrower_weights_have_a_larger_rate(width: int, head: Any, rate: float) -> None:
    assert usual_rate(ModelSettings(hidden_size=width, num_heads=1, head=head)) == rate


def test_a_rate_by_the_weights_is_for_fine_tuning_with_adamw() -> None:
    assert resolve_task("classify").optimizer.learning_rate == resolve_task("squad/v1.1").optimizer.learning_rate == -1
    for recipe, changes in (
        ("bert-tiny", {"optimizer.learning_rate": "-1"}),
        ("finetune-glue", {"optimizer.learning_rate": "-0.5"}),
        ("finetune-glue", {"optimizer.name": "lamb"}),
    ):
        with refused("out-of-range", "optimizer.learning_rate", "adamw"):
            resolve(recipe, list(changes.items()))
