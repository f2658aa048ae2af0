"""Predict every published MLPerf result of BERT with the model of `bertrain plan`, and score the predictions.

    python benchmarks/plan.py [--output benchmarks/results/plan.json]
    python benchmarks/plan.py --tables    # what bertrain would reach, and what costs most, from the committed results

bertrain/mlperf/published.csv has the results with their sources. The model is calibrated on one single-node result of
each GPU family, marked there: one factor on the time of all computation. What NVIDIA's code launches, copies and
computes in attention is read off its public source (KERNELS, COPIED, APEX_HEAD_S). Links are as stated by their makers,
80 % of them reached. Nothing is fitted to results of several nodes, and the score counts those alone.
"sequences/s" is samples over the whole run, evaluations and start-up included, as the logs have it; "minutes" adds
MLPerf's convergence points, or in the open division the run's own samples.

Without CUDA graphs the host launches kernels: NVIDIA's code as fast as in its evaluations on 8 H200, Samsung's as
fast as Transformers' Trainer on our H200. `all as NVIDIA` and `all as Transformers` take one of them for both.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bertrain.config.resolve import resolve
from bertrain.config.settings import ModelSettings, Settings
from bertrain.planning.convergence import LARGEST, TARGET, mlperf_interval, samples_to_target
from bertrain.planning.devices import Gpu, Network, find_gpu, find_network
from bertrain.planning.plan import EVALUATED, START_UP_S, Wish, evaluation_seconds, lengths_of, make_plan
from bertrain.planning.step_time import (
    HOST_S,
    LAUNCHES,
    Cluster,
    Design,
    Floats,
    Load,
    StepTime,
    count_launches,
    step_time,
)

HERE = Path(__file__).parent
JITTER = 0.01
METRICS = "sequences_per_s", "minutes"
KERNELS = {
    "fp8": {
        "a layer": {
            "products": 12,
            "casts and transposes of weights": 4,
            "casts and transposes of activations and gradients, sums for biases": 12,
            "scales: move, clear and compute them, for two modules in both passes": 12,
            "attention: seed, offsets and padding too": 7,
            "LayerNorm": 6,
            "dropout with residual": 4,
            "sums of two gradients": 2,
        },
        "the rest": {"embeddings": 76, "heads and losses": 60, "update": 90},
    },
    "fp16": {
        "a layer": {
            "products, with GELU": 12,
            "attention": 2,
            "LayerNorm": 6,
            "dropout with residual": 4,
            "sums of two gradients": 2,
        },
        "the rest": {"embeddings": 76, "heads and losses": 60, "update": 90},
    },
    "fp16, 2 or 3 rows": {
        "a layer": {
            "products": 12,
            "GELU": 2,
            "attention: padding and a sum of parts too": 5,
            "LayerNorm": 6,
            "dropout with residual": 4,
            "sums of two gradients": 2,
        },
        "the rest": {"embeddings": 16, "heads and losses": 60, "update": 90},
    },
}
"""Kernels of NVIDIA's code in a step, counted in its source; copies and clearing by libraries, which bertrain's number
has, are not in it. One kernel each is assumed of dropout with residual, of computing scales and of cuDNN's attention.
Embeddings, heads and update are read to within some 20 %.

- Configurations, in mlcommons/training_results_v3.1, NVIDIA/benchmarks/bert/implementations/v30-pytorch:
  config_DGXH100_1x8x48x1_pack.sh (fp8); config_DGXH100_64x8x3x1_pack_clipafter.sh, 96x8x3 and 384x8x2 and, in
  pytorch, 434x8x2 (2 or 3 rows: no --use_transformer_engine2, --fused_gemm_gelu, --dense_seq_output). In
  training_results_v2.0, pytorch: config_DGXA100_1x8x56x1.sh (fp16), 128x8x2x1_pack and 512x8x2x1_pack (2 rows).
- Layers: te_layers.py and fmha.py (v30-pytorch), modeling.py (v2.0). A cast with sums for a bias is two kernels:
  NVIDIA/TransformerEngine, transformer_engine/common/transpose/cast_transpose_fusion.cu. Scales: amax_and_scale_update
  in transformer_engine/pytorch/fp8.py. Attention: transformer_engine/common/fused_attn/fused_attn_fp8.cu.
