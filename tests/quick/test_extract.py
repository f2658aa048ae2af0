"""Sources to text: every form and packing, the real wikitext of a dump, hold-out, duplicates, workers."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertrain.base.errors import UserError
from bertrain.base.seeds import derive
from bertrain.data.text.extract import extract
from bertrain.data.text.parsing import split_sentences
from bertrain.data.text.wikipedia import NotAnArticle, Wiki, paragraphs_of_wikitext

SAMPLE = Path(__file__).parents[1] / "golden" / "enwik-sample.xml"
DUMP = SAMPLE.read_bytes()


def text_of(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "train").iterdir()))


def documents_of(text: str) -> list[list[str]]:
    return [block.split("\n") for block in text.split("\n\n") if block]


def test_a_real_dump(tmp_path: Path) -> None:
    made = extract([SAMPLE], tmp_path / "out")
    assert made["counts"]["documents"] == 5
    assert made["skipped"] == {"other namespace": 1, "redirect": 1}
    text = text_of(tmp_path / "out")
    mean, ampere, acetylene, allele, nitrite = documents_of(text)
    assert mean[4] == "If the set is a statistical sample, we call the resulting statistic a sample mean."
    assert ampere[:2] == [
        "The ampere (symbol: A) is the SI base unit of electric current equal to one coulomb per second.",
        "It is named after André-Marie Ampère, one of the main discoverers of electromagnetism.",
    ]
    assert acetylene[0].startswith("The chemical compound and unsaturated hydrocarbon acetylene, also known under")
    assert allele[5].endswith("which two alleles it possesses for this color gene, and how the two interact.")
    assert (
        nitrite[-1] == "When the liquid is dropped onto fused caustic potash (liquid KOH), it forms potassium valerate."
    )
    assert not any(
        mark in text for mark in ("[[", "]]", "{{", "}}", "{|", "''", "==", "<", "Image:", "Category:", "http")
    )


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "dump.xml": bytes,
    "dump": bytes,  # recognized by its content
    "dump.xml.gz": gzip.compress,
    "dump.xml.xz": lzma.compress,
    "dump.xml.zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    "dump.xml.bz2": bz2.compress,
    "multistream.xml.bz2": lambda data: b"".join(
        bz2.compress(data[at : at + 5000]) for at in range(0, len(data), 5000)
    ),
    "dump.tar": lambda data: archive({"folder/dump.xml": data}),
    "dump.tar.xz": lambda data: lzma.compress(archive({"dump.xml": data})),
    "dump.tgz": lambda data: gzip.compress(archive({"dump.xml.bz2": bz2.compress(data), ".hidden": b"nothing"})),
}


def archive(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("link.xml")
        link.type, link.linkname = tarfile.SYMTYPE, next(iter(members))
        tar.addfile(link)
    return packed.getvalue()


@pytest.mark.parametrize("name", PACKINGS)
def test_every_packing_gives_the_same_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(PACKINGS[name](DUMP))
    extract([tmp_path / name], tmp_path / "out")
    extract([SAMPLE], tmp_path / "plain")
    assert text_of(tmp_path / "out") == text_of(tmp_path / "plain")


DOCUMENTS = ["Dr. Smith came.  He saw\u00a0it.\nThe end.", "Second one.", "", "Third. A\u2028b."]
SENTENCES = [["Dr. Smith came.", "He saw it.", "The end."], ["Second one."], ["Third.", "A b."]]


def write_json_lines(path: Path) -> Path:
    path.write_text("".join(json.dumps({"id": n, "body": text}) + "\n" for n, text in enumerate(DOCUMENTS)))
    return path


def write_parquet(path: Path) -> Path:
    pyarrow.parquet.write_table(pa.table({"id": range(5), "body": [*DOCUMENTS, None]}), path)
    return path


def write_extracted(path: Path) -> Path:
    blocks = [f'<doc id="1" url="u" title="A &amp; B">\nA & B\n\n{text}\n</doc>\n' for text in DOCUMENTS]
    path.write_text("".join(blocks))
    return path


def write_text(path: Path) -> Path:
    path.write_text("\n\n\n".join(DOCUMENTS))
    return path


def write_prose(folder: Path) -> Path:
    folder.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_text(text.replace("\n", "\n\n").replace("He saw", "He\nsaw"))
    return folder


def test_every_form_gives_the_same_text(tmp_path: Path) -> None:
    for number, (inputs, options) in enumerate(
        [
            (write_json_lines(tmp_path / "a.jsonl"), {"text_column": "body"}),
            (write_json_lines(tmp_path / "no-ending"), {"text_column": "body"}),
            (write_parquet(tmp_path / "a.parquet"), {"text_column": "body"}),
            (write_extracted(tmp_path / "wiki_00"), {}),
            (write_text(tmp_path / "a.txt"), {}),
            (write_prose(tmp_path / "prose"), {"document_end": "file"}),
        ]
    ):
        out = tmp_path / f"out-{number}"
        extract([inputs], out, **options)
        assert documents_of(text_of(out)) == SENTENCES, inputs


def test_our_own_text_comes_out_as_it_went_in(tmp_path: Path) -> None:
    extract([SAMPLE], tmp_path / "once")
    extract([tmp_path / "once" / "train"], tmp_path / "again", sentences="lines")
    assert text_of(tmp_path / "again") == text_of(tmp_path / "once")


lines = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=12)


@settings(max_examples=60)
@given(
    documents=st.lists(st.lists(lines, min_size=1, max_size=3), min_size=1, max_size=12),
    part_bytes=st.integers(1, 200),
    hold_out=st.integers(0, 3),
    deduplicate=st.booleans(),
    min_characters=st.integers(0, 12),
)
def test_writing_against_a_plain_twin(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[str]],
    part_bytes: int,
    hold_out: int,
    deduplicate: bool,
    min_characters: int,
) -> None:
    folder = tmp_path_factory.mktemp("twin")
    (folder / "in.txt").write_text("\n\n".join("\n".join(document) for document in documents))
    kept = [document for document in documents if len("".join(document)) >= min_characters]
    if deduplicate:
        kept = [document for number, document in enumerate(kept) if document not in kept[:number]]
    draws = {number: derive(12345, "hold-out", number) for number in range(len(kept))}
    held = set(sorted(draws, key=lambda number: draws[number])[:hold_out])

    def run() -> None:
        extract(
            [folder / "in.txt"],
            folder / "out",
            form="text",
            sentences="lines",
            part_bytes=part_bytes,
            hold_out=hold_out,
            deduplicate=deduplicate,
            min_characters=min_characters,
        )

    if len(kept) <= hold_out:
        with pytest.raises(UserError):
            run()
        assert not (folder / "out").exists()
        return
    run()
    assert documents_of(text_of(folder / "out")) == [document for n, document in enumerate(kept) if n not in held]
    held_text = (folder / "out" / "eval.txt").read_text() if hold_out else ""
    assert documents_of(held_text) == [kept[number] for number in sorted(held)]
    for part in (folder / "out" / "train").iterdir():
        whole = part.read_bytes()
        assert whole.endswith(b"\n\n")
        assert len(whole[:-2].rpartition(b"\n\n")[0]) < part_bytes


@settings(max_examples=300)
@given(
    st.text(
        st.one_of(st.sampled_from(" .!?\"'()[]A.B1\u2028\u00a0\u3000\n"), st.characters(codec="utf-8")), max_size=60
    ),
    st.sampled_from(["en", "de", "fr", "ja", "xx"]),
)
def test_splitting_loses_no_letter(text: str, language: str) -> None:
    sentences = split_sentences([text], splitter="sentencex", language=language)
    assert [c for c in "".join(sentences) if c.isalnum()] == [c for c in text if c.isalnum()]
    assert all(sentence == " ".join(sentence.split()) for sentence in sentences)
    assert split_sentences([text], splitter="none") == [" ".join(text.split())] * bool(text.split())


WIKI = Wiki.from_header(b'<mediawiki><namespace key="6">Datei</namespace><namespace key="1">Diskussion</namespace>')


@pytest.mark.parametrize(
    ("wikitext", "paragraphs"),
    [
        ("'''Bold''' and ''italic''.", ["Bold and italic."]),
        ("One\nline.\n\nTwo.", ["One line.", "Two."]),
        ("== Heading ==\nText.", ["Text."]),
        ("A [[link]], a [[page|piped one]] and [[plural]]s.", ["A link, a piped one and plurals."]),
        ("[[Datei:a.jpg|thumb|A [[cat]]]]Text.[[Category:X]]\n[[fr:Texte]]", ["Text."]),
        ("See [[:Category:X]].", ["See Category:X."]),
        ("Fact.<ref name=a>Source {{cite|x}}</ref> More.<ref name=a/>", ["Fact. More."]),
        ("{{Infobox|a={{b}}|c=[[d]]}}\nText (born {{birth|1}}).", ["Text (born )."]),
        ("Text ({{IPA|x}}; {{lang|el|ὕδωρ}}) is.", ["Text (ὕδωρ) is."]),
        ("It is {{convert|5|km|mi}} long.", ["It is 5 km long."]),
        ("Before.\n{| class=x\n| cell\n|}\nAfter.", ["Before.", "After."]),
        ("Text:\n* one\n* two\n# three\n: four\nEnd.", ["Text:", "End."]),
        ("Text.\n int main() { }\nEnd.", ["Text.", "End."]),
        ("A&nbsp;b &amp; c &#8211; d<br/>e<!-- hidden -->.", ["A b & c – d e."]),
        ("Left {{open\n\nand [[open too.", ["and open too."]),
        ("[http://x.y a site] and http://z.w", ["a site and"]),
        ("Area <math>x^2</math> <sup>2</sup> <div>x</div>__NOTOC__", ["Area 2"]),
        ("&#xD800;a", ["a"]),
    ],
)
def test_wikitext(wikitext: str, paragraphs: list[str]) -> None:
    assert [" ".join(text.split()) for text in paragraphs_of_wikitext(wikitext, WIKI)] == paragraphs


MARKS = [
    "[[",
    "]]",
    "{{",
    "}}",
    "{|",
    "|}",
    "|",
    "\n",
    "*",
    "''",
    "<ref>",
    "</ref>",
    "<br>",
    "&#9",
    ";",
    "==",
    "a",
    " ",
]


@settings(max_examples=150)
@given(st.lists(st.sampled_from(MARKS), max_size=40).map("".join))
def test_no_wikitext_breaks_the_parser(wikitext: str) -> None:
    text = "".join(paragraphs_of_wikitext(wikitext, WIKI))
    assert not any(mark in text for mark in ("[[", "{{", "{|", "\0", "\n"))


@pytest.mark.parametrize("mark", ["<b>", "<a ", '<b x="', "<!--", "[http://a ", "<ref>{{a|"])
def test_a_page_of_unclosed_marks_is_skipped_before_it_takes_minutes(mark: str) -> None:
    wiki = Wiki.from_header(b"<mediawiki>")
    with pytest.raises(NotAnArticle):
        paragraphs_of_wikitext(mark * 20_000, wiki)
    assert paragraphs_of_wikitext("Words <b>of</b> a page.<br>" * 2000 + "\n\n" + mark * 50, wiki)


def test_a_seed_without_documents_to_hold_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n")
    with pytest.raises(UserError, match="--hold-out-seed needs --hold-out"):
        extract([tmp_path / "a.txt"], tmp_path / "out", hold_out_seed=5)
    assert not (tmp_path / "out").exists()
