"""Every layout into every other: nothing is lost, names sort, fields are those that other trainers read."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertrain.base.errors import UserError
from bertrain.config.choices import Target
from bertrain.data.formats import tfrecord
from bertrain.data.formats.block import Block
from bertrain.data.formats.convert import bin_by_length, convert, eval_set, shard_sizes
from bertrain.data.formats.inspect import inspect_data, lines_of, parse_rows
from bertrain.data.formats.source import DataSource, open_data
from bertrain.data.formats.verify import verify
from bertrain.data.text.vocabulary import SPECIAL_WORDS, Vocabulary
from tests import helpers

MASKED = ("hdf5-fixed", "hdf5-varlength", "tfrecord")  # in these each record is one row
SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "tfrecord"


def rows_of(source: DataSource) -> list[dict[str, Any]]:
    return helpers.examples_of(source.read(np.arange(len(source))))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith(".") and path.name != "vocab.txt")


def arrays_of(record: bytes) -> dict[str, np.ndarray]:
    return {name: tfrecord.stack(name, [feature])[0] for name, feature in tfrecord.parse_example(record).items()}


@pytest.fixture(scope="module")
def unmasked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.make_data(tmp_path_factory.mktemp("unmasked"))


@pytest.fixture(scope="module")
def masked(unmasked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrow with masks of its own."""
    folder = tmp_path_factory.mktemp("masked")
    convert(unmasked, folder / "fixed", to="hdf5-fixed", seed=3)
    convert(folder / "fixed", folder / "data", to="arrow")
    return folder / "data"


# --- to and fro -----------------------------------------------------------------------------------------


@st.composite
def examples(draw: st.DrawFn, num_words: int) -> list[Block]:
    made = []
    for _ in range(draw(st.integers(1, 12))):
        length = draw(st.integers(3, 20))
        words = st.integers(0, num_words - 1)
        positions = sorted(draw(st.sets(st.integers(1, length - 1), max_size=5)))
        made.append(
            helpers.example(
                draw(st.lists(words, min_size=length, max_size=length)),
                draw(st.integers(0, length)),
                draw(st.booleans()),
                positions,
                [draw(words) for _ in positions],
            )
        )
    return made


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_round_trips_lose_nothing(tmp_path: Path, data: st.DataObject) -> None:
    words = Vocabulary((*SPECIAL_WORDS, *(f"w{number}" for number in range(95))), lower_case=True)
    made = data.draw(examples(100))
    shards = data.draw(st.integers(1, len(made)))
    shutil.rmtree(tmp_path, ignore_errors=True)
    helpers.write_examples(tmp_path / "0", made, words, max_seq_length=20, rows_per_shard=5)
    expected = rows_of(open_data(tmp_path / "0"))
    assert expected == [row for one in made for row in helpers.examples_of(one)]
    chain = data.draw(st.permutations((*MASKED, "arrow")))
    for number, layout in enumerate(chain):
        written = convert(tmp_path / str(number), tmp_path / str(number + 1), to=layout, shards=shards)
        source = open_data(tmp_path / str(number + 1))
        assert (source.layout, source.vocabulary) == (layout, words)
        assert (written.rows, written.files) == (len(made), shards)
        assert rows_of(source) == expected
    last = tmp_path / str(len(chain))
    packed = convert(last, tmp_path / "packed", to="hdf5-packed")
    assert packed.records <= packed.rows
    by_content = json.dumps
    assert sorted(map(by_content, rows_of(open_data(tmp_path / "packed")))) == sorted(map(by_content, expected))
    convert(last, tmp_path / "per-length", to="hdf5-per-length")
    in_order_of_length = sorted(expected, key=lambda row: len(row["tokens"]))
    assert rows_of(open_data(tmp_path / "per-length")) == in_order_of_length


