"""What `data extract` takes for a document, a sentence, an encoding and a language when nobody tells it."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from bertrain.config.choices import DocumentEnd
from bertrain.data.prepare.prepare import prepare
from bertrain.data.text.extract import extract
from bertrain.data.text.languages import guess_language
from bertrain.data.text.streams import guess_encoding
from bertrain.data.text.survey import survey
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.data.text.vocabulary_training import train_vocabulary
from tests import helpers
from tests.quick.test_extract import documents_of, text_of, write_parquet

SAMPLE = Path(__file__).parents[1] / "golden" / "sample.txt"
SAVED = Path(__file__).parents[1] / "data" / "datasets" / "saved" / "cola"
SENTENCES = [line for line in SAMPLE.read_text().split("\n") if line]
ARTICLES = [SENTENCES[at : at + 6] for at in range(0, len(SENTENCES), 6)]
"""Real text as lists of sentences."""
LONG = " ".join(ARTICLES[0])


def paragraphs(article: list[str], size: int = 4) -> list[str]:
    return [" ".join(article[at : at + size]) for at in range(0, len(article), size)]


def wrapped(article: list[str]) -> str:
    return (
        "\n\n".join(
            "\n".join(textwrap.wrap(paragraph, 72, break_on_hyphens=False)) for paragraph in paragraphs(article)
        )
        + "\n"
    )


def write_files(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    return folder


FORMS: dict[str, tuple[list[str], DocumentEnd, bool]] = {
    "wrapped files": ([wrapped(article) for article in ARTICLES], "file", True),
    "a wrapped book": (["\n".join(map(wrapped, ARTICLES))], "size", True),
    "own form": (["\n\n".join("\n".join(article) for article in ARTICLES)], "blank-line", False),
    "own form in parts": (
        ["\n\n".join("\n".join(a) for a in ARTICLES[part::3]) for part in range(3)],
        "blank-line",
        False,
    ),
    "a document per line": (["\n".join(" ".join(article) for article in ARTICLES * 20)], "line", False),
    "a sentence per line": (["\n".join(sentence for article in ARTICLES for sentence in article)], "size", False),
    "files of a paragraph per line": (["\n\n".join(paragraphs(article)) for article in ARTICLES], "file", False),
    "nothing": (["\n"], "size", False),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_plain_text(tmp_path: Path, name: str) -> None:
    texts, document_end, is_wrapped = FORMS[name]
    found = survey([write_files(tmp_path / "raw", texts)])
    assert (found.document_end, found.wrapped) == (document_end, is_wrapped)
    assert (found.files, found.bytes) == (len(texts), sum(len(text.encode()) for text in texts))
    assert found.encoding == "utf-8"
    assert found.language == ("en" if name != "nothing" else "")


@pytest.mark.parametrize("kilobytes", [10, 90, 300])
@pytest.mark.parametrize("form", ["paragraphs", "wrapped"])
def test_an_article_of_any_length_is_one_document(tmp_path: Path, form: str, kilobytes: int) -> None:
    """Files of one length, and a long one among short ones; the reason is said."""
    draw, write = random.Random(0), wrapped if form == "wrapped" else lambda text: "\n\n".join(paragraphs(text)) + "\n"

    def article(size: int) -> str:
        sentences: list[str] = []
        while sum(map(len, sentences)) < 1000 * size:
            sentences += draw.sample(SENTENCES, len(SENTENCES))
        return f"Article {draw.random()}\n\n{write(sentences)}"

    alike = write_files(tmp_path / "alike", [article(kilobytes) for _ in range(24)])
    mixed = write_files(tmp_path / "mixed", [*(article(10) for _ in range(9)), article(kilobytes)])
    for folder, count in ((alike, 24), (mixed, 10)):
        found = extract([folder], tmp_path / f"{folder.name}-out")
        assert (found["survey"]["document_end"], found["counts"]["documents"]) == ("file", count)
        assert "each file is one document" in found["survey"]["said"][1]
        assert "files of about" in found["survey"]["said"][1]
    few = write_files(tmp_path / "few", [article(300) for _ in range(4)])
    assert survey([few]).document_end == ("size" if form == "wrapped" else "blank-line"), "too few to learn from"


def test_text_without_punctuation_is_not_taken_for_wrapped(tmp_path: Path) -> None:
    draw = random.Random(0)
    lines = (" ".join(draw.choices(helpers.vocabulary_words(), k=draw.randint(14, 15))) for _ in range(500))
    (tmp_path / "a.txt").write_text("".join(f"{line}\n{'' if draw.random() < 0.8 else chr(10)}" for line in lines))
    assert not survey([tmp_path / "a.txt"]).wrapped


def sentences_of(folder: Path) -> list[list[str]]:
    return documents_of(text_of(folder))


def test_wrapped_files_yield_the_documents_and_sentences_they_were_made_of(tmp_path: Path) -> None:
    extract([write_files(tmp_path / "raw", FORMS["wrapped files"][0])], tmp_path / "out")
    extract([write_files(tmp_path / "plain", [" ".join(article) for article in ARTICLES])], tmp_path / "expected")
    assert [" ".join(document) for document in sentences_of(tmp_path / "out")] == [
        " ".join(document) for document in sentences_of(tmp_path / "expected")
    ]
    described = json.loads((tmp_path / "out" / "extract.json").read_text())["survey"]
    assert (described["document_end"], described["wrapped"], described["files"]) == ("file", True, len(ARTICLES))
    assert described["said"]


def test_a_book_becomes_documents_of_several_paragraphs(tmp_path: Path) -> None:
    book = FORMS["a wrapped book"][0]
    made = extract([write_files(tmp_path / "raw", book * 2)], tmp_path / "out")
    assert made["counts"]["documents"] == 2, "small files"
    (tmp_path / "book.txt").write_text(book[0] * 3)
    extract([tmp_path / "book.txt"], tmp_path / "book")
    documents = ["\n".join(document) for document in sentences_of(tmp_path / "book")]
    assert all(len(document) > 7000 for document in documents[:-1])
    assert all(len(document) < 16_000 for document in documents)
    assert len(documents) > 2


def test_what_auto_chose_can_be_said(tmp_path: Path) -> None:
    raw = write_files(tmp_path / "raw", FORMS["files of a paragraph per line"][0])
    extract([raw], tmp_path / "auto")
    extract([raw], tmp_path / "said", document_end="file", wrapped=False, language="en", encoding="utf-8")
    assert text_of(tmp_path / "auto") == text_of(tmp_path / "said")


def test_short_documents_are_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("".join(f"Sentence {number}.\n\n" for number in range(30)))
    extract([tmp_path / "a.txt"], tmp_path / "out")
    assert "--document-end" in capsys.readouterr().err
    vocab = helpers.write_vocabulary(tmp_path / "vocab.txt")
    (tmp_path / "b.txt").write_text("bato kese livi\n\n" * 30)
    prepare([tmp_path / "b.txt"], tmp_path / "short", vocab=vocab, max_seq_length=128)
    assert "`bertrain data extract" in capsys.readouterr().err


def test_prepare_remarks_on_wrapped_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = write_files(tmp_path / "raw", FORMS["wrapped files"][0])
    prepare([raw], tmp_path / "out", max_seq_length=16)
    assert "`bertrain data extract" in capsys.readouterr().err
    extract([raw], tmp_path / "text")
    capsys.readouterr()
    prepare([tmp_path / "text" / "train"], tmp_path / "good", max_seq_length=16)
    assert "`bertrain data extract" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Der Hund ist nicht groß, und die Katze ist mit dem Ball zu den Kindern gegangen.", "de"),
        ("Le chien est dans la maison et les enfants sont partis pour une promenade.", "fr"),
        ("El perro que vive en la casa de los niños y las niñas es una alegría por la mañana.", "es"),
        ("Il cane non è nel giardino, che sono della nonna; gli amici di Carlo per ora no.", "it"),
        ("O cão não está em casa com os meninos, que foram para uma festa da escola.", "pt"),
        ("De hond is niet van het kind, dat op een fiets zat en voor zijn huis stond.", "nl"),
        ("Это не то, что мы видели в городе, и как это случилось, никто не знает.", "ru"),
        ("今日は天気がいいから、散歩に行きましょう。", "ja"),
        ("今天天气很好，我们去公园散步吧。", "zh"),
        ("오늘은 날씨가 좋아서 공원에 갑니다.", "ko"),
        ("ذهب الولد إلى المدرسة في الصباح", "ar"),
        ("lorem ipsum dolor sit amet consectetur", ""),
        ("12 34 !?", ""),
    ],
)
def test_languages(text: str, code: str) -> None:
    assert guess_language([text]) == code


# --- encodings -------------------------------------------------------------------------------------------------

GERMAN = "Der Käufer überprüft die Möbel.\nDie Straße ist naß.\n\nÖl ist schön.\n"
GERMAN_DOCUMENTS = [["Der Käufer überprüft die Möbel.", "Die Straße ist naß."], ["Öl ist schön."]]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32", "utf-8-sig", "gb18030"])
def test_encodings_that_are_named(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(GERMAN.encode(encoding))
    made = extract([tmp_path / "a.txt"], tmp_path / "out", encoding=encoding)
    assert sentences_of(tmp_path / "out") == GERMAN_DOCUMENTS
    assert made["counts"]["lines_not_utf8"] == 0


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1", "cp1252"])
def test_encodings_that_are_recognized(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes(GERMAN.encode(encoding))
    extract([tmp_path / "a.txt"], tmp_path / "out")
    assert sentences_of(tmp_path / "out") == GERMAN_DOCUMENTS
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": "Das ist schön."}, ensure_ascii=False).encode(encoding))
    extract([tmp_path / "a.jsonl"], tmp_path / "json")
    assert sentences_of(tmp_path / "json") == [["Das ist schön."]]


def test_a_guessed_encoding_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = write_files(tmp_path / "raw", [GERMAN, GERMAN + "Das ist der Käse."])
    (raw / "001.txt").write_bytes((raw / "001.txt").read_text().encode("latin-1"))
    made = extract([raw], tmp_path / "out")
    assert made["guessed_encoding"] == [str(raw / "001.txt")]
    said = helpers.unwrapped(capsys.readouterr().err)
    assert f"1 file not in UTF-8, read as Windows-1252 (--encoding auto): {raw / '001.txt'}" in said


CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy. Byl to krásný den a všichni byli rádi. "
RUSSIAN = "Это не так просто, как кажется, и в этом что-то есть. "


@pytest.mark.parametrize(
    "content",
    [
        CZECH.encode("cp1250"),
        RUSSIAN.encode("cp1251"),
        RUSSIAN.encode("koi8-r"),
        "日本語の文章です。".encode("shift-jis"),
        GERMAN.encode() + "Das ist schön.".encode("latin-1"),
        b"The end of the text is \x81.",
        b"Bj\xf6rk",
    ],
    ids=["cp1250", "cp1251", "koi8-r", "shift-jis", "damaged UTF-8", "undefined byte", "no language"],
)
def test_no_other_bytes_are_taken_for_western_text(content: bytes) -> None:
    assert guess_encoding(content) == "utf-8"


@pytest.mark.parametrize("document_end", ["auto", "blank-line", "file", "line", "size"])
def test_no_letter_is_dropped_in_silence(
    tmp_path: Path, document_end: DocumentEnd, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("Plain. Čeština.\n\nPlain too.\n".encode() + GERMAN.encode("latin-1"))
    with helpers.refused("not-utf8", f"line 4 of {path}", "--encoding latin-1", "--on-error skip"):
        extract([path], tmp_path / "out", document_end=document_end)
    capsys.readouterr()
    made = extract([path], tmp_path / "out", document_end=document_end, on_error="skip")
    assert made["counts"]["lines_not_utf8"] == 3
    assert made["lost_bytes"] == {str(path): 3}
    assert str(path) in capsys.readouterr().err
    assert "Der Kufer berprft die Mbel." in text_of(tmp_path / "out")
    (tmp_path / "cut.txt").write_bytes(GERMAN.encode("utf-16")[:-1])
    with helpers.refused("not-utf8", f"line 4 of {tmp_path / 'cut.txt'}"):
        extract([tmp_path / "cut.txt"], tmp_path / "cut", document_end=document_end)


def test_a_document_that_loses_all_its_letters_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "plain.txt").write_text("Plain text.\n")
    files = [tmp_path / "in" / f"{number:03}.txt" for number in range(103)]  # more than PROBLEMS_LISTED
    for path in files:
        path.write_bytes("Москва".encode("cp1251"))
    made = extract([tmp_path / "in"], tmp_path / "out", on_error="skip")
    assert made["skipped"] == {"empty": 103}
    assert made["lost_bytes"] == {str(path): 1 for path in files}
    assert "103 lines in 103 files had bytes that cannot be decoded" in " ".join(capsys.readouterr().err.split())
    with helpers.refused("no-document", "--encoding"):
        extract(files[:3], tmp_path / "none", on_error="skip")


def test_an_encoding_is_that_of_the_files_that_are_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    for name, encoding in (("a", "utf-8"), ("b", "cp1250"), ("c", "ascii"), ("d", "utf-16")):
        text = "Příliš žluťoučký kůň." if encoding != "ascii" else "Plain."
        (tmp_path / "in" / f"{name}.txt").write_bytes(text.encode(encoding))
    made = extract([tmp_path / "in"], tmp_path / "out", encoding="cp1250")
    assert text_of(tmp_path / "out").count("Příliš žluťoučký kůň.") == 3
    assert made["guessed_encoding"] == [str(tmp_path / "in" / f"{name}.txt") for name in "ad"]
    said = helpers.unwrapped(capsys.readouterr().err)
    assert "2 files in UTF-8 or UTF-16, not read as --encoding cp1250" in said
    extract([tmp_path / "in" / "a.txt"], tmp_path / "again", encoding="UTF8")
    assert "--encoding" not in capsys.readouterr().err


def test_prepare_and_vocab_read_utf8_only(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(("bato kese\nlivi\n\n" * 30 + "mögo\n\n").encode("latin-1"))
    vocab = helpers.write_vocabulary(tmp_path / "vocab.txt")
    for run in (
        lambda: prepare([path], tmp_path / "out", vocab=vocab, max_seq_length=16),
        lambda: train_vocabulary([path], tmp_path / "v.txt", size=100),
    ):
        with helpers.refused("not-utf8", f"line 91 of {path}", "`bertrain data extract`", "--encoding"):
            run()
    skipped = prepare([path], tmp_path / "out", vocab=vocab, max_seq_length=16, on_error="skip")
    assert skipped["preparation"]["text"]["lines_not_utf8"] == 1
    reference = prepare([path], tmp_path / "reference", vocab=vocab, max_seq_length=16, reference=True)
    assert reference["preparation"]["text"]["lines_not_utf8"] == 1


def test_no_such_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Text.\n")
    for encoding in ("klingon", "base64"):
        with helpers.refused("unknown-encoding", encoding, "latin-1"):
            extract([tmp_path / "a.txt"], tmp_path / "out", encoding=encoding)


# --- tables, binaries, datasets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_csv(tmp_path: Path, delimiter: str) -> None:
    path = tmp_path / ("a.tsv" if delimiter == "\t" else "a.csv")
    second = "Two lines.\nThe, second; | one." if delimiter != "\t" else 'It says "Two'
    with open(path, "w", newline="") as file:
        quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
        writer = csv.writer(file, delimiter=delimiter, quoting=quoting, quotechar=None if delimiter == "\t" else '"')
        writer.writerows([["id", "body"], ["1", "One here."], ["2", second]])
    with helpers.refused("damaged-input", path, "'text'", "'id', 'body'", "--text-column body"):
        extract([path], tmp_path / "out")
    extract([path], tmp_path / "out", text_column="body")
    assert sentences_of(tmp_path / "out") == [["One here."], second.replace("; | one", "; | one").split("\n")]
    for run in (lambda: prepare([path], tmp_path / "p"), lambda: train_vocabulary([path], tmp_path / "v", size=100)):
        with helpers.refused("not-text", path, "`bertrain data extract`"):
            run()


def test_damaged_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,n\n"Good.",1\nbad,row,here\nFine.,2\n')
    with helpers.refused("damaged-input", f"line 3 of {path}", "3 fields"):
        extract([path], tmp_path / "out")
    extract([path], tmp_path / "out", on_error="skip")
    assert sentences_of(tmp_path / "out") == [["Good."], ["Fine."]]
    path.write_text('text,n\nFirst.,1\n"never closed,2\n')
    with helpers.refused("damaged-input", path, "line 3"):
        extract([path], tmp_path / "other")
    path.write_bytes("text,n\nFirst.,1\nSchön.,2\n".encode("latin-1"))
    with helpers.refused("not-utf8", f"line 3 of {path}", "--encoding"):
        extract([path], tmp_path / "other")


def test_the_text_column_is_named_only_where_it_is_obvious(tmp_path: Path) -> None:
    with helpers.refused("damaged-input", "--text-column body"):
        extract([write_parquet(tmp_path / "a.parquet")], tmp_path / "out")
    (tmp_path / "a.jsonl").write_text('{"title": "a title", "name": "a name"}\n')
    with helpers.refused("damaged-input", "'title', 'name'; give --text-column"):
        extract([tmp_path / "a.jsonl"], tmp_path / "out")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_the_only_column_of_long_strings_is_the_text(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": number, "title": "A title", "content": " ".join(article)} for number, article in enumerate(ARTICLES)]
    table = pa.Table.from_pylist(rows)
    if name == "a.csv":
        pyarrow.csv.write_csv(table, tmp_path / name)
    elif name == "a.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = extract([tmp_path / name], tmp_path / "out")
    assert made["counts"]["documents"] == len(rows)
    assert "the text is in 'content' (--text-column)" in capsys.readouterr().err


def test_every_table_of_a_folder_has_its_own_text_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    for number in range(200):  # so that a stride over the files meets no table
        (folder / f"note-{number:03}.txt").write_text(f"The note {number} is short. It has two sentences.\n")
    pyarrow.parquet.write_table(pa.table({"url": ["u"], "body": [LONG + " in Parquet."]}), folder / "crawl.parquet")
    with open(folder / "posts.csv", "w", newline="") as file:
        rows = [[number, f"{LONG} in row {number}. " * 600] for number in range(3)]  # more than is looked at
        csv.writer(file).writerows([["date", "comment"], *rows])
    (folder / "a.jsonl").write_text(json.dumps({"id": 1, "text": LONG + " in JSON."}) + "\n")
    made = extract(folder, tmp_path / "out")
    assert made["counts"]["documents"] == 200 + 1 + 3 + 1
    assert "the text is in 'body', 'comment', 'text' (--text-column)" in helpers.unwrapped(capsys.readouterr().err)


def binaries(folder: Path) -> list[Path]:
    paths = [folder / "random.bin", folder / "program"]
    paths[0].write_bytes(random.Random(0).randbytes(5000).replace(b"\0", b""))
    shutil.copy(os.path.realpath("/bin/ls"), paths[1])
    return paths


def test_binaries_are_refused(tmp_path: Path) -> None:
    for path in binaries(tmp_path):
        with helpers.refused("damaged-input", path, "binary"):
            extract([path], tmp_path / "out")
        with helpers.refused("not-text", path, "binary"):
            prepare([path], tmp_path / "out")
        with helpers.refused("not-text", path, "binary"):
            train_vocabulary([path], tmp_path / "vocab", size=100)


def test_binaries_beside_text_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = write_files(tmp_path / "raw", FORMS["wrapped files"][0])
    (tmp_path / "raw" / "more").mkdir()
    named = binaries(tmp_path / "raw" / "more")
    made = extract([raw], tmp_path / "out")
    assert made["skipped"] == {"not text": 2}
    said = helpers.unwrapped(capsys.readouterr().err)
    assert f"2 files left out, not text: {', '.join(sorted(map(str, named)))}" in said
    assert made["counts"]["documents"] == len(ARTICLES)
    with helpers.refused("damaged-input", named[0]):
        extract([raw, named[0]], tmp_path / "other")
    with helpers.refused("damaged-input", named[1]):
        extract([raw], tmp_path / "other", document_end="file")


@pytest.mark.parametrize("part", ["data/{split}-00000-of-00001.parquet", "default/{split}/0000.parquet"])
def test_parquet_in_the_layout_of_the_hub(tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str) -> None:
    """Of several splits only train is read, through links as in the Hub's cache, without the card and `hf`'s cache."""
    place, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    blobs.mkdir()
    for split in ("train", "validation", "test"):
        table = pa.table({"text": [f"A sentence of {split}. And another one."] * 3})
        pyarrow.parquet.write_table(table, blobs / split)
        path = place / part.format(split=split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(blobs / split)
    (place / "README.md").write_text("# A card, not text to train on\n")
    (place / ".cache" / "huggingface" / "download").mkdir(parents=True)
    (place / ".cache" / "huggingface" / "download" / "README.md.metadata").write_text("a commit of the cache\n")
    extract([place], tmp_path / "out")
    assert "of its splits test, train, validation, only train is read" in capsys.readouterr().err
    text = text_of(tmp_path / "out")
    assert "sentence of train" in text
    assert not any(word in text for word in ("validation", "test", "card", "cache"))
    other = place / part.format(split="test")
    extract([other.parent if "default" in part else other], tmp_path / "named")
    assert "sentence of test" in text_of(tmp_path / "named"), "a split that is named is read"
    (place / part.format(split="train")).unlink()
    with helpers.refused("missing-split", place, "test, validation"):
        extract([place], tmp_path / "none")


def test_numbered_parts_that_are_no_splits_are_all_read(tmp_path: Path) -> None:
    for name in ("books", "letters"):
        table = pa.table({"text": [f"A sentence of {name}. And another one."] * 3})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}-00000-of-00001.parquet")
    extract([tmp_path], out := tmp_path.parent / f"{tmp_path.name}-out")
    assert all(f"sentence of {name}" in text_of(out) for name in ("books", "letters"))


def test_saved_datasets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = extract([SAVED], tmp_path / "out", text_column="sentence")
    assert made["counts"]["documents"] == 24
    assert made["survey"]["forms"] == {"arrow": 1}
    said = capsys.readouterr().err
    assert all(split in said for split in ("train", "validation", "test"))
    extract([SAVED / "train"], tmp_path / "train", text_column="sentence")
    assert text_of(tmp_path / "train") == text_of(tmp_path / "out")
    with helpers.refused("damaged-input", "'sentence', 'label', 'idx'", "--text-column sentence"):
        extract([SAVED], tmp_path / "other")
    with helpers.refused("not-text", "arrow", "`bertrain data extract`"):
        prepare([SAVED], tmp_path / "other")
    shutil.copytree(SAVED, tmp_path / "cola", ignore=shutil.ignore_patterns("train"))
    with helpers.refused("missing-split", tmp_path / "cola", "test, validation"):
        extract([tmp_path / "cola"], tmp_path / "other", text_column="sentence")


# --- case ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "is_cased"), [("bato", False), ("Bato", True), ("bató", True), ("हिंदी", True)])
def test_case_follows_the_vocabulary(tmp_path: Path, word: str, is_cased: bool) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*helpers.SPECIAL, "[unused1]", "kese", word]) + "\n")
    assert Vocabulary.load(tmp_path / "vocab.txt", lower_case=None).lower_case is not is_cased
    (tmp_path / "a.txt").write_text(f"{word} kese\n{word}\n\n" * 30)
    options = {"vocab": tmp_path / "vocab.txt", "max_seq_length": 16}
    manifest = prepare([tmp_path / "a.txt"], tmp_path / "out", **options)  # type: ignore[arg-type]
    assert manifest["vocabulary"]["lower_case"] is not is_cased
    assert manifest["preparation"]["text"]["unknown_tokens"] == 0


def test_a_contradiction_is_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*helpers.SPECIAL, "kese", "Bato"]) + "\n")
    (tmp_path / "a.txt").write_text("kese kese\nkese\n\n" * 30)
    prepare([tmp_path / "a.txt"], tmp_path / "out", vocab=tmp_path / "vocab.txt", lower_case=True, max_seq_length=16)
    assert "--cased" in capsys.readouterr().err


def test_a_single_path_is_not_taken_for_letters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("bato kese\nlivi\n\n" * 30)
    vocab = helpers.write_vocabulary(tmp_path / "vocab.txt")
    prepare(str(tmp_path / "a.txt"), tmp_path / "out", vocab=vocab, max_seq_length=16)
    extract(str(tmp_path / "a.txt"), tmp_path / "text")


def test_a_table_with_dates_that_python_does_not_have(tmp_path: Path) -> None:
    rows = pa.table({"day": pa.array([2**30], pa.date32()), "body": ["some words about something " * 20]})
    pyarrow.parquet.write_table(rows, tmp_path / "old.parquet")
    assert survey([tmp_path / "old.parquet"]).text_columns == ("body",)
    extract([tmp_path / "old.parquet"], tmp_path / "out")
    assert "some words about something" in text_of(tmp_path / "out")


def test_a_column_that_is_there_twice_is_said(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["some words"])] * 2, ["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    survey([tmp_path / "twice.parquet"])
    with helpers.refused("damaged-input", "twice.parquet", "twice"):
        extract([tmp_path / "twice.parquet"], tmp_path / "out")


def test_only_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(bytes(range(256)) * 8)
    with helpers.refused("empty-input", "1 input file"):
        prepare([tmp_path / "x.bin"], tmp_path / "out", on_error="skip")
