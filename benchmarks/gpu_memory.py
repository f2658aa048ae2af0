"""Activation checkpointing on one GPU: BERT-Large's largest token budget, its speed there and at 24,576 tokens.

    python benchmarks/gpu_memory.py [--output benchmarks/results/gpu_memory.json]

Workload and step are those of gpu_pretrain.py: Wikipedia's lengths up to 512, one bin a step, LAMB, dropout 0.1. A
budget fits if a bin of it runs as it is, is captured as a CUDA graph and replayed, with its updates. The search begins
at what `bertrain.planning.memory` estimates, and takes four trials at the most; nothing beyond what the kernels can
count (524,280 tokens) is tried.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_pretrain import (
    DEVICE,
    MEAN_LENGTH,
    make_steps,
    natural_lengths,
    settings_for,
    time_steps,
    versions,
    write_examples,
)

from bertrain.base.formatting import GIB
from bertrain.config.settings import Settings
from bertrain.data.formats.shards import Shards
from bertrain.model.fused_layer import Recompute
from bertrain.planning.kernel_limits import MOST_TOKENS
from bertrain.planning.memory_fit import (
    BUDGET_STEP,
    Place,
    available_memory,
    is_out_of_memory,
    largest_budget,
    with_budget,
)
from bertrain.ranks import parallel
from bertrain.run.metrics import Stopwatch
from bertrain.training import engine
from bertrain.training.loop import train_step
from bertrain.training.state import TrainState

MODES: tuple[Recompute, ...] = ("none", "selective", "full")
COMMON_BUDGET, MOST = 24576, MOST_TOKENS // 64 * 64
TRIALS, PRECISE = 4, 0.02


def at_budget(settings: Settings, budget: int) -> Settings:
    return replace(settings, batch=replace(settings.batch, token_budget=budget, tokens=budget))


def measure(
    state: TrainState, shards: Shards, settings: Settings, *, warm_up: int, timed: int
) -> dict[str, Any] | None:
    """Speed and memory of some steps of one bin each; None where memory runs out."""
    release(state)
    torch.cuda.reset_peak_memory_stats()
    ranks, watch = parallel.Ranks(0, 1, DEVICE), Stopwatch(DEVICE)
    steps = make_steps(shards, settings, 4)
    steps = [replace(steps[number % 4], number=number) for number in range(warm_up + timed)]
    try:
        state.engine = engine.build(state.model, state.arena, state.optimizer, state.exchange, ranks, settings)
        state.engine.restore({})
        ms, tokens, _ = time_steps(lambda step: train_step(state, step, settings, ranks, watch), steps, warm_up)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    median = statistics.median(ms)
    return {
        "token_budget": settings.batch.token_budget,
        "ms_per_step": round(median, 2),
        "real_tokens_per_s": round(tokens / median * 1e3),
        "sequences_per_s": round(tokens / median * 1e3 / MEAN_LENGTH, 1),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 2),
    }


def release(state: TrainState) -> None:
    """Give back what the last trial held: its graphs and their pool."""
    state.engine = None  # type: ignore[assignment]
    gc.collect()
    torch.cuda.empty_cache()


def search(state: TrainState, shards: Shards, settings: Settings, expected: int) -> tuple[dict[str, Any] | None, int]:
    """The measurement at the largest budget that fits, and the smallest that was seen not to (0: none was)."""
    best, low, high, budget = None, 0, 0, expected
    for _ in range(TRIALS):
        result = measure(state, shards, at_budget(settings, budget), warm_up=2, timed=3)
        print(f"  {budget:>9,} tokens: {result or 'out of memory'}", flush=True)
        if result is None:
            high = budget
        else:
            best, low = result, budget
        if low == MOST or (high and low and high - low < PRECISE * high):
            break
        following = (low + high) / 2 if low and high else 1.06 * low if low else 0.9 * high
        budget = min(MOST, int(following) // BUDGET_STEP * BUDGET_STEP)
    return best, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8"])
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    workload = natural_lengths()
    with tempfile.TemporaryDirectory() as folder:
        shards = write_examples(workload, Path(folder) / "data")
        bytes, words = available_memory(DEVICE, 1)
        place = Place(shards, 1, engine="fused", on_gpu=True, bytes=bytes, label=words)
        for precision in arguments.precisions:
            plain = settings_for(workload, COMMON_BUDGET, precision)
            state = TrainState.build(plain, parallel.Ranks(0, 1, DEVICE))
            for mode in MODES:
                settings = replace(plain, train=replace(plain.train, activation_checkpointing=mode))
                print(f"{precision}, {mode}", flush=True)
                common = measure(state, shards, settings, warm_up=8, timed=20)
                expected = largest_budget(settings, place, MOST)
                best, too_large = search(state, shards, settings, expected)
                results.append(
                    {
                        "precision": precision,
                        "activation_checkpointing": mode,
                        "at_24576": common,
                        "estimate_at_24576_gib": round(place.needs(settings).total / GIB, 2),
                        "largest_by_estimate": expected,
                        "largest": best,
                        "estimate_at_largest_gib": round(
                            place.needs(with_budget(settings, best["token_budget"])).total / GIB, 2
                        )
                        if best
                        else None,
                        "did_not_fit": too_large or None,
                    }
                    | versions()
                )
                if arguments.output:  # after each, so that a run that is cut short leaves what it had
                    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
            release(state)
            del state
    print(
        f"{'':<5}{'checkpointing':<14}{'at 24,576: seq/s':>17}{'GiB':>7}{'estimate':>9}"
        f"{'largest':>10}{'seq/s':>8}{'GiB':>7}{'estimated':>10}"
    )
    for one in results:
        common, best = one["at_24576"] or {}, one["largest"] or {}
        print(
            f"{one['precision']:<5}{one['activation_checkpointing']:<14}{common.get('sequences_per_s', 0):>17,.0f}"
            f"{common.get('peak_allocated_gib', 0):>7.1f}{one['estimate_at_24576_gib']:>9.1f}"
            f"{best.get('token_budget', 0):>10,}{best.get('sequences_per_s', 0):>8,.0f}"
            f"{best.get('peak_allocated_gib', 0):>7.1f}{one['largest_by_estimate']:>10,}"
        )


if __name__ == "__main__":
    main()
