"""BERT-Large pre-training on one GPU: bertrain's own step against Transformers, on the same examples, in one run.

    python benchmarks/gpu_pretrain.py [--output benchmarks/results/gpu_pretrain.json] [--profile]

The measure: 24 layers of 1024, 16 heads, vocabulary padded to 30,528, at most 512 tokens, lengths drawn from those of
Wikipedia (wikipedia-512.csv beside this file), hidden and attention dropout 0.1, 15 % masked words (at most 76) and
next sentence, exact loss, LAMB with float32 masters, gradients clipped to norm 1, one update per bin. A step runs from
a Batch in pinned host memory to updated weights, and is `bertrain.training.loop.train_step`, which the trainer calls.
Sequences per second are real tokens per second over 254.5, the mean length of MLPerf's Wikipedia set.

Peers: Transformers' BertForPreTraining, bf16 autocast, torch.compile, fused AdamW (which computes less than LAMB), on
the same examples in the same order: padded to 512 with sdpa attention, which is how it comes; and its layers on our
flat bins with the flash attention that PyTorch has built in, for which one has to write the code.

NVIDIA's published 1,095 sequences/s per H200 and 1,141 per H100 include the all-reduce of 8 and 4 GPUs, overlapped;
here is one GPU.

At the first number of tokens, `bertrain pretrain --benchmark` trains on the same examples: the share of the step's rate
that is left with the loader, metrics and the console around it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import median_us
from workload import Example, padded_inputs, random_examples, wikipedia_lengths, write_folder

from bertrain.config.resolve import resolve
from bertrain.config.settings import Settings
from bertrain.data.feed.loader import Loader, Step
from bertrain.data.formats.shards import Shards
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.batch import IGNORED
from bertrain.ranks import parallel
from bertrain.run.metrics import Stopwatch
from bertrain.training.loop import train_step
from bertrain.training.state import TrainState

DEVICE = torch.device("cuda")
MEAN_LENGTH = 254.5  # of MLPerf's Wikipedia set at 512 tokens


@dataclass(frozen=True)
class Workload:
    """What is trained on: MLPerf's natural lengths, or full rows of 128 as in DeepLearningExamples' first phase."""

    name: str
    max_seq_length: int
    max_predictions: int
    mean_length: float
    mean_square: float  # of the lengths, which attention's cost goes by

    @property
    def flop_per_sequence(self) -> float:
        """Training flops by the formula of NVIDIA's published figures: encoder, attention, masked words."""
        matrices, vocabulary = 12 * 24 * 1024**2, 1024**2 + 1024 * 30528
        attention = 12 * 24 * 1024 * self.mean_square
        predictions = 0.15 * (self.mean_length - 3)
        return 6 * matrices * self.mean_length + attention + 6 * vocabulary * predictions


def natural_lengths() -> Workload:
    lengths = wikipedia_lengths(200_000, seed=2)
    return Workload("wikipedia, at most 512", 512, 76, MEAN_LENGTH, float((lengths.astype(float) ** 2).mean()))


FULL_128 = Workload("full rows of 128", 128, 20, 128.0, 128.0**2)


RECIPE = "bert-large-phase2"


def overrides(workload: Workload, budget: int, precision: str) -> list[tuple[str, str]]:
    """One bin is one step. The rate is small, so that random words are not a wild ride."""
    return [
        ("data.max_seq_length", str(workload.max_seq_length)),
        ("data.max_predictions", str(workload.max_predictions)),
        ("batch.sequences", "0"),
        ("batch.tokens", str(budget)),
        ("batch.token_budget", str(budget)),
        ("train.precision", precision),
        ("optimizer.learning_rate", "1e-4"),
    ]


def settings_for(workload: Workload, budget: int, precision: str) -> Settings:
    return resolve(RECIPE, overrides(workload, budget, precision))


def write_examples(workload: Workload, folder: Path) -> Shards:
    vocabulary = Vocabulary.load()
    examples = random_examples(12_000, vocabulary)
    if workload is FULL_128:
        examples = (Example((e.tokens * 26)[:127] + e.tokens[-1:], 64, e.is_random) for e in examples)
    write_folder(folder, examples, vocabulary)
    return Shards.open(folder, verify="size")


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


