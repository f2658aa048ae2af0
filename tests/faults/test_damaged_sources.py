"""Sources cut off, altered or not what they seem: one sentence with the place in it, or skipped and counted."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bertrain.data.text.records
from bertrain.base.errors import UserError
from bertrain.data.text.documents import LONGEST_LINE, Span, find_inputs, read_documents, read_lines
from bertrain.data.text.extract import extract
from tests import helpers
from tests.quick.test_extract import DUMP, PACKINGS, archive, documents_of, text_of, write_parquet


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "a.xml").write_bytes(DUMP)
    extract([folder / "a.xml"], folder / "out")
    return documents_of(text_of(folder / "out"))


@settings(max_examples=40)
@given(cut=st.integers(0, len(DUMP) - len(b"</mediawiki>\n")))
def test_a_dump_cut_anywhere(tmp_path_factory: pytest.TempPathFactory, whole: list[list[str]], cut: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    (folder / "a.xml").write_bytes(DUMP[:cut])
    with pytest.raises(UserError) as caught:
        extract([folder / "a.xml"], folder / "out", form="dump")
    assert "a.xml" in str(caught.value)
    assert "\n" not in str(caught.value)
    articles = [
        not (b"#REDIRECT" in page or b"<title>Wikipedia:" in page) for page in DUMP[:cut].split(b"</page>")[:-1]
    ]
    if not any(articles):
        return
    made = extract([folder / "a.xml"], folder / "out", form="dump", on_error="skip")
    assert documents_of(text_of(folder / "out")) == whole[: sum(articles)]
    assert made["skipped"]["damaged"] == 1


PACKED = [name for name in PACKINGS if "." in name and not name.endswith((".xml", ".tar"))]
DAMAGES = [(name, damage) for name in PACKED for damage in ("cut", "altered")]
DAMAGES.remove(("dump.xml.zst", "altered"))  # a Zstandard file need not have a checksum, and this one has none


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_damaged_packings(tmp_path: Path, whole: list[list[str]], name: str, damage: str) -> None:
    packed = bytearray(PACKINGS[name](DUMP))
    draw = random.Random(name)
    for attempt in range(6):
        at = draw.randrange(20, len(packed) - 60)
        damaged = packed[:at] if damage == "cut" else packed[:at] + bytes([packed[at] ^ 255]) + packed[at + 1 :]
        path = tmp_path / f"{attempt}-{name}"
        path.write_bytes(damaged)
        with pytest.raises(UserError) as caught:
            extract([path], tmp_path / "out")
        assert str(path) in str(caught.value)
        (tmp_path / "good.txt").write_text("A whole document.\n")
        out = tmp_path / f"out-{attempt}"
        made = extract([path, tmp_path / "good.txt"], out, on_error="skip")
        assert made["skipped"]["damaged"] >= 1
        assert documents_of(text_of(out))[-1] == ["A whole document."]


@pytest.mark.parametrize("packing", ["dump.xml.gz", "multistream.xml.bz2", "dump.xml.xz", "dump.xml.zst"])
@pytest.mark.parametrize("form", ["xml", "txt"])
def test_what_comes_before_a_break_is_kept(tmp_path: Path, packing: str, form: str) -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=7)) for _ in range(400)]
    texts = [" ".join(draw.choices(words, k=60)) for _ in range(400)]
    if form == "txt":
        content = "\n\n".join(texts).encode()
    else:
        pages = (f"<page><title>a</title><ns>0</ns><revision><text>{text}</text></revision></page>" for text in texts)
        content = f"<mediawiki>{''.join(pages)}</mediawiki>".encode()
    packed = PACKINGS[packing](content)
    path = tmp_path / f"a.{form}.{packing.rpartition('.')[2]}"
    path.write_bytes(packed[: len(packed) * 7 // 8])
    made = extract([path], tmp_path / "out", sentences="lines", on_error="skip")
    kept = documents_of(text_of(tmp_path / "out"))
    assert kept == [[text] for text in texts[: len(kept)]]
    assert len(kept) > len(texts) / 2
    assert made["skipped"] == {"damaged": 1}


def test_a_line_just_too_long_takes_no_other_with_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * LONGEST_LINE + "\nGood.\n")
    counts: Counter[str] = Counter()
    span = Span(str(tmp_path / "a.txt"), 0, (tmp_path / "a.txt").stat().st_size)
    assert list(read_lines(span, counts, on_error="skip")) == ["Good."]
    assert counts == {"lines_skipped": 1}


def test_sentences_too_long_for_prepare(tmp_path: Path) -> None:
    fits, giant = "é" * ((LONGEST_LINE - 2) // 2), "é" * (LONGEST_LINE // 2)
    (tmp_path / "a.txt").write_text(f"{fits}\n\n{giant}\n\nGood.\n")
    with helpers.refused("damaged-input", f"line 3 of {tmp_path / 'a.txt'}", "4,194,305 bytes"):
        extract([tmp_path / "a.txt"], tmp_path / "out", sentences="lines")
    made = extract([tmp_path / "a.txt"], tmp_path / "out", sentences="lines", on_error="skip")
    assert documents_of(text_of(tmp_path / "out")) == [[fits], ["Good."]]
    assert made["skipped"] == {"damaged": 1}
    assert list(read_documents(find_inputs([tmp_path / "out" / "train"]))) == [[fits], ["Good."]]


def test_a_damaged_tar_is_not_taken_for_whole(tmp_path: Path) -> None:
    packed = bytearray(archive({"a.txt": b"First.\n" * 2000, "b.txt": b"Second.\n"}))
    second = packed.index(b"b.txt")
    packed[second : second + 5] = b"c.txt"  # the header's sum is wrong now
    (tmp_path / "a.tar").write_bytes(packed)
    with helpers.refused("damaged-input", "a.tar is damaged", "line 1 of", "a.tar:a.txt"):
        extract([tmp_path / "a.tar"], tmp_path / "out")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut of', "is not JSON"),
        (b"[1, 2]", "is not a JSON object"),
        (b'{"id": 1, "body": "x"}', "has no field 'text' but 'id', 'body'; give --text-column"),
        (b'{"text": 5}', "has int in 'text', not text"),
        (b'{"text": "\xff"}', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "Good one."}\n' + line + b'\n{"text": "\\ud800 Good too."}\n')
    with helpers.refused("damaged-input", f"line 2 of {path} {message}"):
        extract([path], tmp_path / "out")
    made = extract([path], tmp_path / "out", on_error="skip")
    assert documents_of(text_of(tmp_path / "out")) == [["Good one."], ["Good too."]]
    assert len(made["problems"]) == 1


@settings(max_examples=60)
@given(data=st.data())
def test_damaged_parquet(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    whole = write_parquet(folder / "whole.parquet").read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    (folder / "a.parquet").write_bytes(whole[:cut])
    with pytest.raises(UserError) as caught:
        extract([folder / "a.parquet"], folder / "out", text_column="body")
    assert "a.parquet" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_columns(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    with helpers.refused("damaged-input", path, "'text'", "'id', 'body'", "--text-column"):
        extract([path], tmp_path / "out")
    with helpers.refused("damaged-input", path, "int64", "'id'"):
        extract([path], tmp_path / "out", text_column="id")
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(path.read_bytes()))
    with helpers.refused("damaged-input", tmp_path / "b.parquet.gz"):
        extract([tmp_path / "b.parquet.gz"], tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        (b'<doc title="a">\na\nText.\n', "damaged-input", "<doc> of line 1"),
        (b'<doc title="a">\na\n<doc title="b">\nText.\n</doc>\n', "damaged-input", "line 3 of {}"),
        (b'<doc title="a">\na\nText.\n</doc>\nstray\n', "damaged-input", "line 5 of {}"),
        (b'<doc title="a">\na\n</doc>\n</doc>\n', "damaged-input", "line 4 of {}"),
        (b"\x89PNG\r\n\x1a\n\0\0", "damaged-input", "{}"),
        (b"<mediawiki>\n</mediawiki>\n", "damaged-input", "page"),
        (b"<mediawiki><page><title>x</page></mediawiki>", "damaged-input", "page 1 of {}"),
        (b'[{"text": "One."}, {"text": "Two."}]\n', "damaged-input", "one object per line"),
        (b'{\n "text": "One."\n}\n', "damaged-input", "one object per line"),
        (b"", "no-document", "empty"),
        (b"\n\n \n", "no-document", ""),
    ],
)
def test_not_what_it_seems(tmp_path: Path, content: bytes, code: str, named: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with helpers.refused(code, named.format(tmp_path / "a")):
        extract([tmp_path / "a"], tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("form", ["dump", "jsonl", "text", "wikiextractor"])
def test_a_giant_record_does_not_fill_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(bertrain.data.text.records, "LARGEST_RECORD", 10_000)
    contents = {
        "dump": b"<page>" + b"x" * 1_100_000,
        "jsonl": b'{"text": "' + b"x" * 30_000 + b'"}\n' + json.dumps({"text": "Good."}).encode(),
        "text": b"a line\n" * 3000 + b"\nGood.\n",
        "wikiextractor": b'<doc title="a">\na\n' + b"x" * 30_000 + b'\n</doc>\n<doc title="b">\nb\nGood.\n</doc>\n',
    }
    (tmp_path / "a").write_bytes(contents[form])
    with helpers.refused("damaged-input", tmp_path / "a", "0 MiB"):
        extract([tmp_path / "a"], tmp_path / "out", form=form)
    if form != "dump":
        extract([tmp_path / "a"], tmp_path / "out", form=form, on_error="skip")
        assert documents_of(text_of(tmp_path / "out"))[-1] == ["Good."]


@settings(max_examples=80)
@given(
    content=st.binary(max_size=300),
    form=st.sampled_from(["auto", "dump", "wikiextractor", "jsonl", "csv", "parquet", "arrow", "text"]),
    packing=st.sampled_from([bytes, gzip.compress, bz2.compress, lzma.compress]),
    encoding=st.sampled_from(["auto", "utf-16", "shift_jis", "utf-7"]),
)
def test_arbitrary_bytes_end_in_a_sentence_or_in_text(
    tmp_path_factory: pytest.TempPathFactory,
    content: bytes,
    form: str,
    packing: Callable[[bytes], bytes],
    encoding: str,
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    ending = {bytes: "", gzip.compress: ".gz", bz2.compress: ".bz2", lzma.compress: ".xz"}[packing]
    (folder / f"a{ending}").write_bytes(packing(content))
    with contextlib.suppress(UserError):
        made = extract([folder / f"a{ending}"], folder / "out", form=form, encoding=encoding, on_error="skip")
        assert made["counts"]["documents"] == len(documents_of(text_of(folder / "out")))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"hold_out": -1}, "--hold-out is -1"),
        ({"workers": 0}, "--workers is 0"),
    ],
)
def test_wrong_options(tmp_path: Path, option: dict[str, object], message: str) -> None:
    (tmp_path / "a").write_text("Text.\n")
    with helpers.refused("option-out-of-range", message):
        extract([tmp_path / "a"], tmp_path / "out", **option)  # type: ignore[arg-type]
