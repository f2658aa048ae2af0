"""What benchmarks that compare held-out losses share: commands of bertrain in processes of their own, data, figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MEASURED = ("mlm_loss", "mlm_accuracy", "hidden_accuracy", "constant_accuracy", "nsp_accuracy")
LENGTH = 128


def bertrain(*words: object) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "bertrain", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def prepare(work: Path, texts: list[Path], held_out: Path, words: int) -> None:
    """A vocabulary of `words` words, examples to train on and held-out masks; what is there stays."""
    vocabulary = work / "vocab.txt"
    if not vocabulary.exists():
        bertrain("data", "vocab", *texts, "--size", words, "--out", vocabulary)
    if not (work / "data" / "manifest.json").exists():
        bertrain("data", "prepare", *texts, "--out", work / "data", "--vocab", vocabulary, "--max-seq-length", LENGTH)
    mask_held_out(work, held_out, vocabulary)


def mask_held_out(work: Path, held_out: Path, vocabulary: Path) -> None:
    """Prepare a text, a sentence per line, once with 15 % of the words masked."""
    if not (work / "held-out" / "manifest.json").exists():
        masks = ("--reference", "--max-predictions", 20, "--masked-lm-prob", 0.15, "--max-seq-length", LENGTH)
        bertrain("data", "prepare", held_out, "--vocab", vocabulary, "--out", work / "held-out", *masks)


def evaluate(run: Path, work: Path) -> dict[str, float]:
    """The figures of a run on the held-out masks."""
    metrics = json.loads(bertrain("evaluate", run, "--data", work / "held-out", "--json"))
    return {name: metrics[name] for name in MEASURED if name in metrics}


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]
