"""BERT-Large pre-training on a CPU: bertrain's own step against Transformers, same examples, same cores, one run.

    python benchmarks/cpu_pretrain.py [--output benchmarks/results/cpu_pretrain.json] [--quick]

The measure: 24 layers of 1024, 16 heads, vocabulary padded to 30,528, hidden and attention dropout 0.1, masked words
and next sentence, AdamW with float32 masters, gradients clipped to norm 1. Two workloads with the lengths of Wikipedia
(wikipedia-512.csv and wikipedia-128.csv beside this file): at most 512 tokens and 76 predictions, at most 128 and 20.
A step runs from a Batch in memory to updated weights, and is `bertrain.train.loop.train_step`, which the trainer calls.

Peer: Transformers' BertForPreTraining in the same precision, sdpa attention, padded, torch's fused AdamW, the same
examples in the same steps; eager and through torch.compile.

The ceiling is what torch.mm reaches on the products of a step (all layers and the words, forward and backward, as
long as the step's real tokens), one after another into memory that is there. Its rate times the step's time are the
flops it could have done; the step's own flops over those are its share. Our own product of weight gradients is not part
of it, so a share may pass 1.

Every case is a process of its own, so that its peak memory is its own, with the allocator and the OpenMP runtime that
bertrain would choose (peers get them, too). Cases of fp32 and bf32 take half of the examples, since a step of fp32 takes
a minute; bertrain's fp32 is run at both sizes.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VOCABULARY = 30528
Action = Callable[[int], float]


@dataclass(frozen=True)
class Case:
    """One process: a system, a workload, a precision, and how many examples make an update."""

    system: str  # bertrain, transformers, transformers compiled, or products
    max_seq_length: int
    precision: str
    rows: int
    steps: int
    threads: int
    layers: int = 24

    @property
    def max_predictions(self) -> int:
        return 76 if self.max_seq_length == 512 else 20


# --- examples ------------------------------------------------------------------------------------------------------


def write_examples(folder: Path, max_seq_length: int, count: int) -> None:
    """Examples of random words with Wikipedia's lengths."""
    import numpy as np

    from bertrain.data.tokenizer import Vocabulary
    from bertrain.data.write import Example, write_shards

    with open(HERE / f"wikipedia-{max_seq_length}.csv") as file:
        rows = [(int(row["length"]), int(row["sequences"])) for row in csv.DictReader(file)]
    lengths, weights = np.array([row for row in rows if row[0] >= 5], dtype=np.float64).T
    draw, vocabulary = np.random.default_rng(0), Vocabulary.load()
    start, separator = vocabulary.id_of("[CLS]"), vocabulary.id_of("[SEP]")

    def examples() -> Iterator[Example]:
        for length in draw.choice(lengths.astype(np.int64), count, p=weights / weights.sum()).tolist():
            tokens = draw.integers(1000, len(vocabulary.words), length)
            middle = int(draw.integers(2, length - 2))
            tokens[[0, middle, -1]] = start, separator, separator
            yield Example(tokens.tolist(), middle + 1, bool(draw.random() < 0.5))

    write_shards(folder, examples(), vocabulary, preparation={}, rows_per_shard=65536)


def settings_for(case: Case) -> Any:
    from bertrain.config import resolve

    return resolve(
        "bert-large-phase2",
        [
            ("model.num_layers", str(case.layers)),
            ("model.pad_vocab_to", "64"),
            ("data.max_seq_length", str(case.max_seq_length)),
            ("data.max_predictions", str(case.max_predictions)),
            ("batch.sequences", str(case.rows)),
            ("batch.token_budget", str(case.rows * case.max_seq_length)),
            ("optimizer.name", "adamw"),
            ("optimizer.learning_rate", "1e-5"),
            ("train.precision", case.precision),
            ("train.device", "cpu"),
        ],
    )


def make_steps(case: Case, folder: Path, policy: str) -> list[Any]:
    """The same examples for every system, step by step."""
    from bertrain.data.loader import Loader
    from bertrain.data.shards import Shards

    settings = settings_for(case)
    shards = Shards.open(folder, verify="size")
    loader = Loader(shards, replace(settings, batch=replace(settings.batch, policy=policy)))
    return [loader.step(number, number * case.rows) for number in range(case.steps)]


# --- the systems ---------------------------------------------------------------------------------------------------


def bertrain(case: Case, folder: Path) -> tuple[list[Any], Action]:
    import torch

    from bertrain.observe.metrics import Stopwatch
    from bertrain.train.loop import train_step
    from bertrain.train.parallel import Ranks
    from bertrain.train.state import TrainState

    settings, cpu = settings_for(case), torch.device("cpu")
    steps, ranks, watch = make_steps(case, folder, settings.batch.policy), Ranks(0, 1, cpu), Stopwatch(cpu)
    state = TrainState.build(settings, ranks)

    def act(number: int) -> float:
        train_step(state, steps[number], settings, ranks, watch)
        return float(state.compute.sums[0]) / steps[number].num_predictions

    return steps, act


