"""MLPerf's data in one command: the folders of NVIDIA's prepare_data, its orders, its checksums; and restarts."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest

import bertrain.mlperf.data as mlperf
from bertrain.data.formats.source import open_data
from bertrain.data.prepare.prepare import prepare
from bertrain.mlperf.data import mlperf_data
from tests import helpers

SHARDS = 3
TRAINING = f"hdf5/training-{SHARDS}/hdf5_{SHARDS}_shards"
PLACES = [
    "arrow/training",
    "hdf5/training",
    f"{TRAINING}_uncompressed",
    f"{TRAINING}_varlength",
    f"{TRAINING}_varlength_shuffled",
    "arrow/eval",
    "hdf5/eval",
    "hdf5/eval_varlength",
    "per_seqlen",
    "packed_data",
]


def write_inputs(out: Path) -> None:
    (out / "download" / "results4").mkdir(parents=True)
    (out / "phase1").mkdir()
    helpers.write_vocabulary(out / "phase1" / "vocab.txt")
    for number in range(2):
        helpers.write_corpus(out / "download" / "results4" / f"part-0000{number}-of-00002", documents=12, seed=number)
    helpers.write_corpus(out / "download" / "results4" / "eval.txt", documents=9, seed=9)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mlperf") / "bert_data"
    write_inputs(out)
    done = mlperf_data(out, packed=True, skip_download=True, shards=SHARDS, eval_count=10)
    assert done["stages"] == dict.fromkeys(PLACES, "made")
    assert not done["is_mlperfs_text"]
    return out


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "vocab.txt")


def rows_of(*files: Path) -> list[list[int]]:
    """The tokens of all rows, by h5py alone."""
    rows = []
    for path in files:
        with h5py.File(path) as file:
            for number in range(len(file["input_ids"])):
                row = file["input_ids"][number]
                rows.append((row[: file["input_mask"][number].sum()] if "input_mask" in file else row).tolist())
    return rows


def test_names_are_those_of_nvidia(made: Path) -> None:
    names = {place: [path.name for path in files_of(made / place)] for place in PLACES}
    assert names["hdf5/training"] == ["part-00000-of-00002.hdf5", "part-00001-of-00002.hdf5"]
    parts = [f"part_{number:05d}_of_{SHARDS:05d}" for number in range(SHARDS)]
    assert names[f"{TRAINING}_uncompressed"] == names[f"{TRAINING}_varlength"] == [f"{part}.hdf5" for part in parts]
    assert names[f"{TRAINING}_varlength_shuffled"] == [f"{part}.hdf" for part in parts]
    assert names["hdf5/eval"] == ["eval_all.hdf5", "part_eval_10k.hdf5"]
    assert names["hdf5/eval_varlength"] == ["part_eval_10k.hdf5"]
    assert names["per_seqlen"] == [f"train_sentences_{length:03d}.hdf5" for length in range(1, 513)]
    assert names["packed_data"] == [f"part_{number:05d}" for number in range(SHARDS)]


def test_the_same_rows_in_every_layout(made: Path, tmp_path: Path) -> None:
    per_part = []
    for part in sorted((made / "download" / "results4").glob("part-*")):
        vocab, alone = made / "phase1" / "vocab.txt", tmp_path / part.name
        prepare([part], alone, vocab=vocab, reference=True, dupe_factor=10, seed=12345)
        source = open_data(alone)
        block = source.read(np.arange(len(source)))
        per_part.append([row.tolist() for row in np.split(block.tokens, np.cumsum(block.lengths)[:-1])])
    assert [rows_of(path) for path in files_of(made / "hdf5/training")] == per_part
    rows = per_part[0] + per_part[1]
    assert rows_of(*files_of(made / f"{TRAINING}_uncompressed")) == rows
    assert rows_of(*files_of(made / f"{TRAINING}_varlength")) == rows
    sizes = [len(rows_of(path)) for path in files_of(made / f"{TRAINING}_varlength")]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(rows_of(*files_of(made / "per_seqlen"))) == sorted(rows)
    tokens = [token for row in rows_of(*files_of(made / "packed_data")) for token in row]
    assert sorted(tokens) == sorted(token for row in rows for token in row)


def test_the_shuffle_is_that_of_a_list_of_pairs(made: Path) -> None:
    shards = [rows_of(path) for path in files_of(made / f"{TRAINING}_varlength")]
    pairs = [(shard, row) for shard, rows in enumerate(shards) for row in range(len(rows))]
    random.Random(24).shuffle(pairs)
    expected = [shards[shard][row] for shard, row in pairs]
    found = [rows_of(path) for path in files_of(made / f"{TRAINING}_varlength_shuffled")]
    assert [row for rows in found for row in rows] == expected
    assert list(map(len, found)) == list(map(len, shards))


def test_intermediate_results_on_request(made: Path, tmp_path: Path) -> None:
    """What NVIDIA's own steps leave behind: rows by part and length, and which rows each file got."""
    out = tmp_path / "bert_data"
    write_inputs(out)
    with helpers.refused("conflicting-options", "--needed-only", "--intermediate"):
        mlperf_data(out, packed=True, skip_download=True, intermediate=True, needed_only=True)
    mlperf_data(out, packed=True, skip_download=True, shards=SHARDS, eval_count=10, intermediate=True)
    assert [path.name for path in files_of(out / "per_seqlen_parts")] == ["part-00000", "part-00001"]
    for part, whole in zip(files_of(out / "per_seqlen_parts"), files_of(made / "hdf5/training"), strict=True):
        assert len(list(part.iterdir())) == 512
        by_length = [rows_of(part / f"seqlength_{length:03d}.hdf5") for length in range(1, 513)]
        assert [row for rows in by_length for row in rows] == sorted(rows_of(whole), key=len)
    rows = rows_of(*files_of(made / f"{TRAINING}_varlength"))
    for path in sorted((out / f"{TRAINING}_varlength_shuffled").glob("*.hdf")):
        listed = json.loads(path.with_suffix(".lst").read_text())
        assert [rows[number] for number in listed] == rows_of(path)
    lists = sorted((out / "packed_data").glob("shard_list_*.lst"))
    assert len(lists) == SHARDS
    for number, path in enumerate(lists):
        packs = [[token for row in pack for token in rows[row]] for pack in json.loads(path.read_text())]
        assert packs == rows_of(out / "packed_data" / f"part_{number:05d}")
    with helpers.refused("other-stage", f"{made}/{TRAINING}_varlength_shuffled", "--intermediate"):
        mlperf_data(made, packed=True, skip_download=True, shards=SHARDS, eval_count=10, intermediate=True)


