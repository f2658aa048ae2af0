"""`bertrain train` on several ranks."""

from __future__ import annotations

from pathlib import Path

from bertrain.pipeline.train import summary, train
from tests import helpers
from tests.training.test_train import SMALL, write_articles


def test_it_starts_the_ranks_that_were_asked_for(tmp_path: Path) -> None:
    articles, out = write_articles(tmp_path / "articles"), tmp_path / "out"
    settings = dict(SMALL) | {"train.max_steps": "3", "train.threads": "1"}
    given = [word for key, value in settings.items() for word in (f"--{key}", value)]
    done = helpers.bertrain("train", articles, "--out", out, "--size", "tiny", "--nproc", 2, *given)
    assert "2 ranks of 1 thread" in done.stdout
    again = train(articles, out, size="tiny", overrides=tuple(settings.items()))
    assert summary(again)[0] in done.stdout, "the number of ranks is no part of what was asked for"