def figures(
    system: str, workload: Workload, budget: int, precision: str, ms: list[float], tokens: float, start_up: float
) -> dict[str, Any]:
    """One line of the result."""
    median = statistics.median(ms)
    per_second = tokens / median * 1e3
    quarters = statistics.quantiles(ms, n=4)
    return {
        "system": system,
        "model": "bert-large",
        "workload": workload.name,
        "token_budget": budget,
        "max_seq_length": workload.max_seq_length,
        "dropout": 0.1,
        "precision": precision,
        "ms_per_step": round(median, 3),
        "ms_quartiles": [round(quarters[0], 3), round(quarters[2], 3)],
        "real_tokens_per_s": round(per_second),
        "sequences_per_s": round(per_second / workload.mean_length, 1),
        "tflops": round(per_second / workload.mean_length * workload.flop_per_sequence / 1e12, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "start_up_s": round(start_up, 1),
    }


def products_ms(budget: int, precision: str) -> float:
    """The matrix products of 24 layers alone, forward and backward, one after another: the ceiling of a step."""

    def operand(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, columns, device=DEVICE).to(dtype)

    one = torch.ones((), device=DEVICE)
    eight = precision == "fp8"
    forward, backward = (torch.float8_e4m3fn, torch.float8_e5m2) if eight else (torch.bfloat16, torch.bfloat16)

    def product(a: torch.Tensor, b: torch.Tensor, out: torch.dtype) -> torch.Tensor:
        if eight:
            return torch._scaled_mm(a, b.t(), one, one, out_dtype=out, use_fast_accum=out is torch.bfloat16)
        return torch.mm(a, b.t(), out_dtype=out) if out is torch.float32 else torch.mm(a, b.t())

    total = 0.0
    for rows, columns in ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)):
        x, weight = operand(budget, columns, forward), operand(rows, columns, forward)
        dy, weight_t = operand(budget, rows, backward), operand(columns, rows, forward)
        dy_t, x_t = operand(rows, budget, backward), operand(columns, budget, forward)
        for a, b, out in ((x, weight, torch.bfloat16), (dy, weight_t, torch.bfloat16), (dy_t, x_t, torch.float32)):
            total += median_us(partial(product, a, b, out)) / 1e3
    return 24 * total


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


def bertrain(
    shards: Shards, workload: Workload, budget: int, precision: str, count: int, *, profile: bool
) -> dict[str, Any]:
    result = bertrain_steps(shards, workload, budget, precision, count, profile=profile)
    gc.collect()
    torch.cuda.empty_cache()  # the largest bins leave no room for anything beside them
    result["products_alone_ms"] = round(products_ms(budget, precision), 2)
    result["share_of_product_ceiling"] = round(result["products_alone_ms"] / result["ms_per_step"], 3)
    return result


def bertrain_steps(
    shards: Shards, workload: Workload, budget: int, precision: str, count: int, *, profile: bool
) -> dict[str, Any]:
    settings = settings_for(workload, budget, precision)
    steps = make_steps(shards, settings, min(count, 24))
    steps = [replace(steps[i % len(steps)], number=i) for i in range(count)]
    ranks, watch = parallel.Ranks(0, 1, DEVICE), Stopwatch(DEVICE)
    begin = time.perf_counter()
    state = TrainState.build(settings, ranks)
    records = []

    def action(step: Step) -> None:
        records.append(train_step(state, step, settings, ranks, watch))

    ms, tokens, start_up = time_steps(action, steps, 8)
    result = figures("bertrain", workload, budget, precision, ms, tokens, start_up)
    result["start_up_s"] = round(time.perf_counter() - begin - sum(ms) / 1e3, 1)
    if profile:
        breakdown(action, steps[:3])
    return result


def whole_loop(folder: Path, workload: Workload, budget: int, step: dict[str, Any]) -> dict[str, Any]:
    """The same through `bertrain pretrain --benchmark`, in a process of its own: loader, metrics, console and all."""
    options = [f"--{name}={value}" for name, value in overrides(workload, budget, step["precision"])]
    command = [sys.executable, "-m", "bertrain", "pretrain", RECIPE, "--data", str(folder), "--benchmark", "--json"]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True)
    said = json.loads(done.stdout)
    per_second = said["real_tokens_per_s"]
    return {
        "system": "bertrain pretrain --benchmark",
        **{
            name: step[name] for name in ("model", "workload", "token_budget", "max_seq_length", "dropout", "precision")
        },
        "ms_per_step": round(said["ms_per_step"], 3),
        "real_tokens_per_s": round(per_second),
        "sequences_per_s": round(per_second / workload.mean_length, 1),
        "peak_memory_gib": round(said["peak_memory_gib"], 1),
        "share_of_the_step": round(per_second / step["real_tokens_per_s"], 4),
    }


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


def transformers_model(attention: str) -> Any:
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=30528, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    config._attn_implementation = attention
    model: Any = BertForPreTraining(config)  # Transformers' annotation of `to` takes no device
    return model.to(DEVICE).train()


