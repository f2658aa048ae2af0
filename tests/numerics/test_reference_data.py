"""`data prepare --reference` against MLPerf's own output, and against a plain twin of its script on anything else."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertrain.data.prepare import prepare as prepare_module
from bertrain.data.prepare.prepare import prepare
from bertrain.data.prepare.reference import shuffle
from bertrain.data.text.vocabulary import Vocabulary
from tests import helpers, plain_reference

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"

LINES = [
    b"bato kese, LIDA.",
    b"b\xc3\xa4to mo\xcc\x81da xyz \xe6\x9d\xb1\xe4\xba\xac",
    b"kese\rlito\tmoda" * 3,
    b"ketose " * 25,
    b"\xff\xfe bato \x00 kese\xc3",
    b"bato\xe2\x80\xa8kese",
    b"",
    b"",
    b" \t ",
    b"\xff",
    b"\x1c",
    b"\x07",
    b"\r",
]
texts = st.lists(st.sampled_from(LINES), max_size=40).map(b"\n".join)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    shards = sorted(folder.glob("shard-*.arrow"))
    return [row for shard in shards for row in pa.ipc.open_file(shard).read_all().to_pylist()]


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the reference's output is not here (shared/golden)")
@pytest.mark.parametrize(("max_seq_length", "max_predictions"), [(128, 20), (512, 76)])
def test_equal_to_the_reference_script(tmp_path: Path, max_seq_length: int, max_predictions: int) -> None:
    prepare(
        [GOLDEN / "wiki_00.txt"],
        tmp_path / "data",
        max_seq_length=max_seq_length,
        max_predictions=max_predictions,
        dupe_factor=2,
        seed=12345,
        reference=True,
        rows_per_shard=1000,
    )
    golden = np.load(GOLDEN / f"wiki_00-{max_seq_length}-{max_predictions}-d2-s12345.npz")
    made = {name: np.zeros_like(golden[name]) for name in golden}
    for number, row in enumerate(read_rows(tmp_path / "data")):
        length, predictions = len(row["tokens"]), len(row["mlm_positions"])
        made["input_ids"][number, :length] = row["tokens"]
        made["input_mask"][number, :length] = 1
        made["segment_ids"][number, row["segment_b"] : length] = 1
        made["masked_lm_positions"][number, :predictions] = row["mlm_positions"]
        made["masked_lm_ids"][number, :predictions] = row["mlm_labels"]
        made["next_sentence_labels"][number] = row["is_random"]
    for name in golden:
        assert np.array_equal(made[name], golden[name]), name


@settings(max_examples=60)
@given(
    contents=st.lists(texts, min_size=1, max_size=3),
    seed=st.integers(0, 1 << 40),
    max_seq_length=st.integers(8, 70),
    max_predictions=st.integers(1, 12),
    masked_lm_prob=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    short_seq_prob=st.sampled_from([0.0, 0.1, 1.0]),
    dupe_factor=st.integers(1, 3),
    per_file=st.booleans(),
    lower_case=st.booleans(),
)
def test_equal_to_the_plain_twin(
    contents: list[bytes], seed: int, per_file: bool, lower_case: bool, dupe_factor: int, **numbers: Any
) -> None:
    with tempfile.TemporaryDirectory() as folder_name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "UNKNOWN_LIMIT", 1.0)  # these texts may be of nothing but unknown words
        folder = Path(folder_name)
        vocab = helpers.write_vocabulary(folder / "vocab.txt")
        words = Vocabulary.load(vocab).words
        files = [folder / f"part-{number}" for number in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content + b"\nbato kese lida moda")  # a word at least, and no newline at the end
        prepare(
            files,
            folder / "data",
            vocab=vocab,
            lower_case=lower_case,
            seed=seed,
            dupe_factor=dupe_factor,
            reference=True,
            per_file=per_file,
            rows_per_shard=7,
            **numbers,
        )
        numbered = {word: number for number, word in enumerate(words)}
        expected = [
            instance
            for group in ([[file] for file in files] if per_file else [files])
            for instance in plain_reference.instances(
                group, numbered, lower_case=lower_case, seed=seed, dupe_factor=dupe_factor, **numbers
            )
        ]
        made = read_rows(folder / "data")
        assert len(made) == len(expected)
        for row, instance in zip(made, expected, strict=True):
            assert [words[token] for token in row["tokens"]] == instance.words
            assert [words[token] for token in row["mlm_labels"]] == instance.labels
            assert row["mlm_positions"] == instance.positions
            assert (row["segment_b"], row["is_random"]) == (instance.segment_b, instance.is_random)


@given(length=st.integers(0, 600), seed=st.integers(0, 1000))
def test_shuffles_are_pythons_to_the_last_bit(length: int, seed: int) -> None:
    theirs, ours = random.Random(seed), random.Random(seed)
    expected, made = list(range(length)), list(range(length))
    theirs.shuffle(expected)
    shuffle(made, ours)
    assert made == expected
    assert ours.getstate() == theirs.getstate()
