"""Compare `bertrain plan`'s model with bertrain's own measured steps: on one H200, and on two CPU ranks here.

    python benchmarks/plan_own.py gpu              # committed results of benchmarks/gpu_pretrain.py and gpu_sizes.json
    python benchmarks/plan_own.py cpu --output ... # trains ten configurations for a few steps on two CPU ranks

H200: the rates of config/devices.toml come from BERT-Large's steps of 24,576 tokens, a profile of one and single
kernels, so those steps are left out of the score. CPU: calibrated on one more configuration, measured first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.data.feed.batching import capacity_for
from bertrain.planning.devices import find_gpu, find_network
from bertrain.planning.plan import lengths_of
from bertrain.planning.step_time import Cluster, Design, Load, step_time

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
            ("data.max_seq_length", str(length)),
            ("data.max_predictions", str(length * 3 // 20)),
            ("train.precision", precision),
        ],
    )


def one_bin(settings: Settings, tokens: int, lengths: Any) -> Load:
    """A full bin of these lengths."""
    capacity = capacity_for(
        tokens,
        bin_sequences=0,
        mean_length=float(lengths.mean()),
        max_predictions=settings.data.max_predictions,
        mask_probability=0.15,
    )
    pairs = tokens * float((lengths.astype(float) ** 2).sum() / lengths.sum())
    sizes = 1, tokens, pairs, capacity.predictions, capacity.sequences
    return Load(*(np.array([float(size)]) for size in sizes))


def predict_gpu(name: str, length: int, precision: str, tokens: int, *, full: bool) -> float:
    settings = sized(name, length, precision)
    lengths = np.array([length]) if full else lengths_of(HERE / f"wikipedia-{length}.csv", length)
    gpu = find_gpu("h200")
    cluster = Cluster(gpu, find_network("nvlink", gpu, 8), 1)
    load = one_bin(settings, tokens, lengths)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=("gpu", "cpu"))
    parser.add_argument("--output", type=Path, help="add the comparison to this JSON file")
    arguments = parser.parse_args()
    rows = gpu_rows()
    found = {"score": report(rows), "rows": rows}
    if arguments.output:
        kept = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        arguments.output.write_text(json.dumps(kept | {arguments.device: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