def test_words_beyond_two_bytes(tmp_path: Path) -> None:
    words = Vocabulary((*SPECIAL_WORDS, *(f"w{number}" for number in range(70_000))), lower_case=True)
    made = [helpers.example([2, 69_999, 65_536, 3], 4, False, [1, 2], [65_535, 70_004])]
    helpers.write_examples(tmp_path / "arrow", made, words)
    for layout in (*MASKED, "hdf5-packed"):
        convert(tmp_path / "arrow", tmp_path / layout, to=layout)
        assert rows_of(open_data(tmp_path / layout)) == rows_of(open_data(tmp_path / "arrow"))
    with h5py.File(tmp_path / "hdf5-fixed" / "part_00000_of_00001.hdf5") as file:
        assert file["input_ids"].dtype == np.int32


def test_rows_are_read_in_any_order_from_any_layout(masked: Path, tmp_path: Path) -> None:
    expected = rows_of(open_data(masked))
    chosen = np.random.default_rng(0).permutation(len(expected))[:60]
    for layout in MASKED:
        convert(masked, tmp_path / layout, to=layout, shards=7)
        found = helpers.examples_of(open_data(tmp_path / layout).read(chosen))
        assert found == [expected[row] for row in chosen], layout


def test_unmasked_rows_get_masks_from_the_seed(unmasked: Path, tmp_path: Path) -> None:
    plain = rows_of(open_data(unmasked))
    for name, seed, layout in (("a", 3, "tfrecord"), ("b", 3, "hdf5-varlength"), ("c", 4, "tfrecord")):
        written = convert(unmasked, tmp_path / name, to=layout, seed=seed, max_predictions=6)
        assert (written.masks, written.max_predictions) == ("drawn", 6)
    a, b, c = (rows_of(open_data(tmp_path / name)) for name in "abc")
    assert a == b
    assert a != c
    changed = 0
    for before, after in zip(plain, a, strict=True):
        assert len(after["positions"]) == min(6, max(1, round(0.15 * len(before["tokens"]))))
        tokens = list(after["tokens"])
        for position, label in zip(after["positions"], after["labels"], strict=True):
            changed += tokens[position] != label
            tokens[position] = label
        assert tokens == before["tokens"]
    assert changed > len(plain)


def test_arrow_of_unmasked_rows_stays_unmasked(unmasked: Path, tmp_path: Path) -> None:
    assert convert(unmasked, tmp_path / "again", to="arrow", shards=3).masks == "none"
    again = open_data(tmp_path / "again")
    assert again.predictions is None
    assert rows_of(again) == rows_of(open_data(unmasked))


# --- files that others read -------------------------------------------------------------------------------


