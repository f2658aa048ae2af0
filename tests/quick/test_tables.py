"""Readers of tables: what published files trip over, what is named when a row is wrong, and any bytes at all."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertrain.base.errors import UserError
from bertrain.data.text.records import Problem
from bertrain.tasks.table_task import Columns, RowFormat, class_parser, read_rows
from bertrain.tasks.tables import FORMATS, TABLES, BadRows, Row, find_tables, format_of, read_table
from bertrain.tasks.texts import TextFile
from tests.helpers import refused

SAMPLES = Path(__file__).parents[1] / "data"


def read(path: Path, *columns: str, header: Sequence[str] = ()) -> list[tuple[str | None, ...] | Problem]:
    """Rows as the tuples of their values; problems as they are."""
    rows = read_table(path, lambda names: columns, header)
    return [row.values if isinstance(row, Row) else row for row in rows]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# --- TSV ---------------------------------------------------------------------------------------------------


def test_quotes_in_tsv_are_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", 'text\tlabel\n" he said\t0\nthe "end" of it\t1\n""\t0\n')
    assert read(path, "text", "label") == [('" he said', "0"), ('the "end" of it', "1"), ('""', "0")]


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("glue/*/*.tsv")), ids=lambda path: "-".join(path.parts[-2:]))
def test_published_tsv_reads_as_by_the_csv_module_without_quoting(path: Path) -> None:
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        expected = [tuple(row) for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
    names = [f"column {number}" for number in range(len(expected[0]))]
    if path.parts[-2] == "CoLA" and path.stem != "test":
        assert read(path, *names, header=names) == expected
    else:
        assert read(path, *expected[0]) == expected[1:]


def test_line_ends_marks_and_blank_lines(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.tsv", "text\tlabel\none\t1\ntwo\t2\n")
    for number, content in enumerate(
        (
            "text\tlabel\r\none\t1\r\ntwo\t2\r\n",
            "text\tlabel\none\t1\ntwo\t2",
            b"\xef\xbb\xbftext\tlabel\none\t1\ntwo\t2\n",
            "text\tlabel\none\t1\n\n\r\ntwo\t2\n\n",
        )
    ):
        assert read(write(tmp_path / f"{number}.tsv", content), "text", "label") == read(plain, "text", "label")


def test_only_a_line_feed_ends_a_row_of_tsv(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\x0bd\re"
    assert read(write(tmp_path / "a.tsv", f"text\tlabel\n{text}\t1\n"), "text", "label") == [(text, "1")]


@pytest.mark.parametrize("ending", [suffix for suffix, kind in FORMATS.items() if kind in TABLES])
def test_a_file_without_rows_has_none(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a.{ending}", b"")
    if ending in ("parquet", "arrow"):
        with refused("damaged-table", path):
            read(path, "text")
    else:
        assert read(path, "text") == []
        with refused("no-usable-row", path):
            read_rows([path], RowFormat(Columns(("text",)), class_parser(["a"])), BadRows("stop"), with_labels=True)


def test_wrong_rows_are_named_by_file_and_line(tmp_path: Path) -> None:
    content = b"text\tlabel\ngood\t1\nshort\nlong\t1\t2\n\xff\xfe\t1\nlast\t1\n"
    path = write(tmp_path / "a.tsv", content)
    good, short, long, not_utf8, last = read(path, "text", "label")
    assert (good, last) == (("good", "1"), ("last", "1"))
    problems = (short, long, not_utf8)
    assert [problem.place for problem in problems] == [f"line {number} of {path}" for number in (3, 4, 5)]
    assert "1 field " in str(short)
    assert "3 fields" in str(long)
    assert "UTF-8" in str(not_utf8)


def test_a_header_in_utf16_is_named(tmp_path: Path) -> None:
    with refused("bad-header", f"line 1 of {tmp_path / 'a.tsv'}", "UTF-8"):
        read(write(tmp_path / "a.tsv", "text\tlabel\na\t1\n".encode("utf-16")), "text")


# --- CSV ---------------------------------------------------------------------------------------------------


def test_csv_has_quotes_and_lines_within(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    rows = [("a, b", "1"), ('she said "no"', "2"), ("two\nlines", "3"), ("", "4")]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    assert read(path, "text", "label") == rows


@pytest.mark.parametrize("separator", [";", "\t"])
def test_the_header_of_csv_shows_what_separates_fields(tmp_path: Path, separator: str) -> None:
    lines = ["text,label", 'a; b\t,"1,2"', "c,3"]
    other = [line.replace(",", separator) for line in ("text,label", '"a, b","1;2"', "c,3")]
    assert read(write(tmp_path / "a.csv", "\n".join(lines) + "\n"), "label") == [("1,2",), ("3",)]
    assert read(write(tmp_path / "b.csv", "\n".join(other) + "\n"), "label")[1] == ("3",)
    assert read(write(tmp_path / "c.csv", "text\na;b\n"), "text") == [("a;b",)], "a single column"


def test_wrong_rows_of_csv_are_named_by_their_first_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.csv", 'text,label\n"two\nlines",1\n"a"b,1\nthree,fields,here\n\xff,1\n"open,1\nlost,1\n"x",1\n'
    )
    path.write_bytes(path.read_bytes().replace("\xff".encode(), b"\xff"))
    first, *problems = read(path, "text", "label")
    assert first == ("two\nlines", "1")
    assert [str(problem).split(" of ")[0] for problem in problems] == [f"line {n}" for n in (4, 5, 6, 7, 8, 9)]
    assert "3 fields" in str(problems[1])
    assert "UTF-8" in str(problems[2])
    assert "',' expected after" in str(problems[3]), "and so are the lines that it swallowed"


def test_a_quote_that_is_never_closed_is_no_row_to_pass_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\na,1\n" + '"open,1\n' + "b,1\n" * 97)
    with refused("unclosed-quote", f"line 3 of {path}"):
        read(path, "text", "label")


# --- JSON lines, Parquet, Arrow ----------------------------------------------------------------------------


def test_values_of_json_become_text(tmp_path: Path) -> None:
    values = ["a", 1, 2.5, 3.0, True, None, float("nan")]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": value}) + "\n" for value in values))
    assert read(path, "text") == [("a",), ("1",), ("2.5",), ("3",), ("true",), (None,), (None,)]


def test_wrong_lines_of_json_are_named(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', "{", "[1]", '{"other": 1}', '{"text": ["a"]}', '{"text": "\\ud800"}', "1", "[" * 100000]
    path = write(tmp_path / "a.jsonl", "\n".join(lines) + '\n{"text": "\xff"}\n')
    path.write_bytes(path.read_bytes().replace("\xff".encode(), b"\xff"))
    first, *problems = read(path, "text")
    assert first == ("a",)
    assert [problem.place for problem in problems] == [f"line {number} of {path}" for number in range(2, 10)]


def test_an_array_of_json_is_refused(tmp_path: Path) -> None:
    with refused("json-array", "a.json"):
        read(write(tmp_path / "a.json", '[\n{"text": "a"}\n]'), "text")


@pytest.mark.parametrize("way", ["saved", "parquet", "json"])
def test_what_datasets_saved_reads_as_the_original(way: str) -> None:
    original = read(SAMPLES / "glue/CoLA/train.tsv", "text", "label", header=("source", "label", "mark", "text"))
    found = find_tables(SAMPLES / "datasets" / way / "cola", ["train"])
    (files,) = found.values()
    names = ["unacceptable", "acceptable"]
    rows = [row for path in files for row in read(path, "sentence", "label")]
    expected = [(text, label if way == "json" else names[int(label or 0)]) for text, label in original]
    assert rows == expected


def test_labels_that_datasets_has_not_are_none() -> None:
    for path in (SAMPLES / "datasets").rglob("test*.parquet"):
        assert {label for (label,) in read(path, "label")} == {None}


def test_class_labels_that_pandas_made_floats_have_their_names(tmp_path: Path) -> None:
    info = json.dumps({"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}})
    table = pa.table({"label": [1.0, None, 0.0, -1.0, 7.0, 0.5, float("nan")]})
    pyarrow.parquet.write_table(table.replace_schema_metadata({"huggingface": info}), tmp_path / "a.parquet")
    labels = [label for (label,) in read(tmp_path / "a.parquet", "label")]
    assert labels == ["yes", None, "no", None, "7", "0.5", None]


def test_a_cut_off_file_is_refused_as_a_whole(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{number} " * 50 for number in range(5000)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=500)
    packed = gzip.compress("".join(f"text {number}\t{number}\n" for number in range(50000)).encode())
    (tmp_path / "a.tsv.gz").write_bytes(b"" + packed)
    for name in ("a.parquet", "a.arrow", "a.tsv.gz"):
        path = tmp_path / name
        assert len(read(path, "text") if "tsv" not in name else read(path, "a", header=("a", "b"))) >= 5000
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
        with refused("damaged-table", path):
            read(path, "text") if "tsv" not in name else read(path, "a", header=("a", "b"))


def test_arrow_as_others_write_it(tmp_path: Path) -> None:
    table = pa.table({"text": pa.array(["a", None, "b"]).dictionary_encode(), "label": [1, 2, 3]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert read(tmp_path / "a.arrow", "text", "label") == [("a", "1"), (None, "2"), ("b", "3")]


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "sentence\tscore\na\t1\n")
    with refused("missing-column", path, "'text' or 'words'", "'sentence', 'score'"):
        read_rows([path], RowFormat(Columns(("text", "words")), float), BadRows("stop"), with_labels=True)


# --- finding files -----------------------------------------------------------------------------------------


def test_files_of_a_part_are_found_by_name(tmp_path: Path) -> None:
    for name in ("train.tsv", "train.jsonl.gz", "train_small.csv", "training.csv", "train.py", ".train.csv"):
        (tmp_path / name).touch()
    for number in range(2):
        (tmp_path / f"validation-0000{number}-of-00002.parquet").touch()
    found = find_tables(tmp_path, ["train", "train_*"])
    assert list(found) == ["train.jsonl.gz", "train.tsv", "train_small.csv"]
    ((name, files),) = find_tables(tmp_path, ["dev", "validation"]).items()
    assert (name, len(files)) == ("validation-*-of-00002", 2)
    assert find_tables(tmp_path / "absent", ["train"]) == {}
    (tmp_path / "hub" / "data").mkdir(parents=True)
    (tmp_path / "hub" / "data" / "train-00000-of-00001.parquet").touch()
    assert list(find_tables(tmp_path / "hub", ["train"])) == ["train-*-of-00001"], "as the hub lays them out"
    (tmp_path / "hub" / "data" / "test-00000-of-00001.parquet").touch()
    (files,) = find_tables(tmp_path / "hub", ["train", "data"]).values()
    assert [path.name for path in files] == ["train-00000-of-00001.parquet"], "its folder data is not a split"


@pytest.mark.parametrize(("ids", "has_ids"), [(["a", None], True), ([None, "b"], True), ([None, None], False)])
def test_some_texts_without_an_id_leave_the_others_theirs(tmp_path: Path, ids: list[str | None], has_ids: bool) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": one, "text": "a"}) + "\n" for one in ids))
    assert TextFile(path).survey().has_ids is has_ids
    assert [text.id for text in TextFile(path)] == ids


def test_forms_by_name() -> None:
    names = ["a.tsv", "a.b.TXT", "a.csv.gz", "a.json", "a.parquet", "a.arrow", "a", "a.gz", "a.py", "tsv"]
    expected = ["tsv", "tsv", "csv", "jsonl", "parquet", "arrow", "", "", "", "tsv"]
    assert [format_of(Path(name)) for name in names] == expected


# --- any bytes at all --------------------------------------------------------------------------------------

SEEDS = {
    "tsv": b"text\tlabel\nsome words\t1\nothers\t0\n",
    "csv": b'text,label\n"some, words",1\nothers,0\n',
    "jsonl": b'{"text": "some words", "label": 1}\n{"text": "others", "label": 0}\n',
    "parquet": (SAMPLES / "datasets/parquet/cola/train-00000-of-00001.parquet").read_bytes(),
    "arrow": (SAMPLES / "datasets/saved/cola/train/data-00000-of-00001.arrow").read_bytes(),
    "tsv.gz": gzip.compress(b"text\tlabel\nsome words\t1\nothers\t0\n"),
}


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A small real file with some of its bytes replaced, taken out or put in."""
    ending = draw(st.sampled_from(sorted(SEEDS)))
    content = bytearray(SEEDS[ending])
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(content)))
        removed = draw(st.integers(0, 4))
        content[place : place + removed] = draw(st.binary(max_size=4) | st.sampled_from([b"\t", b"\n", b'"', b"\r"]))
    return ending, bytes(content)


ANYTHING = st.tuples(st.sampled_from([*FORMATS, "tsv.gz", "csv.bz2", "jsonl.zst"]), st.binary(max_size=200))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=ANYTHING | mutated())
def test_no_bytes_raise_anything_but_a_sentence(tmp_path: Path, file: tuple[str, bytes]) -> None:
    path = write(tmp_path / f"fuzzed.{file[0]}", file[1])
    row_format = RowFormat(
        Columns(("text", "sentence")), class_parser(["unacceptable", "acceptable"], {"0": 0, "1": 1})
    )
    for on_error in ("stop", "skip"):
        sentence = ""
        try:
            texts = read_rows([path], row_format, BadRows(on_error), with_labels=True)
        except UserError as error:
            sentence = str(error)
        assert sentence == "" or "fuzzed" in sentence
        if not sentence:
            assert len(texts.first) == len(texts.targets) == len(texts.ids) > 0
            assert all(text.strip() and text.encode() for text in texts.first)
