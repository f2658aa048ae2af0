"""ModernBERT on one GPU: bertrain's own step in bf16 and FP8 against Transformers, compiled in bf16, in one run.

    python benchmarks/gpu_modern.py [--lengths 1024 8192] [--rows natural full] [--precisions bf16 fp8] [--steps 30]
                                    [--tokens 32768] [--output FILE] [--no-peer] [--profile]

ModernBERT-base: 22 layers of 768, inner width 1,152, 12 heads, vocabulary 50,368, windows of 128 tokens but in every
third layer, 30 % masked words, no dropout, AdamW, gradients clipped. Examples are random words in the lengths of
Wikipedia (`natural`; of `bertrain data prepare`, see workload.py), or rows that are all as long as possible (`full`). A
step runs from pinned memory to updated weights: `bertrain.training.loop.train_step`; and Transformers'
ModernBertForMaskedLM under torch.compile with sdpa attention, padded to the longest length, with fused AdamW. Real
tokens per second. MFU is relative to the dense bf16 peak of an H200, in FP8 too. `--profile` prints the kernels of a
step by their time, instead of measuring.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_portable import BUDGET, Data, Times, measured, time_bertrain, time_peer, write_examples
from gpu_pretrain import DEVICE, make_steps

from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.ranks import parallel
from bertrain.run.metrics import Stopwatch
from bertrain.training.loop import train_step
from bertrain.training.precision import set_precision
from bertrain.training.state import TrainState

VOCABULARY, MASKED = 50368, 0.3
SYSTEMS = ("bertrain bf16", "bertrain fp8", "Transformers, compiled, bf16")


def settings_for(length: int, precision: str, tokens: int) -> Settings:
    given = {
        "model.vocab_size": VOCABULARY, "data.max_seq_length": length, "data.max_predictions": int(MASKED * length) + 1,
        "batch.sequences": 0, "batch.tokens": tokens, "batch.token_budget": tokens, "train.precision": precision,
        "train.kernels": "fused", "optimizer.learning_rate": 1e-5,
    }  # fmt: skip
    return resolve("modernbert-base", [(name, str(value)) for name, value in given.items()])


def flop_per_token(settings: Settings, lengths: list[int]) -> float:
    """Training FLOPs: products of the encoder, attention within sequences and windows, vocabulary of masked words."""
    model, total = settings.model, sum(lengths)
    hidden, inner = model.hidden_size, model.intermediate_size
    pairs = sum(
        length * (length if window is None else min(length, 2 * window + 1))
        for length in lengths
        for window in model.windows
    )
    products = 6 * model.num_layers * (4 * hidden**2 + 3 * hidden * inner)
    return products + 12 * hidden * pairs / total + 6 * (hidden**2 + hidden * VOCABULARY) * MASKED


def time_transformers(data: Data, settings: Settings, count: int) -> Times:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(vocab_size=VOCABULARY)  # the other defaults are ModernBERT-base
    config._attn_implementation = "sdpa"
    model: Any = ModernBertForMaskedLM(config)  # Transformers' annotation of `to` takes no device
    return time_peer(model.to(DEVICE).train(), data, settings, count)


def profile(data: Data, settings: Settings) -> None:
    """Print the GPU time of a step by kernel."""
    ranks, watch = parallel.Ranks(0, 1, DEVICE), Stopwatch(DEVICE)
    set_precision(settings.train)
    state = TrainState.build(settings, ranks)
    for rows, shards in data.items():
        steps = make_steps(shards, settings, 6)
        for step in steps[:5]:
            train_step(state, step, settings, ranks, watch)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            train_step(state, steps[5], settings, ranks, watch)
            torch.cuda.synchronize()
        print(f"{settings.train.precision}, {settings.data.max_seq_length}, {rows}")
        print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=60))


def table(results: list[dict[str, Any]]) -> str:
    """Tokens/s of the systems, with the speedup over Transformers."""
    lines = ["| length | rows | " + " | ".join(SYSTEMS) + " |", "|---:|---|" + "---:|" * len(SYSTEMS)]
    for length, rows in dict.fromkeys((record["length"], record["rows"]) for record in results):
        rates = {
            record["system"]: record["real_tokens_per_s"]
            for record in results
            if (record["length"], record["rows"]) == (length, rows)
        }
        peer = rates.get(SYSTEMS[-1])
        cells = [
            "" if name not in rates else f"{rates[name]:,}" + (f" ({rates[name] / peer:.2f} x)" if peer else "")
            for name in SYSTEMS
        ]
        lines.append(f"| {length:,} | {rows} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 8192], choices=[512, 1024, 2048, 8192])
    parser.add_argument("--rows", nargs="+", default=["natural", "full"], choices=["natural", "full"])
    parser.add_argument("--precisions", nargs="*", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=BUDGET, help="of a step")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu_modern.json"))
    options = parser.parse_args()
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": __import__("triton").__version__, "transformers": __import__("transformers").__version__,
    }  # fmt: skip
    results: list[dict[str, Any]] = []
    for length in options.lengths:
        with tempfile.TemporaryDirectory() as folder:
            data = {rows: write_examples(Path(folder) / rows, length, rows, VOCABULARY) for rows in options.rows}
            systems = [(f"bertrain {precision}", precision, time_bertrain) for precision in options.precisions]
            if not options.no_peer:
                systems.append((SYSTEMS[-1], "bf16", time_transformers))
            for name, precision, system in systems:
                settings = settings_for(length, precision, options.tokens)
                if options.profile:
                    profile(data, settings)
                    continue
                found = measured(system, data, settings, options.steps, flop_per_token)
                for rows, record in found.items():
                    results.append({"system": name, "length": length, "rows": rows, "tokens": options.tokens, **record})
                    print(json.dumps(results[-1]), flush=True)
                    options.output.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