def test_hdf5_files_are_as_mlperf_has_them(masked: Path, tmp_path: Path) -> None:
    rows = rows_of(open_data(masked))
    written = convert(masked, tmp_path / "fixed", to="hdf5-fixed", shards=2, max_seq_length=64, max_predictions=10)
    assert written.max_predictions == 10
    files = files_of(tmp_path / "fixed")
    assert [file.name for file in files] == ["part_00000_of_00002.hdf5", "part_00001_of_00002.hdf5"]
    size = -(-len(rows) // 2)
    with h5py.File(files[0]) as file:
        assert {name: (data.dtype.str, data.shape) for name, data in file.items()} == {
            "input_ids": ("<i2", (size, 64)),
            "input_mask": ("|i1", (size, 64)),
            "segment_ids": ("|i1", (size, 64)),
            "masked_lm_positions": ("<i2", (size, 10)),
            "masked_lm_ids": ("<i2", (size, 10)),
            "next_sentence_labels": ("|i1", (size,)),
        }
        assert all(data.compression is None for data in file.values())
        assert file["input_ids"][3, : len(rows[3]["tokens"])].tolist() == rows[3]["tokens"]

    convert(masked, tmp_path / "varlength", to="hdf5-varlength")
    with h5py.File(tmp_path / "varlength" / "part_00000_of_00001.hdf5") as file:
        assert {name: h5py.check_vlen_dtype(data.dtype) for name, data in file.items()} == {
            "input_ids": np.int16,
            "segment_ids": np.int8,
            "masked_lm_positions": np.int16,
            "masked_lm_ids": np.int16,
            "next_sentence_labels": None,
        }
        for number, row in enumerate(rows):
            assert file["input_ids"][number].tolist() == row["tokens"]
            assert file["masked_lm_positions"][number].tolist() == row["positions"]
            assert file["masked_lm_ids"][number].tolist() == row["labels"]
            assert file["next_sentence_labels"][number] == row["is_random"]

    packed = convert(masked, tmp_path / "packed", to="hdf5-packed", shards=3)
    assert [file.name for file in files_of(tmp_path / "packed")] == ["part_00000", "part_00001", "part_00002"]
    sizes = []
    for path in files_of(tmp_path / "packed"):
        with h5py.File(path) as file:
            sizes.append(len(file["input_ids"]))
            assert h5py.check_vlen_dtype(file["next_sentence_labels"].dtype) == np.int8
            assert h5py.check_vlen_dtype(file["packed_input_len"].dtype) == np.int16
            assert h5py.check_vlen_dtype(file["packed_masked_lm_len"].dtype) == np.int16
            for number in range(len(file["input_ids"])):
                assert sum(file["packed_input_len"][number]) == len(file["input_ids"][number]) <= 64
                assert 1 <= len(file["packed_input_len"][number]) <= 3
                masked_lm = file["masked_lm_positions"][number]
                assert sum(file["packed_masked_lm_len"][number]) == len(masked_lm)
    assert sum(sizes) == packed.records
    assert max(sizes) - min(sizes) <= 1

    convert(masked, tmp_path / "per-length", to="hdf5-per-length")
    names = [file.name for file in files_of(tmp_path / "per-length")]
    assert names == [f"train_sentences_{length:03d}.hdf5" for length in range(1, 65)]


def test_tfrecords_have_the_features_of_berts_script(masked: Path, tmp_path: Path) -> None:
    convert(masked, tmp_path / "out", to="tfrecord", shards=2, max_predictions=12)
    assert [file.name for file in files_of(tmp_path / "out")] == [
        "part-00000-of-00002.tfrecord",
        "part-00001-of-00002.tfrecord",
    ]
    _, record = next(tfrecord.records(tmp_path / "out" / "part-00000-of-00002.tfrecord"))
    features = arrays_of(record)
    assert {name: (len(values), values.dtype.kind) for name, values in features.items()} == {
        "input_ids": (64, "i"),
        "input_mask": (64, "i"),
        "segment_ids": (64, "i"),
        "masked_lm_positions": (12, "i"),
        "masked_lm_ids": (12, "i"),
        "masked_lm_weights": (12, "f"),
        "next_sentence_labels": (1, "i"),
    }
    assert (features["masked_lm_weights"] == (features["masked_lm_positions"] > 0)).all()


def test_real_tfrecords_go_through_hdf5_and_back(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "google-mlperf.tfrecord"
    shutil.copy(golden, tmp_path / "part-00000-of-00500")
    written = convert(tmp_path / "part-00000-of-00500", tmp_path / "hdf5", to="hdf5-fixed")
    assert (written.max_seq_length, written.max_predictions) == (512, 76)
    convert(tmp_path / "hdf5", tmp_path / "back", to="tfrecord")
    theirs = [arrays_of(data) for _, data in tfrecord.records(golden)]
    ours = [arrays_of(data) for _, data in tfrecord.records(tmp_path / "back" / "part-00000-of-00001.tfrecord")]
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert np.array_equal(one[name], other[name]), name


def test_the_studys_encoded_files_are_unmasked(unmasked: Path, tmp_path: Path) -> None:
    """gzip, 32-bit words, and where [CLS] and [SEP] stand."""
    rows = rows_of(open_data(unmasked))
    (tmp_path / "encoded").mkdir()
    shutil.copy(unmasked / "vocab.txt", tmp_path / "encoded")
    with h5py.File(tmp_path / "encoded" / "train_0.hdf5", "w") as file:
        ids = [row["tokens"] + [0] * (64 - len(row["tokens"])) for row in rows]
        special = [[0, row["segment_b"] - 1, len(row["tokens"]) - 1] for row in rows]
        file.create_dataset("input_ids", data=ids, dtype="i4", compression="gzip")
        file.create_dataset("special_token_positions", data=special, dtype="i4", compression="gzip")
        labels = [row["is_random"] for row in rows]
        file.create_dataset("next_sentence_labels", data=labels, dtype="i1", compression="gzip")
    source = open_data(tmp_path / "encoded")
    assert (source.layout, source.predictions) == ("hdf5-encoded", None)
    assert rows_of(source) == rows
    convert(tmp_path / "encoded", tmp_path / "arrow", to="arrow")
    assert rows_of(open_data(tmp_path / "arrow")) == rows


def test_samsungs_wider_integers_are_read(masked: Path, tmp_path: Path) -> None:
    convert(masked, tmp_path / "narrow", to="hdf5-fixed")
    (tmp_path / "wide").mkdir()
    shutil.copy(tmp_path / "narrow" / "vocab.txt", tmp_path / "wide")
    with (
        h5py.File(tmp_path / "narrow" / "part_00000_of_00001.hdf5") as narrow,
        h5py.File(tmp_path / "wide" / "part_0.hdf5", "w") as wide,
    ):
        for name, data in narrow.items():
            wide.create_dataset(name, data=data[:], dtype="i4" if data.dtype == np.int16 else "i1")
    assert rows_of(open_data(tmp_path / "wide")) == rows_of(open_data(masked))


def test_ragged_datasets_in_chunks_are_read(masked: Path, tmp_path: Path) -> None:
    """As h5py writes them where a dataset can grow."""
    convert(masked, tmp_path / "whole", to="hdf5-varlength")
    (tmp_path / "chunked").mkdir()
    shutil.copy(tmp_path / "whole" / "vocab.txt", tmp_path / "chunked")
    with (
        h5py.File(tmp_path / "whole" / "part_00000_of_00001.hdf5") as whole,
        h5py.File(tmp_path / "chunked" / "part.hdf5", "w") as chunked,
    ):
        for name, data in whole.items():
            chunked.create_dataset(name, data=data[:], dtype=data.dtype, maxshape=(None,), chunks=(16,))
    assert rows_of(open_data(tmp_path / "chunked")) == rows_of(open_data(masked))


# --- order and number -------------------------------------------------------------------------------------


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_shards_differ_by_one_at_the_most(count: int, shards: int) -> None:
    if shards > count:
        with helpers.refused("option-out-of-range", "--shards"):
            shard_sizes(count, shards)
        return
    sizes = shard_sizes(count, shards)
    assert (len(sizes), sum(sizes)) == (shards, count)
    assert max(sizes) - min(sizes) <= 1


def test_a_shuffle_is_the_same_whatever_the_layout_and_shards(masked: Path, tmp_path: Path) -> None:
    expected = rows_of(open_data(masked))
    convert(masked, tmp_path / "a", to="arrow", shards=3, shuffle_seed=24)
    convert(masked, tmp_path / "b", to="hdf5-varlength", shards=40, shuffle_seed=24)
    convert(masked, tmp_path / "c", to="arrow", shards=3, shuffle_seed=25)
    a, b, c = (rows_of(open_data(tmp_path / name)) for name in "abc")
    assert a == b
    assert a != c
    assert a != expected
    assert sorted(map(json.dumps, a)) == sorted(map(json.dumps, c)) == sorted(map(json.dumps, expected))


def test_bins_by_length(tmp_path: Path) -> None:
    words = Vocabulary((*SPECIAL_WORDS, "a"), lower_case=True)
    lengths = [5, 128, 129, 256, 257, 500, 512, 40, 10]
    made = [helpers.example([2, *[5] * (length - 2), 3], length, False, [1], [5]) for length in lengths]
    helpers.write_examples(tmp_path / "data", made, words, rows_per_shard=4)
    written = bin_by_length(tmp_path / "data", tmp_path / "binned")
    found = {longest: open_data(tmp_path / "binned" / str(longest)).lengths.tolist() for longest in written}
    assert found == {128: [5, 128, 40, 10], 256: [129, 256], 384: [257], 512: [500, 512]}
    assert {path.name for path in (tmp_path / "binned").iterdir() if path.is_dir()} == {"128", "256", "384", "512"}
    assert open_data(tmp_path / "binned").lengths.tolist() == [5, 128, 40, 10, 129, 256, 257, 500, 512]
    with pytest.raises(UserError, match=str(tmp_path / "binned")):
        bin_by_length(tmp_path / "data", tmp_path / "binned")
    with helpers.refused("option-out-of-range", "folder 384 would have 1 example"):
        bin_by_length(tmp_path / "data", tmp_path / "again", shards=2)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("count", [1, 7, 50])
def test_an_evaluation_set_is_evenly_strided(masked: Path, tmp_path: Path, count: int) -> None:
    expected = rows_of(open_data(masked))
    ratio = len(expected) / count
    eval_set(masked, tmp_path / "out", count=count, to="hdf5-varlength")
    assert rows_of(open_data(tmp_path / "out")) == [expected[int(number * ratio)] for number in range(count)]
    assert eval_set(tmp_path / "out", tmp_path / "again", count=1).layout == "hdf5-varlength"


def test_what_cannot_be_converted_is_refused(unmasked: Path, masked: Path, tmp_path: Path) -> None:
    longest = int(open_data(masked).lengths.max())
    for arguments, code, named in (
        ({"max_seq_length": longest - 1}, "example-too-long", f"{longest} tokens"),
        ({"max_predictions": 1}, "too-many-predictions", "--max-predictions is 1"),
        ({"shards": 10_000_000}, "option-out-of-range", "--shards is 10000000"),
        ({"packing": "spfhp"}, "option-without-effect", "--packing"),
        ({"max_per_row": 2}, "option-without-effect", "--max-per-row"),
    ):
        with helpers.refused(code, named):
            convert(masked, tmp_path / "out", to="hdf5-fixed", **arguments)
        assert not (tmp_path / "out").exists()
    with helpers.refused("option-without-effect", "--max-predictions"):
        convert(unmasked, tmp_path / "out", to="arrow", max_predictions=9)
    assert not (tmp_path / "out").exists()
    with helpers.refused("option-out-of-range", "--count is 10000000"):
        eval_set(masked, tmp_path / "out", count=10_000_000)


@pytest.mark.parametrize("to", get_args(Target))
def test_a_file_that_memory_cannot_hold_is_refused_first(
    to: Target, masked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate is near the size of the largest file, so half of that size is refused and its double is not."""
    shards = {} if to == "hdf5-per-length" else {"shards": 1}
    convert(masked, tmp_path / "whole", to=to, **shards)
    largest = max(path.stat().st_size for path in (tmp_path / "whole").iterdir() if path.name != "vocab.txt")
    monkeypatch.setattr("bertrain.data.formats.convert.free_memory", lambda: 2 * largest)
    convert(masked, tmp_path / "again", to=to, **shards)
    monkeypatch.setattr("bertrain.data.formats.convert.free_memory", lambda: largest // 2)
    if to == "tfrecord":
        convert(masked, tmp_path / "streamed", to=to, **shards)
        return
    with helpers.refused("out-of-memory", "GiB"):
        convert(masked, tmp_path / "refused", to=to, **shards)
    assert not (tmp_path / "refused").exists()


# --- verify and inspect -----------------------------------------------------------------------------------


def plain_row_checksum(path: Path) -> str:
    with h5py.File(path) as file:
        sums = [hashlib.md5(str(row.tolist()).encode()).hexdigest() for row in file["input_ids"]]
    return hashlib.md5(str(sums).encode()).hexdigest()


def test_verify_compares_rows_with_a_list_of_checksums(masked: Path, tmp_path: Path) -> None:
    convert(masked, tmp_path / "data", to="hdf5-varlength", shards=2)
    files = files_of(tmp_path / "data")
    checksums = tmp_path / "list.chk"
    checksums.write_text("".join(f"{path.name}\t{plain_row_checksum(path)}\n" for path in files))
    assert verify(tmp_path / "data", checksums=checksums).files == 2
    files[0].rename(files[0].with_suffix(".hdf"))  # MLPerf's lists say .hdf5 where its shuffled files are .hdf
    assert verify(tmp_path / "data", checksums=checksums).files == 2
    checksums.write_text(f"{files[1].name}\t{plain_row_checksum(files[1])}\n")
    with helpers.refused("unlisted-file", "part_00000_of_00002.hdf", checksums):
        verify(tmp_path / "data", checksums=checksums)
    checksums.write_text(f"{files[0].name}\t{plain_row_checksum(files[1])}\n")
    files[1].unlink()
    with helpers.refused("wrong-checksum", "part_00000_of_00002.hdf", plain_row_checksum(files[0].with_suffix(".hdf"))):
        verify(tmp_path / "data", checksums=checksums)
    for text, code, named in (
        ("a b c\n", "bad-checksum-list", f"line 1 of {checksums}"),
        ("", "bad-checksum-list", checksums),
        ("x\t" + "0" * 32, "missing-file", f"{checksums} lists x"),
    ):
        checksums.write_text(text)
        with helpers.refused(code, named):
            verify(tmp_path / "data", checksums=checksums)


def test_verify_refuses_files_and_lines_of_one_name(masked: Path, tmp_path: Path) -> None:
    folder, checksums = tmp_path / "bins", tmp_path / "list.chk"
    for length in ("128", "512"):
        convert(masked, folder / length, to="hdf5-fixed", shards=1)
    (name,) = (path.name for path in files_of(folder / "128"))
    checksums.write_text(f"{name}\t{plain_row_checksum(folder / '128' / name)}\n")
    assert verify(folder / "128", checksums=checksums).files == 1
    with helpers.refused("ambiguous-name", f"128/{name}", f"512/{name}"):
        verify(folder, checksums=checksums)
    checksums.write_text(f"{checksums.read_text()}{name}\t{'0' * 32}\n")
    with helpers.refused("bad-checksum-list", f"line 2 of {checksums}", name):
        verify(folder / "128", checksums=checksums)


def test_inspect_shows_words_segments_and_masks(masked: Path, unmasked: Path) -> None:
    words = open_data(masked).vocabulary.words
    shown = inspect_data(masked, rows="2:4")
    expected = rows_of(open_data(masked))[2:4]
    assert [example.row for example in shown] == [2, 3]
    for example, row in zip(shown, expected, strict=True):
        assert example.words == [words[token] for token in row["tokens"]]
        assert example.labels == {
            position: words[label] for position, label in zip(row["positions"], row["labels"], strict=True)
        }
        head, a, b = (line.plain for line in lines_of(example))
        assert f"row {example.row}: {len(row['tokens'])} tokens" in head
        spoken = (a.strip() + b.strip()[1:]).split()[1:]
        for position, word in enumerate(spoken):
            label = example.labels.get(position)
            assert word == (example.words[position] if label is None else f"{example.words[position]}={label}")
    assert inspect_data(unmasked, rows="0:1")[0].labels is None


@pytest.mark.parametrize("text", ["5", "a:b", "3:3", "4:2", "-1:2", "100:101", ":0"])
def test_rows_to_inspect_are_first_and_end(text: str) -> None:
    assert parse_rows(":3", 10) == (0, 3)
    assert parse_rows("8:", 10) == (8, 10)
    assert parse_rows("8:100", 10) == (8, 10)
    with helpers.refused("bad-row-range", "--rows"):
        parse_rows(text, 10)


# --- the index --------------------------------------------------------------------------------------------


def test_the_index_is_made_once_and_again_when_a_file_changes(masked: Path, tmp_path: Path) -> None:
    convert(masked, tmp_path / "data", to="hdf5-fixed", shards=2)
    first = open_data(tmp_path / "data")
    index = tmp_path / "data" / ".bertrain-index" / "index.json"
    made = index.stat().st_mtime_ns
    assert open_data(tmp_path / "data").fingerprint == first.fingerprint
    assert index.stat().st_mtime_ns == made
    (tmp_path / "data" / "part_00001_of_00002.hdf5").unlink()
    second = open_data(tmp_path / "data")
    assert len(second) < len(first)
    assert second.fingerprint != first.fingerprint
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / ".bertrain-index")
    assert open_data(tmp_path / "copy").fingerprint == second.fingerprint


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data/tfrecord")
def test_the_index_of_a_folder_that_is_not_writable_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(SHARED / "graphcore.sample_text.tfrecord", data)
    data.chmod(0o555)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(open_data(data)) == 45
    assert [path.name for path in data.iterdir()] == ["graphcore.sample_text.tfrecord"]
    assert any((tmp_path / "cache" / "bertrain").iterdir())
    data.chmod(0o755)
