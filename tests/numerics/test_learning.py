"""It learns: a small model on a small corpus gets well under the entropy of guessing by frequency."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from bertrain.data.formats.shards import Shards
from bertrain.training.evaluate import evaluate
from bertrain.training.start import pretrain
from tests import helpers


def unigram_entropy(shards: Shards) -> float:
    """Nats per word of the best guess that looks at nothing but frequencies."""
    tokens = shards.read(np.arange(len(shards))).tokens
    words = tokens[tokens >= len(helpers.SPECIAL)]
    shares = np.bincount(words) / len(words)
    return -sum(share * math.log(share) for share in shares[shares > 0])


def test_loss_falls_well_under_the_unigram_entropy(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path / "train", documents=300)
    held_out = helpers.make_data(tmp_path / "held-out", documents=60, seed=1)
    settings = helpers.tiny_settings(
        train__max_steps=200,
        model__hidden_size=64,
        model__intermediate_size=256,
        batch__sequences=32,
        batch__token_budget=2048,
        optimizer__learning_rate=3e-3,
        schedule__warmup_steps=20,
        log__every_steps=50,
        checkpoint__every_steps=0,
        evaluate__data=held_out,
    )
    pretrain(settings, data, tmp_path / "run")
    entropy = unigram_entropy(Shards.open(held_out))
    result = evaluate(tmp_path / "run", held_out)
    assert result["mlm_loss"] < 0.7 * entropy, (result, entropy)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (during,) = [record for record in records if record["kind"] == "evaluation"]
    assert during["mlm_loss"] == result["mlm_loss"]