def transformers(case: Case, folder: Path) -> tuple[list[Any], Action]:
    """BertForPreTraining on the same examples, padded."""
    import torch
    from transformers import BertConfig, BertForPreTraining

    from bertrain.data.batch import IGNORED

    if case.precision == "bf32":
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        num_hidden_layers=case.layers,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    config._attn_implementation = "sdpa"
    model = BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    called = torch.compile(model) if case.system.endswith("compiled") else model
    steps, inputs = make_steps(case, folder, "padded"), []
    for step in steps:
        batch, grid = step.bins[0], (case.rows, case.max_seq_length)
        slots = case.rows * case.max_seq_length
        labels = torch.full((slots,), IGNORED)
        real = batch.mlm_labels != IGNORED
        labels[batch.mlm_positions[real]] = batch.mlm_labels[real]
        ids = batch.input_ids[:slots].view(grid)
        inputs.append(
            {
                "input_ids": ids,
                "attention_mask": (ids != 0).long(),
                "token_type_ids": batch.segment_ids[:slots].view(grid),
                "labels": labels.view(grid),
                "next_sentence_label": batch.nsp_labels[batch.nsp_labels != IGNORED],
            }
        )

    def act(number: int) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            loss = called(**inputs[number]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return steps, act


def products(case: Case, folder: Path) -> dict[str, Any]:
    """The rate of torch.mm on the products of a step."""
    import torch

    if case.precision == "bf32":
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    step = make_steps(case, folder, "budget")[0]
    tokens, predictions = step.num_tokens, step.num_predictions
    shapes = [(tokens, 3072, 1024), (tokens, 1024, 1024), (tokens, 4096, 1024), (tokens, 1024, 4096)]
    seconds = flops = 0.0
    for (rows, n, k), count in [*((shape, case.layers) for shape in shapes), ((predictions, VOCABULARY, 1024), 1)]:
        x, weight, dy = (torch.randn(size).to(dtype) for size in ((rows, k), (n, k), (rows, n)))
        y, dx, dweight = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)
        for left, right, out in ((x, weight.t(), y), (dy, weight, dx), (dy.t(), x, dweight)):
            times = []
            for _ in range(5):
                begin = time.perf_counter()
                torch.mm(left, right, out=out)
                times.append(time.perf_counter() - begin)
            seconds += count * statistics.median(times[1:])
            flops += count * 2 * rows * n * k
    return {"gflops_of_products": round(flops / seconds / 1e9)}


def flops_of(case: Case, step: Any) -> float:
    """Training flops of a step's real tokens: layers, attention, masked words."""
    squares = sum(length**2 for batch in step.bins for length in batch.sequence_lengths[: batch.num_sequences])
    matrices, words = 12 * case.layers * 1024**2, 1024**2 + 1024 * VOCABULARY
    return 6 * matrices * step.num_tokens + 12 * case.layers * 1024 * squares + 6 * words * step.num_predictions


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """In a process of its own: time the steps."""
    begin = time.perf_counter()
    import torch

    torch.set_num_threads(case.threads)
    if case.system == "products":
        return products(case, folder)
    steps, act = (bertrain if case.system == "bertrain" else transformers)(case, folder)
    loss = act(0)
    start_up, seconds = time.perf_counter() - begin, []
    for number in range(1, case.steps):
        begin = time.perf_counter()
        loss = act(number)
        seconds.append(time.perf_counter() - begin)
    tokens = sum(step.num_tokens for step in steps[1:])
    rates = [step.num_tokens / time for step, time in zip(steps[1:], seconds, strict=True)]
    return {
        "ms_per_step": round(1e3 * statistics.median(seconds), 1),
        "real_tokens_per_step": round(tokens / len(seconds)),
        "real_share": round(tokens / len(seconds) / case.rows / case.max_seq_length, 3),
        "real_tokens_per_s": round(statistics.median(rates), 1),
        "best_tokens_per_s": round(max(rates), 1),
        "gflops": round(sum(flops_of(case, step) for step in steps[1:]) / sum(seconds) / 1e9),
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        "start_up_s": round(start_up, 1),
        "last_loss": round(loss, 3),
    }


# --- ranks, through the command line --------------------------------------------------------------------------------