- fp16: NVIDIA/apex, csrc/fused_dense_cuda.cu, apex/contrib/csrc/fmha/fmha_api.cpp, apex/contrib/csrc/layer_norm, whose
  gradient is two kernels.
- Embeddings: three gradients, of some 22 kernels each as the one in tests/data/profile-h200, or two for few tokens.
- Update: NVIDIA/apex, apex/contrib/optimizers/distributed_fused_lamb.py. A kernel takes 64 tensors and 320 x 65,536
  numbers at most.
"""
COPIED = {"gradients": 4.0, "weights": 4.0, "weights in 8 bits": 0.9 * 4.0}
"""Bytes per parameter that NVIDIA's code reads and writes to copy gradients into one buffer; weights out of one, where
it sends gradients during the backward pass; and in FP8, weights of layers into 8 bits, as they lie and transposed.

NVIDIA/apex, apex/contrib/optimizers/distributed_fused_lamb.py; te_layers.py."""
APEX_HEAD_S = 2.95e-3 / math.ceil(64 * 16 / 108)
"""Seconds of Apex's attention on an A100: both passes with dropout, one head of 64 and 512 tokens on one processor.

- Table 7 of the FlashAttention paper (arXiv 2205.14135): 2.95 ms for 64 sequences of 16 heads, on 108 processors.
- NVIDIA/apex, apex/contrib/csrc/fmha/src/fmha_fprop_kernel_1xN.h and fmha_dgrad_kernel_1xN_reload.h: one block computes
  all rows of a head and sequence, 16 at a time, against 512 keys. Its shared memory, 114 kB and more in the backward
  pass, leaves no room for a second on the same processor. fmha.py: 2 or 3 sequences in all are divided further.
"""
CLOCKS = {"a100": 1410, "a100-40": 1410, "h100": 1830}
"""MHz of the stated peaks. Apex's kernels are compiled for the A100: an H100 gains its clock and processors alone."""
HOSTS = {
    "": 0.0,
    "graphs": 0.0,
    "nvidia": 43e-6,  # of 975 kernels of ours: a third of them in each of 79 batches, in 1.1 s (v4.0's log, 8 H200)
    "eager": HOST_S["eager"],
}
"""Seconds of the host for each of HOST_LAUNCHES, by the column `host`."""
VARIANTS = {
    "predicted": {},
    "all as NVIDIA": {"eager": "nvidia"},
    "all as Transformers": {"nvidia": "eager"},
}
"""Other hosts of the results, by the variant of the prediction."""
LOWEST_DIFFERENCE = 0.15  # between two results whose order is scored
LONGEST = 512
PACKED = "packed", "packed_all"
NO_GPUS = "xeon", "tpu-v4"
EVERY_ROW = "packed_all", "pad_fmha"  # which the heads read
LENGTHS = np.loadtxt(HERE / "wikipedia-512.csv", delimiter=",", skiprows=1)


def draw_lengths(count: int, seed: int = 0) -> Any:
    chances = LENGTHS[:, 1] / LENGTHS[:, 1].sum()
    return np.random.default_rng(seed).choice(LENGTHS[:, 0], count, p=chances).astype(float)


