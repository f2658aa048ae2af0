"""`bertrain data mlperf`, stopped and continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bertrain.data.formats.source import open_data
from bertrain.mlperf.data import mlperf_data
from bertrain.weights.source import read_weights
from tests import helpers
from tests.miniature_tasks import command_line
from tests.quick.test_mlperf_data import PLACES, SHARDS, TRAINING, files_of, write_inputs
from tests.systems import write_download


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mlperf") / "bert_data"
    write_inputs(out)
    done = mlperf_data(out, packed=True, skip_download=True, shards=SHARDS, eval_count=10)
    assert done["stages"] == dict.fromkeys(PLACES, "made")
    assert not done["is_mlperfs_text"]
    return out


def test_the_text_is_compared_with_the_list_beside_it(tmp_path: Path) -> None:
    """And length 128, NVIDIA's checkpoint; nothing is made of text that was damaged on its way."""
    out = write_download(tmp_path / "bert_data")
    text = out / "download" / "results4"
    part = text / "part-00001-of-00002"
    whole = part.read_bytes()
    words = ("data", "mlperf", "--out", out, "--skip-download", "--shards", 2, "--eval-count", 10, "--needed-only")
    words += ("--max-seq-length", 128, "--convert-checkpoint")
    for damaged, code in ((whole.replace(b"a", b"e", 1), "wrong-checksum"), (None, "missing-input")):
        part.unlink() if damaged is None else part.write_bytes(damaged)
        refused = command_line(*words, check=False)
        assert refused.code == 2
        assert (part.name if damaged else "parts") in refused.err, code
        assert not (out / "length-128").exists()
    part.write_bytes(whole)
    done = command_line(*words)
    assert "3 text files have the checksums" in done.err
    made = open_data(out / "length-128" / "arrow" / "training")
    assert made.lengths.max() <= 128
    assert list((out / "length-128" / "hdf5" / "training-2" / "hdf5_2_shards_varlength").glob("part_*"))
    assert list(read_weights(out / "phase1" / "model.ckpt-28252.pt").tensors)
    with helpers.refused("option-out-of-range", "100"):
        mlperf_data(out, skip_download=True, max_seq_length=100)


def test_it_goes_on_where_it_was(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    shutil.copytree(made, out)
    lost = [f"{TRAINING}_varlength_shuffled", "hdf5/eval", "per_seqlen"]
    before = {place: [path.read_bytes() for path in files_of(out / place)] for place in lost}
    for place in lost:
        shutil.rmtree(out / place)
    (out / "hdf5" / ".eval.partial-123").mkdir()  # of a process that was killed
    arguments = ("--out", out, "--packed", "--skip-download", "--shards", SHARDS, "--eval-count", 10, "--needed-only")
    done = json.loads(command_line("data", "mlperf", *arguments, "--json").out)
    assert [place for place, what in done["stages"].items() if what == "made"] == lost[:1]
    assert "left out" in (done["stages"]["hdf5/eval"], done["stages"]["per_seqlen"])
    mlperf_data(out, packed=True, skip_download=True, shards=SHARDS, eval_count=10)
    assert {place: [path.read_bytes() for path in files_of(out / place)] for place in lost} == before
    assert not list(out.rglob("*partial*"))