def ranks_case(folder: Path, ranks: int, case: Case) -> dict[str, Any]:
    """`bertrain pretrain --benchmark` on all cores, as one rank or as one for each."""
    overrides = [
        *("--model.num_layers", str(case.layers), "--data.max_seq_length", str(case.max_seq_length)),
        *("--data.max_predictions", str(case.max_predictions), "--batch.sequences", str(case.rows)),
        *("--batch.token_budget", str(case.rows * case.max_seq_length // ranks), "--optimizer.name", "adamw"),
        *("--train.precision", case.precision, "--train.device", "cpu", "--train.binding", "auto"),
    ]
    command = [sys.executable, "-m", "bertrain", "pretrain", "bert-large-phase2", "--data", str(folder)]
    command += ["--benchmark", "--benchmark-steps", str(case.steps - 1), "--warm-up-steps", "1", "--json", "--quiet"]
    told = subprocess.run([*command, "--nproc", str(ranks), *overrides], capture_output=True, text=True, check=True)
    figures = json.loads(told.stdout.splitlines()[-1])
    return {
        "ms_per_step": round(figures["ms_per_step"], 1),
        "real_tokens_per_s": round(figures["real_tokens_per_s"], 1),
        "phase_ms": {name: round(value, 1) for name, value in figures["phase_ms"].items()},
    }


# --- all of it ------------------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """What bertrain would preload."""
    from bertrain.launch.preload import choose

    return {**os.environ, **choose("auto", "auto").environment, "OMP_WAIT_POLICY": "passive"}


def measure(case: Case, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, "--case", json.dumps(asdict(case)), "--data", str(folder)]
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if told.returncode:
        return {"failed": f"{told.returncode}: {told.stderr.strip()[-200:]}"}
    return json.loads(told.stdout.splitlines()[-1])


def plan(threads: int, layers: int, *, quick: bool) -> list[Case]:
    """Everything, the headline first; `quick` leaves out what is slow."""
    cases = []
    for length, rows in ((512, 8), (128, 32)):

        def case(system: str, precision: str, rows: int = rows, steps: int = 4, length: int = length) -> Case:
            return Case(system, length, precision, rows, steps, threads, layers)

        cases += [case("products", "bf16"), case("bertrain", "bf16", steps=7), case("transformers", "bf16")]
        cases += [case("transformers compiled", "bf16"), case("bertrain", "bf16", steps=7)]
        if quick:
            continue
        cases.append(case("bertrain", "fp32", steps=3))
        for precision in ("fp32", "bf32"):
            for system in ("products", "bertrain", "transformers", "transformers compiled"):
                cases.append(case(system, precision, rows // 2, 3))
    return cases


def machine(threads: int) -> dict[str, Any]:
    import torch
    import transformers

    from bertrain.launch.preload import choose
    from bertrain.train.isa import cpu_name

    return {
        "cpu": cpu_name(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "preloaded": choose("auto", "auto").names,
    }


def show(results: list[dict[str, Any]]) -> None:
    """A table; ratios to the better peer of the same workload and precision, shares of the products' rate."""

    def like(one: dict[str, Any], system: str) -> list[dict[str, Any]]:
        keys = ("max_seq_length", "precision", "rows")
        return [o for o in results if o["system"].startswith(system) and all(o.get(k) == one.get(k) for k in keys)]

    print(
        f"{'system':<24}{'length':>7}{'rows':>6}{'prec.':>6}{'s/step':>9}{'tokens/s':>10}{'GiB':>6}{'ratio':>7}{'share':>7}"
    )
    for one in results:
        if "real_tokens_per_s" not in one:
            continue
        peers = [o["real_tokens_per_s"] for o in like(one, "transformers") if "real_tokens_per_s" in o]
        ceilings = [o["gflops_of_products"] for o in like(one, "products") if "gflops_of_products" in o]
        ratio = f"{one['real_tokens_per_s'] / max(peers):>7.2f}" if peers else f"{'':>7}"
        share = f"{one['gflops'] / max(ceilings):>7.2f}" if ceilings and "gflops" in one else ""
        print(
            f"{one['system']:<24}{one['max_seq_length']:>7}{one['rows']:>6}{one['precision']:>6}"
            f"{one['ms_per_step'] / 1e3:>9.2f}{one['real_tokens_per_s']:>10,.0f}{one.get('peak_memory_gib', 0):>6.1f}"
            f"{ratio}{share}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="bf16 only")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(run_case(Case(**json.loads(arguments.case)), arguments.data)))
        return
    results: list[dict[str, Any]] = []
    about = machine(arguments.threads)

    def note(case: Case, figures: dict[str, Any], **more: Any) -> None:
        results.append(asdict(case) | more | figures | about)
        print(json.dumps(asdict(case) | more | figures), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        for length, count in ((512, 400), (128, 1000)):
            write_examples(Path(folder) / str(length), length, count)
        for case in plan(arguments.threads, arguments.layers, quick=arguments.quick):
            note(case, measure(case, Path(folder) / str(case.max_seq_length)))
        if arguments.threads > 1:
            case = Case("bertrain", 512, "bf16", 8, 6, arguments.threads, arguments.layers)
            for ranks in (1, arguments.threads, 1, arguments.threads):
                figures = ranks_case(Path(folder) / "512", ranks, case)
                note(
                    replace(case, system="bertrain --benchmark", threads=arguments.threads // ranks),
                    figures,
                    ranks=ranks,
                )
    show(results)


if __name__ == "__main__":
    main()
