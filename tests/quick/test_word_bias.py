"""The initial bias `frequencies`: counted right from every kind of data, and a prediction by frequency alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from bertrain.data.formats import frequencies
from bertrain.data.formats.frequencies import word_shares
from bertrain.data.formats.source import open_data
from bertrain.data.prepare.prepare import prepare
from bertrain.model.initialization import WORD_BIAS, initialize, set_word_bias, uninitialized
from tests import helpers

SPECIAL = ("[CLS]", "[SEP]", "[PAD]")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    helpers.make_data(folder)
    return folder


def test_shares_are_those_of_the_words_that_may_be_predicted(corpus: Path) -> None:
    data = open_data(corpus / "data")
    words = data.vocabulary.words
    block = data.read(np.arange(len(data)))
    counts = Counter(words[token] for token in block.tokens)
    total = sum(count for word, count in counts.items() if word not in SPECIAL)
    shares = word_shares(data, range(len(data)))
    assert shares.sum() == pytest.approx(1)
    for word, share in zip(words, shares, strict=True):
        expected = 0 if word in SPECIAL else counts[word]
        assert share == pytest.approx((expected + 1) / (total + len(words)))


def test_static_masks_are_counted_by_their_labels(corpus: Path) -> None:
    prepare(
        [corpus / "corpus.txt"], corpus / "masked", vocab=corpus / "vocab.txt", max_seq_length=64,
        reference=True, max_predictions=5, masked_lm_prob=0.15,
    )  # fmt: skip
    data = open_data(corpus / "masked")
    masks = data.read(np.arange(len(data))).masks
    assert masks is not None
    expected = np.bincount(masks.labels, minlength=len(data.vocabulary.words)) + 1
    np.testing.assert_allclose(word_shares(data, range(len(data))), expected / expected.sum())


def test_a_sample_is_spread_over_the_rows_to_train_on(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_data(corpus / "data")
    read: list[int] = []
    monkeypatch.setattr(frequencies, "SAMPLED_TOKENS", 10 * int(data.lengths.mean()))
    monkeypatch.setattr(frequencies, "EXAMPLES_AT_ONCE", 3)
    monkeypatch.setattr(data, "read", lambda rows, read_rows=data.read: (read.extend(rows), read_rows(rows))[1])
    part = range(5, len(data) - 3)  # of data.slice
    word_shares(data, part)
    assert 8 <= len(read) <= 11
    assert (read[0], read[-1]) == (part[0], part[-1])
    assert max(np.diff(read)) <= len(part) / 7


def test_a_new_model_predicts_by_frequency() -> None:
    settings = helpers.tiny_settings(model__vocab_size=30, model__pad_vocab_to=8).model
    model = uninitialized(settings, "cpu")
    initialize(model, 1)
    shares = torch.rand(28) + 0.01  # the data's vocabulary may have fewer words than the model
    shares /= shares.sum()
    set_word_bias(model, shares)
    bias = model.get_parameter(WORD_BIAS).detach()
    torch.testing.assert_close(bias[:28].softmax(0), shares)
    assert (bias[28:30] == bias[:28].min()).all()
    assert (bias[30:] == 0).all(), "the padding of the vocabulary"
