"""Files of examples, damaged: one sentence that names file and row, never a traceback, never a crash."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertrain.base.errors import UserError
from bertrain.data.formats import tfrecord
from bertrain.data.formats.convert import bin_by_length, convert, eval_set
from bertrain.data.formats.source import open_data
from bertrain.data.formats.verify import verify
from tests import helpers

GOLDEN = Path(__file__).parents[1] / "golden"
LAYOUTS = ("hdf5-fixed", "hdf5-varlength", "hdf5-packed", "hdf5-encoded", "tfrecord", "tfrecord-packed")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A small file of each layout."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copy(GOLDEN / "google-mlperf.tfrecord", folder)
    shutil.copy(GOLDEN / "graphcore-packed.tfrecord", folder / "tfrecord-packed")
    for layout in ("hdf5-fixed", "hdf5-varlength", "hdf5-packed", "tfrecord"):
        convert(folder / "google-mlperf.tfrecord", folder / "to", to=layout)
        next((folder / "to").glob("part*")).rename(folder / layout)
        shutil.rmtree(folder / "to")
    with h5py.File(folder / "hdf5-encoded", "w") as file:
        ids = np.random.default_rng(0).integers(5, 900, (30, 64))
        file.create_dataset("input_ids", data=ids, dtype="i4", compression="gzip")
        file.create_dataset("special_token_positions", data=[[0, 20, 63]] * 30, dtype="i4", compression="gzip")
        file.create_dataset("next_sentence_labels", data=[0] * 30, dtype="i1", compression="gzip")
    return {layout: (folder / layout).read_bytes() for layout in LAYOUTS}


@st.composite
def damage(draw: st.DrawFn) -> Any:
    """A function that flips some bytes, often near the beginning where the structure is, or cuts the end off."""
    where = st.floats(0, 1, exclude_max=True)
    cut = draw(st.none() | where)
    flips = draw(st.lists(st.tuples(st.booleans(), where, st.integers(1, 255)), max_size=4))

    def apply(content: bytes) -> bytes:
        changed = bytearray(content if cut is None else content[: int(cut * len(content))])
        for is_early, place, bits in flips:
            if changed:
                changed[int(place * (min(len(changed), 4096) if is_early else len(changed)))] ^= bits
        return bytes(changed)

    return apply


def read_all(path: Path) -> list[dict[str, Any]]:
    source = open_data(path)
    return helpers.examples_of(source.read(np.arange(len(source))))


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged=damage())
def test_readers_refuse_or_read(whole: dict[str, bytes], tmp_path: Path, layout: str, damaged: Any) -> None:
    """HDF5 has no checksums, so a flipped word is another word; TFRecord has, so it is found out."""
    path = tmp_path / "data"
    path.write_bytes(damaged(whole[layout]))
    try:
        found = read_all(path)
    except UserError as error:
        sentence = str(error)
    else:
        sentence = ""
    if sentence:
        assert str(path) in sentence
    elif layout.startswith("tfrecord"):
        path.write_bytes(whole[layout])
        expected = read_all(path)
        assert found == expected[: len(found)]  # a file cut off between two records is a shorter file


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged=damage())
def test_what_was_indexed_is_recognized(whole: dict[str, bytes], tmp_path: Path, layout: str, damaged: Any) -> None:
    """Bits that rot under a file's unchanged date are found by the hash in the index."""
    path = tmp_path / "data"
    path.write_bytes(whole[layout])
    os.utime(path, (1e9, 1e9))
    read_all(path)
    content = damaged(whole[layout])
    path.write_bytes(content)
    os.utime(path, (1e9, 1e9))
    if content == whole[layout]:
        assert verify(path).files == 1
    elif len(content) == len(whole[layout]):
        with pytest.raises(UserError) as caught:
            verify(path)
        assert caught.value.code in ("damaged-data", "unknown-layout")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of one shard with static masks."""
    folder = tmp_path_factory.mktemp("shards")
    shutil.copy(GOLDEN / "google-mlperf.tfrecord", folder)
    convert(folder / "google-mlperf.tfrecord", folder / "data", to="arrow")
    return folder / "data"


@settings(max_examples=60)
@given(damaged=damage())
def test_shards_of_unchanged_size_are_refused_or_read(shards: Path, damaged: Any) -> None:
    """A run compares sizes only; what it then reads is within its bounds, or is refused by the shard's name."""
    path = shards / "shard-00000.arrow"
    content = path.read_bytes()
    changed = damaged(content)
    replace_file(path, changed + bytes(len(content) - len(changed)))
    sentence = ""
    try:
        source = open_data(shards, verify="size")
        block = source.read(np.arange(len(source)))
    except UserError as error:
        sentence = str(error)
    finally:
        replace_file(path, content)
    if sentence:
        assert "\n" not in sentence
        assert str(path) in sentence or str(shards / "manifest.json") in sentence  # where a column lost its name
    else:
        assert block.masks is not None
        assert block.tokens.max() < len(source.vocabulary.words)
        assert (block.masks.positions < np.repeat(block.lengths, block.masks.counts)).all()


