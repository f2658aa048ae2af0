"""Ranks and resume on other people's files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from bertrain.data.formats.convert import convert
from bertrain.data.formats.source import open_data
from bertrain.reports import history
from bertrain.training.start import pretrain, resume
from tests import helpers
from tests.miniature_tasks import command_line
from tests.quick.test_static_masks import write_layouts

NO_DROPOUT = {"model__hidden_dropout": 0, "model__attention_dropout": 0, "train__max_steps": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_layouts(tmp_path_factory.mktemp("static"))


def test_ranks_and_resume_on_other_peoples_files(
    folders: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.tfrecord"  # one file will do, and its index is made by whichever rank comes first
    convert(folders["arrow"], tmp_path / "one", to="tfrecord")
    shutil.copy(tmp_path / "one" / "part-00000-of-00001.tfrecord", data)
    overrides = NO_DROPOUT | {"checkpoint__every_steps": 2, "data__vocab": folders["arrow"] / "vocab.txt"}
    pretrain(helpers.tiny_settings(**overrides), data, tmp_path / "alone")
    expected = helpers.losses(tmp_path / "alone")
    shutil.rmtree(tmp_path / "alone" / "checkpoints" / "step-00000004")
    resume(tmp_path / "alone")
    assert helpers.losses(tmp_path / "alone") == pytest.approx(expected, rel=1e-6)
    lengths, counts = np.unique(open_data(data, vocab=overrides["data__vocab"]).lengths, return_counts=True)
    assert history.read(tmp_path / "alone", "alone").lengths == dict(zip(lengths, counts, strict=True))
    arguments = helpers.tiny_arguments(**overrides)
    shutil.rmtree(tmp_path / ".data.tfrecord.bertrain-index")
    assert history.read(tmp_path / "alone", "alone").lengths is None
    command_line("pretrain", "bert-tiny", "--data", data, "--run", tmp_path / "ranks", "--nproc", 2, *arguments)
    assert "masks: those of the data" in capfd.readouterr().out
    assert helpers.losses(tmp_path / "ranks") == pytest.approx(expected, rel=1e-5)
