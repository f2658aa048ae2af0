"""The fast paths train what the plain path trains: BERT-Base on real text, loss curves over each other.

    python benchmarks/gpu_convergence.py [--output benchmarks/results] [--steps 2000]
    python benchmarks/gpu_convergence.py --again        the summary and the plot, from the curves that are there
    python benchmarks/gpu_convergence.py --early        the first steps alone, of more seeds and of PyTorch's own bf16

Every run goes through `bertrain pretrain` and, stopped half-way by a signal, `bertrain resume`, on the articles in
demo/ with BERT's vocabulary: steps of one bin of 8,192 tokens, dropout 0.1, AdamW. Seed 1 is run in plain fp32, in
fused bf16 and in FP8 (the same order of examples and the same masks; dropout draws are each path's own); seeds 2 and 3
in fused bf16 show how far two equal trainings lie apart. Reported: the training loss, smoothed over 100 steps, and the
held-out loss at the end. The noise is the largest distance at the same step between two runs of different seeds (all of
them, and the three of bf16 alone); a fast path is held to it by its distance from plain fp32 with the same seed,
everywhere and over the last 200 steps.

Where the learning rate is at its highest, around step 100, a training can stumble, in fp32 as well, and is behind from
there on. So that one fp32 run's luck is not taken for a property of bf16, `--early` trains four seeds in each of four
ways, plain bf16 among them, up to step 350 of the same schedule, five runs at a time (speeds mean nothing there).
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertrain.base.errors import EXIT_REQUEUE

HERE = Path(__file__).parent
DEMO = HERE.parent / "demo"
RUNS = {
    "fp32 plain, seed 1": ("fp32", "plain", 1),
    "bf16 fused, seed 1": ("bf16", "auto", 1),
    "fp8 fused, seed 1": ("fp8", "auto", 1),
    "bf16 fused, seed 2": ("bf16", "auto", 2),
    "bf16 fused, seed 3": ("bf16", "auto", 3),
}
SMOOTHED = 100
EARLY_WAYS = {
    "fp32 plain": ("fp32", "plain"),
    "bf16 plain": ("bf16", "plain"),
    "bf16 fused": ("bf16", "auto"),
    "fp8 fused": ("fp8", "auto"),
}
EARLY_SEEDS, EARLY_STEPS, AT_ONCE = (1, 2, 3, 4), 350, 5


def bertrain(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "bertrain", *map(str, arguments)]


def prepare(folder: Path) -> None:
    for name, files in (("data", ["train-1.txt", "train-2.txt"]), ("held-out", ["held-out.txt"])):
        texts = [DEMO / file for file in files]
        subprocess.run(
            bertrain("data", "prepare", *texts, "--max-seq-length", "128", "--out", folder / name),
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip


def start(folder: Path, run: Path, precision: str, kernels: str, seed: int, steps: int) -> subprocess.Popen[bytes]:
    settings = {
        "batch.sequences": 0, "batch.tokens": 8192, "batch.token_budget": 8192, "optimizer.name": "adamw",
        "optimizer.learning_rate": 2e-4, "optimizer.beta2": 0.98, "schedule.warmup_steps": steps // 20,
        "schedule.power": 1.0, "model.initial_heads": "neighbours", "train.max_steps": steps, "train.seed": seed,
        "train.precision": precision, "train.kernels": kernels, "evaluate.data": folder / "held-out",
        "checkpoint.every_steps": 0, "log.every_steps": 50, "log.trackers": "none",
    }  # fmt: skip
    overrides = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    return subprocess.Popen(
        bertrain("pretrain", "bert-base-phase1", "--data", folder / "data", "--run", run, *overrides),
        stdout=subprocess.DEVNULL,
    )


def step_lines(metrics: Path) -> list[dict[str, Any]]:
    """Every step's line; a last one that is cut off is left out."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["kind"] == "step"]


def wait_for(process: subprocess.Popen[bytes], metrics: Path, steps: int) -> None:
    """Until so many steps are written down, or the process has ended."""
    while process.poll() is None and not (metrics.is_file() and len(step_lines(metrics)) >= steps):
        time.sleep(0.2)


