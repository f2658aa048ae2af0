"""What the engine costs: its overhead over a bare loop, ranks on one machine, and how long a checkpoint stops it.

    python benchmarks/engine.py [--output benchmarks/results/engine.json] [--layers 4 --hidden 256 --tokens 2048]
    python benchmarks/engine.py --parts checkpoint      only that; what the file says of the others stays

Overhead: steps through `bertrain pretrain` (loader, metrics, console, agreement), against a loop that has its batches
ready and does nothing but forward, backward and update with the same model and update rule; blocks of steps of either
kind alternate, and medians are compared. On a GPU both compute on the kernels. Scaling: one rank of one thread against
two, on the same steps. Checkpoint: BERT-Large; the time that training stands still (the copy to host memory, after the
memory was set aside), and the time the writing then takes in the background.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bertrain.base.machine import cpu_name
from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.shards import Shards
from bertrain.data.prepare.prepare import prepare
from bertrain.ranks.parallel import Ranks
from bertrain.run.checkpoint import Saver
from bertrain.training.benchmark import benchmark
from bertrain.training.state import TrainState

HERE = Path(__file__).parent
DEMO = HERE.parent / "demo"
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
WARM_UP, BLOCK, BLOCKS = 4, 24, 5


def settings_for(arguments: argparse.Namespace, **overrides: object) -> Settings:
    given = {
        "model.hidden_size": arguments.hidden, "model.num_layers": arguments.layers,
        "model.num_heads": arguments.hidden // 64, "model.intermediate_size": 4 * arguments.hidden,
        "batch.sequences": 0, "batch.tokens": arguments.tokens, "batch.token_budget": arguments.tokens,
        "train.precision": "bf16", "log.trackers": "none", "log.level": "quiet",
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in overrides.items()}
    return resolve("bert-base-phase1", [(key, str(value).lower()) for key, value in given.items()])


def bare_loop(settings: Settings, data: Path, count: int) -> list[float]:
    """Milliseconds of steps whose batches are ready, and of which nobody keeps a record."""
    loader = Loader(Shards.open(data), settings, pin_memory=ON_GPU)
    steps, position = [], 0
    for number in range(WARM_UP + count):
        steps.append(loader.step(number, position))
        position = steps[-1].next_position
    state = TrainState.build(settings, Ranks(0, 1, DEVICE))
    state.engine.restore({})
    moments = [_now()]
    for step in steps:
        state.engine.begin(step)
        for batch in step.bins:
            state.engine.add_bin(batch, step, is_last=False)
        state.engine.update(1e-4)
        moments.append(_now())
    if ON_GPU:
        torch.cuda.synchronize()
    pairs = list(zip(moments[WARM_UP:], moments[WARM_UP + 1 :], strict=False))
    return [a.elapsed_time(b) if ON_GPU else 1e3 * (b - a) for a, b in pairs]


def _now() -> Any:
    if not ON_GPU:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def overhead(settings: Settings, data: Path) -> dict[str, Any]:
    bare, engine = [], []
    for _ in range(BLOCKS):
        bare.append(statistics.median(bare_loop(settings, data, BLOCK)))
        engine.append(benchmark(settings, data, steps=BLOCK, warm_up=WARM_UP)["ms_per_step"])
    ratios = [ours / theirs for ours, theirs in zip(engine, bare, strict=True)]
    return {
        "bare_ms_per_step": [round(ms, 3) for ms in bare],
        "engine_ms_per_step": [round(ms, 3) for ms in engine],
        "overhead": round(statistics.median(ratios) - 1, 4),
        "overhead_of_the_fastest_blocks": round(min(engine) / min(bare) - 1, 4),
    }


def scaling(arguments: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Tokens per second of one and of two ranks of one thread each, alternating."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(3):
        for ranks, found in rates.items():
            overrides = {
                "model.hidden_size": arguments.hidden, "model.num_layers": arguments.layers,
                "model.num_heads": arguments.hidden // 64, "model.intermediate_size": 4 * arguments.hidden,
                "batch.sequences": 0, "batch.tokens": 4 * arguments.tokens, "batch.token_budget": arguments.tokens,
                "train.precision": "bf16", "train.threads": 1, "train.device": "cpu", "log.level": "quiet",
            }  # fmt: skip
            words = [str(word) for key, value in overrides.items() for word in (f"--{key}", value)]
            done = subprocess.run(
                [
                    sys.executable, "-m", "bertrain", "pretrain", "bert-base-phase1", "--data", data, "--benchmark",
                    "--benchmark-steps", "10", "--warm-up-steps", "2", "--json", "--nproc", str(ranks), *words,
                ],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            found.append(json.loads(done.stdout)["real_tokens_per_s"])
    best = {ranks: max(found) for ranks, found in rates.items()}
    return {
        "tokens_per_s": {str(ranks): [round(rate) for rate in found] for ranks, found in rates.items()},
        "two_ranks_over_one": round(best[2] / best[1], 3),
    }


def checkpoint_stall() -> dict[str, Any]:
    settings = resolve("bert-large-phase2", [("train.precision", "bf16")])
    state = TrainState.build(settings, Ranks(0, 1, DEVICE))
    begin = time.perf_counter()
    state.allocate_snapshots()
    room = time.perf_counter() - begin
    stalls, writes = [], []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), 2)
        for step in range(3):
            state.progress = replace(state.progress, step=step + 1)
            if ON_GPU:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            snapshot = state.snapshot()
            assert snapshot is not None
            saver.save(snapshot)
            stalls.append(time.perf_counter() - begin)
            saver.wait()
            writes.append(time.perf_counter() - begin - stalls[-1])
            if saver.failure:
                raise saver.failure
    return {
        "parameters": len(state.arena.values),
        "seconds_to_set_memory_aside_at_the_start": round(room, 3),
        "seconds_that_training_stands_still": [round(seconds, 3) for seconds in stalls],
        "seconds_of_writing_in_the_background": [round(seconds, 3) for seconds in writes],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "engine.json")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parts = ["checkpoint", "overhead"] + ["scaling"] * (not ON_GPU)
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if ON_GPU else f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}"
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        if set(arguments.parts) - {"checkpoint"}:
            prepare([DEMO / "train-1.txt", DEMO / "train-2.txt"], data, max_seq_length=128)
        model = {"layers": arguments.layers, "hidden": arguments.hidden, "tokens": arguments.tokens}
        for part in arguments.parts:
            if part == "checkpoint":
                found = checkpoint_stall()
            elif part == "overhead":
                found = model | overhead(settings_for(arguments), data)
            else:
                found = model | scaling(arguments, data)
            print(json.dumps({part: found}, indent=1), flush=True)
            results = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
            results.setdefault(name, {})[part] = found | {"torch": torch.__version__}
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