def time_peer(
    system: str, workload: Workload, budget: int, count: int, model: Any, loss_of: Any, given: list[tuple[Step, Any]]
) -> dict[str, Any]:
    """A peer's steps from pinned memory to updated weights; `given` are steps with its own form of their tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    compiled = torch.compile(loss_of)
    by_number = [given[i % len(given)] for i in range(count)]
    queue = iter(by_number)

    def action(_: Step) -> None:
        _, tensors = next(queue)
        on_device = {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in tensors.items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(**on_device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    ms, tokens, start_up = time_steps(action, [step for step, _ in by_number], 8)
    return figures(system, workload, budget, "bf16", ms, tokens, start_up)


def transformers_padded(shards: Shards, workload: Workload, budget: int, count: int) -> dict[str, Any]:
    """BertForPreTraining as it is: as many padded rows as the bin has tokens for."""
    settings = settings_for(workload, budget, "bf16")
    rows, model = budget // workload.max_seq_length, transformers_model("sdpa")
    loader = Loader(shards, replace(settings, batch=replace(settings.batch, tokens=0, sequences=rows, policy="padded")))
    given = []
    for number in range(min(count, 24)):
        step = loader.step(number, number * rows)
        tensors = padded_inputs(step.bins[0], rows, workload.max_seq_length)
        given.append((step, {name: tensor.pin_memory() for name, tensor in tensors.items()}))

    def loss_of(**tensors: torch.Tensor) -> torch.Tensor:
        return model(**tensors).loss

    return time_peer("transformers, compiled, padded", workload, budget, count, model, loss_of, given)


def flash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    dropout: float,
    scaling: float,
    bounds: torch.Tensor,
    longest: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """PyTorch's own flash attention over sequences one after another, as an attention of Transformers."""
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    limits = (bounds, bounds, longest, longest)
    out = torch.ops.aten._flash_attention_forward(*flat, *limits, dropout, False, False, scale=scaling)
    return out[0][None], None


def transformers_flattened(shards: Shards, workload: Workload, budget: int, count: int) -> dict[str, Any]:
    """Their model on our bins: no padding, flash attention, and words looked up for masked rows alone."""
    from torch.nn.functional import cross_entropy
    from transformers import AttentionInterface

    AttentionInterface.register("ragged_of_torch", flash_attention)
    model = transformers_model("ragged_of_torch")
    settings = settings_for(workload, budget, "bf16")
    steps = make_steps(shards, settings, min(count, 24))

    def loss_of(**given: torch.Tensor) -> torch.Tensor:
        (hidden,) = model.bert(
            input_ids=given["input_ids"][None],
            token_type_ids=given["segment_ids"][None],
            position_ids=given["position_ids"][None],
            bounds=given["cu_seqlens"],
            longest=workload.max_seq_length,
        ).last_hidden_state
        pooled = model.bert.pooler(hidden[given["cls_positions"]][:, None])
        words = model.cls.predictions(hidden[given["mlm_positions"]])
        masked = cross_entropy(words, given["mlm_labels"], ignore_index=IGNORED)
        return masked + cross_entropy(model.cls.seq_relationship(pooled), given["nsp_labels"], ignore_index=IGNORED)

    names = ["input_ids", "segment_ids", "position_ids", "cu_seqlens", "cls_positions", "mlm_positions"]
    names += ["mlm_labels", "nsp_labels"]
    given = [(step, {name: getattr(step.bins[0], name) for name in names}) for step in steps]
    return time_peer("transformers, compiled, flattened", workload, budget, count, model, loss_of, given)


def versions() -> dict[str, Any]:
    import pynvml
    import triton

    pynvml.nvmlInit()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--budgets", type=int, nargs="+", default=[24576, 57344, 163840])
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--steps", type=int, default=108)
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--without-loop", action="store_true", help="leave out `bertrain pretrain --benchmark`")
    parser.add_argument("--without-128", action="store_true", help="leave out the full rows of 128")
    parser.add_argument("--profile", action="store_true", help="show where the time goes, by kernel")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []

    def note(result: dict[str, Any]) -> None:
        results.append(result | versions())
        print(json.dumps(results[-1]), flush=True)
        if arguments.output:  # after each, so that a run that is cut short leaves what it had
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    workloads = [(natural_lengths(), arguments.budgets)] + ([] if arguments.without_128 else [(FULL_128, [24576])])
    with tempfile.TemporaryDirectory() as folder:
        for workload, budgets in workloads:
            written = Path(folder) / str(workload.max_seq_length)
            shards = write_examples(workload, written)
            for budget in budgets:
                for precision in arguments.precisions:
                    note(bertrain(shards, workload, budget, precision, arguments.steps, profile=arguments.profile))
                    if not arguments.without_loop and workload is not FULL_128 and budget == budgets[0]:
                        note(whole_loop(written, workload, budget, results[-1]))
                if not arguments.without_peers and budget == budgets[0]:
                    note(transformers_padded(shards, workload, budget, arguments.steps))
                    note(transformers_flattened(shards, workload, budget, arguments.steps))
    peers = {(one["workload"], one["token_budget"]): one for one in results if one["system"].endswith("padded")}
    print(
        f"{'system':<35}{'rows':>5}{'tokens':>8}{'prec.':>6}{'ms':>9}{'tokens/s':>10}{'seq/s':>8}{'GiB':>7}{'padded':>7}"
    )
    for one in results:
        peer = peers.get((one["workload"], one["token_budget"]))
        ratio = f"{one['real_tokens_per_s'] / peer['real_tokens_per_s']:>7.2f}" if peer else ""
        print(
            f"{one['system']:<35}{one['max_seq_length']:>5}{one['token_budget']:>8}{one['precision']:>6}"
            f"{one['ms_per_step']:>9.2f}{one['real_tokens_per_s']:>10,}{one['sequences_per_s']:>8.0f}"
            f"{one['peak_memory_gib']:>7.1f}{ratio}"
        )


if __name__ == "__main__":
    main()
