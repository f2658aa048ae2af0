"""Text to shards: documents, pairs, what is on disk, and that it comes out as it went in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertrain.data.examples import pairs_of_documents
from bertrain.data.prepare import prepare
from bertrain.data.shards import Shards
from bertrain.data.text import find_inputs, read_documents
from bertrain.data.tokenizer import Tokenizer, Vocabulary
from bertrain.data.write import Example, write_shards
from bertrain.files import file_digest
from tests import helpers

documents_of_tokens = st.lists(
    st.lists(st.lists(st.integers(5, 99), min_size=1, max_size=30), min_size=1, max_size=12), min_size=2, max_size=10
)


def test_documents(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"one\n two \n\n\n\nthree\r\n")
    (tmp_path / "a.txt").write_bytes(b"\n\nzero \xff\n")
    (tmp_path / ".hidden").write_text("no\n")
    assert list(read_documents(find_inputs([tmp_path]))) == [["zero \ufffd"], ["one", "two"], ["three"]]


@given(documents=documents_of_tokens, seed=st.integers(0, 50), max_seq_length=st.integers(8, 64))
def test_pairs_fit_and_are_not_empty(documents: list, seed: int, max_seq_length: int) -> None:
    for pair in pairs_of_documents(documents, max_seq_length=max_seq_length, short_seq_prob=0.3, seed=seed):
        assert pair.a
        assert pair.b
        assert len(pair.a) + len(pair.b) + 3 <= max_seq_length


def test_pairs_say_the_truth_about_the_next_sentence() -> None:
    """Each document counts upwards from its own thousand: true pairs go on counting, random ones change thousand."""
    documents = [[[1000 * d + 4 * s + t for t in range(4)] for s in range(40)] for d in range(50)]
    pairs = list(pairs_of_documents(documents, max_seq_length=40, short_seq_prob=0.1, seed=1, block_size=20))
    for pair in pairs:
        if pair.is_random:
            assert pair.a[0] // 1000 != pair.b[0] // 1000
        else:
            # truncation may have taken tokens off either side of the seam, never off the order
            assert pair.a[0] // 1000 == pair.b[0] // 1000
            assert pair.a[-1] < pair.b[0]
        for segment in (pair.a, pair.b):
            assert segment == list(range(segment[0], segment[0] + len(segment)))
    share = np.mean([pair.is_random for pair in pairs])
    assert abs(share - 0.5) < 4 * 0.5 / len(pairs) ** 0.5
    used = {token for pair in pairs for token in pair.a}
    assert len(used) > 0.4 * 50 * 160, "the unused sentences of a random pair come again"
    lengths = np.array([len(pair.a) + len(pair.b) + 3 for pair in pairs])
    assert (lengths == 40).mean() > 0.6


def test_pairs_of_a_document_do_not_depend_on_the_others_pairs() -> None:
    documents = [[[d * 100 + s] * 6 for s in range(10)] for d in range(6)]
    alike = [pairs_of_documents(documents, max_seq_length=32, short_seq_prob=0.1, seed=s) for s in (1, 1, 2)]
    one, same, other = (list(pairs) for pairs in alike)
    assert one == same
    assert one != other


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
        tokens = shards.gather(np.array([row]))
        split = int(shards.segment_b(np.array([row]))[0])
        assert tokens[0] == words.id_of("[CLS]")
        assert tokens[split - 1] == tokens[-1] == words.id_of("[SEP]")
        assert (tokens == words.id_of("[SEP]")).sum() == 2


def test_others_can_read_the_shards(tmp_path: Path) -> None:
    table = pa.ipc.open_file(helpers.make_data(tmp_path) / "shard-00000.arrow").read_all()
    assert table.schema.names == ["tokens", "segment_b", "is_random"]
    assert table.schema.field("tokens").type == pa.list_(pa.uint16())


def test_the_same_text_gives_the_same_bytes(tmp_path: Path) -> None:
    one, other = helpers.make_data(tmp_path / "1"), helpers.make_data(tmp_path / "2")
    assert (one / "manifest.json").read_bytes() == (other / "manifest.json").read_bytes()


@pytest.mark.parametrize(("extra", "token_type"), [(0, pa.uint16()), (70_000, pa.uint32())])
def test_vocabularies_beyond_65535_words(tmp_path: Path, extra: int, token_type: pa.DataType) -> None:
    vocabulary = Vocabulary((*helpers.SPECIAL, *(f"w{n}" for n in range(extra + 10))), lower_case=True)
    last = len(vocabulary.words) - 1
    examples = [Example([2, last, 3, 7, 3], 3, True), Example([2, 6, 3, last, last, 3], 3, False)]
    write_shards(tmp_path / "data", examples, vocabulary, preparation={}, rows_per_shard=9)
    shards = Shards.open(tmp_path / "data")
    assert shards.gather(np.array([1, 0])).tolist() == [2, 6, 3, last, last, 3, 2, last, 3, 7, 3]
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
