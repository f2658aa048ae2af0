"""Do the fixed settings of fine-tuning limit the six tasks? Other rates, with dropout and without.

    python benchmarks/speedrun/fine_tuning.py NAME WEIGHTS --glue DIR [--output FILE] [--only VARIANT ...]

WEIGHTS is a run or a folder of weights; NAME stands in the rows, which are appended to FILE. `as the rules` is what
run.py does; the variants change it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from run import RESULTS, TASKS, fine_tune

OUTPUT = RESULTS.with_name("speedrun_fine_tuning.json")
NO_DROPOUT = {"model.hidden_dropout": "0.0", "model.attention_dropout": "0.0"}
VARIANTS: dict[str, dict[str, str]] = {
    "as the rules": {},
    "no dropout": NO_DROPOUT,
    "1e-4": {"optimizer.learning_rate": "1e-4"},
    "2e-4": {"optimizer.learning_rate": "2e-4"},
    "1e-4, no dropout": {"optimizer.learning_rate": "1e-4"} | NO_DROPOUT,
}
SEEDS = 2  # of the small tasks
AT_ONCE = 7  # fine-tunings on one GPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("weights", type=Path)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--only", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    jobs = [(variant, task) for task in TASKS for variant in options.only]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:

        def one(job: tuple[str, str]) -> dict[str, Any]:
            variant, task = job
            run = Path(folder) / f"{task}-{list(VARIANTS).index(variant)}"
            seeds = min(SEEDS, TASKS[task][1])
            change = VARIANTS[variant]
            scores = fine_tune(task, options.weights, options.glue, run, num_seeds=seeds, change=change)
            return {"weights": options.name, "variant": variant, "task": task, "values": scores}

        rows = list(pool.map(one, jobs))
    for variant in options.only:
        shown = [f"{row['task']} {100 * fmean(row['values']):.1f}" for row in rows if row["variant"] == variant]
        print(f"{options.name}, {variant}: {', '.join(shown)}")
    before = json.loads(options.output.read_text()) if options.output.exists() else []
    lines = ",\n".join(json.dumps(row) for row in before + rows)
    options.output.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
