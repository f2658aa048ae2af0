"""Tagging: schemes and scores against seqeval, files and what is wrong with them, words in pieces and windows."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertrain.base.errors import UserError
from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.data.text.tokenizer import Tokenizer
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.tasks.registry import open_task
from bertrain.tasks.tables import BadRows
from bertrain.tasks.tag.encode import encode_words
from bertrain.tasks.tag.files import Sentence, Span, read_sentences
from bertrain.tasks.tag.schemes import Entity, Scheme, SchemeName, find_entities, recognize
from bertrain.tasks.tag.scoring import count_by_type, report_by_type, score_tags
from bertrain.tasks.tag.task import TagTask
from tests.helpers import refused

NAMES = Path(__file__).parents[2] / "demo" / "names"
VOCABULARY = Vocabulary.load()
SCHEMES: tuple[SchemeName, ...] = ("BIO", "IOB1", "BIOES", "BILOU", "IO")


def tag_settings(**given: object) -> Settings:
    values = {"task.name": "tag", "batch.token_budget": 4096, "model.max_positions": 512}
    changes = values | {key.replace("__", "."): value for key, value in given.items()}
    return resolve("finetune-tag", [(key, str(value)) for key, value in changes.items()])


def opened(folder: Path, **given: object) -> TagTask:
    task = open_task(tag_settings(**given), folder, VOCABULARY)
    assert isinstance(task, TagTask)
    return task


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def conll(*sentences: str) -> str:
    """Sentences such as "Ada/B-PER met/O Bob/B-PER" in two columns."""
    return "\n".join("".join(f"{pair.replace('/', chr(9))}\n" for pair in words.split()) for words in sentences)


# --- schemes and scores ------------------------------------------------------------------------------------


def tags_of(prefixes: str) -> st.SearchStrategy[str]:
    return st.sampled_from(["O", *(f"{prefix}-{name}" for prefix in prefixes for name in ("PER", "work-of-art"))])


@st.composite
def two_taggings(draw: st.DrawFn) -> tuple[list[list[str]], list[list[str]]]:
    """True and predicted tags of a few sentences of any length, broken sequences included."""
    tags = tags_of(draw(st.sampled_from(["BI", "BIES", "I"])))
    true = draw(st.lists(st.lists(tags, min_size=1, max_size=9), min_size=1, max_size=5))
    return true, [draw(st.lists(tags, min_size=len(one), max_size=len(one))) for one in true]


@settings(max_examples=400, deadline=None)
@given(two_taggings())
def test_scores_are_those_of_seqeval(taggings: tuple[list[list[str]], list[list[str]]]) -> None:
    metrics = pytest.importorskip("seqeval.metrics")
    found, by_type = score_tags(*taggings, Scheme("BIO")), count_by_type(*taggings, Scheme("BIO"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("f1", "precision", "recall", "accuracy"):
            function = getattr(metrics, f"{name}_score")
            assert found[name] == pytest.approx(function(*taggings), abs=1e-12), name
        if by_type:  # seqeval's report fails without an entity
            report = metrics.classification_report(*taggings, output_dict=True)
            for name, one in by_type.items():
                expected = [report[name][key] for key in ("precision", "recall", "f1-score", "support")]
                assert [one.precision, one.recall, one.f1, one.true] == pytest.approx(expected, abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.lists(tags_of("BIESLU"), max_size=9), st.sampled_from(SCHEMES))
def test_any_sequence_is_repaired_and_a_valid_one_stays(tags: list[str], name: SchemeName) -> None:
    scheme, entities = Scheme(name), find_entities(tags)
    written = scheme.write(entities, len(tags))
    assert scheme.convert(written, scheme) == written
    if name == "IO":  # adjacent entities of a type become one
        assert {one.type for one in find_entities(written)} == {one.type for one in entities}
    else:
        assert find_entities(written) == entities


@pytest.mark.parametrize(
    ("sentences", "expected"),
    [
        ("B-PER I-PER O B-LOC | O I-LOC", Scheme("BIO")),  # the last is broken
        ("I-PER I-PER B-PER O I-LOC", Scheme("IOB1")),
        ("I-PER O I-LOC", Scheme("IO")),
        ("PER PER O LOC", Scheme("IO", is_prefixed=False)),
        ("B-PER E-PER O S-LOC", Scheme("BIOES")),
        ("B-PER L-PER O U-LOC", Scheme("BILOU")),
        ("NOUN VERB NOUN", Scheme("words", is_prefixed=False)),
    ],
)
def test_schemes_are_recognized(sentences: str, expected: Scheme) -> None:
    assert recognize([one.split() for one in sentences.split(" | ")]) == expected


def test_classes_of_words_have_an_accuracy_and_no_entities() -> None:
    scheme, true = Scheme("words", is_prefixed=False), [["NOUN", "VERB", "NOUN"]]
    metrics = score_tags(true, [["NOUN", "NOUN", "NOUN"]], scheme)
    assert metrics["accuracy"] == metrics["baseline_accuracy"] == pytest.approx(2 / 3)
    assert metrics["f1_macro"] == pytest.approx((0.8 + 0) / 2)
    assert "all entities" not in report_by_type(true, true, scheme)


# --- files -------------------------------------------------------------------------------------------------


def read(path: Path, **given: object) -> list[Sentence]:
    return read_sentences([path], tag_settings(**given).task, BadRows("stop"))


def test_conll_of_two_and_four_columns(tmp_path: Path) -> None:
    two = read(write(tmp_path / "a.conll", "Ada\tB-PER\nran\tO\n\t\n\nBob\tB-PER\r\n"))
    four = read(
        write(tmp_path / "b.txt", "-DOCSTART- -X- O O\n\nAda NNP B-NP B-PER\nran VBD  B-VP O\n\nBob NNP B-NP B-PER\n")
    )
    for sentences in (two, four):
        assert [sentence.words for sentence in sentences] == [["Ada", "ran"], ["Bob"]]
        assert [sentence.tags for sentence in sentences] == [["B-PER", "O"], ["B-PER"]]
        assert [sentence.text for sentence in sentences] == ["Ada ran", "Bob"]
    assert [sentence.tags for sentence in read(write(tmp_path / "c.conll", "Ada\nran\n"))] == [None]


def test_spans_of_characters_become_tags(tmp_path: Path) -> None:
    text = "Prof. Ada-Lou met the Parisians, in Rome."
    spans = [{"start": 36, "end": 40, "label": "city"}, {"start": 6, "end": 13, "label": "person"}]
    spans.append({"start": 22, "end": 27, "label": "city"})  # of a word, a part
    (sentence,) = read(write(tmp_path / "a.jsonl", json.dumps({"text": text, "entities": spans}) + "\n"))
    assert sentence.tags is not None
    found = {
        (entity.type, text[slice(*sentence.span_of(entity))]) for entity in find_entities(sentence.tags)
    }  # fmt: skip
    assert found == {("person", "Ada-Lou"), ("city", "Paris"), ("city", "Rome")}
    assert "".join(sentence.words) == "".join(text.split())


@pytest.mark.parametrize("kind", ["List", "Sequence", "list"])
def test_datasets_have_the_names_of_their_classes(tmp_path: Path, kind: str) -> None:
    classes = {"names": ["O", "B-PER", "I-PER"], "_type": "ClassLabel"}
    feature = {"feature": classes, "_type": kind} if kind != "list" else [classes]
    features = {"tokens": {"feature": {"dtype": "string", "_type": "Value"}, "_type": kind}, "ner_tags": feature}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = pa.table({"id": ["7"], "tokens": [["Ada", "Lovelace", "ran"]], "ner_tags": [[1, 2, 0]]})
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "train-00000-of-00001.parquet")
    task = opened(tmp_path, task__hold_out=0)
    assert task.training().true_tags == [["B-PER", "I-PER", "O"]]
    assert task.labels == ("O", "B-PER", "I-PER")


BAD: dict[str, tuple[str, str, str]] = {
    "fields": ("a.conll", "Ada\tB-PER\nran\n", "line 2"),
    "no tag": ("a.conll", "Ada\tB-PER\nran\t \n", "line 2"),
    "no word": ("a.conll", "Ada\tO\n\n\tO\n", "line 3"),
    "no prefix": ("a.conll", "Ada\tB-PER\n\nBob\tPER\n", "without a prefix"),
    "no type": ("a.conll", "Ada\tB-PER\n\nBob\tB-\n", "'B-', without a type"),
    "overlap": (
        "a.jsonl",
        '{"text": "a b", "spans": []}\n{"text": "Ada ran", "spans": [{"start": 0, "end": 4, "label": "x"}, '
        '{"start": 3, "end": 7, "label": "y"}]}\n',
        "0:4 and 3:7",
    ),
    "outside": ("a.jsonl", '{"text": "Ada", "spans": [{"start": 0, "end": 4, "label": "x"}]}\n', "0:4"),
    "backwards": ("a.jsonl", '{"text": "Ada", "spans": [{"start": 2, "end": 1, "label": "x"}]}\n', "2:1"),
    "space": ("a.jsonl", '{"text": "a b", "spans": [{"start": 1, "end": 2, "label": "x"}]}\n', "1:2"),
    "no label": ("a.jsonl", '{"text": "Ada", "spans": [{"start": 0, "end": 1}]}\n', "line 1"),
    "late spans": (
        "a.jsonl",
        '{"text": "Ada"}\n{"text": "Bob", "spans": [{"start": 0, "end": 3, "label": "x"}]}\n',
        "line 2",
    ),
    "no spans": ("a.jsonl", '{"text": "Ada", "spans": []}\n{"text": "Bob"}\n', "line 2"),
    "empty": ("a.jsonl", '{"text": " ", "spans": []}\n', "line 1"),
    "lengths": ("a.jsonl", '{"tokens": ["Ada", "ran"], "ner_tags": ["O"]}\n', "line 1"),
    "numbers": ("a.jsonl", '{"tokens": ["Ada"], "ner_tags": [3]}\n', "write names, such as B-PER"),
    "json": ("a.jsonl", '{"tokens": ["Ada"], "ner_tags": ["O"]}\n{"tokens"\n', "line 2"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named_by_file_and_line_or_skipped(tmp_path: Path, what: str) -> None:
    name, content, place = BAD[what]
    path = write(tmp_path / name, content)
    with refused("bad-row", path, place):
        read(path)
    counted = BadRows("skip")
    with suppress(UserError):  # where nothing is left
        assert len(read_sentences([path], tag_settings(task__on_error="skip").task, counted)) == 1
    assert counted.count == 1


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    with refused("no-answers", "train.conll"):
        opened(write(tmp_path / "plain" / "train.conll", "Ada\nran\n").parent)
    with refused("one-label", "'O'"):
        opened(write(tmp_path / "one" / "train.conll", "Ada\tO\n").parent)
    with refused("mixed-schemes", "BILOU"):
        opened(write(tmp_path / "mixed" / "train.conll", "Ada\tS-PER\nBob\tU-PER\n").parent)
    with refused("missing-split", "train"):
        opened(write(tmp_path / "dev" / "dev.conll", "Ada\tS-PER\n").parent)
    with refused("missing-data", ".conll"):
        opened(write(tmp_path / "csv" / "train.csv", "text,label\n").parent)
    with refused("no-examples", "1 row", "task.hold_out"):
        opened(write(tmp_path / "few" / "train.conll", "Ada\tB-PER\nran\tO\n").parent).training()
    with refused("missing-column", "'tokens'", "'sentence'"):
        opened(write(tmp_path / "column" / "train.jsonl", '{"sentence": "a"}\n').parent)


def test_schemes_and_repairs_are_said(tmp_path: Path) -> None:
    train = write(tmp_path / "train.conll", conll("Ada/B-PER ran/O", "in/O Rome/I-LOC", "Bob/B-PER Coe/I-PER"))
    write(tmp_path / "dev.conll", conll("Eve/S-PER", "Ada/B-PER Coe/E-PER saw/O It/S-WORK"))
    task = opened(tmp_path)
    dev = task.held_out()["dev"]
    assert task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert task.training().true_tags[1] == ["O", "B-LOC"]
    assert dev.true_tags == [["B-PER"], ["B-PER", "I-PER", "O", "B-WORK"]], "in the scheme of the training data"
    notes = "\n".join(task.notes)
    assert "scheme BIO; 5 classes" in notes
    assert (
        f"train: repaired 1 sentence with a broken sequence, such as I- after O; the first: line 4 of {train}" in notes
    )
    assert "dev: has tags that are not in the training data: 'B-WORK'" in notes


def test_wnuts_own_names_are_found(tmp_path: Path) -> None:
    for name in ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated"):
        write(tmp_path / name, conll("Ada/B-PER ran/O"))
    task = opened(tmp_path)
    assert [*task.held_out()] == ["dev", "test"]
    assert not task.hold_out


def test_without_a_dev_part_the_same_sentences_are_held_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "names" / "train.conll", (NAMES / "train.conll").read_text()).parent
    task, again = opened(folder), opened(folder, train__seed=5)
    texts = [[one.text for one in split.sentences] for split in (task.training(), task.held_out()["dev"])]
    assert [len(one) for one in texts] == [144, 16]
    assert [one.text for one in again.held_out()["dev"].sentences] == texts[1]


# --- words, pieces and windows -----------------------------------------------------------------------------

WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8) | st.sampled_from(
    ["\u200b", "antidisestablishmentarianism", "x" * 300, "e\u0301t\u00e9", "\u4e2d\u6587", "don't"]
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(WORDS, min_size=1, max_size=40), min_size=1, max_size=4),
    st.integers(5, 24),
    st.integers(1, 30),
)
def test_each_word_is_labeled_once_at_its_first_piece(sentences: list[list[str]], longest: int, stride: int) -> None:
    """In order, whatever the windows; in the window that a plain search finds to have most context."""
    total = sum(map(len, sentences))
    block = encode_words(VOCABULARY, sentences, np.arange(total), longest, stride)
    assert block.masks is not None
    assert block.masks.labels.tolist() == list(range(total)), "all words, once, in the order of the text"
    assert int(block.lengths.max()) <= longest
    assert (block.masks.counts > 0).all()
    tokenizer, unknown = Tokenizer(VOCABULARY), VOCABULARY.id_of("[UNK]")
    pieces = [tokenizer.encode([word])[0] or [unknown] for words in sentences for word in words]
    places = np.repeat(block.offsets[:-1], block.masks.counts) + block.masks.positions
    assert block.tokens[places].tolist() == [one[0] for one in pieces]

    step, word = min(stride, longest // 2), 0
    for words in sentences:
        length = sum(len(pieces[word + number]) for number in range(len(words)))
        begins = [0]
        while begins[-1] + longest - 2 < length:
            begins.append(begins[-1] + step)
        first = 0
        for _ in words:

            def context(begin: int, first: int = first, length: int = length) -> tuple[float, int]:
                count = min(longest - 2, length - begin)
                left = first - begin
                return (min(left, count - 1 - left) + 0.01 * count if 0 <= left < count else -1.0), -begin

            expected = max(begins, key=context)
            assert block.masks.positions[word] == first - expected + 1
            first += len(pieces[word])
            word += 1


def test_a_sentence_that_fits_is_one_example() -> None:
    sentences = [["Ada", "saw", "unbelievable", "things"], ["Bob"]]
    block = encode_words(VOCABULARY, sentences, np.array([1, 0, 0, 0, 1]), 128, 64)
    pieces = Tokenizer(VOCABULARY).encode(["Ada saw unbelievable things", "Bob"])
    assert [one.tolist() for one in np.split(block.tokens, block.offsets[1:-1])] == [
        [VOCABULARY.id_of("[CLS]"), *one, VOCABULARY.id_of("[SEP]")] for one in pieces
    ]


def test_windows_overlap_whatever_the_stride(tmp_path: Path) -> None:
    write(tmp_path / "train.conll", conll("Ada/B-PER ran/O " * 60))
    task = opened(tmp_path, task__hold_out=0, data__max_seq_length=64, task__doc_stride=128)
    assert len(task.training().block) == 3, "those of 0, 32 and 64 to 120"
    assert "train: 1 sentence in 3 windows of at most 64 tokens, one every 32 (--task.doc_stride)" in task.notes


def test_predictions_are_written_as_conll_and_spans(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train.conll", conll("Ada/B-PER Lovelace/I-PER ran/O", "in/O Rome/B-LOC"))
    write(tmp_path / "data" / "test.jsonl", '{"text": "Bob  Coe, in Rome"}\n')
    task = opened(tmp_path / "data", task__hold_out=0)
    split, known = task.to_predict()["test"], replace(task.training(), name="known")
    assert task.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    outputs = np.log(np.full((5, 5), 0.1, np.float32))
    for word, label in enumerate((3, 4, 0, 0, 2)):  # Rome is I-LOC after O
        outputs[word, label] = np.log(0.6)
    tmp_path.joinpath("out").mkdir()
    files = [*split.write_predictions(outputs, tmp_path / "out"), *known.write_predictions(outputs, tmp_path / "out")]
    assert [file.name for file in files] == ["test.conll", "test.jsonl", "known.conll", "known.jsonl"]
    assert files[0].read_text() == "Bob\tB-PER\nCoe\tI-PER\n,\tO\nin\tO\nRome\tB-LOC\n"
    (answer,) = map(json.loads, files[1].read_text().splitlines())
    assert answer["text"] == "Bob  Coe, in Rome"
    assert answer["entities"] == [
        {"start": 0, "end": 8, "label": "PER", "score": pytest.approx(0.6, abs=1e-6), "text": "Bob  Coe"},
        {"start": 13, "end": 17, "label": "LOC", "score": pytest.approx(0.6, abs=1e-6), "text": "Rome"},
    ]
    assert files[2].read_text().startswith("Ada\tB-PER\tB-PER\nLovelace\tI-PER\tI-PER\nran\tO\tO\n\nin\tO\tO\n")
    again = read(files[2])
    assert [find_entities(one.tags or []) for one in again] == [[Entity("PER", 0, 2)], [Entity("LOC", 1, 2)]]


def test_a_text_is_cut_at_spaces_and_signs() -> None:
    sentence = Sentence.of_text("It's 3.5 km.", [Span(5, 8, "length")])
    assert sentence.words == ["It", "'", "s", "3", ".", "5", "km", "."]
    assert sentence.tags == ["O", "O", "O", "B-length", "I-length", "I-length", "O", "O"]


def test_a_text_is_split_as_the_words_of_conll_are() -> None:
    text = "(Ada-Lou), O'Brien's U.S.-based\u2026 it\u2019s 3.5 in the U.S., e.g. bato-kese."
    joined = "( Ada-Lou ) , O'Brien 's U.S.-based \u2026 it \u2019s 3.5 in the U.S. , e.g. bato-kese ."
    words = joined.split()
    sentence = Sentence.of_text(text, [Span(1, 4, "person")], split="spaces")
    assert sentence.words == [words[0], "Ada", "-Lou", *words[2:]], "a span cuts"
    assert Sentence.of_text(text, split="spaces").words == words


def test_texts_are_split_as_those_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "words" / "train.conll", conll("Ada-Lou/B-PER ran/O"))
    record = {"text": "Ada-Lou ran", "spans": [{"start": 0, "end": 7, "label": "PER"}]}
    write(tmp_path / "texts" / "train.jsonl", json.dumps(record) + "\n")
    of_words, of_texts = (opened(tmp_path / name, task__hold_out=0) for name in ("words", "texts"))
    whole, parts = ["Bo-Lee", "ran"], ["Bo", "-", "Lee", "ran"]
    assert of_words.encode(["Bo-Lee ran"]).sentences[0].words == whole
    assert of_texts.encode(["Bo-Lee ran"]).sentences[0].words == parts
    assert of_texts.training().sentences[0].words == ["Ada", "-", "Lou", "ran"]
    for split, words in (("auto", parts), ("spaces", whole)):  # runs of before know nothing of it
        later = TagTask(tag_settings(task__text_split=split), None, VOCABULARY, of_words.to_dict())
        assert later.encode(["Bo-Lee ran"]).sentences[0].words == words


def test_marks_stay_with_their_word() -> None:
    for words in (
        ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u092e\u0947\u0902", "!"],  # Hindi: "in Hindi"
        ["\u0e17\u0e35\u0e48\u0e19\u0e35\u0e48"],  # Thai: "here"
        ["cafe\u0301", "e\u0301te\u0301", "\u2764\ufe0f"],
        ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"],  # Persian, with a joiner that does not join
    ):
        assert Sentence.of_text(" ".join(words)).words == words
