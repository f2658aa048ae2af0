"""The learning rate of fine-tuning against the width of the weights.

    python benchmarks/finetune_rates.py --glue GLUE --text TEXT --work FOLDER [--sizes 2x128 ...] [--rates 1e-3 ...]

Models of three sizes are pre-trained here on TEXT (a sentence per line), and fine-tuned on a part of SST-2 with recipe
finetune-glue (AdamW, steps of 32, 3 epochs) at rates a factor of about three apart. Writes finetune_rates.json after
every run: the accuracy on SST-2's dev set of each, and for each size the mean over seeds by rate, and the best rate, if
any has learned something. What FOLDER has of an earlier start is not computed again, so sizes can be measured one by
one, or at the same time in several processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import bertrain
from bertrain.base.machine import cpu_name

HERE = Path(__file__).parent
MAJORITY = 0.5092  # accuracy of always predicting the more frequent class of SST-2's dev set
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
QUIET = {"log.level": "quiet", "log.trackers": "none"}
ROWS = "0:0.15"  # of SST-2's training file
SEEDS = (1, 2)


@dataclass(frozen=True)
class Size:
    """A model and how it is pre-trained: steps of 32,768 tokens."""

    layers: int
    width: int
    rate: float
    steps: int = 2000


SIZES = {
    "2x128": Size(2, 128, 2e-3),
    "4x256": Size(4, 256, 1e-3),
    "6x384": Size(6, 384, 1e-3),
}


def pairs(settings: dict[str, Any]) -> list[tuple[str, str]]:
    return [(key, str(value)) for key, value in (settings | QUIET).items()]


def make_data(folder: Path, text: Path) -> Path:
    """Examples of 128 tokens, and their vocabulary."""
    texts = sorted(text.glob("*.txt"))
    if not (folder / "data").exists():
        bertrain.train_vocabulary(texts, folder / "vocab.txt", size=16000)
        bertrain.prepare(texts, folder / "data", vocab=folder / "vocab.txt", max_seq_length=128, workers=8)
    return folder / "data"


def make_weights(folder: Path, data: Path, name: str) -> Path:
    """The weights of a size; what an earlier start has made is continued."""
    size = SIZES[name]
    model = {
        "model.num_layers": size.layers, "model.hidden_size": size.width, "model.num_heads": size.width // 64,
        "model.intermediate_size": 4 * size.width, "train.max_steps": size.steps, "batch.tokens": 32768,
        "batch.token_budget": 32768,
        "batch.sequences": 0,
        "optimizer.learning_rate": size.rate,
    }  # fmt: skip
    bertrain.pretrain(bertrain.resolve("bert-base", pairs(model)), data, folder / name)
    return folder / name


def finetune(folder: Path, glue: Path, init: Path, rate: float, seed: int) -> dict[str, Any]:
    """The end of one run: steps, accuracy and training loss."""
    overrides = {"optimizer.learning_rate": rate, "train.seed": seed, "evaluate.every_epochs": 0, "data.slice": ROWS}
    overrides["checkpoint.enabled"] = "false"
    bertrain.finetune(bertrain.resolve_task("glue/sst2", pairs(overrides)), glue, folder, init=str(init))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    evaluation = next(line for line in lines if line["kind"] == "evaluation")
    loss = fmean(step["loss"] for step in steps[-10:])
    return {"steps": len(steps), "accuracy": round(evaluation["accuracy"], 4), "last_loss": round(loss, 4)}


def read(path: Path) -> list[dict[str, Any]]:
    """The runs that a file has, if it is there."""
    return json.loads(path.read_text()) if path.exists() else []


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each size the mean accuracy over seeds by rate, and the best rate."""
    summary = []
    for size in dict.fromkeys(run["size"] for run in runs):
        chosen = [run for run in runs if run["size"] == size]
        by_rate = {
            rate: round(fmean(run["accuracy"] for run in chosen if run["rate"] == rate), 4)
            for rate in dict.fromkeys(run["rate"] for run in chosen)
        }
        best = max(by_rate, key=lambda rate: by_rate[rate]) if max(by_rate.values()) > MAJORITY else None
        summary.append({"size": size, "accuracy_by_rate": by_rate, "best_rate": best})
    return summary


def write(folder: Path, path: Path) -> None:
    """Everything that has been measured so far, of all sizes."""
    runs = [run for name in SIZES for run in sorted(read(folder / f"{name}.json"), key=lambda run: run["rate"])]
    result = {
        "what": "accuracy on SST-2's dev set by size of the weights and learning rate of fine-tuning",
        "majority_class": MAJORITY,
        "summary": summarize(runs),
        "runs": runs,
        "machine": {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    data = make_data(given.work, given.text)
    for name in given.sizes:
        weights, done = make_weights(given.work, data, name), given.work / f"{name}.json"
        for seed, rate in itertools.product(SEEDS, given.rates):
            run: dict[str, Any] = {"size": name, "rate": rate, "seed": seed}
            if any(run.items() <= one.items() for one in read(done)):
                continue
            with tempfile.TemporaryDirectory() as place:
                run |= finetune(Path(place) / "run", given.glue, weights, rate, seed)
            print(run, flush=True)
            done.write_text(json.dumps([*read(done), run]))
            write(given.work, given.output / "finetune_rates.json")


if __name__ == "__main__":
    main()
