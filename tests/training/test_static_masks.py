"""Losses on other people's files, in any layout and bin policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from bertrain.training.evaluate import evaluate
from bertrain.training.start import pretrain
from tests import helpers
from tests.quick.test_static_masks import LAYOUTS, write_layouts

NO_DROPOUT = {"model__hidden_dropout": 0, "model__attention_dropout": 0, "train__max_steps": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_layouts(tmp_path_factory.mktemp("static"))


def test_losses_are_the_same_in_any_layout_and_policy(folders: dict[str, Path], tmp_path: Path) -> None:
    runs = {}
    for layout in LAYOUTS:
        pretrain(helpers.tiny_settings(**NO_DROPOUT), folders[layout], tmp_path / layout)
        runs[layout] = helpers.losses(tmp_path / layout)
    assert runs["hdf5-varlength"] == runs["tfrecord"] == runs["arrow"]
    evaluations = [evaluate(tmp_path / "arrow", folders[layout]) for layout in LAYOUTS]
    assert all(evaluation == evaluations[0] for evaluation in evaluations)
    for policy, budget in (("padded", 256), ("budget", 64)):
        settings = helpers.tiny_settings(**NO_DROPOUT, batch__policy=policy, batch__token_budget=budget)
        pretrain(settings, folders["hdf5-varlength"], tmp_path / f"{policy}-{budget}")
        for one, other in zip(helpers.losses(tmp_path / f"{policy}-{budget}"), runs["arrow"], strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_evaluations_mask_the_same_words_whatever_is_trained_with(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    for share in (0.15, 0.3):
        masked = {"data__mask_probability": share, "data__max_predictions": 0}
        # The warm-up's first step has a learning rate of 0, so both runs keep the same weights.
        pretrain(helpers.tiny_settings(**masked, train__max_steps=1), data, tmp_path / str(share))
    assert evaluate(tmp_path / "0.15", data) == evaluate(tmp_path / "0.3", data)
