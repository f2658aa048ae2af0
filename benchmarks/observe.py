"""What it costs to watch: steps with telemetry, with logging, and with neither, in turn.

    python benchmarks/observe.py [--output benchmarks/results/observe.json] [--rounds 5] [--steps 60]

Each round times the same steps of the real loop (`bertrain.training.benchmark`) three times, in an order that is turned
from round to round: as quiet as it can be (no telemetry, no TensorBoard, a line at the end), with telemetry every
100 ms, and with telemetry, TensorBoard and a line every ten steps, as a run is. Compared are medians of a round with
those of the same round; reported are the medians of these ratios over the rounds, and the fastest round of each.
On a GPU the model is BERT-Large in bf16, on a CPU a small one on one core. Beside the time on the clock stands the time
of all cores that a round took, which other people's work on the machine disturbs less; and, from the sampler itself,
which share of one core it takes when nothing else runs in the process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bertrain.base.machine import cpu_name
from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.profiling.synthetic import write_synthetic
from bertrain.run.telemetry import TelemetryWriter, device_sensors
from bertrain.training.benchmark import benchmark

HERE = Path(__file__).parent
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
WAYS: dict[str, dict[str, object]] = {
    "quiet": {"log.telemetry": False, "log.trackers": "none", "log.every_steps": 100_000},
    "telemetry": {"log.telemetry": True, "log.trackers": "none", "log.every_steps": 100_000},
    "telemetry and logging": {"log.telemetry": True, "log.trackers": "tensorboard", "log.every_steps": 10},
}


def settings_for(changes: dict[str, object]) -> Settings:
    model: dict[str, object] = {"batch.sequences": 0, "log.level": "quiet"}
    if ON_GPU:
        model |= {"batch.tokens": 24576, "batch.token_budget": 24576, "train.precision": "bf16"}
    else:
        model |= {
            "model.hidden_size": 128, "model.num_layers": 2, "model.num_heads": 2, "model.intermediate_size": 512,
            "model.vocab_size": 1000, "batch.tokens": 1024, "batch.token_budget": 1024, "train.precision": "fp32",
            "train.threads": 1,
        }  # fmt: skip
    pairs = [
        (key, str(value).lower() if isinstance(value, bool) else str(value)) for key, value in (model | changes).items()
    ]
    return resolve("bert-large-phase1", pairs)


def cost(watched: list[float], quiet: list[float]) -> float:
    """The median of the rounds' ratios, less one."""
    return round(statistics.median(one / other for one, other in zip(watched, quiet, strict=True)) - 1, 4)


def sampler_alone(interval_ms: int, seconds: float = 3.0) -> float:
    """Which share of a core sampling takes."""
    with tempfile.TemporaryDirectory() as folder:
        sampler = TelemetryWriter(Path(folder), device_sensors(DEVICE), interval_ms)
        time.sleep(seconds)
        sampler.stop()
        return json.loads((Path(folder) / "telemetry.json").read_text())[-1]["share_of_a_core"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "observe.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    core_seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_synthetic(data, settings_for({}))
        for number in range(arguments.rounds):
            ways = list(WAYS)
            for way in ways[number % 3 :] + ways[: number % 3]:
                before = time.process_time()
                figures = benchmark(settings_for(WAYS[way]), data, steps=arguments.steps, warm_up=6)
                core_seconds[way].append(time.process_time() - before)
                times[way].append(figures["ms_per_step"])
                print(f"round {number + 1}, {way}: {times[way][-1]:.3f} ms a step", flush=True)
    found: dict[str, Any] = {"steps": arguments.steps, "torch": torch.__version__}
    found["sampler_share_of_a_core"] = {f"every {ms} ms": round(sampler_alone(ms), 5) for ms in (100, 50, 10)}
    for way in WAYS:
        found[way] = {"ms_per_step": [round(ms, 3) for ms in times[way]]}
        if way != "quiet":
            found[way] |= {
                "cost": cost(times[way], times["quiet"]),
                "cost_of_the_fastest": round(min(times[way]) / min(times["quiet"]) - 1, 4),
                "cost_in_time_of_all_cores": cost(core_seconds[way], core_seconds["quiet"]),
            }
    name = torch.cuda.get_device_name() if ON_GPU else f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}"
    results = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    arguments.output.write_text(json.dumps(results | {name: found}, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
