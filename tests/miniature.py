"""MLPerf's benchmark in miniature: a text so simple that two small layers guess 72 % of its masked words in seconds."""

from __future__ import annotations

import random
from pathlib import Path

from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.data.prepare.prepare import prepare
from tests.helpers import SPECIAL

WORDS = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel"]
NOISE = 0.1  # share of words that are any word, so that no model guesses all of them

SETTINGS = {
    "model.vocab_size": len(SPECIAL) + len(WORDS),
    "model.hidden_size": 64,
    "model.num_heads": 4,
    "model.intermediate_size": 128,
    "model.max_positions": 32,
    "model.hidden_dropout": 0,
    "model.attention_dropout": 0,
    "model.initial_heads": "neighbours",
    "data.max_seq_length": 32,
    "data.max_predictions": 5,
    "batch.sequences": 32,
    "batch.token_budget": 1024,
    "optimizer.name": "lamb",
    "optimizer.learning_rate": 0.015,
    "schedule.warmup_steps": 0,
    "train.max_steps": 200,
    "train.precision": "fp32",
    "train.threads": 1,
    "evaluate.every_samples": 640,
    "checkpoint.enabled": "false",
    "log.level": "quiet",
    "log.trackers": "none",
    "mlperf.clear_cache": "false",  # it would slow down whatever else this machine is doing
}


def write_text(path: Path, *, documents: int, seed: int) -> Path:
    """The eight words round and round."""
    draw = random.Random(seed)
    lines = []
    for _ in range(documents):
        place = draw.randrange(len(WORDS))
        for _ in range(6):
            words = []
            for _ in range(draw.randint(8, 14)):
                place = (place + 1) % len(WORDS)
                words.append(draw.choice(WORDS) if draw.random() < NOISE else WORDS[place])
            lines.append(" ".join(words))
        lines.append("")
    path.write_text("\n".join(lines) + "\n")
    return path


def make_miniature(folder: Path) -> Path:
    """Folders `train` and `held-out` in `folder`."""
    vocab = folder / "vocab.txt"
    vocab.write_text("\n".join([*SPECIAL, *WORDS]) + "\n")
    for name, documents, seed in (("train", 150, 1), ("held-out", 30, 2)):
        text = write_text(folder / f"{name}.txt", documents=documents, seed=seed)
        prepare([text], folder / name, vocab=vocab, max_seq_length=32)
    return folder


def _values(folder: Path, given: dict[str, object]) -> dict[str, str]:
    values = SETTINGS | {"evaluate.data": folder / "held-out"} | {k.replace("__", "."): v for k, v in given.items()}
    return {key: str(value) for key, value in values.items()}


def miniature_settings(folder: Path, **given: object) -> Settings:
    return resolve("bert-tiny", list(_values(folder, given).items()))


def miniature_arguments(folder: Path, **given: object) -> list[str]:
    return [word for key, value in _values(folder, given).items() for word in (f"--{key}", value)]
