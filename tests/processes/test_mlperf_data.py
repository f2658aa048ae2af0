"""`bertrain data mlperf`, stopped and continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bertrain.mlperf.data import mlperf_data
from tests import helpers
from tests.quick.test_mlperf_data import PLACES, SHARDS, TRAINING, files_of, write_inputs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mlperf") / "bert_data"
    write_inputs(out)
    done = mlperf_data(out, packed=True, skip_download=True, shards=SHARDS, eval_count=10)
    assert done["stages"] == dict.fromkeys(PLACES, "made")
    assert not done["is_mlperfs_text"]
    return out


def test_it_goes_on_where_it_was(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    shutil.copytree(made, out)
    lost = [f"{TRAINING}_varlength_shuffled", "hdf5/eval", "per_seqlen"]
    before = {place: [path.read_bytes() for path in files_of(out / place)] for place in lost}
    for place in lost:
        shutil.rmtree(out / place)
    (out / "hdf5" / ".eval.partial-123").mkdir()  # of a process that was killed
    arguments = ("--out", out, "--packed", "--skip-download", "--shards", SHARDS, "--eval-count", 10, "--needed-only")
    done = json.loads(helpers.bertrain("data", "mlperf", *arguments, "--json").stdout)
    assert [place for place, what in done["stages"].items() if what == "made"] == lost[:1]
    assert "left out" in (done["stages"]["hdf5/eval"], done["stages"]["per_seqlen"])
    mlperf_data(out, packed=True, skip_download=True, shards=SHARDS, eval_count=10)
    assert {place: [path.read_bytes() for path in files_of(out / place)] for place in lost} == before
    assert not list(out.rglob("*partial*"))