def test_the_evaluation_set_is_evenly_strided(made: Path) -> None:
    everything = rows_of(made / "hdf5/eval/eval_all.hdf5")
    picked = [everything[int(number * (len(everything) / 10))] for number in range(10)]
    assert rows_of(made / "hdf5/eval/part_eval_10k.hdf5") == picked
    assert rows_of(made / "hdf5/eval_varlength/part_eval_10k.hdf5") == picked


def test_folders_made_of_something_else_are_refused(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    shutil.copytree(made, out)

    def refuse(code: str, *named: str, **changed: int) -> None:
        with helpers.refused(code, *named):
            mlperf_data(out, **{"packed": True, "skip_download": True, "shards": SHARDS, "eval_count": 10} | changed)

    refuse("other-stage", "--eval-count 10, not 9", f"remove {out}/hdf5/eval", "--out", eval_count=9)
    refuse("other-stage", f"{out}/packed_data", f"--shards {SHARDS}, not 2", shards=2)
    assert not (out / "hdf5/training-2").exists()
    held_out = out / "download" / "results4" / "eval.txt"
    text = held_out.read_text()
    held_out.write_text(text[::-1])
    refuse("other-stage", f"{out}/arrow/eval", "eval.txt")
    held_out.write_text(text)  # of a new date, but the same
    with (out / "phase1" / "vocab.txt").open("a") as vocab:
        vocab.write("another\n")
    refuse("other-stage", f"{out}/arrow/training", "vocab.txt")
    shutil.copy(made / "phase1" / "vocab.txt", out / "phase1" / "vocab.txt")
    mlperf_data(out, packed=True, skip_download=True, shards=SHARDS, eval_count=10)
    (out / ".packed_data.made-of.json").write_text("[" * 100_000)
    refuse("unknown-stage", f"{out}/packed_data")
    (out / ".packed_data.made-of.json").unlink()
    refuse("unknown-stage", f"{out}/packed_data")


def row_checksum_by_hand(path: Path) -> str:
    hashes = [hashlib.md5(str(row).encode()).hexdigest() for row in rows_of(path)]
    return hashlib.md5(str(hashes).encode()).hexdigest()


def test_checksums_are_compared_for_mlperfs_own_text(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = sorted((made / "download" / "results4").iterdir())
    known = {path.name: (path.stat().st_size, hashlib.md5(path.read_bytes()).hexdigest()) for path in texts}
    monkeypatch.setattr(mlperf, "MLPERF_FILES", known)
    shard = made / f"{TRAINING}_varlength" / f"part_00001_of_{SHARDS:05d}.hdf5"
    right = {
        f"hdf5_{SHARDS}_shards_varlength": {shard.stem: row_checksum_by_hand(shard)},
        "eval_varlength": {"part_eval_10k": row_checksum_by_hand(made / "hdf5/eval_varlength/part_eval_10k.hdf5")},
    }
    monkeypatch.setattr(mlperf, "ROW_CHECKSUMS", right)
    done = mlperf_data(made, packed=True, skip_download=True, shards=SHARDS, eval_count=10)
    assert done["is_mlperfs_text"]
    assert done["checksums_compared"] == 2
    monkeypatch.setitem(right, "eval_varlength", {"part_eval_10k": "0" * 32})
    with helpers.refused("wrong-checksum", "part_eval_10k.hdf5", "0" * 32):
        mlperf_data(made, packed=True, skip_download=True, shards=SHARDS, eval_count=10)
    monkeypatch.setitem(known, "eval.txt", (1, "0" * 32))
    with helpers.refused("wrong-checksum", "eval.txt"):
        mlperf_data(made, skip_download=True, shards=SHARDS)


def test_the_archive_is_unpacked(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    text, packed = tmp_path / "download" / "results4", tmp_path / "download" / "results_text.tar.gz"
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(text, "results4")
    before = {path.name: path.read_bytes() for path in text.iterdir()}
    shutil.rmtree(text)
    mlperf_data(tmp_path, skip_download=True, shards=SHARDS, eval_count=10, needed_only=True)
    assert {path.name: path.read_bytes() for path in text.iterdir()} == before
    shutil.rmtree(text)
    packed.write_bytes(packed.read_bytes()[:-100])
    with helpers.refused("damaged-input", packed):
        mlperf_data(tmp_path, skip_download=True)
    assert not text.exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with helpers.refused("missing-input", "part-00000-of-00500"):
        mlperf_data(tmp_path, skip_download=True)
    write_inputs(tmp_path)
    (tmp_path / "phase1" / "vocab.txt").unlink()
    with helpers.refused("missing-vocabulary", tmp_path / "phase1" / "vocab.txt"):
        mlperf_data(tmp_path, skip_download=True)
    (tmp_path / "download" / "results4" / "eval.txt").unlink()
    with helpers.refused("missing-input", "eval.txt"):
        mlperf_data(tmp_path, skip_download=True)
    (tmp_path / "download" / "results4" / "part-00000-of-00002").unlink()
    with helpers.refused("missing-input", "1 of 2 parts"):
        mlperf_data(tmp_path, skip_download=True)
