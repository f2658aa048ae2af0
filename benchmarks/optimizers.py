"""The optimizers on the demo's model and articles: what each makes of a few hundred steps.

    python benchmarks/optimizers.py [--steps 200] [--output benchmarks/results]

Every rule gets the same examples, masks, initial weights and schedule (recipe bert-demo: 2 layers of 128, steps of 16
examples, a tenth of the steps of warm-up). Seed 1 chooses its rate, by held-out loss, out of four a factor of about
three apart; seeds 2, 3 and 4 at that rate, and only those, are reported. One rank of one thread. Writes
optimizers.json: held-out loss and masked-word accuracy of every run, and the share of the step that the update took.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bertrain
from bertrain.base.machine import cpu_name

HERE = Path(__file__).parent
DEMO = HERE.parent / "demo"
RATES = {
    "lamb": (1e-3, 3e-3, 1e-2, 3e-2),
    "adamw": (3e-4, 1e-3, 3e-3, 1e-2),
    "stableadamw": (3e-4, 1e-3, 3e-3, 1e-2),
    "muon": (1e-3, 3e-3, 1e-2, 3e-2),
    "madgrad": (1e-3, 3e-3, 1e-2, 3e-2),
    "acclip": (3e-4, 1e-3, 3e-3, 1e-2),
}
TUNING_SEED, SEEDS = 1, (2, 3, 4)


def prepare(folder: Path) -> None:
    texts, vocab = [DEMO / "train-1.txt", DEMO / "train-2.txt"], folder / "vocab.txt"
    bertrain.train_vocabulary(texts, vocab, size=4000)
    bertrain.prepare(texts, folder / "data", vocab=vocab, max_seq_length=128)
    bertrain.prepare([DEMO / "held-out.txt"], folder / "held-out", vocab=vocab, max_seq_length=128)


def train(folder: Path, rule: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """One run, evaluated at its end."""
    overrides = {
        "optimizer.name": rule, "optimizer.learning_rate": rate, "schedule.warmup_steps": steps // 10,
        "train.max_steps": steps, "train.seed": seed, "train.threads": 1, "train.device": "cpu",
        "evaluate.data": folder / "held-out", "checkpoint.every_steps": 0, "log.level": "quiet",
        "log.trackers": "none",
    }  # fmt: skip
    run = folder / f"{rule}-{rate}-{seed}"
    settings = bertrain.resolve("bert-demo", [(key, str(value)) for key, value in overrides.items()])
    bertrain.pretrain(settings, folder / "data", run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps_done = [line for line in lines if line["kind"] == "step"]
    held_out = next(line for line in lines if line["kind"] == "evaluation")
    seconds = {phase: sum(step["seconds"][phase] for step in steps_done) for phase in steps_done[0]["seconds"]}
    result = {
        "rule": rule,
        "rate": rate,
        "seed": seed,
        "held_out_loss": round(held_out["loss"], 4),
        "held_out_accuracy": round(held_out["mlm_accuracy"], 5),
        "steps_not_applied": sum(not step["applied"] for step in steps_done),
        "update_share": round(seconds["optimizer"] / sum(seconds.values()), 3),
    }
    print(result, flush=True)
    return result


def compare(folder: Path, steps: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every run, and for each rule its best rate and what the reported seeds made of it."""
    runs, summary = [], []
    for rule, rates in RATES.items():
        tuning = [train(folder, rule, rate, TUNING_SEED, steps) for rate in rates]
        rate = min(tuning, key=lambda result: result["held_out_loss"])["rate"]
        reported = [train(folder, rule, rate, seed, steps) for seed in SEEDS]
        losses = [result["held_out_loss"] for result in reported]
        summary.append(
            {
                "rule": rule,
                "rate": rate,
                "rate_is_the_largest_or_smallest_tried": rate in (rates[0], rates[-1]),
                "held_out_loss": round(float(np.mean(losses)), 4),
                "between_seeds": round(max(losses) - min(losses), 4),
                "held_out_accuracy": round(float(np.mean([result["held_out_accuracy"] for result in reported])), 4),
                "update_share": round(float(np.mean([result["update_share"] for result in reported])), 3),
            }
        )
        runs += tuning + reported
    return runs, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        runs, summary = compare(Path(name), arguments.steps)
    result = {
        "what": "held-out loss of the demo's model under each update rule",
        "steps": arguments.steps,
        "summary": summary,
        "runs": runs,
        "machine": {"cpu": cpu_name(), "python": platform.python_version(), "torch": torch.__version__},
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "optimizers.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
