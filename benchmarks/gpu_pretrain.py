"""BERT-Large pre-training on one GPU: bertrain's own step against Transformers, on the same examples, in one run.

    python benchmarks/gpu_pretrain.py [--output benchmarks/results/gpu_pretrain.json] [--only bertrain] [--profile]

The measure: 24 layers of 1024, 16 heads, vocabulary padded to 30,528, at most 512 tokens, lengths drawn from Wikipedia's
(wikipedia-512.csv beside this file), hidden and attention dropout 0.1, 15 % masked words (at most 76) and next
sentence, exact loss, LAMB with float32 masters, gradients clipped to norm 1, one update per bin. A step runs from a
Batch in pinned host memory to updated weights, and is `bertrain.train.pretrain.train_step`, which the trainer calls.
Sequences per second are real tokens per second over 254.5, the mean length of MLPerf's Wikipedia set.

Peer: Transformers' BertForPreTraining, bf16 autocast, sdpa attention, torch.compile, padded to 512, fused AdamW (which
computes less than LAMB), the same examples in the same order.

NVIDIA's published 1,095 sequences/s per H200 and 1,141 per H100 include the all-reduce of 8 and 4 GPUs, overlapped;
here is one GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loader import random_examples

from bertrain.config import Settings, resolve
from bertrain.data.loader import Loader, Step
from bertrain.data.shards import Shards
from bertrain.data.tokenizer import Vocabulary
from bertrain.data.write import write_shards
from bertrain.model.bert import Bert, split_parts
from bertrain.model.initial import initialise
from bertrain.observe.metrics import Stopwatch
from bertrain.optim.arena import Arena
from bertrain.optim.lamb import AdaptiveOptimizer
from bertrain.train import compute, parallel
from bertrain.train.checkpoint import Progress
from bertrain.train.pretrain import TrainState, train_step

MEAN_LENGTH = 254.5
DEVICE = torch.device("cuda")


def settings_for(budget: int, precision: str, *overrides: tuple[str, str]) -> Settings:
    """MLPerf's shape: one bin is one step. The rate is small, so that random words are not a wild ride."""
    return resolve(
        "bert-large-phase2",
        [
            ("batch.sequences", "0"),
            ("batch.tokens", str(budget)),
            ("batch.token_budget", str(budget)),
            ("train.precision", precision),
            ("optimizer.learning_rate", "1e-4"),
            *overrides,
        ],
    )


def make_steps(shards: Shards, settings: Settings, count: int) -> list[Step]:
    """Steps of one full-sized bin each, in pinned memory."""
    loader = Loader(shards, settings, pin_memory=True)
    steps: list[Step] = []
    position = number = 0
    while len(steps) < count:
        step = loader.step(number, position)
        position, number = step.next_position, number + 1
        if step.num_bins == 1 and len(step.bins[0].input_ids) == settings.batch.token_budget:
            steps.append(step)
    return steps


def figures(system: str, budget: int, precision: str, ms: list[float], tokens: float, start_up: float) -> dict[str, Any]:
    """One line of the result."""
    median = statistics.median(ms)
    per_second = tokens / median * 1e3
    quarters = statistics.quantiles(ms, n=4)
    return {
        "system": system,
        "model": "bert-large",
        "token_budget": budget,
        "max_seq_length": 512,
        "dropout": 0.1,
        "precision": precision,
        "ms_per_step": round(median, 3),
        "ms_quartiles": [round(quarters[0], 3), round(quarters[2], 3)],
        "real_tokens_per_s": round(per_second),
        "sequences_per_s": round(per_second / MEAN_LENGTH, 1),
        "tflops": round(per_second * FLOP_PER_TOKEN / 1e12, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "start_up_s": round(start_up, 1),
    }


# Matrix products and attention, forward and twice that backward, of one token at the mean length: 24 layers of
# 12 * 1024^2 weights, attention over 512 / 2.012 tokens' worth of keys weighted by length, and 15 % of the vocabulary.
FLOP_PER_TOKEN = 6 * (24 * (12 * 1024**2 + 2 * 1024 * 335 / 2) + 0.15 * (1024 * 30528 + 1024**2))


def time_steps(action: Any, steps: list[Step], warm_up: int) -> tuple[list[float], float, float]:
    """Milliseconds of each step after `warm_up`, mean real tokens, and seconds until the warm-up was over."""
    begin = time.perf_counter()
    for step in steps[:warm_up]:
        action(step)
    torch.cuda.synchronize()
    start_up = time.perf_counter() - begin
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) - warm_up + 1)]
    events[0].record()
    for event, step in zip(events[1:], steps[warm_up:], strict=True):
        action(step)
        event.record()
    torch.cuda.synchronize()
    ms = [events[i].elapsed_time(events[i + 1]) for i in range(len(events) - 1)]
    return ms, statistics.mean(step.num_tokens for step in steps[warm_up:]), start_up


def build(settings: Settings) -> TrainState:
    model = Bert(settings.model)
    initialise(model, 1)
    model.to(DEVICE).train()
    arena = Arena(model, split_parts)
    optimizer = AdaptiveOptimizer(arena, settings.optimizer)
    return TrainState(model, arena, optimizer, compute.build(model, arena, optimizer, settings), Progress())


