"""Which size `bertrain train` should choose: sizes and learning rates with equal computation, by their held-out loss.

    python benchmarks/train_sizes.py TEXT... --held-out FILE --work FOLDER [--minutes 2 6] [--sizes tiny mini small]
        [--rates 1 2] [--seeds 1] [--words 8000] [--gflops 300] [--jobs 2]

Every size reads as many tokens as `train` expects in the given minutes on a machine of that many GFLOP/s, so that other
work on the machine does not change the result; with `--jobs`, several runs share the cores. Each gets the settings that
`train` gives it for TEXT and the time, and the learning rate of its rule times a factor. All share one vocabulary, so
that their losses compare; `train` gives small ones fewer words. The loss is that of FILE (a sentence per line),
prepared once with 15 % of the words masked. Results are added to benchmarks/results/train_sizes.json after each run;
what FOLDER has of an earlier start is not computed again.
"""

from __future__ import annotations

import argparse
import json
import platform
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from held_out import bertrain, evaluate, prepare, steps_of

from bertrain.config.choices import Size
from bertrain.config.model_size import count_parameters
from bertrain.pipeline.plan import SIZES, Machine, Text, plan_training
from bertrain.run.folder import Run

RESULTS = Path(__file__).parent / "results" / "train_sizes.json"
NOT_HERE = ("train.budget", "evaluate.every_samples", "optimizer.learning_rate", "log.every_steps")
"""Settings of the plan that the script sets itself."""


@dataclass(frozen=True)
class Case:
    minutes: float
    size: Size
    factor: float
    seed: int


def count(texts: list[Path]) -> Text:
    """A sentence per line, an empty line between documents."""
    lines = [line for path in texts for line in path.read_text().splitlines()]
    sentences = [line for line in lines if line.strip()]
    return Text(len(lines) - len(sentences) + 1, len(sentences), sum(map(len, sentences)))


def measure(case: Case, work: Path, text: Text, machine: Machine, threads: int) -> dict[str, Any]:
    plan = plan_training(text, machine, budget=f"{case.minutes:g}m", size=case.size, given={"model.rtd": "0"})
    settings = plan.settings(work)
    run = work / f"run-{case.size}-{case.minutes:g}m-{case.factor:g}-{case.seed}"
    rate = case.factor * settings.optimizer.learning_rate
    if not (run / "metrics.jsonl").exists() or '"kind": "end"' not in (run / "metrics.jsonl").read_text():
        num_steps = machine.tokens_in(60 * case.minutes, settings) // settings.batch.tokens
        kept = {name: value for name, value in plan.overrides.items() if name not in NOT_HERE}
        given = [word for name, value in kept.items() for word in (f"--{name}", value)]
        own = ("--data", work / "data", "--run", run, "--max-steps", num_steps, "--lr", rate, "--seed", case.seed)
        how = ("--train.threads", threads, "--log.every_steps", 1, "--log.level", "quiet")
        bertrain("pretrain", plan.recipe, *given, *own, *how)
    steps = steps_of(run)
    return {
        "minutes": case.minutes,
        "size": case.size,
        "learning_rate": rate,
        "seed": case.seed,
        "steps": len(steps),
        "tokens": sum(step["tokens"] for step in steps),
        "encoder_parameters": count_parameters(settings.model)[1],
        "initializer_range": Run.open(run).settings.model.initializer_range,
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
    parser.add_argument("--gflops", type=float, default=300.0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, which share the cores")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    prepare(options.work, options.texts, options.held_out, options.words)
    text = count(options.texts)
    machine = Machine("", 1, options.gflops * 1e9, is_gpu=torch.cuda.is_available())
    records = json.loads(options.output.read_text()) if options.output.exists() else []
    record: dict[str, Any] = {
        "text": vars(text), "words": options.words, "gflops": options.gflops, "device": platform.machine(),
        "torch": torch.__version__, "python": platform.python_version(), "rows": [],
    }  # fmt: skip
    threads = max(1, torch.get_num_threads() // options.jobs)
    cases = [Case(*one) for one in product(options.minutes, options.sizes, options.rates, options.seeds)]
    with ThreadPoolExecutor(options.jobs) as pool:
        running = [
            pool.submit(measure, case, options.work, text, machine, threads)
            for case in sorted(cases, key=lambda case: case.minutes)
        ]
        for finished in as_completed(running):
            record["rows"].append(finished.result())
            print(record["rows"][-1], flush=True)
            options.output.write_text(json.dumps([*records, record], indent=1) + "\n")


if __name__ == "__main__":
    main()
