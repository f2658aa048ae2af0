"""Runs whose output layer starts with the words' frequencies."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from bertrain.data.formats.frequencies import word_shares
from bertrain.data.formats.source import open_data
from bertrain.model.initialization import WORD_BIAS
from bertrain.training.start import pretrain, resume
from tests import helpers
from tests.launched import records

FREQUENCIES = {"model__initial_bias": "frequencies", "train__max_steps": 4, "checkpoint__every_steps": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return helpers.make_data(tmp_path_factory.mktemp("corpus"))


def log_shares(data: Path) -> torch.Tensor:
    opened = open_data(data)
    return torch.from_numpy(np.log(word_shares(opened, range(len(opened))))).float()


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_the_first_loss_is_the_entropy_of_the_words(data: Path, tmp_path: Path, family: str) -> None:
    given = FREQUENCIES | helpers.FAMILIES[family] | {"model__initializer_range": 1e-4, "train__max_steps": 1}
    settings = helpers.tiny_settings(**given)
    pretrain(settings, data, tmp_path / "run")
    shares = log_shares(data)
    entropy = -(shares.exp() * shares).sum().item()
    assert entropy < 0.9 * math.log(helpers.vocab_size()), "the corpus can tell the two apart"
    assert records(tmp_path / "run")[0]["mlm_loss"] == pytest.approx(entropy, rel=0.05)


def test_what_was_learned_is_kept(data: Path, tmp_path: Path) -> None:
    settings = helpers.tiny_settings(**FREQUENCIES)
    pretrain(settings, data, tmp_path / "run")
    expected = helpers.final_weights(tmp_path / "run")
    resume(tmp_path / "run", from_step=2)
    resumed = helpers.final_weights(tmp_path / "run")
    assert all(expected[name].equal(resumed[name]) for name in expected)

    pretrain(helpers.tiny_settings(train__max_steps=1), data, tmp_path / "zero")  # its first step has a rate of 0
    pretrain(settings, data, tmp_path / "continued", init=str(tmp_path / "zero"))
    assert helpers.final_weights(tmp_path / "continued")[WORD_BIAS].abs().max() < 0.1