def bertrain(shards: Shards, budget: int, precision: str, count: int, profile: str = "") -> dict[str, Any]:
    settings = settings_for(budget, precision)
    steps = make_steps(shards, settings, min(count, 24))
    steps = [replace(steps[i % len(steps)], number=i) for i in range(count)]
    ranks, watch = parallel.Ranks(0, 1, DEVICE), Stopwatch(DEVICE)
    begin = time.perf_counter()
    state = build(settings)
    records = []

    def action(step: Step) -> None:
        records.append(train_step(state, step, settings, ranks, watch))

    ms, tokens, start_up = time_steps(action, steps, 8)
    result = figures("bertrain", budget, precision, ms, tokens, start_up)
    result["last_loss"] = round(records[-1].sums[0].item() / records[-1].num_predictions, 4)
    result["start_up_s"] = round(time.perf_counter() - begin - sum(ms) / 1e3, 1)
    if profile:
        breakdown(action, steps[:3])
    return result


def breakdown(action: Any, steps: list[Step]) -> None:
    """Where the time of a step goes, by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for step in steps:
            action(step)
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    print(f"kernels: {total / len(steps) / 1e3:.2f} ms per step")
    for row in rows[:34]:
        per_step = row.self_device_time_total / len(steps) / 1e3
        print(f"{per_step:8.3f} ms {row.count / len(steps):7.1f} x  {row.key[:100]}")


def transformers_padded(shards: Shards, budget: int, count: int) -> dict[str, Any]:
    """BertForPreTraining, compiled, on the same examples: as many rows of 512 as the bin has tokens for."""
    from transformers import BertConfig, BertForPreTraining

    settings = settings_for(budget, "bf16")
    rows = budget // 512
    config = BertConfig(
        vocab_size=30528, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    config._attn_implementation = "sdpa"
    model = BertForPreTraining(config).to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    compiled = torch.compile(model)
    loader = Loader(
        shards, replace(settings, batch=replace(settings.batch, tokens=0, sequences=rows, policy="padded"))
    )
    steps = [loader.step(i, i * rows) for i in range(min(count, 24))]
    inputs = []
    for step in steps:
        batch = step.bins[0]
        lengths = torch.tensor(batch.sequence_lengths[: 2 * rows : 2]) if False else None
        grid = (rows, 512)
        labels = torch.full((budget,), -100)
        real = batch.mlm_labels >= 0
        labels[batch.mlm_positions[real]] = batch.mlm_labels[real]
        ids = batch.input_ids[:budget].view(grid)
        del lengths
        inputs.append(
            {
                "input_ids": ids.pin_memory(),
                "attention_mask": (ids != 0).long().pin_memory(),
                "token_type_ids": batch.segment_ids[:budget].view(grid).pin_memory(),
                "labels": labels.view(grid).pin_memory(),
                "next_sentence_label": batch.nsp_labels[batch.nsp_labels >= 0].pin_memory(),
            }
        )
    by_number = [(steps[i % len(steps)], inputs[i % len(steps)]) for i in range(count)]
    queue = iter(by_number)

    def action(_: Step) -> None:
        _, given = next(queue)
        on_device = {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in given.items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(**on_device).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    ms, tokens, start_up = time_steps(action, [step for step, _ in by_number], 8)
    return figures("transformers, compiled, padded", budget, "bf16", ms, tokens, start_up)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--budgets", type=int, nargs="+", default=[24576, 57344])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--only", choices=["bertrain", "transformers"])
    parser.add_argument("--steps", type=int, default=108)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    import triton

    versions = {
        "gpu": torch.cuda.get_device_name(),
        "driver": torch._C._cuda_getDriverVersion() if hasattr(torch._C, "_cuda_getDriverVersion") else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Vocabulary.load()
        write_shards(
            Path(folder) / "data", random_examples(12_000, vocabulary), vocabulary, preparation={}, rows_per_shard=65536
        )
        shards = Shards.open(Path(folder) / "data", verify="size")
        for budget in arguments.budgets:
            for precision in arguments.precisions if arguments.only != "transformers" else []:
                torch.cuda.reset_peak_memory_stats()
                results.append(
                    bertrain(shards, budget, precision, arguments.steps, "yes" if arguments.profile else "") | versions
                )
                print(json.dumps(results[-1]), flush=True)
                gc.collect()
                torch.cuda.empty_cache()
            if arguments.only != "bertrain":
                torch.cuda.reset_peak_memory_stats()
                results.append(transformers_padded(shards, budget, arguments.steps) | versions)
                print(json.dumps(results[-1]), flush=True)
                torch._dynamo.reset()
                gc.collect()
                torch.cuda.empty_cache()
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"{'system':<34}{'tokens':>8}{'prec.':>6}{'ms':>9}{'tokens/s':>10}{'seq/s':>8}{'GiB':>7}")
    for one in results:
        print(
            f"{one['system']:<34}{one['token_budget']:>8}{one['precision']:>6}{one['ms_per_step']:>9.2f}"
            f"{one['real_tokens_per_s']:>10,}{one['sequences_per_s']:>8.0f}{one['peak_memory_gib']:>7.1f}"
        )


if __name__ == "__main__":
    main()
