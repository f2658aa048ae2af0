"""The estimate of memory against the size of real runs on a CPU.

    python benchmarks/memory.py [--only WORD]

Each case is `bertrain pretrain` in a process of its own, three steps, the third beside a checkpoint being written, on
full rows of 128 random words; its largest resident size is compared with what `bertrain.planning.memory` had said.
Writes benchmarks/results/memory.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from workload import Example, random_examples, write_folder

from bertrain.base.formatting import GIB
from bertrain.config.resolve import resolve
from bertrain.data.formats.shards import Shards
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.training.resolve_auto import place_for

RESULTS = Path(__file__).parent / "results" / "memory.json"
CHECKPOINTING = "train.activation_checkpointing"
BASE = {"batch.sequences": "16", "batch.token_budget": "2048"}  # one bin of full rows a step
LONGER = {"batch.sequences": "32", "batch.token_budget": "4096"}
CASES: list[tuple[str, dict[str, str]]] = [
    ("bert-tiny", {}),
    ("bert-tiny", {"batch.sequences": "256", "batch.token_budget": "32768"}),
    ("bert-tiny", {"batch.sequences": "256", "batch.token_budget": "32768", "train.precision": "bf16"}),
    ("bert-base-phase1", BASE | {"train.precision": "fp32"}),
    *[
        ("bert-base-phase1", BASE | {"train.precision": "bf16", CHECKPOINTING: mode})
        for mode in ("none", "selective", "full")
    ],
]
# Two constants of the estimate, what libraries and malloc take on a CPU, were fitted to the cases above, not to these.
HELD_OUT: list[tuple[str, dict[str, str]]] = [
    ("bert-tiny", {"batch.sequences": "128", "batch.token_budget": "16384", "train.precision": "fp16"}),
    ("bert-base-phase1", LONGER | {"train.precision": "bf16"}),
    ("bert-base-phase1", LONGER | {"train.precision": "fp32", CHECKPOINTING: "selective"}),
]


def write_data(folder: Path) -> Path:
    """Full rows of 128, so that every bin is full."""
    vocabulary = Vocabulary.load()
    examples = (
        Example((one.tokens * 26)[:127] + one.tokens[-1:], 64, one.is_random)
        for one in random_examples(2000, vocabulary)
    )
    write_folder(folder, examples, vocabulary)
    return folder


def peak_of_run(recipe: str, settings: dict[str, str], data: Path, run: Path) -> int:
    """The largest resident size of a training process, in bytes."""
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "bertrain", "pretrain", recipe, "--data", str(data), "--run", str(run), *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}")
    return usage.ru_maxrss << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this; writes nothing")
    only = parser.parse_args().only
    common = {"train.max_steps": "3", "checkpoint.every_steps": "2", "train.device": "cpu", "log.trackers": "none"}
    results: list[dict[str, Any]] = []
    for recipe, chosen in [*CASES, *HELD_OUT]:
        settings = common | chosen
        resolved = resolve(recipe, list(settings.items()))
        batch, how = resolved.batch, resolved.train
        name = f"{recipe} {how.precision} {how.activation_checkpointing} {batch.token_budget}"
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            data = write_data(Path(folder) / "data")
            needed = place_for(resolved, Shards.open(data, verify="size"), 1).needs(resolved)
            peak = peak_of_run(recipe, settings, data, Path(folder) / "run")
        result = {
            "recipe": recipe,
            "precision": how.precision,
            "activation_checkpointing": how.activation_checkpointing,
            "token_budget": batch.token_budget,
            "estimate_gib": round(needed.total / GIB, 3),
            "peak_resident_gib": round(peak / GIB, 3),
            "ratio": round(needed.total / peak, 3),
            "parts": needed.text(),
            "fitted": (recipe, chosen) in CASES,
        }
        results.append(result)
        print(f"{name:<44}{result['estimate_gib']:>8.2f} GiB estimated{result['peak_resident_gib']:>8.2f} measured"
              f"{result['ratio']:>7.2f}", flush=True)  # fmt: skip
    if not only:
        RESULTS.write_text(json.dumps({"torch": torch.__version__, "cases": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