def train(folder: Path, run: Path, precision: str, kernels: str, seed: int, steps: int) -> dict[str, Any]:
    """Train, stop half-way, resume; returns losses, held-out figures and seconds."""
    begin = time.perf_counter()
    process = start(folder, run, precision, kernels, seed, steps)
    metrics = run / "metrics.jsonl"
    wait_for(process, metrics, steps // 2)
    process.send_signal(signal.SIGTERM)
    if process.wait() != EXIT_REQUEUE:
        raise SystemExit(f"{run.name}: expected to be stopped and saved, ended with {process.returncode}")
    subprocess.run(bertrain("resume", run), check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    by_step = step_lines(metrics)
    assert [line["step"] for line in by_step] == list(range(1, steps + 1)), "every step must stand there once"
    return {
        "loss": [round(line["loss"], 4) for line in by_step],
        "held_out": next(line for line in reversed(lines) if line["kind"] == "evaluation"),
        "median_tokens_per_s": round(float(np.median([line["tokens_per_s"] for line in by_step]))),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def train_early(folder: Path, way: str, seed: int, steps: int) -> list[float]:
    """The losses of the first steps; what follows them is killed."""
    run = folder / f"{way}, seed {seed}"
    process = start(folder, run, *EARLY_WAYS[way], seed, steps)
    wait_for(process, run / "metrics.jsonl", EARLY_STEPS)
    process.kill()
    process.wait()
    losses = [round(line["loss"], 4) for line in step_lines(run / "metrics.jsonl")]
    if len(losses) < EARLY_STEPS:
        raise SystemExit(f"{run.name}: ended after {len(losses)} steps")
    print(f"{run.name}: loss of the last 50 steps {np.mean(losses[:EARLY_STEPS][-50:]):.3f}", flush=True)
    return losses[:EARLY_STEPS]


def compare_early(folder: Path, output: Path, steps: int) -> None:
    jobs = [(way, seed) for seed in EARLY_SEEDS for way in EARLY_WAYS]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        losses = [pool.submit(train_early, folder, way, seed, steps) for way, seed in jobs]
        runs: dict[str, dict[str, list[float]]] = {way: {} for way in EARLY_WAYS}
        for (way, seed), found in zip(jobs, losses, strict=True):
            runs[way][str(seed)] = found.result()
    output.mkdir(parents=True, exist_ok=True)
    facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    (output / "gpu_convergence_early.json").write_text(json.dumps(facts | {"losses": runs}) + "\n")


def smooth(losses: list[float]) -> np.ndarray[Any, Any]:
    return np.convolve(losses, np.ones(SMOOTHED) / SMOOTHED, mode="valid")


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, result in results.items():
        curve = smooth(result["loss"])
        axes.plot(np.arange(SMOOTHED, SMOOTHED + len(curve)), curve, label=name, linewidth=1.2)
    axes.set_xlabel("step (8,192 tokens)")
    axes.set_ylabel(f"loss, mean of {SMOOTHED} steps")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--again", action="store_true", help="run nothing: read the curves from the output folder")
    parser.add_argument("--early", action="store_true", help="the first steps alone, of more seeds and ways")
    arguments = parser.parse_args()
    if arguments.again:
        found = json.loads((arguments.output / "gpu_convergence.json").read_text())
        write(found["runs"], arguments.output, gpu=found["gpu"], torch=found["torch"])
        return
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        if arguments.early:
            compare_early(folder, arguments.output, arguments.steps)
            return
        for number, (title, (precision, kernels, seed)) in enumerate(RUNS.items()):
            results[title] = train(folder, folder / f"run-{number}", precision, kernels, seed, arguments.steps)
            held_out = results[title]["held_out"]
            print(f"{title}: held-out loss {held_out['loss']:.4f}, {results[title]['seconds']} s", flush=True)
    write(results, arguments.output)


def summarize(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    curves = {title: smooth(result["loss"]) for title, result in results.items()}
    seeds = {title: RUNS[title][2] for title in curves}
    strangers = [(a, b) for a in curves for b in curves if seeds[a] < seeds[b]]
    of_bf16 = [pair for pair in strangers if all(title.startswith("bf16") for title in pair)]
    reference = "fp32 plain, seed 1"
    same_seed = [title for title in curves if seeds[title] == seeds[reference] and title != reference]

    def distance(one: str, other: str, last: int = 0) -> float:
        return round(float(np.abs(curves[one][-last:] - curves[other][-last:]).max()), 4)

    return {
        "largest_distance_between_different_seeds": max(distance(a, b) for a, b in strangers),
        "largest_distance_between_seeds_of_bf16": max(distance(a, b) for a, b in of_bf16),
        "largest_distance_from_fp32_of_the_same_seed": {title: distance(title, reference) for title in same_seed},
        "the_same_over_the_last_200_steps": {
            "between_different_seeds": max(distance(a, b, 200) for a, b in strangers),
            "between_seeds_of_bf16": max(distance(a, b, 200) for a, b in of_bf16),
            **{title: distance(title, reference, 200) for title in same_seed},
        },
        "last_loss": {title: round(float(curve[-1]), 4) for title, curve in curves.items()},
        "held_out_mlm_loss": {title: round(result["held_out"]["mlm_loss"], 4) for title, result in results.items()},
        "median_tokens_per_s": {title: result["median_tokens_per_s"] for title, result in results.items()},
    }


def write(results: dict[str, dict[str, Any]], folder: Path, **facts: str) -> None:
    facts = facts or {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    summary = facts | summarize(results)
    print(json.dumps(summary, indent=1))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_convergence.json").write_text(json.dumps(summary | {"runs": results}) + "\n")
    plot(results, folder / "gpu_convergence.svg")


if __name__ == "__main__":
    main()