@pytest.mark.parametrize("name", [b"tokens", b"is_random", b"mlm_labels"])
def test_a_shard_whose_column_lost_its_name(shards: Path, name: bytes) -> None:
    path = shards / "shard-00000.arrow"
    content = path.read_bytes()
    replace_file(path, content.replace(name, name[:-1] + b"~"))
    try:
        with helpers.refused("damaged-data", path):
            open_data(shards, verify="size")
    finally:
        replace_file(path, content)


def replace_file(path: Path, content: bytes) -> None:
    """Put a new file in place of one that may still be mapped."""
    path.unlink()
    path.write_bytes(content)


def test_a_damaged_row_of_a_shard_is_named(shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(shards, folder)
    path = folder / "shard-00000.arrow"
    source = open_data(folder)
    tokens = source.read(np.array([3])).tokens.astype(np.uint16).tobytes()
    content = path.read_bytes()
    replace_file(path, content.replace(tokens, b"\xff\xff" + tokens[2:]))
    with helpers.refused("damaged-data", f"{path} is damaged in row 3", len(source.vocabulary.words)):
        open_data(folder, verify="size").read(np.array([5, 3]))
    offsets = np.concatenate([[0], np.cumsum(source.lengths)]).astype(np.int32)
    replace_file(path, content.replace(offsets.tobytes(), offsets[[0, 2, 1, *range(3, len(offsets))]].tobytes()))
    with helpers.refused("damaged-data", path):
        open_data(folder, verify="size")


@pytest.mark.parametrize("name", ["shard-00000.arrow" * 300, "../shard-00000.arrow", "\0"])
def test_a_name_that_no_shard_has_is_damage(shards: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    shutil.copytree(shards, folder)
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace('"shard-00000.arrow"', json.dumps(name)))
    with helpers.refused("damaged-data", folder / "manifest.json", "files[0].name"):
        open_data(folder)


def test_text_is_not_taken_for_tfrecords(whole: dict[str, bytes], tmp_path: Path) -> None:
    assert tfrecord.is_tfrecord(whole["tfrecord"][:16])
    (tmp_path / "text").write_text("words of a text, long enough")
    refuse("not-prepared", tmp_path, tmp_path / "text")


def test_verify_compares_with_the_index_there_was(whole: dict[str, bytes], tmp_path: Path) -> None:
    """Files of a new date are compared with the old hashes, not with hashes of what they hold now."""
    for layout in ("hdf5-fixed", "tfrecord"):
        folder = tmp_path / layout
        folder.mkdir()
        path = folder / "part"
        path.write_bytes(whole[layout])
        assert verify(folder).against is None
        assert verify(folder).against == "the hashes of its index"
        os.utime(path, (1e9, 1e9))
        assert verify(folder).against == "the hashes of its index"
        other = tmp_path / f"other-{layout}"
        convert(folder, other, to=layout, shuffle_seed=1)
        path.write_bytes(next(other.glob("part*")).read_bytes())
        for _ in range(2):
            with helpers.refused("damaged-data", path, "SHA-256"):
                verify(folder)
        path.write_bytes(whole[layout])
        (folder / "part2").write_bytes(whole[layout])
        with helpers.refused("changed-data", "part2 was added"):
            verify(folder)
        (folder / "part2").rename(path)
        path.rename(folder / "moved")
        with helpers.refused("changed-data", "moved was added"):
            verify(folder)


def test_files_that_change_while_they_are_read(whole: dict[str, bytes], tmp_path: Path) -> None:
    for layout in ("hdf5-fixed", "tfrecord"):
        path = tmp_path / layout
        path.write_bytes(whole[layout])
        source = open_data(path)
        shuffled = tmp_path / "shuffled"
        convert(path, shuffled, to=layout, shuffle_seed=1)
        os.replace(next(shuffled.glob("part*")), path)
        shutil.rmtree(shuffled)
        with pytest.raises(UserError) as caught:
            source.read(np.arange(len(source)))
        assert caught.value.code in ("changed-data", "damaged-data")


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """The nearest thing to a full disk: the system refuses to write on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    folder, out = helpers.make_data(tmp_path), tmp_path / "new" / "out"
    writers: list[Callable[..., object]] = [
        partial(bin_by_length, folder),
        partial(eval_set, folder, count=60, to="hdf5-fixed"),
    ]
    for layout in ("hdf5-fixed", "hdf5-varlength", "hdf5-packed", "hdf5-per-length", "tfrecord", "arrow"):
        writers.append(partial(convert, folder, to=layout))
    assert (folder / "vocab.txt").stat().st_size < 2048
    for write, size in product(writers, (2048, 8192)):
        with no_file_larger_than(size), pytest.raises(UserError) as caught:
            write(out=out)
        assert str(out.parent) in str(caught.value)
        assert "File too large" in str(caught.value)
        assert not list(out.parent.iterdir())


# --- what is wrong, said of the file and the row ----------------------------------------------------------


def refuse(code: str, path: Path, *named: object) -> None:
    with helpers.refused(code, *named):
        open_data(path)


def edit(path: Path, content: bytes, name: str, row: int, value: Any) -> Path:
    """A copy of an HDF5 file with one row of a dataset changed."""
    path.write_bytes(content)
    with h5py.File(path, "r+") as file:
        file[name][row] = value
    return path


def test_rows_that_contradict_themselves_are_named(whole: dict[str, bytes], tmp_path: Path) -> None:
    path, fixed = tmp_path / "part_00000", whole["hdf5-fixed"]
    with h5py.File(edit(path, fixed, "next_sentence_labels", 0, 0)) as file:
        mask = file["input_mask"][7]
    mask[3] = 0
    for name, row, value, complaint in (
        ("input_mask", 7, mask, "input_mask"),
        ("segment_ids", 4, np.arange(512) % 2, "segment_ids"),
        ("input_ids", 2, -1, "negative"),
        ("masked_lm_positions", 9, 511, ""),
        ("next_sentence_labels", 5, 3, "next-sentence label"),
        ("input_mask", 1, 0, "empty"),
    ):
        refuse("damaged-data", edit(path, fixed, name, row, value), f"{path}, row {row}: ", complaint)
    refuse("other-vocabulary", edit(path, fixed, "input_ids", 6, 30522), f"{path}, row 6", "token id 30522")
    ragged = whole["hdf5-varlength"]
    refuse("damaged-data", edit(path, ragged, "segment_ids", 3, [0, 0, 1]), f"{path}, row 3: segment_ids")
    packed = whole["hdf5-packed"]
    refuse("damaged-data", edit(path, packed, "packed_input_len", 2, [9]), f"{path}, row 2: ")


def test_files_of_the_wrong_kind_are_named(whole: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    refuse("not-prepared", folder, folder)
    (folder / "part_00001").write_bytes(b"")
    refuse("unknown-layout", folder, folder / "part_00001")
    (folder / "part_00001").write_text("text,label\nnot prepared,yes\n")
    refuse("not-prepared", folder, folder / "part_00001", "bertrain data prepare")
    (folder / "part_00001").write_bytes(gzip.compress(whole["tfrecord"]))
    refuse("compressed-data", folder, folder / "part_00001", f"gunzip < {folder / 'part_00001'}")
    (folder / "part_00000").write_bytes(whole["hdf5-fixed"])
    (folder / "part_00001").write_bytes(whole["tfrecord"])
    refuse("mixed-layouts", folder, f"{folder / 'part_00000'} is hdf5-fixed", f"{folder / 'part_00001'} is tfrecord")
    (folder / "part_00001").unlink()
    with h5py.File(folder / "part_00000", "r+") as file:
        del file["masked_lm_ids"]
    refuse("missing-field", folder, folder / "part_00000", "masked_lm_ids")
    with h5py.File(folder / "part_00000", "r+") as file:
        file["masked_lm_ids"] = np.zeros((3, 76), dtype="i2")
    refuse("bad-field", folder, "input_ids has 10 rows, masked_lm_ids 3")
    with h5py.File(folder / "part_00000", "r+") as file:
        del file["masked_lm_ids"]
        file["masked_lm_ids"] = np.zeros((10, 76), dtype="f4")
    refuse("bad-field", folder, "masked_lm_ids", "float32")
    with h5py.File(folder / "part_00000", "w") as file:
        for name in ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids"):
            file[name] = np.zeros((0, 8), dtype="i2")
        file["next_sentence_labels"] = np.zeros(0, dtype="i1")
    refuse("empty-data", folder, folder)


def test_records_cut_off_or_damaged_are_named(whole: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "part.tfrecord"
    content = whole["tfrecord"]
    path.write_bytes(content[:-1])
    refuse("damaged-data", path, f"record 9 of {path} is truncated")
    path.write_bytes(content + b"\x01\x02")
    refuse("damaged-data", path, f"record 10 of {path} is truncated")
    path.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    refuse("damaged-data", path, f"record 9 of {path} is damaged", "checksum of its data")


def test_the_command_line_says_it_in_one_sentence(whole: dict[str, bytes], tmp_path: Path) -> None:
    path = tmp_path / "part.hdf5"
    path.write_bytes(whole["hdf5-varlength"][:-2000])
    for arguments in (
        ("data", "convert", path, "--to", "arrow", "--out", tmp_path / "out"),
        ("pretrain", "bert-tiny", "--data", path, "--run", tmp_path / "run"),
    ):
        done = helpers.bertrain(*arguments, check=False)
        assert done.returncode == 2
        assert "[damaged-data]" in done.stderr
        assert str(path) in done.stderr
        assert "Traceback" not in done.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir() if not entry.name.endswith(".lock")) == ["part.hdf5"]
