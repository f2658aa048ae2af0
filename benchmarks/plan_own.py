"""Compare `bertrain plan`'s model with bertrain's own measured steps: on one H200, and on two CPU ranks here.

    python benchmarks/plan_own.py gpu              # committed results of benchmarks/gpu_pretrain.py and gpu_sizes.json
    python benchmarks/plan_own.py cpu --output ... # trains ten configurations for a few steps on two CPU ranks

H200: the rates of config/devices.toml come from BERT-Large's steps of 24,576 tokens, a profile of one and single
kernels, so those steps are left out of the score. CPU: calibrated on one more configuration of each precision.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.planning.devices import Network, find_gpu, find_network
from bertrain.planning.plan import deal_steps, full_bins, lengths_of
from bertrain.planning.prediction import cpu_like
from bertrain.planning.speed import measure_ceilings
from bertrain.planning.step_time import Cluster, Design, calibrated, step_time
from bertrain.profiling.synthetic import write_synthetic
from bertrain.training.engine import choose

HERE = Path(__file__).parent
SIZES = {"6x384": (6, 384, 12), "4x512": (4, 512, 8), "base": (12, 768, 12), "large": (24, 1024, 16)}


def sized(name: str, length: int, precision: str) -> Settings:
    layers, width, heads = SIZES[name]
    return resolve(
        "bert-large-phase2",
        [
            ("model.num_layers", str(layers)),
            ("model.hidden_size", str(width)),
            ("model.num_heads", str(heads)),
            ("model.intermediate_size", str(4 * width)),
            ("model.max_positions", str(max(512, length))),
            ("data.max_seq_length", str(length)),
            ("data.max_predictions", str(length * 3 // 20)),
            ("train.precision", precision),
        ],
    )


def predict_gpu(name: str, length: int, precision: str, tokens: int, *, full: bool) -> float:
    settings = sized(name, length, precision)
    lengths = np.array([length]) if full else lengths_of(HERE / f"wikipedia-{length}.csv", length)
    gpu = find_gpu("h200")
    cluster = Cluster(gpu, find_network("nvlink", gpu, 8), 1)
    load = full_bins(settings, tokens, 1, lengths)
    return 1e3 * step_time(settings, [load], cluster, Design.of(settings), jitter=0).seconds


def gpu_rows() -> list[dict[str, Any]]:
    rows = []
    for one in json.loads((HERE / "results/gpu_sizes.json").read_text())["results"]:
        if one["kernels"] == "fused":
            found = predict_gpu(one["model"], one["length"], one["precision"], 32768, full=one["rows"] == "full")
            what = f"{one['model']}, {one['precision']}, 32,768 tokens, {one['rows']} rows of {one['length']}"
            rows.append(("scored", what, one["bertrain"]["ms_per_step"], found))
    for one in json.loads((HERE / "results/gpu_pretrain.json").read_text()):
        if one["system"] == "bertrain" and one["model"] == "bert-large":
            full, tokens = "full" in one["workload"], one["token_budget"]
            found = predict_gpu("large", one["max_seq_length"], one["precision"], tokens, full=full)
            what = f"large, {one['precision']}, {tokens:,} tokens, {one['workload']}"
            role = "calibration" if tokens == 24576 else "scored"
            rows.append((role, what, one["ms_per_step"], found))
    names = "role", "configuration", "measured_ms", "predicted_ms"
    return [dict(zip(names, row, strict=True)) | {"error": row[3] / row[2] - 1} for row in rows]


def report(rows: list[dict[str, Any]]) -> dict[str, Any]:
    for row in rows:
        times = f"measured {row['measured_ms']:>9.2f} ms  predicted {row['predicted_ms']:>9.2f}  {row['error']:>+7.1%}"
        print(f"{row['configuration']:<60} {times}  {row['role']}")
    errors = sorted(abs(row["error"]) for row in rows if row["role"] == "scored")
    found = {"rows": len(errors), "median_error": statistics.median(errors), "largest_error": errors[-1]}
    print(json.dumps(found))
    return found


Row = tuple[int, int, int, int, int, str]  # layers, width, length, token budget, sequences of a step, precision
CPU_CALIBRATIONS: list[Row] = [(4, 256, 128, 2048, 32, "fp32"), (4, 256, 128, 2048, 32, "bf16")]
CPU_CONFIGURATIONS: list[Row] = [
    (2, 128, 128, 2048, 64, "fp32"),
    (4, 256, 128, 1024, 32, "fp32"),
    (4, 256, 128, 4096, 64, "fp32"),
    (4, 512, 128, 2048, 32, "fp32"),
    (8, 256, 128, 2048, 32, "fp32"),
    (4, 256, 256, 2048, 16, "fp32"),
    (4, 256, 128, 4096, 64, "bf16"),
    (4, 512, 128, 2048, 32, "bf16"),
    (8, 256, 128, 2048, 32, "bf16"),
    (4, 256, 256, 2048, 16, "bf16"),
]


def cpu_settings(layers: int, width: int, length: int, budget: int, sequences: int, precision: str) -> dict[str, str]:
    return {
        "model.num_layers": str(layers),
        "model.hidden_size": str(width),
        "model.num_heads": str(width // 64),
        "model.intermediate_size": str(4 * width),
        "model.vocab_size": "8000",
        "data.max_seq_length": str(length),
        "data.max_predictions": str(length * 3 // 20),
        "batch.token_budget": str(budget),
        "batch.sequences": str(sequences),
        "train.precision": precision,
    }


def measure_cpu(values: dict[str, str], steps: int) -> float:
    """Seconds of a step on two CPU ranks: the median of some."""
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic(Path(folder) / "data", resolve("bert-tiny", list(values.items())))
        given = [word for name, value in values.items() for word in (f"--{name}", value)]
        command = ["pretrain", "bert-tiny", "--data", f"{folder}/data", "--nproc", "2", "--benchmark", "--json"]
        counts = ["--benchmark-steps", str(steps), "--warm-up-steps", "2", "--train.device", "cpu"]
        words = [sys.executable, "-m", "bertrain", *command, *counts, *given]
        printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return float(json.loads(printed)["ms_per_step"]) / 1e3


def measured_in_turns(steps: int, turns: int) -> dict[Row, float]:
    """Seconds of a step of each configuration: the median of turns, in each of which all are measured once.

    Machines here are shared: one turn may meet a busy moment, which the next seldom meets again.
    """
    found: dict[Row, list[float]] = {row: [] for row in [*CPU_CALIBRATIONS, *CPU_CONFIGURATIONS]}
    for turn in range(turns):
        for row, seconds in found.items():
            seconds.append(measure_cpu(cpu_settings(*row), steps))
            print(f"turn {turn + 1}, load {os.getloadavg()[0]:.1f}: {1e3 * seconds[-1]:,.0f} ms, {row}", flush=True)
    return {row: statistics.median(seconds) for row, seconds in found.items()}


def cpu_rows(steps: int, turns: int) -> list[dict[str, Any]]:
    """Each precision is calibrated on one configuration; its rates are those of one thread here."""
    torch.set_num_threads(1)
    network = Network("loopback", 1e9, 50e-6, 1e9, 50e-6)
    measured = measured_in_turns(steps, turns)
    rows: list[dict[str, Any]] = []
    for calibration in CPU_CALIBRATIONS:
        precision = calibration[-1]
        cpu = cpu_like(precision, measure_ceilings(torch.device("cpu"), precision))
        for row in [calibration, *(row for row in CPU_CONFIGURATIONS if row[-1] == precision)]:
            settings = resolve("bert-tiny", list(cpu_settings(*row).items()))
            engine, _ = choose(settings, torch.device("cpu"))  # without AMX, bf16 has no kernels
            loads, _ = deal_steps(settings, np.full(4096, row[2]), 2)
            cluster, design = Cluster(cpu, network, 2, 2), Design.of(settings, engine)
            if row == calibration:
                cpu = calibrated(settings, loads, cluster, design, measured[row], jitter=0)
            found = step_time(settings, loads, replace(cluster, gpu=cpu), design, jitter=0).seconds
            rows.append(
                {
                    "role": "calibration" if row == calibration else "scored",
                    "configuration": "{}x{}, length {}, bins of {} tokens, {} sequences, {}".format(*row),
                    "measured_ms": 1e3 * measured[row],
                    "predicted_ms": 1e3 * found,
                    "error": found / measured[row] - 1,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("gpu", "cpu"))
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each configuration on the CPU")
    parser.add_argument("--turns", type=int, default=1, help="how often each configuration is measured on the CPU")
    parser.add_argument("--output", type=Path, help="add the comparison to this JSON file")
    arguments = parser.parse_args()
    rows = gpu_rows() if arguments.device == "gpu" else cpu_rows(arguments.steps, arguments.turns)
    found = {"score": report(rows), "rows": rows}
    if arguments.output:
        kept = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        arguments.output.write_text(json.dumps(kept | {arguments.device: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
