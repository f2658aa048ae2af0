"""How fast one core turns shards into batches, deals a step into bins, and answers --help.

    python benchmarks/loader.py

Examples have the lengths of Wikipedia at 512 tokens (benchmarks/wikipedia-512.csv) and words at random; the page
cache is warm. Writes benchmarks/results/loader.json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from workload import random_examples, write_folder

from bertrain.base.machine import cpu_name
from bertrain.config.resolve import resolve
from bertrain.data.feed.batching import choose_policy
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.masking import count_predictions
from bertrain.data.formats.shards import Shards
from bertrain.data.text.vocabulary import Vocabulary

HERE = Path(__file__).parent
STEP = 768


def median_seconds(action: Callable[[int], object], repeats: int) -> float:
    times = []
    for number in range(repeats):
        begin = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core for all that follows
    settings = resolve("bert-large-phase2", [("batch.sequences", str(STEP)), ("batch.policy", "budget")])
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Vocabulary.load()
        write_folder(Path(folder) / "data", random_examples(20_000, vocabulary), vocabulary)
        shards = Shards.open(Path(folder) / "data")  # reading it all for the hash also warms the cache
        loader = Loader(shards, settings)
        loader.step(0, 0)
        step_seconds = median_seconds(lambda number: loader.step(number, number * STEP), 30)
        step = loader.step(1, STEP)

        lengths = shards.lengths[:STEP].astype(np.int64)
        predictions = count_predictions(lengths, 76, 0.15)
        deal_seconds = median_seconds(
            lambda _: choose_policy("budget").deal(lengths, predictions, loader.capacity, 512), 100
        )
    help_seconds = median_seconds(
        lambda _: subprocess.run([sys.executable, "-m", "bertrain", "--help"], capture_output=True, check=True), 9
    )
    result = {
        "what": "one core: batches from shards (512 tokens, dynamic masking, budget), dealing, --help",
        "examples_per_s": STEP / step_seconds,
        "tokens_per_s": step.num_tokens / step_seconds,
        "mean_length": float(shards.lengths.mean()),
        "bins_per_step": step.num_bins,
        "bin_fill": step.num_tokens / (step.num_bins * settings.batch.token_budget),
        "deal_768_ms": 1e3 * deal_seconds,
        "help_s": help_seconds,
        "machine": {"cpu": cpu_name(), "python": platform.python_version(), "numpy": np.__version__},
    }
    (HERE / "results" / "loader.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['examples_per_s']:,.0f} examples/s ({result['tokens_per_s']:,.0f} tokens/s) on one core")
    print(f"dealing {STEP} examples into bins: {result['deal_768_ms']:.2f} ms, {result['bin_fill']:.1%} full")
    print(f"bertrain --help: {help_seconds:.2f} s")


if __name__ == "__main__":
    main()