def load_of(row: dict[str, str], settings: Settings) -> Load:
    """What each GPU computes in a step, as the published code deals it.

    Packed: whole rows of 512 tokens with two sequences each on average; packed_all (no --dense_seq_output): the heads
    read every row. Unpadded: sorted by length and dealt in snake
    order over all GPUs (exchange_padding). Samsung: the same within machines of 8. Padded: rows of 512. pad_fmha: the
    same, but attention skips padding, and the heads read every row.
    """
    batch, count = int(row["batch"]), int(row["count"])
    lengths = draw_lengths(batch)
    group = 8 if row["layout"] == "samsung" else count
    parts = [np.sort(part)[::-1] for part in np.array_split(lengths, count // group)]
    tokens, pairs = np.zeros(count), np.zeros(count)
    for number, part in enumerate(parts):
        turn, place = np.divmod(np.arange(len(part)), group)
        owner = number * group + np.where(turn % 2, group - 1 - place, place)
        np.add.at(tokens, owner, part)
        np.add.at(pairs, owner, part * (LONGEST if row["precision"] == "fp16" else part))
    if row["layout"] in PACKED:
        tokens[:], pairs[:] = LONGEST * batch / 2 / count, pairs.mean()
    elif row["layout"] == "padded":
        tokens[:], pairs[:] = LONGEST * batch / count, LONGEST**2 * batch / count
    elif row["layout"] == "pad_fmha":
        tokens[:] = LONGEST * batch / count
    predictions = tokens if row["layout"] in EVERY_ROW else settings.data.mask_probability * tokens
    return Load(np.ones(count), tokens, pairs, predictions, np.full(count, batch / count))


def device_of(row: dict[str, str]) -> tuple[Gpu, Network]:
    """GPU and network of a row. Two devices are no GPUs and not in the table: their makers' figures, for one rank."""
    if row["gpu"] == "xeon":  # a quarter of two Xeon 8480+; 100 Gb/s Ethernet for each machine
        gpu = replace(find_gpu("a100"), name="xeon", products={"bf16": 0.79 * 100e12}, memory=0.8 * 150e9, link=20e9)
        gpu = replace(gpu, processors=14)
        return gpu, Network("xeon", 20e9, 5e-6, 12.5e9, 30e-6)
    if row["gpu"] == "tpu-v4":  # 275 TFLOP/s, 1,228 GB/s, a torus of six links of 50 GB/s
        gpu = replace(find_gpu("a100"), name="tpu-v4", products={"bf16": 0.79 * 275e12}, memory=0.8 * 1228e9)
        gpu = replace(gpu, processors=8)
        return gpu, Network("tpu", 300e9, 15e-9, 300e9, 1e-6)  # some 50 hops of 1 us across the torus
    gpu = find_gpu(row["gpu"])
    return gpu, find_network(row["network"], gpu, int(row["per_node"]))


def attention_of(row: dict[str, str], gpu: Gpu, model: ModelSettings) -> Callable[[Floats, Floats], Floats] | None:
    """The attention of NVIDIA's code in fp16, Apex's; in FP8 cuDNN's, which takes as long as bertrain's.

    One processor computes a whole head of a sequence. In a bin of few sequences, most processors wait for those of the
    longest.
    """
    if row["precision"] != "fp16":
        return None
    head_s = APEX_HEAD_S * CLOCKS["a100"] / CLOCKS[row["gpu"]]
    rate = 12 * 64 * LONGEST**2 * gpu.processors / head_s
    rows = LONGEST / 2 if row["layout"] == "pad_fmha" else LONGEST  # three sequences, each divided in two

    def seconds(bins: Floats, pairs: Floats) -> Floats:
        alone = bins * gpu.processors / model.num_heads * rows * LONGEST
        return 12 * model.num_layers * model.hidden_size * np.maximum(pairs, alone) / rate

    return seconds


def copied_bytes(row: dict[str, str]) -> float:
    """Of each parameter, that NVIDIA's code copies in a step."""
    if row["layout"] == "samsung" or row["gpu"] in NO_GPUS:
        return 0.0
    found = COPIED["gradients"] + (COPIED["weights"] if row["overlaps"] == "yes" else 0.0)
    return found + (COPIED["weights in 8 bits"] if row["precision"] == "fp8" else 0.0)


def counted_launches(row: dict[str, str], settings: Settings) -> float:
    """Kernels of a row's code outside of the update, over bertrain's: those of KERNELS; 1 for code that was not read.

    What its update launches beyond bertrain's is part of it.
    """
    if row["layout"] == "samsung" or row["gpu"] in NO_GPUS:
        return 1.0
    code = "fp16, 2 or 3 rows" if row["layout"] in EVERY_ROW else row["precision"]
    layer, rest = (sum(KERNELS[code][part].values()) for part in ("a layer", "the rest"))
    return (settings.model.num_layers * layer + rest - LAUNCHES[2]) / count_launches(settings)


def predict(row: dict[str, str], base: Settings, slowdown: float) -> dict[str, Any]:
    """Step time, sequences/s of the whole run, and minutes to the target."""
    precision: Any = row["precision"]
    settings = replace(base, train=replace(base.train, precision=precision))
    gpu, network = device_of(row)
    gpu = replace(gpu, slowdown=slowdown)
    cluster = Cluster(gpu, network, int(row["count"]), int(row["per_node"]))
    is_ddp = row["layout"] in ("samsung", "padded")
    design = Design(
        gradient_bytes=2,
        buckets=int(row["buckets"]),
        overlaps=row["overlaps"] == "yes",
        sharded="no" if is_ddp else "node",
        weight_bytes=2,
        copied_bytes=copied_bytes(row),
        is_fused=False,
        launches=counted_launches(row, settings),
        host_s=HOSTS[row["host"]],
        attention=attention_of(row, gpu, base.model),
    )
    step: StepTime = step_time(settings, [load_of(row, settings)], cluster, design, jitter=JITTER)
    batch = int(row["batch"])
    is_open = "open division" in row["source"]  # with other optimizers, which the convergence points do not cover
    samples = float(row["samples"]) if is_open else samples_to_target(min(batch, LARGEST))
    evaluations = samples / mlperf_interval(batch)
    length = LONGEST if row["layout"] in (*PACKED, "padded", "pad_fmha") else LONGEST / 2
    each = evaluation_seconds(settings, cluster, design, EVALUATED, length=length, at_once=16)
    seconds = START_UP_S + samples / batch * step.seconds + evaluations * each
    return {
        "step_ms": 1e3 * step.seconds,
        "parts_ms": {name: round(1e3 * value, 3) for name, value in step.parts.items()},
        "evaluation_s": each,
        "samples": samples,
        "sequences_per_s": samples / seconds,
        "minutes": seconds / 60,
    }


def calibrate(row: dict[str, str], base: Settings) -> float:
    """The slowdown at which the predicted sequences/s are the published ones."""
    low, high = 0.2, 20.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        is_too_fast = predict(row, base, middle)["sequences_per_s"] > float(row["sequences_per_s"])
        low, high = (middle, high) if is_too_fast else (low, middle)
    return (low * high) ** 0.5


def error_of(row: dict[str, str], predicted: dict[str, Any], name: str) -> float | None:
    return predicted[name] / float(row[name]) - 1 if row[name] else None


def describe(row: dict[str, str], predicted: dict[str, Any]) -> dict[str, Any]:
    """A prediction beside the published result."""
    return {
        **{name: row[name] for name in ("round", "system", "gpu", "role", "source")},
        "count": int(row["count"]),
        "batch": int(row["batch"]),
        **{f"published_{name}": float(row[name]) if row[name] else None for name in METRICS},
        **{f"{name}_error": error_of(row, predicted, name) for name in METRICS},
        **predicted,
    }


def score(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Errors and order of the rows of several nodes that publish `name`."""
    scored = [row for row in rows if row["role"] == "scored" and row[f"{name}_error"] is not None]
    errors = sorted(abs(row[f"{name}_error"]) for row in scored)
    pairs = right = 0
    for one, other in itertools.combinations(scored, 2):
        published = one[f"published_{name}"] / other[f"published_{name}"]
        if max(published, 1 / published) > 1 + LOWEST_DIFFERENCE:
            pairs += 1
            right += (published - 1) * (one[name] - other[name]) > 0  # equal predictions are wrong
    return {
        "rows": len(scored),
        "median_error": statistics.median(errors),
        "within_10_percent": sum(error <= 0.1 for error in errors) / len(errors),
        "within_20_percent": sum(error <= 0.2 for error in errors) / len(errors),
        "pairs": pairs,
        "pairs_in_order": right / pairs,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| result | GPUs | batch | role | sequences/s: published | predicted | error | minutes: published | predicted "
        "| error |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|",
    ]

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    for row in rows:
        lines.append(
            f"| {row['round']} {row['system']} | {row['count']:,} {row['gpu']} | {row['batch']:,} | {row['role']} "
            f"| {number(row['published_sequences_per_s'], ',.0f')} | {row['sequences_per_s']:,.0f} "
            f"| {number(row['sequences_per_s_error'], '+.1%')} | {number(row['published_minutes'], '.3f')} "
            f"| {row['minutes']:.3f} | {number(row['minutes_error'], '+.1%')} |"
        )
    return "\n".join(lines)


OURS = [
    ("8 H200", "h200", 8, "nvlink", "mlperf-nvidia-1x8x48-packed", [], "4.76 min (HPE, v5.0)"),
    ("64 H100", "h100", 64, "nvlink+ib-ndr", "mlperf-nvidia-8x8x36-packed", [], "0.887 min (Cisco, v5.0)"),
    (
        "1,024 A100", "a100", 1024, "nvlink+ib-hdr", "mlperf-nvidia-434x8x2-packed",
        [("batch.sequences", "4096"), ("train.precision", "bf16")], "25.3 s (NVIDIA, v2.0); 22.3 s (Samsung, open)",
    ),
    ("3,472 H100", "h100", 3472, "nvlink+ib-ndr", "mlperf-nvidia-434x8x2-packed", [], "7.2 s (NVIDIA, v3.1)"),
]  # fmt: skip
"""Machines of the records, and the recipe that bertrain would run there."""
DESIGNS = {
    "as the recipe is": [],
    "gradients in bf16": [("train.exchange_precision", "bf16")],
    "bf16, buckets of 200 MB": [("train.exchange_precision", "bf16"), ("train.bucket_mb", "200")],
    "bf16, 200 MB, sent during the backward pass": [
        ("train.exchange_precision", "bf16"), ("train.bucket_mb", "200"), ("optimizer.clipping", "global"),
    ],
}  # fmt: skip


def predict_ours() -> list[dict[str, Any]]:
    """What bertrain itself would reach, with the kernels measured on an H200."""
    found = []
    for name, gpu_name, count, network, recipe, changes, record in OURS:
        gpu = find_gpu(gpu_name)
        for variant, more in DESIGNS.items():
            settings = resolve(recipe, [*changes, *more])
            cluster = Cluster(gpu, find_network(network, gpu, 8), count)
            wish = Wish(settings, lengths_of(HERE / "wikipedia-512.csv", LONGEST), cluster, TARGET, JITTER)
            found.append({"machine": name, "record": record, "variant": variant} | make_plan(wish, count).facts())
    return found


NEEDED = "products", "attention"  # by any design


def own_tables(rows: list[dict[str, Any]]) -> str:
    """Step and time of each design on each machine, and the three parts of the recipe that cost most, as Markdown."""
    names = "the recipe", "gradients in bf16", "and buckets of 200 MB", "and sent during the backward pass"
    reached = [f"| machine | record | {' | '.join(names)} |", "|---|---|" + len(names) * "---:|"]
    costly = []
    for machine, group in itertools.groupby(rows, key=lambda row: row["machine"]):
        designs = list(group)
        times = (f"{row['step_ms']:.1f} ms, {row['seconds']:.1f} s" for row in designs)
        reached.append(f"| {machine} | {designs[0]['record']} | {' | '.join(times)} |")
        parts = {name: value for name, value in designs[0]["parts_ms"].items() if name not in NEEDED}
        most = sorted(parts, key=lambda name: -parts[name])[:3]
        costly.append(f"- {machine}: " + ", ".join(f"{name} {parts[name]:.1f}" for name in most))
    return "\n".join([*reached, "", *costly])


def predict_all(published: list[dict[str, str]], base: Settings, hosts: dict[str, str]) -> dict[str, Any]:
    """All results, some with another host, and their scores."""
    known = [row | {"host": hosts.get(row["host"], row["host"])} for row in published]
    slowdowns = {row["gpu"]: calibrate(row, base) for row in known if row["role"] == "calibration"}
    rows = [describe(row, predict(row, base, slowdowns.get(row["gpu"], slowdowns["a100"]))) for row in known]
    return {"slowdown": slowdowns, "score": {metric: score(rows, metric) for metric in METRICS}, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the predictions as JSON here")
    parser.add_argument("--tables", action="store_true", help="print the tables of bertrain's own predictions")
    arguments = parser.parse_args()
    if arguments.tables:
        print(own_tables(json.loads((HERE / "results/plan.json").read_text())["bertrain"]["rows"]))
        return
    base = resolve("mlperf-nvidia-1x8x48-packed", [])
    with open(HERE.parent / "bertrain/mlperf/published.csv") as file:
        published = [row for row in csv.DictReader(file) if row["role"] != "not planned"]
    found = {name: predict_all(published, base, hosts) for name, hosts in VARIANTS.items()}
    print(table(found["predicted"]["rows"]))
    for name, one in found.items():
        rows = one["rows"] if name == "predicted" else one.pop("rows")
        print(name, json.dumps(one | {"rows": len(rows)}, indent=1))
    found["bertrain"] = {"rows": predict_ours()}
    print(own_tables(found["bertrain"]["rows"]))
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
