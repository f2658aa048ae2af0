"""Sizes and learning rates that `bertrain train` chooses among, each trained for the same time, by their held-out loss.

    python benchmarks/train_sizes.py TEXT... --held-out FILE --work FOLDER [--minutes 2 6] [--sizes tiny mini small]
        [--rates 1 2] [--seeds 1] [--words 8000]

Each size gets the settings that `train` gives it for TEXT, this machine and the time, and the learning rate of its
rule times a factor. All share one vocabulary, so that their losses compare; `train` gives small ones fewer words. Runs
follow one another and have the machine alone. The loss is that of FILE (a sentence per line), prepared once with 15 %
of the words masked. Adds to benchmarks/results/train_sizes.json after each run; what FOLDER has of an earlier start is
not computed again.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from held_out import bertrain, evaluate, prepare, steps_of

from bertrain.pipeline.plan import SIZES, Machine, Text, TrainingPlan, plan_training
from bertrain.pipeline.train import measure_machine

RESULTS = Path(__file__).parent / "results" / "train_sizes.json"
NOT_HERE = ("train.budget", "evaluate.every_samples", "optimizer.learning_rate", "log.every_steps")
"""Settings of the plan that the script sets itself."""


def count(texts: list[Path]) -> Text:
    """A sentence per line, an empty line between documents."""
    lines = [line for path in texts for line in path.read_text().splitlines()]
    sentences = [line for line in lines if line.strip()]
    return Text(len(lines) - len(sentences) + 1, len(sentences), sum(map(len, sentences)))


def known_machine(work: Path) -> Machine:
    """Measured at the first start, so that all runs are planned for the same machine."""
    kept = work / "machine.json"
    if not kept.exists():
        kept.write_text(json.dumps(vars(measure_machine("auto", 1))))
    return Machine(**json.loads(kept.read_text()))


def measure(work: Path, plan: TrainingPlan, minutes: float, factor: float, seed: int) -> dict[str, Any]:
    size = plan.recipe.removeprefix("bert-")
    run = work / f"run-{size}-{minutes:g}m-{factor:g}-{seed}"
    rate = factor * float(plan.overrides["optimizer.learning_rate"])
    if not (run / "metrics.jsonl").exists() or '"kind": "end"' not in (run / "metrics.jsonl").read_text():
        settings = {name: value for name, value in plan.overrides.items() if name not in NOT_HERE}
        given = [word for name, value in settings.items() for word in (f"--{name}", value)]
        logged = ("--log.every_steps", 1, "--log.level", "quiet")
        own = ("--data", work / "data", "--run", run, "--budget", f"{minutes:g}m", "--lr", rate, "--seed", seed)
        bertrain("pretrain", plan.recipe, *given, *own, *logged)
    steps = steps_of(run)
    return {
        "minutes": minutes,
        "size": size,
        "learning_rate": rate,
        "seed": seed,
        "steps": len(steps),
        "tokens": sum(step["tokens"] for step in steps),
        **evaluate(run, work),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, nargs="+", default=[2, 6])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES[:3]))
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--words", type=int, default=8000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    prepare(options.work, options.texts, options.held_out, options.words)
    text, machine = count(options.texts), known_machine(options.work)
    records = json.loads(options.output.read_text()) if options.output.exists() else []
    record: dict[str, Any] = {
        "text": vars(text), "words": options.words, "device": machine.name,
        "gflops": round(machine.flops_per_s / 1e9, 1), "torch": torch.__version__,
        "python": platform.python_version(), "chosen": {}, "rows": [],
    }  # fmt: skip
    for minutes in options.minutes:
        record["chosen"][f"{minutes:g}"] = plan_training(text, machine, budget=f"{minutes:g}m").recipe
        for factor in options.rates:
            for size in options.sizes:
                plan = plan_training(text, machine, budget=f"{minutes:g}m", size=size)
                for seed in options.seeds:
                    record["rows"].append(measure(options.work, plan, minutes, factor, seed))
                    print(record["rows"][-1], flush=True)
                    options.output.write_text(json.dumps([*records, record], indent=1) + "\n")


if __name__ == "__main__":
    main()
