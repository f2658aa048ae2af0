"""Bins of few sequences, as thousands of GPUs compute them: bertrain's step on one GPU beside `bertrain plan`.

    python benchmarks/small_bins.py [--output benchmarks/results/small_bins.json]

BERT-Large on the examples of gpu_pretrain.py, one bin a step, of 1,024 tokens and more. The plan's rates come from
bins of 24,576 tokens, in which launches and idle processors hardly count. Each row has the measured step, the plan's
and its parts, and the same for the matrix products of all layers alone, one after another in a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gpu_pretrain import bertrain_steps, natural_lengths, products_ms, settings_for, versions, write_examples
from workload import wikipedia_lengths

from bertrain.planning import costs
from bertrain.planning.devices import find_gpu, find_network
from bertrain.planning.plan import full_bins
from bertrain.planning.step_time import LAYER_PRODUCTS, Cluster, Design, step_time

WORKLOAD = natural_lengths()


def predict(budget: int, precision: str) -> dict[str, Any]:
    """The plan's step, its parts, and the products of all layers, each launched by a CUDA graph."""
    settings, gpu = settings_for(WORKLOAD, budget, precision), find_gpu("h200")
    load = full_bins(settings, budget, 1, wikipedia_lengths(200_000, seed=2))
    step = step_time(settings, [load], Cluster(gpu, find_network("", gpu, 8), 1), Design.of(settings), jitter=0)
    parts = costs.required_costs(settings, costs.WorkSize(tokens=budget), is_fused=False)
    operations, moved = np.sum([parts[part] for part in (costs.QKV, costs.ATTENTION_OUT, costs.FEED_FORWARD)], axis=0)
    launches = LAYER_PRODUCTS * settings.model.num_layers * (gpu.launch_s + gpu.half_wave_s(precision))
    return {
        "predicted_ms": 1e3 * step.seconds,
        "predicted_parts_ms": {name: round(1e3 * seconds, 3) for name, seconds in step.parts.items()},
        "predicted_products_ms": 1e3 * (
            operations / gpu.rate(precision) + gpu.exposed_bytes * moved / gpu.memory + launches
        ),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--steps", type=int, default=108)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        shards = write_examples(WORKLOAD, Path(folder) / "examples")
        for precision in arguments.precisions:
            for budget in arguments.budgets:
                measured = bertrain_steps(shards, WORKLOAD, budget, precision, arguments.steps, profile=False)
                alone = {"products_ms": products_ms(budget, precision)}
                rows.append(measured | alone | predict(budget, precision) | versions())
                print(json.dumps(rows[-1]), flush=True)
                if arguments.output:  # after each, so that a run that is cut short leaves what it had
                    arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
