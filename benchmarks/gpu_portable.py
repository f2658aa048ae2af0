"""The compiled engine against Transformers, compiled too: what a GPU, precision or head size without our kernels gets.

    python benchmarks/gpu_portable.py [--models base large] [--lengths 128 512] [--precisions bf16 fp16 tf32 fp32]
                                      [--rows natural full] [--output benchmarks/results/gpu_portable.json]

Both train BERT with its two heads and dropout 0.1 on the same examples: random words in the lengths of Wikipedia
(`natural`), or rows that are all as long as possible (`full`), where there is no padding to save. A step runs from
pinned memory to updated weights: `bertrain.training.loop.train_step` with `train.kernels compiled` and AdamW; and
Transformers' BertForPreTraining under torch.compile with sdpa attention, padded to the longest length, with fused AdamW
and gradients clipped. Real tokens per second; the ratio is what counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_pretrain import DEVICE, make_steps, time_steps
from workload import padded_inputs, random_examples

from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader, Step
from bertrain.data.formats.shards import Shards
from bertrain.data.formats.write import Example, write_shards
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.ranks import parallel
from bertrain.run.metrics import Stopwatch
from bertrain.training.loop import train_step
from bertrain.training.precision import set_precision
from bertrain.training.state import TrainState

BUDGET, STEPS, WARM_UP, LOSS_SCALE = 32768, 30, 8, 1024.0
SIZES = {"base": (768, 12, 12, 3072), "large": (1024, 24, 16, 4096)}
PREDICTIONS = {128: 20, 512: 76}
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def settings_for(model: str, length: int, precision: str) -> Settings:
    given = {
        "data.max_seq_length": length, "data.max_predictions": PREDICTIONS[length], "batch.sequences": 0,
        "batch.tokens": BUDGET, "batch.token_budget": BUDGET, "train.precision": precision,
        "train.kernels": "compiled", "optimizer.name": "adamw", "optimizer.learning_rate": 1e-5,
    }  # fmt: skip
    return resolve(f"bert-{model}-phase1", [(name, str(value)) for name, value in given.items()])


def write_examples(folder: Path, length: int, rows: str) -> Shards:
    vocabulary = Vocabulary.load()
    examples = random_examples(8_000, vocabulary, length)
    if rows == "full":
        examples = (
            Example((e.tokens * length)[: length - 1] + e.tokens[-1:], length // 2, e.is_random) for e in examples
        )
    write_shards(folder, examples, vocabulary, preparation={}, rows_per_shard=65536)
    return Shards.open(folder, verify="size")


def time_bertrain(shards: Shards, settings: Settings) -> tuple[list[float], float, float]:
    ranks, watch = parallel.Ranks(0, 1, DEVICE), Stopwatch(DEVICE)
    state = TrainState.build(settings, ranks)
    steps = make_steps(shards, settings, 8)
    steps = [replace(steps[i % len(steps)], number=i) for i in range(STEPS + WARM_UP)]

    def action(step: Step) -> None:
        train_step(state, step, settings, ranks, watch)

    return time_steps(action, steps, WARM_UP)


def time_transformers(shards: Shards, settings: Settings, model_name: str) -> tuple[list[float], float, float]:
    from transformers import BertConfig, BertForPreTraining

    hidden, layers, heads, inner = SIZES[model_name]
    config = BertConfig(
        vocab_size=30528, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = BertForPreTraining(config).to(DEVICE).train()
    length, precision = settings.data.max_seq_length, settings.train.precision
    rows = BUDGET // length
    padded = replace(settings, batch=replace(settings.batch, tokens=0, sequences=rows, policy="padded"))
    loader = Loader(shards, padded)
    steps = [loader.step(number, number * rows) for number in range(8)]
    inputs = {
        step.number: {name: tensor.pin_memory() for name, tensor in padded_inputs(step.bins[0], rows, length).items()}
        for step in steps
    }
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    loss_of: Callable[..., torch.Tensor] = torch.compile(lambda **tensors: model(**tensors).loss)
    scale = LOSS_SCALE if precision == "fp16" else 1.0

    def action(step: Step) -> None:
        tensors = {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in inputs[step.number].items()}
        with torch.autocast("cuda", NARROW.get(precision, torch.bfloat16), enabled=precision in NARROW):
            loss = loss_of(**tensors)
        (loss * scale).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return time_steps(action, [steps[i % len(steps)] for i in range(STEPS + WARM_UP)], WARM_UP)


def measured(action: Callable[[], tuple[list[float], float, float]]) -> dict[str, Any]:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ms, tokens, start_up = action()
    return {
        "real_tokens_per_s": round(tokens / statistics.median(ms) * 1e3),
        "ms_per_step": round(statistics.median(ms), 2),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "start_up_s": round(start_up, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["base", "large"], choices=SIZES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512], choices=PREDICTIONS)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp16", "tf32", "fp32"])
    parser.add_argument("--rows", nargs="+", default=["natural", "full"], choices=["natural", "full"])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu_portable.json"))
    options = parser.parse_args()
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens_per_step": BUDGET,
        "transformers": __import__("transformers").__version__,
    }  # fmt: skip
    results: list[dict[str, Any]] = []
    for length in options.lengths:
        for rows in options.rows:
            with tempfile.TemporaryDirectory() as folder:
                shards = write_examples(Path(folder) / "data", length, rows)
                for model in options.models:
                    for precision in options.precisions:
                        settings = settings_for(model, length, precision)
                        set_precision(settings.train)
                        ours = measured(lambda s=settings: time_bertrain(shards, s))  # noqa: B023 - called at once
                        theirs = measured(lambda s=settings, m=model: time_transformers(shards, s, m))  # noqa: B023
                        ratio = round(ours["real_tokens_per_s"] / theirs["real_tokens_per_s"], 2)
                        case = {"model": model, "length": length, "rows": rows, "precision": precision}
                        results.append(case | {"ratio": ratio, "bertrain": ours, "transformers": theirs})
                        print(json.dumps(results[-1]), flush=True)
                        content = json.dumps({"machine": machine, "results": results}, indent=1) + "\n"
                        options.output.write_text(content)


if __name__ == "__main__":
    main()
