"""Text to shards: documents, pairs, what is on disk, and that it comes out as it went in."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.base.extras import is_installed
from bertrain.base.files import file_digest
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.shards import Shards
from bertrain.data.prepare.examples import Pair, TokenText, block_of_pairs, draw_pairs, full_sentences
from bertrain.data.prepare.prepare import prepare
from bertrain.data.text.documents import LONGEST_DOCUMENT, find_inputs, plan_units, read_documents
from bertrain.data.text.tokenizer import Tokenizer
from bertrain.data.text.vocabulary import Vocabulary
from tests import helpers

documents_of_tokens = st.lists(
    st.lists(st.lists(st.integers(5, 99), min_size=1, max_size=30), min_size=1, max_size=12), min_size=2, max_size=10
)
CLS, SEP = 2, 3


def token_text(documents: list[list[list[int]]]) -> TokenText:
    sentences = [sentence for document in documents for sentence in document]
    return TokenText(
        np.array([token for sentence in sentences for token in sentence], np.uint16),
        array("q", [0, *np.cumsum([len(sentence) for sentence in sentences]).tolist()]),
        array("q", [0, *np.cumsum([len(document) for document in documents]).tolist()]),
    )


def words_of(text: TokenText, pair: Pair) -> tuple[list[int], list[int]]:
    return text.tokens[pair.a_start : pair.a_stop].tolist(), text.tokens[pair.b_start : pair.b_stop].tolist()


def test_documents(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"one\n two \n\n\n\nthree\r\n")
    (tmp_path / "a.txt").write_bytes(b"\n\nzero \n \xc2\xa0 \nafter a line of nothing but spaces")
    (tmp_path / ".hidden").write_text("no\n")
    found = list(read_documents(find_inputs([tmp_path])))
    assert found == [["zero"], ["after a line of nothing but spaces"], ["one", "two"], ["three"]]


@given(
    pieces=st.lists(st.sampled_from([b"a b\n", b"\n", b" \r\n", b"\x1c\n", b"long " * 9 + b"\n", b"\xff\n", b"x"])),
    unit_bytes=st.integers(1, 80),
)
def test_units_are_whole_documents_and_all_of_them(pieces: list[bytes], unit_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        path.write_bytes(b"".join(pieces))
        units = plan_units([path], unit_bytes)
        spans = [span for unit in units for span in unit]
        content = path.read_bytes()
        assert b"".join(content[span.start : span.stop] for span in spans) == content
        for span in spans[:-1]:
            lines = content[span.start : span.stop].split(b"\n")
            assert lines[-1] == b"", "a span ends with a line"
            too_long = span.stop - span.start >= LONGEST_DOCUMENT * unit_bytes
            assert too_long or not lines[-2].decode(errors="ignore").strip(), "and that line is blank"


@given(documents=documents_of_tokens, seed=st.integers(0, 50), max_seq_length=st.integers(8, 64))
def test_pairs_fit_and_are_not_empty(documents: list, seed: int, max_seq_length: int) -> None:
    text = token_text(documents)
    pairs = list(draw_pairs(text, max_seq_length=max_seq_length, short_seq_prob=0.3, seed=seed))
    rows = block_of_pairs(text.tokens, pairs, CLS, SEP)
    assert len(rows) == len(pairs)
    for number, pair in enumerate(pairs):
        a, b = words_of(text, pair)
        assert a
        assert b
        row = rows.tokens[rows.offsets[number] : rows.offsets[number + 1]].tolist()
        assert row == [CLS, *a, SEP, *b, SEP]
        assert len(row) <= max_seq_length
        assert rows.segment_b[number] == len(a) + 2


@given(documents=documents_of_tokens, seed=st.integers(0, 50), max_seq_length=st.integers(8, 64))
def test_full_sentences_hold_every_word_once(documents: list, seed: int, max_seq_length: int) -> None:
    text = token_text(documents)
    tokens, pairs = full_sentences(text, SEP, max_seq_length=max_seq_length, seed=seed)
    rows = block_of_pairs(tokens, list(pairs), CLS, SEP)
    lengths = np.diff(rows.offsets)
    assert lengths.max() <= max_seq_length
    assert (rows.segment_b == lengths).all()
    assert not rows.is_random.any()
    assert sorted(rows.tokens[rows.tokens > SEP].tolist()) == sorted(text.tokens.tolist())
    # each row begins with a sentence, or goes on with one that is longer than a row
    starts = {tuple(sentence[: max_seq_length - 2]) for document in documents for sentence in document}
    longest = max(len(sentence) for document in documents for sentence in document)
    for first, stop in itertools.pairwise(rows.offsets.tolist()):
        words = rows.tokens[first + 1 : stop - 1].tolist()
        assert any(tuple(words[: len(start)]) == start for start in starts) or longest > max_seq_length - 2
        assert words[0] != SEP
        assert words[-1] != SEP


def test_full_sentences_put_a_separator_between_documents() -> None:
    text = token_text([[[10, 11], [12]], [[20], [21, 22, 23]]])
    tokens, pairs = full_sentences(text, SEP, max_seq_length=8, seed=3)
    rows = block_of_pairs(tokens, list(pairs), CLS, SEP)
    made = [rows.tokens[a:b].tolist() for a, b in itertools.pairwise(rows.offsets.tolist())]
    assert made in (
        [[2, 10, 11, 12, 3, 20, 3], [2, 21, 22, 23, 3]],
        [[2, 20, 21, 22, 23, 3], [2, 10, 11, 12, 3]],
    )


def test_pairs_say_the_truth_about_the_next_sentence() -> None:
    """Each document counts upwards from its own thousand: true pairs go on counting, random ones change thousand."""
    documents = [[[1000 * d + 4 * s + t for t in range(4)] for s in range(40)] for d in range(50)]
    text = token_text(documents)
    pairs = list(draw_pairs(text, max_seq_length=40, short_seq_prob=0.1, seed=1))
    used = set()
    for pair in pairs:
        a, b = words_of(text, pair)
        used.update(a)
        if pair.is_random:
            assert a[0] // 1000 != b[0] // 1000
        else:
            # truncation may have taken tokens off either side of the seam, never off the order
            assert a[0] // 1000 == b[0] // 1000
            assert a[-1] < b[0]
        for segment in (a, b):
            assert segment == list(range(segment[0], segment[0] + len(segment)))
    share = np.mean([pair.is_random for pair in pairs])
    assert abs(share - 0.5) < 4 * 0.5 / len(pairs) ** 0.5
    assert len(used) > 0.4 * 50 * 160, "the unused sentences of a random pair come again"
    lengths = np.array([pair.a_stop - pair.a_start + pair.b_stop - pair.b_start + 3 for pair in pairs])
    assert (lengths == 40).mean() > 0.6


def test_pairs_of_a_document_depend_on_the_seed_and_its_number() -> None:
    text = token_text([[[d * 100 + s] * 6 for s in range(10)] for d in range(6)])

    def drawn(seed: int, first_number: int) -> list[Pair]:
        return list(draw_pairs(text, max_seq_length=32, short_seq_prob=0.1, seed=seed, first_number=first_number))

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(2, 0)
    assert drawn(1, 0) != drawn(1, 6)


def test_manifest_and_shards_tell_the_truth(tmp_path: Path) -> None:
    text = helpers.write_corpus(tmp_path / "text.txt")
    vocab = helpers.write_vocabulary(tmp_path / "vocab.txt")
    prepare([text], tmp_path / "data", vocab=vocab, max_seq_length=64, rows_per_shard=30)
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    shards = Shards.open(tmp_path / "data")
    assert len(manifest["files"]) == -(-len(shards) // 30)
    assert manifest["rows"] == len(shards)
    assert manifest["tokens"] == shards.lengths.sum()
    histogram = np.bincount(shards.lengths)
    assert manifest["length_histogram"] == {str(n): int(histogram[n]) for n in np.flatnonzero(histogram)}
    for file in manifest["files"]:
        assert (file["bytes"], file["sha256"]) == file_digest(tmp_path / "data" / file["name"])
    words = shards.vocabulary
    for row in range(len(shards)):
        tokens = shards.read(np.array([row])).tokens
        split = int(shards.read(np.array([row])).segment_b[0])
        assert tokens[0] == words.id_of("[CLS]")
        assert tokens[split - 1] == tokens[-1] == words.id_of("[SEP]")
        assert (tokens == words.id_of("[SEP]")).sum() == 2


def test_others_can_read_the_shards(tmp_path: Path) -> None:
    """With the lines of docs/how-to-other-layouts.md, the last one where `datasets` is installed."""
    data = helpers.make_data(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "how-to-other-layouts.md").read_text(encoding="utf-8")
    (lines,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "datasets.Dataset" in block]
    if not is_installed("datasets"):
        lines = lines.replace("import datasets\n", "").replace("datasets.Dataset(table)", "table")
    names: dict[str, Any] = {}
    exec(lines.replace('Path("data")', f"Path({str(data)!r})"), names)
    assert names["dataset"].column_names == ["tokens", "segment_b", "is_random"]
    assert names["dataset"].num_rows == json.loads((data / "manifest.json").read_text())["rows"]
    assert names["table"].schema.field("tokens").type == pa.list_(pa.uint16())


def test_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    one, other = helpers.make_data(tmp_path / "1"), helpers.make_data(tmp_path / "2")
    assert (one / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()


@pytest.mark.parametrize(("extra", "token_type"), [(0, pa.uint16()), (70_000, pa.uint32())])
def test_vocabularies_beyond_65535_words(tmp_path: Path, extra: int, token_type: pa.DataType) -> None:
    vocabulary = Vocabulary((*helpers.SPECIAL, *(f"w{n}" for n in range(extra + 10))), lower_case=True)
    last = len(vocabulary.words) - 1
    examples = [helpers.example([2, last, 3, 7, 3], 3, True), helpers.example([2, 6, 3, last, last, 3], 3, False)]
    helpers.write_examples(tmp_path / "data", examples, vocabulary)
    shards = Shards.open(tmp_path / "data")
    assert shards.read(np.array([1, 0])).tokens.tolist() == [2, 6, 3, last, last, 3, 2, last, 3, 7, 3]
    assert shards.is_random(np.array([1, 0])).tolist() == [0, 1]
    assert pa.ipc.open_file(tmp_path / "data" / "shard-00000.arrow").schema.field("tokens").type == pa.list_(token_type)


def test_tokenizer_follows_bert() -> None:
    """Case, accents, punctuation, ideographs, control characters, over-long words, no special word from text."""
    vocabulary = Vocabulary.load()
    assert len(vocabulary.words) == 30522
    (tokens,) = Tokenizer(vocabulary).encode(["Résumé of [MASK] 東京\u0007, Embeddings " + "a" * 201])
    expected = "resume of [ mask ] 東 京 , em ##bed ##ding ##s [UNK]"
    assert " ".join(vocabulary.words[token] for token in tokens) == expected
    assert vocabulary.continues_word.sum() == sum(word.startswith("##") for word in vocabulary.words)


def test_cased_text_with_an_uncased_vocabulary_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = helpers.write_corpus(tmp_path / "text.txt")
    vocab = helpers.write_vocabulary(tmp_path / "vocab.txt")
    prepare([text], tmp_path / "folded", vocab=vocab, max_seq_length=64)
    assert "--cased" not in capsys.readouterr().err
    prepare([text], tmp_path / "cased", vocab=vocab, max_seq_length=64, lower_case=False)
    assert "leave --cased out" in helpers.unwrapped(capsys.readouterr().err)


def test_copies_draw_anew(tmp_path: Path) -> None:
    text = helpers.write_corpus(tmp_path / "text.txt")
    vocab = helpers.write_vocabulary(tmp_path / "vocab.txt")
    prepare([text], tmp_path / "one", vocab=vocab, max_seq_length=64)
    prepare([text], tmp_path / "two", vocab=vocab, max_seq_length=64, dupe_factor=2)
    one, two = Shards.open(tmp_path / "one"), Shards.open(tmp_path / "two")
    first = np.arange(len(one))
    assert (one.read(first).tokens == two.read(first).tokens).all(), "the first copy is what one copy is"
    again = np.arange(len(one), len(two))
    assert abs(len(again) / len(first) - 1) < 0.2
    assert two.read(again).tokens.tolist() != one.read(first).tokens.tolist()


def test_the_trainer_takes_full_sentences_without_next_sentence_prediction(tmp_path: Path) -> None:
    text = helpers.write_corpus(tmp_path / "text.txt")
    vocab = helpers.write_vocabulary(tmp_path / "vocab.txt")
    prepare([text], tmp_path / "data", vocab=vocab, max_seq_length=64, full_sentences=True)
    shards = Shards.open(tmp_path / "data")
    rows = np.arange(len(shards))
    assert (shards.read(rows).segment_b == shards.lengths).all()
    (step,) = Loader(shards, helpers.tiny_settings(model__nsp=False)).steps(0, 0, 1)
    assert not any(batch.segment_ids.any() for batch in step.bins)
    with helpers.refused("no-next-sentence", "--model.nsp false"):
        Loader(shards, helpers.tiny_settings())
