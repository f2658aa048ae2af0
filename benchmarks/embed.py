"""Embedding texts: bertrain against sentence-transformers, same weights, texts, precision and threads, one run.

    python benchmarks/embed.py WEIGHTS --stsb FOLDER [--output benchmarks/results/embed.json] [--precision fp32]

WEIGHTS is a sentence-transformers folder, such as all-MiniLM-L6-v2. Two workloads: the sentences of STS-B's dev part
(`dev.tsv` of GLUE's archive, in FOLDER), and texts of 512 tokens made of the same sentences. Both systems start from
texts in memory and end with vectors in memory: tokenizing counts. bertrain embeds as `bertrain embed` does, without the
files. sentence-transformers sorts by length and pads each batch; its best batch size is found in the same run, on the
first quarter of the texts.

Machines are shared and noisy, so the systems take turns; a speed is that of the best turn, and the ratio is the median
of the ratios of turns side by side. The largest difference between the vectors is recorded, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertrain.training.embed import Encoder

LONG = 512  # tokens
BATCH_SIZES = {"cpu": (8, 16, 32, 64, 128, 256), "cuda": (32, 64, 128, 256, 512, 1024)}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Embed = Callable[[list[str]], np.ndarray]


def read_sentences(folder: Path) -> list[str]:
    """Both sentences of each pair of STS-B's dev part, each once."""
    header, *lines = (folder / "dev.tsv").read_text(encoding="utf-8").splitlines()
    names = header.split("\t")
    columns = [names.index("sentence1"), names.index("sentence2")]
    rows = [line.split("\t") for line in lines]
    return list(dict.fromkeys(row[column] for row in rows for column in columns if len(row) > column))


def long_texts(sentences: list[str], count: int) -> list[str]:
    """Texts of more tokens than any model here reads, so that all are truncated to the same length."""
    return [" ".join(sentences[(row * 37 + part) % len(sentences)] for part in range(80)) for row in range(count)]


def timed(embed: Embed, texts: list[str]) -> tuple[float, np.ndarray]:
    """Texts per second, and the vectors."""
    start = time.perf_counter()
    vectors = embed(texts)
    return len(texts) / (time.perf_counter() - start), vectors


def best_batch_size(model: Any, texts: list[str]) -> tuple[int, dict[int, float]]:
    speeds = {}
    for size in BATCH_SIZES[model.device.type]:
        speeds[size], _ = timed(lambda some, size=size: model.encode(some, batch_size=size), texts)  # type: ignore[misc]
        print(f"  sentence-transformers, batch size {size}: {speeds[size]:,.1f} texts/s", flush=True)
    return max(speeds, key=lambda size: speeds[size]), speeds


def measure(weights: Path, texts: list[str], max_length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(weights), device=arguments.device)
    theirs.max_seq_length = max_length
    theirs = theirs.to(TYPES[arguments.precision])  # it keeps the 16 bits of a file otherwise
    encoder = Encoder.open(weights, max_seq_length=max_length, precision=arguments.precision, device=arguments.device)
    lengths = encoder.encode(texts)[0].lengths
    with encoder.ready() as (predict, ranks):

        def ours(some: list[str]) -> np.ndarray:
            return encoder.embed(some, predict, ranks)[0]

        quarter = texts[: max(1, len(texts) // 4)]
        ours(quarter)  # warm up
        size, by_size = best_batch_size(theirs, quarter)
        turns = []
        for turn in range(arguments.turns):
            our_speed, our_vectors = timed(ours, texts)
            their_speed, their_vectors = timed(lambda some: theirs.encode(some, batch_size=size), texts)
            turns.append({"bertrain": our_speed, "sentence_transformers": their_speed})
            print(f"  turn {turn + 1}: {our_speed:,.1f} and {their_speed:,.1f} texts/s", flush=True)
    ratios = [turn["bertrain"] / turn["sentence_transformers"] for turn in turns]
    return {
        "texts": len(texts),
        "mean_tokens": float(lengths.mean()),
        "max_length": max_length,
        "batch_size": size,
        "texts_per_s_by_batch_size": by_size,
        "turns": turns,
        "bertrain": max(turn["bertrain"] for turn in turns),
        "sentence_transformers": max(turn["sentence_transformers"] for turn in turns),
        "ratio": statistics.median(ratios),
        "largest_difference": float(np.abs(our_vectors - their_vectors.astype(np.float32)).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--stsb", type=Path, required=True, help="the folder of STS-B's dev.tsv")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "embed.json")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sentences", type=int, default=2400, help="sentences of STS-B, repeated if it has fewer")
    parser.add_argument("--long", type=int, default=64, help="texts of 512 tokens")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    sentences = read_sentences(arguments.stsb)
    repeated = [sentences[row % len(sentences)] for row in range(arguments.sentences)]
    results = {}
    for name, texts, length in (("stsb", repeated, 256), ("long", long_texts(sentences, arguments.long), LONG)):
        print(f"{name}: {len(texts):,} texts")
        results[name] = measure(arguments.weights, texts, length, arguments)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    found = {
        "device": name,
        "threads": torch.get_num_threads(),
        "precision": arguments.precision,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "results": results,
    }
    arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    for name, result in results.items():
        print(f"{name}: {result['ratio']:.2f} x sentence-transformers ({result['bertrain']:,.0f} texts/s)")


if __name__ == "__main__":
    main()
