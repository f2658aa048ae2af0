"""One entry of the speedrun: train a recipe for a time, measure its held-out loss, fine-tune six tasks.

    python benchmarks/speedrun/run.py NAME --data DIR --held-out DIR [--glue DIR] [--output FILE]
                                      [--folder FOLDER] [--stop-after SECONDS] -- RECIPE [SETTINGS]

What stands behind `--` goes to `bertrain pretrain` as it is, such as `baseline.toml --budget 7m`. README.md has the
rules, and `data.sh` makes DIR and the held-out DIR. A record is appended to FILE: the command, the seconds, the
held-out loss, the curve, and with `--glue` the scores of the tasks.

With `--stop-after` the training is stopped by SIGTERM after that time, and the same command resumes it: for machines
that are lent for less time than a run takes. FOLDER keeps the run.

`seconds` counts from the start of the process to the end of the last step, without the evaluations on the way, so
imports and compilation are in it, those of a resumed run too; `start_up_s` is the part before the first step ended.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bertrain.base.errors import EXIT_REQUEUE

RESULTS = Path(__file__).parents[1] / "results" / "speedrun.json"
TASKS = {
    "cola": ("matthews", 5), "mrpc": ("f1", 5), "rte": ("accuracy", 5), "stsb": ("spearmanr", 5),
    "sst2": ("accuracy", 1), "mnli": ("accuracy", 1),
}  # fmt: skip
"""The metric of each of the six tasks, and how many seeds it is fine-tuned with."""
FINE_TUNING = {
    "train.epochs": "5", "batch.sequences": "16", "optimizer.learning_rate": "4e-5", "train.precision": "bf16",
    "schedule.warmup_share": "0.06", "checkpoint.enabled": "false", "evaluate.every_epochs": "0",
}  # fmt: skip
"""The same for every model; SST-2, with nine times the rows of the next task, gets three epochs of batches of 32."""
LONG = {"train.epochs": "3", "batch.sequences": "32"}
MNLI_ROWS = 10_000
POINTS = 120  # of a curve


def bertrain(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "bertrain", *map(str, words)]


def printed_json(command: list[str]) -> Any:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {ended.returncode}:\n{ended.stderr[-2000:]}")
    return json.loads(ended.stdout)


def pretrain(run: Path, data: Path, request: list[str], stop_after: float | None) -> bool:
    """Train, or continue the training, and whether it came to its end; notes the time of every start beside the run."""
    command, starts = bertrain("pretrain", *request, "--data", data, "--run", run), starts_file(run)
    before = starts.read_text() if starts.exists() else ""
    starts.write_text(f"{before}{time.time()}\n")
    process = subprocess.Popen(command)
    try:
        code = process.wait(stop_after)
    except subprocess.TimeoutExpired:
        process.terminate()
        code = process.wait()
    if code not in (0, EXIT_REQUEUE):
        starts.write_text(before)  # it has trained nothing
        raise SystemExit(f"{' '.join(command)} ended with code {code}")
    return code == 0


def starts_file(run: Path) -> Path:
    return run.with_name("starts.txt")


def measured(run: Path) -> dict[str, Any]:
    """What the run folder says of the training."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    *_, end = (record for record in records if record["kind"] == "end")
    each = (end["evaluation_seconds"] or 0.0) / max(1, len(evaluations))
    starts = [float(line) for line in starts_file(run).read_text().split()]
    ends = [max(step["ended"] for step in steps if step["ended"] < limit) for limit in [*starts[1:], math.inf]]
    pauses = [start - end for start, end in zip(starts[1:], ends[:-1], strict=True)]

    def clock(step: dict[str, Any]) -> float:
        paused = sum(pause for pause, start in zip(pauses, starts[1:], strict=True) if start < step["ended"])
        evaluated = each * sum(evaluation["step"] < step["step"] for evaluation in evaluations)
        return round(step["ended"] - starts[0] - paused - evaluated, 1)

    stride, ended = max(1, len(steps) // POINTS), {step["step"]: clock(step) for step in steps}
    return {
        "seconds": clock(steps[-1]),
        "start_up_s": clock(steps[0]),
        "starts": len(starts),
        "steps": steps[-1]["step"],
        "tokens": sum(step["tokens"] for step in steps),
        "curve": [[clock(one), round(one["mlm_loss"], 3)] for one in steps[stride - 1 :: stride] if one["mlm_loss"]],
        "evaluations": [
            [ended.get(one["step"], 0.0), round(one["mlm_loss"], 4)] for one in evaluations if one["mlm_loss"]
        ],
    }


def fine_tune(
    task: str, weights: Path, glue: Path, run: Path, *, num_seeds: int, change: dict[str, str] | None = None
) -> list[float]:
    """The scores of all seeds; `change` gives other settings than the rules'."""
    settings = FINE_TUNING | (LONG if task == "sst2" else {}) | (change or {})
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    seeds = ",".join(str(seed) for seed in range(1, num_seeds + 1))
    where = ("--init", weights, "--data", glue, "--run", run)
    (outcome,) = printed_json(bertrain("finetune", f"glue/{task}", *where, "--seeds", seeds, "--json", *words))
    return outcome["figures"][TASKS[task][0]]["values"]


def fine_tune_all(weights: Path, glue: Path, folder: Path) -> dict[str, list[float]]:
    with ThreadPoolExecutor(len(TASKS)) as pool:

        def scores(task: str) -> list[float]:
            return fine_tune(task, weights, glue, folder / task, num_seeds=TASKS[task][1])

        return dict(zip(TASKS, pool.map(scores, TASKS), strict=True))


def check_glue(folder: Path) -> None:
    """Refuse a folder without the tasks, or with more of MNLI than the rules allow, before any training."""
    found = next(iter(sorted((folder / "MNLI").glob("train*.tsv"))), None)
    if found is None:
        raise SystemExit(f"{folder} has no MNLI/train*.tsv; README.md says what belongs there")
    with found.open(encoding="utf-8") as lines:
        rows = sum(1 for _ in lines) - 1
    if rows > MNLI_ROWS:
        raise SystemExit(f"{found} has {rows:,} rows; the rules allow {MNLI_ROWS:,}")


def new_record(name: str, request: list[str]) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    when = time.strftime("%Y-%m-%d")
    return {"name": name, "date": when, "gpu": gpu, "torch": torch.__version__, "request": request}


def add_record(path: Path, record: dict[str, Any]) -> None:
    records = json.loads(path.read_text()) if path.exists() else []
    lines = ",\n".join(json.dumps(one) for one in [*records, record])
    path.write_text(f"[\n{lines}\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--glue", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--stop-after", type=float)
    options, request = parser.parse_known_args()
    if options.stop_after and not options.folder:
        parser.error("--stop-after needs --folder, where the run goes on")
    if options.glue:
        check_glue(options.glue)
    record = new_record(options.name, [word for word in request if word != "--"])
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run = folder / "run"
        if not pretrain(run, options.data, record["request"], options.stop_after):
            print("stopped; the same command goes on")
            return
        record |= measured(run)
        record["held_out"] = printed_json(bertrain("evaluate", run, "--data", options.held_out, "--json"))
        print({name: value for name, value in record.items() if name != "curve"}, flush=True)
        if options.glue:
            record["tasks"] = fine_tune_all(run, options.glue, folder)
    add_record(options.output, record)


if __name__ == "__main__":
    main()
