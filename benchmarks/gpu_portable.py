"""bertrain against Transformers, compiled: models of four sizes, short and long sequences, every precision.

    python benchmarks/gpu_portable.py [--kernels compiled] [--models base large] [--lengths 128 512] [--precisions ...]
                                      [--rows natural full] [--output benchmarks/results/gpu_portable.json]

With `--kernels compiled` it measures what a GPU, precision or head size without our kernels gets; with `--kernels
fused` and `--precisions bf16 fp8`, our kernels. Both systems train BERT with its two heads and dropout 0.1 on the same
examples: random words in the lengths of Wikipedia (`natural`), or rows that are all as long as possible (`full`), where
there is no padding to save. A step runs from pinned memory to updated weights: `bertrain.training.loop.train_step` with
AdamW; and Transformers' BertForPreTraining under torch.compile with sdpa attention, padded to the longest length, with
fused AdamW and gradients clipped. FP8 is compared with Transformers in bf16. Real tokens per second; the ratio is what
counts. MFU is relative to the dense bf16 peak of an H200, 989 TFLOP/s, in FP8 too.

Compiling takes longer than measuring: `--steps 1` with another `--output`, for parts of the matrix in parallel, fills
the compilers' caches first.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_pretrain import DEVICE, make_steps, time_steps
from workload import Example, padded_inputs, random_examples, write_folder

from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader, Step
from bertrain.data.formats.shards import Shards
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.ranks import parallel
from bertrain.run.metrics import Stopwatch
from bertrain.training.loop import train_step
from bertrain.training.precision import set_precision
from bertrain.training.state import TrainState

BUDGET, WARM_UP, LOSS_SCALE = 32768, 8, 1024.0
SIZES = {"6x384": (384, 6, 12), "4x512": (512, 4, 8), "base": (768, 12, 12), "large": (1024, 24, 16)}
"""Width, layers and heads; the inner width is four times the width."""
PREDICTIONS = {128: 20, 512: 76, 2048: 307, 8192: 1228}
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
VOCABULARY, PEAK = 30528, 989e12

Data = dict[str, Shards]
Times = dict[str, tuple[list[float], float, float]]  # as `time_steps` returns them, by kind of rows
Results = dict[str, dict[str, Any]]


def settings_for(model: str, length: int, precision: str, kernels: str) -> Settings:
    hidden, layers, heads = SIZES[model]
    given = {
        "data.max_seq_length": length, "data.max_predictions": PREDICTIONS[length], "batch.sequences": 0,
        "batch.tokens": BUDGET, "batch.token_budget": BUDGET, "train.precision": precision,
        "train.kernels": kernels, "optimizer.name": "adamw", "optimizer.learning_rate": 1e-5,
        "model.hidden_size": hidden, "model.num_layers": layers, "model.num_heads": heads,
        "model.intermediate_size": 4 * hidden, "model.max_positions": max(512, length),
    }  # fmt: skip
    return resolve("bert-base-phase1", [(name, str(value)) for name, value in given.items()])


def write_examples(folder: Path, length: int, rows: str, num_words: int = 0) -> Shards:
    """Examples of random words; of so many that the vocabulary is BERT's with others added."""
    vocabulary = Vocabulary.load()
    more = tuple(f"word{number}" for number in range(num_words - len(vocabulary.words)))
    vocabulary = replace(vocabulary, words=vocabulary.words + more)
    examples = random_examples(max(1_000, 1_000_000 // length), vocabulary, length)
    if rows == "full":
        examples = (
            Example((e.tokens * -(-length // len(e.tokens)))[: length - 1] + e.tokens[-1:], length // 2, e.is_random)
            for e in examples
        )
    write_folder(folder, examples, vocabulary)
    return Shards.open(folder, verify="size")


def time_bertrain(data: Data, settings: Settings, count: int) -> Times:
    ranks, watch = parallel.Ranks(0, 1, DEVICE), Stopwatch(DEVICE)
    state = TrainState.build(settings, ranks)

    def action(step: Step) -> None:
        train_step(state, step, settings, ranks, watch)

    def times(shards: Shards) -> tuple[list[float], float, float]:
        steps = make_steps(shards, settings, 8)
        return time_steps(action, [replace(steps[i % 8], number=i) for i in range(count + WARM_UP)], WARM_UP)

    return {rows: times(shards) for rows, shards in data.items()}


def time_transformers(data: Data, settings: Settings, count: int) -> Times:
    from transformers import BertConfig, BertForPreTraining

    shape = settings.model
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=shape.hidden_size, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model: Any = BertForPreTraining(config)  # Transformers' annotation of `to` takes no device
    return time_peer(model.to(DEVICE).train(), data, settings, count)


def time_peer(model: torch.nn.Module, data: Data, settings: Settings, count: int) -> Times:
    """A model of Transformers, compiled, on padded rows; it gets the inputs that it knows."""
    known = inspect.signature(model.forward).parameters
    length, precision = settings.data.max_seq_length, settings.train.precision
    num_rows = settings.batch.tokens // length
    padded = replace(settings, batch=replace(settings.batch, tokens=0, sequences=num_rows, policy="padded"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    loss_of: Callable[..., torch.Tensor] = torch.compile(lambda **tensors: model(**tensors).loss)
    scale = LOSS_SCALE if precision == "fp16" else 1.0

    def times(shards: Shards) -> tuple[list[float], float, float]:
        loader = Loader(shards, padded)
        steps = [loader.step(number, number * num_rows) for number in range(8)]
        pinned = [
            {
                name: tensor.pin_memory()
                for name, tensor in padded_inputs(step.bins[0], num_rows, length).items()
                if name in known
            }
            for step in steps
        ]

        def action(step: Step) -> None:
            tensors = {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in pinned[step.number].items()}
            with torch.autocast("cuda", NARROW.get(precision, torch.bfloat16), enabled=precision in NARROW):
                loss = loss_of(**tensors)
            (loss * scale).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return time_steps(action, [steps[i % 8] for i in range(count + WARM_UP)], WARM_UP)

    return {rows: times(shards) for rows, shards in data.items()}


def flop_per_token(settings: Settings, lengths: list[int]) -> float:
    """Training FLOPs by the usual count: encoder, attention within sequences, vocabulary of masked words."""
    hidden, layers = settings.model.hidden_size, settings.model.num_layers
    attention = 12 * layers * hidden * sum(length**2 for length in lengths) / sum(lengths)
    return 72 * layers * hidden**2 + attention + 6 * (hidden**2 + hidden * VOCABULARY) * 0.15


def measured(
    system: Callable[[Data, Settings, int], Times],
    data: Data,
    settings: Settings,
    count: int,
    flop: Callable[[Settings, list[int]], float] = flop_per_token,
) -> Results:
    """What one system reaches on each kind of rows; it is built and compiled once."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    set_precision(settings.train)
    results: Results = {}
    for rows, (ms, tokens, start_up) in system(data, settings, count).items():
        per_second = tokens / statistics.median(ms) * 1e3
        results[rows] = {
            "real_tokens_per_s": round(per_second),
            "ms_per_step": round(statistics.median(ms), 2),
            "mfu": round(per_second * flop(settings, data[rows].lengths.tolist()) / PEAK, 3),
            "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
            "warm_up_s": round(start_up, 1),
        }
    return results


def measure(length: int, data: Data, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each model, precision and kind of rows."""
    for model in options.models:
        theirs: dict[str, Results] = {}
        for precision in options.precisions:
            settings = settings_for(model, length, precision, options.kernels)
            ours = measured(time_bertrain, data, settings, options.steps)
            peer = "bf16" if precision == "fp8" else precision
            if peer not in theirs:
                as_peer = settings_for(model, length, peer, options.kernels)
                theirs[peer] = measured(time_transformers, data, as_peer, options.steps)
            case = {"model": model, "length": length, "precision": precision, "kernels": options.kernels}
            for rows, mine in ours.items():
                other = theirs[peer][rows]
                ratio = round(mine["real_tokens_per_s"] / other["real_tokens_per_s"], 2)
                yield case | {"rows": rows, "ratio": ratio, "bertrain": mine, "transformers": other}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="compiled", choices=["compiled", "fused"])
    parser.add_argument("--models", nargs="+", default=["base", "large"], choices=SIZES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512], choices=PREDICTIONS)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp16", "tf32", "fp32"])
    parser.add_argument("--rows", nargs="+", default=["natural", "full"], choices=["natural", "full"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu_portable.json"))
    options = parser.parse_args()
    machine = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens_per_step": BUDGET,
        "transformers": __import__("transformers").__version__,
    }  # fmt: skip
    results: list[dict[str, Any]] = []
    for length in options.lengths:
        with tempfile.TemporaryDirectory() as folder:
            data = {rows: write_examples(Path(folder) / rows, length, rows) for rows in options.rows}
            for record in measure(length, data, options):
                results.append(record)
                print(json.dumps(record), flush=True)
                options.output.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
