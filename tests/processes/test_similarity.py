"""In-batch negatives over all ranks: the same training on one and three ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import helpers
from tests.miniature_tasks import command_line
from tests.training.test_embed import encoder as encoder
from tests.training.test_similarity import write_data


def test_ranks_train_alike(encoder: Path, tmp_path: Path) -> None:
    """With dropout: bins, and so their masks, do not depend on ranks. Steps of few bins leave a rank without any."""
    data = write_data(tmp_path / "data", "triplets")
    losses = []
    for ranks in (1, 3):
        run = tmp_path / f"ranks-{ranks}"
        command_line(
            "finetune", "similarity", "--data", data, "--init", encoder, "--run", run, "--nproc", ranks,
            "--max-steps", 4, "--batch-size", 8, "--data.max_seq_length", 32, "--batch.token_budget", 128,
            "--train.threads", 1,
            "--precision", "fp32", "--lr", "1e-3", "--quiet", "--log.trackers", "none",
        )  # fmt: skip
        losses.append(helpers.losses(run))
        one, other = helpers.final_weights(tmp_path / "ranks-1"), helpers.final_weights(run)
        for name in one:
            assert helpers.relative_error(other[name], one[name]) <= 1e-4, name
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] != pytest.approx(losses[0][0], rel=1e-3), "the weights have changed"
