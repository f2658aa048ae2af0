"""BERT-Large pre-training on a CPU: bertrain's own step against Transformers, same examples, same cores, one run.

    python benchmarks/cpu_pretrain.py [--output benchmarks/results/cpu_pretrain.json] [--ipex PYTHON]

The measure: 24 layers of 1024, 16 heads, vocabulary padded to 30,528, hidden and attention dropout 0.1, masked words
and next sentence, AdamW with float32 masters, gradients clipped to norm 1. Two workloads with the lengths of Wikipedia
(wikipedia-512.csv and wikipedia-128.csv beside this file): at most 512 tokens and 76 predictions, at most 128 and 20.
A step runs from a Batch in memory to updated weights, and is `bertrain.training.loop.train_step`, which the trainer
calls.

Peer: Transformers' BertForPreTraining in the same precision, sdpa attention, padded, torch's fused AdamW, the same
examples in the same steps, eager and through torch.compile. In bf16 it has 1,024 slots at a time and bertrain 2,048
tokens, for which it needs less memory; in fp32 and bf32 both have 512, as two of them have to fit into 24 GiB.
With an environment for it (torch 2.8.0, intel-extension-for-pytorch 2.8.0, transformers 4.51.3, and what bertrain
imports), also what Intel's extension makes of it: by `ipex.optimize`, and by `ipex.fast_bert` without padding.

For CPUs without AMX: plain PyTorch, the compiled engine and both peers in fp32, with 2 layers (groups 19 and 20).

The ceiling is what torch.mm reaches on the products of a step (all layers and the words, forward and backward, as
long as the step's real tokens), one after another into memory that is there. Its rate times the step's time are the
flops it could have done; the step's own flops over those are its share. Our own product of weight gradients is not part
of it, so a share may pass 1.

Machines are shared and noisy, so systems take turns, a step each, in processes that live side by side as far as memory
allows; a ratio is that of their tokens per second over all turns. They have the allocator and the OpenMP runtime that
bertrain would choose, peers too. fp32 and bf32 take a quarter of the examples, since a step of fp32 takes long.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VOCABULARY = 30528
WARM_UP = 4  # rounds that are not counted, in which torch.compile meets the shapes of bins
Action = Callable[[int], float]


@dataclass(frozen=True)
class Case:
    """One process: a system, a workload, a precision, and how many examples make an update."""

    system: str  # one of SYSTEMS
    max_seq_length: int
    precision: str
    rows: int
    steps: int
    threads: int
    layers: int = 24
    tokens_at_once: int = 2048  # of bertrain; as many as memory allows beside the others

    @property
    def max_predictions(self) -> int:
        return 76 if self.max_seq_length == 512 else 20

    @property
    def rows_at_once(self) -> int:
        """How many padded rows a peer computes at a time."""
        return min(self.rows, min(1024, self.tokens_at_once) // self.max_seq_length)


# --- examples ------------------------------------------------------------------------------------------------------


def write_examples(folder: Path, max_seq_length: int, count: int) -> None:
    """Examples of random words with Wikipedia's lengths."""
    from workload import random_examples, write_folder

    from bertrain.data.text.vocabulary import Vocabulary

    vocabulary = Vocabulary.load()
    write_folder(folder, random_examples(count, vocabulary, max_seq_length), vocabulary)


def settings_for(case: Case, policy: str = "budget") -> Any:
    from bertrain.config.resolve import resolve

    return resolve(
        "bert-large-phase2",
        [
            ("model.num_layers", str(case.layers)),
            ("model.pad_vocab_to", "64"),
            ("data.max_seq_length", str(case.max_seq_length)),
            ("data.max_predictions", str(case.max_predictions)),
            ("batch.sequences", str(case.rows)),
            ("batch.token_budget", str(case.rows * case.max_seq_length if policy == "padded" else case.tokens_at_once)),
            ("optimizer.name", "adamw"),
            ("optimizer.learning_rate", "1e-5"),
            ("train.precision", case.precision),
            ("train.device", "cpu"),
            ("train.kernels", "compiled" if case.system == "bertrain compiled" else "auto"),
        ],
    )


def make_steps(case: Case, folder: Path, policy: str) -> list[Any]:
    """The same examples for every system, step by step."""
    from bertrain.data.feed.loader import Loader
    from bertrain.data.formats.shards import Shards

    settings = settings_for(case, policy)
    shards = Shards.open(folder, verify="size")
    loader = Loader(shards, replace(settings, batch=replace(settings.batch, policy=policy)))
    return [loader.step(number, number * case.rows) for number in range(case.steps)]


# --- the systems ---------------------------------------------------------------------------------------------------


def bertrain(case: Case, folder: Path) -> tuple[list[Any], Action]:
    import torch

    from bertrain.ranks.parallel import Ranks
    from bertrain.run.metrics import Stopwatch
    from bertrain.training.loop import train_step
    from bertrain.training.state import TrainState

    settings, cpu = settings_for(case), torch.device("cpu")
    steps, ranks, watch = make_steps(case, folder, settings.batch.policy), Ranks(0, 1, cpu), Stopwatch(cpu)
    state = TrainState.build(settings, ranks)

    def act(number: int) -> float:
        train_step(state, steps[number], settings, ranks, watch)
        return float(state.engine.sums[0]) / steps[number].num_predictions

    return steps, act


def transformers(case: Case, folder: Path) -> tuple[list[Any], Action]:
    """BertForPreTraining on the same examples, padded."""
    import torch
    from transformers import BertConfig, BertForPreTraining
    from workload import padded_inputs

    if case.precision == "bf32":
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        num_hidden_layers=case.layers,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    config._attn_implementation = "eager" if case.system == "ipex fast_bert" else "sdpa"  # it reads eager's masks alone
    model = BertForPreTraining(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=not case.system.startswith("ipex"))
    if case.system.startswith("ipex"):
        model, optimizer = by_intel(case.system, model, optimizer)
    called = torch.compile(model) if case.system.endswith("compiled") else model
    steps, inputs = make_steps(case, folder, "padded"), []
    for step in steps:
        given = padded_inputs(step.bins[0], case.rows, case.max_seq_length)
        parts = {name: tensor.split(case.rows_at_once) for name, tensor in given.items()}
        inputs.append([dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)])

    def act(number: int) -> float:
        total = 0.0
        for part in inputs[number]:
            with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
                loss = called(**part).loss / len(inputs[number])
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return steps, act


def by_intel(system: str, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """What Intel's extension makes of them: all that it has for any model, or its own BERT without padding."""
    import intel_extension_for_pytorch as ipex
    import torch

    if system == "ipex":
        return ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16, inplace=True)
    torch.manual_seed(1)
    model, _ = ipex.fast_bert(model, dtype=torch.bfloat16, optimizer=optimizer, unpad=True)
    # Its own AdamW ends in a segmentation fault (2.8.0), so PyTorch's, without float32 masters, which is less to do.
    return model, torch.optim.AdamW(model.parameters(), 1e-5, foreach=False)


def products(case: Case, folder: Path) -> tuple[list[Any], Action]:
    """Not a step, but its products: those of one layer and of the words, timed for all layers."""
    import torch

    if case.precision == "bf32":
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    steps = make_steps(case, folder, "budget")
    tokens, predictions = steps[0].num_tokens, steps[0].num_predictions
    shapes = [(tokens, 3072, 1024), (tokens, 1024, 1024), (tokens, 4096, 1024), (tokens, 1024, 4096)]
    triples = []
    for rows, n, k in [*shapes, (predictions, VOCABULARY, 1024)]:
        x, weight, dy = (torch.randn(size).to(dtype) for size in ((rows, k), (n, k), (rows, n)))
        y, dx, dweight = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)
        triples.append(((x, weight.t(), y), (dy, weight, dx), (dy.t(), x, dweight)))

    def act(_: int) -> float:
        """Gigaflops per second over the products of a step."""
        seconds = flops = 0.0
        for number, triple in enumerate(triples):
            count = case.layers if number < len(shapes) else 1
            for left, right, out in triple:
                begin = time.perf_counter()
                torch.mm(left, right, out=out)
                seconds += count * (time.perf_counter() - begin)
                flops += count * 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return flops / seconds / 1e9

    return steps, act


SYSTEMS = {
    "bertrain": bertrain,
    "bertrain compiled": bertrain,
    "transformers": transformers,
    "transformers compiled": transformers,
    "ipex": transformers,
    "ipex fast_bert": transformers,
    "products": products,
}


def flops_of(case: Case, step: Any) -> float:
    """Training flops of a step's real tokens: layers, attention, masked words."""
    squares = sum(length**2 for batch in step.bins for length in batch.sequence_lengths[: batch.num_sequences])
    matrices, words = 12 * case.layers * 1024**2, 1024**2 + 1024 * VOCABULARY
    return 6 * matrices * step.num_tokens + 12 * case.layers * 1024 * squares + 6 * words * step.num_predictions


def serve(case: Case, folder: Path) -> None:
    """In a process of its own: get ready, then do a step for each line that arrives, and say how long it took."""
    import torch

    begin = time.perf_counter()
    torch.set_num_threads(case.threads)
    steps, act = SYSTEMS[case.system](case, folder)
    loss = act(0)
    packages = ("torch", "transformers", "intel_extension_for_pytorch")
    versions = {name: str(sys.modules[name].__version__) for name in packages if name in sys.modules}
    print(json.dumps({"start_up_s": round(time.perf_counter() - begin, 1)} | versions), flush=True)
    for number, _ in enumerate(sys.stdin, start=1):
        step = steps[number % len(steps)]
        begin = time.perf_counter()
        loss = act(number % len(steps))
        told = {
            "seconds": time.perf_counter() - begin,
            "tokens": step.num_tokens,
            "flops": flops_of(case, step),
            "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
            "loss": round(loss, 3),
        }
        print(json.dumps(told), flush=True)


# --- ranks, through the command line --------------------------------------------------------------------------------


def ranks_case(folder: Path, ranks: int, case: Case) -> dict[str, Any]:
    """`bertrain pretrain --benchmark` on all cores, as one rank or as one for each."""
    overrides = [
        *("--model.num_layers", str(case.layers), "--data.max_seq_length", str(case.max_seq_length)),
        *("--data.max_predictions", str(case.max_predictions), "--batch.sequences", str(case.rows)),
        *("--batch.token_budget", str(2048 // ranks), "--optimizer.name", "adamw"),
        *("--train.precision", case.precision, "--train.device", "cpu", "--train.binding", "auto"),
    ]
    command = [sys.executable, "-m", "bertrain", "pretrain", "bert-large-phase2", "--data", str(folder)]
    command += ["--benchmark", "--benchmark-steps", str(case.steps - 1), "--warm-up-steps", "1", "--json", "--quiet"]
    told = subprocess.run([*command, "--nproc", str(ranks), *overrides], capture_output=True, text=True, check=True)
    figures = json.loads(told.stdout)
    return {
        "ms_per_step": round(figures["ms_per_step"], 1),
        "real_tokens_per_s": round(figures["real_tokens_per_s"], 1),
        "phase_ms": {name: round(value, 1) for name, value in figures["phase_ms"].items()},
    }


# --- all of it ------------------------------------------------------------------------------------------------------


def environment(system: str) -> dict[str, str]:
    """What bertrain would preload."""
    from bertrain.ranks.preload import choose

    chosen = choose("auto", "auto")
    if system not in ("bertrain", "bertrain compiled", "products"):
        chosen.pop("MALLOC_CONF", None)  # to keep all that was given back would take memory which it needs
    path = os.pathsep.join([str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return {**os.environ, **chosen, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": path}


class Server:
    """A process that does steps when it is asked to."""

    def __init__(self, case: Case, folder: Path, python: str) -> None:
        self.case, self.told = case, list[dict[str, Any]]()
        command = [python, "-W", "ignore", __file__, "--case", json.dumps(asdict(case)), "--data", str(folder)]
        self.process = subprocess.Popen(
            command, env=environment(case.system), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        for line in self.answers:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"{self.case.system} ended with {self.process.wait()}: for want of memory, if that is -9")

    def step(self) -> None:
        self.requests.write("step\n")
        self.requests.flush()
        self.told.append(self._read())

    def end(self) -> dict[str, Any]:
        """What it reached, over all of its steps."""
        self.requests.close()
        self.process.wait()
        if self.case.system == "products":
            rates = [one["loss"] for one in self.told]
            return {"gflops_of_products": round(len(rates) / sum(1 / rate for rate in rates)), "rounds": len(rates)}
        seconds, tokens = (sum(one[name] for one in self.told) for name in ("seconds", "tokens"))
        rates = [one["tokens"] / one["seconds"] for one in self.told]
        return {
            "ms_per_step": round(1e3 * seconds / len(self.told), 1),
            "real_tokens_per_step": round(tokens / len(self.told)),
            "real_share": round(tokens / len(self.told) / self.case.rows / self.case.max_seq_length, 3),
            "real_tokens_per_s": round(tokens / seconds, 1),
            "slowest_and_fastest": [round(min(rates), 1), round(max(rates), 1)],
            "gflops": round(sum(one["flops"] for one in self.told) / seconds / 1e9),
            "peak_memory_gib": self.told[-1]["peak_memory_gib"],
            "rounds": len(self.told),
        } | self.about


def side_by_side(cases: list[Case], folder: Path, limit_s: float, ipex: str) -> list[dict[str, Any]]:
    """Step by step in turns, so that what else the machine does slows all of them alike."""
    pythons = [ipex if case.system.startswith("ipex") else sys.executable for case in cases]
    servers = [Server(case, folder, python) for case, python in zip(cases, pythons, strict=True)]
    for _ in range(WARM_UP * any(case.system == "bertrain compiled" for case in cases)):
        for server in servers:
            server.step()
    for server in servers:
        server.told.clear()
    begin, rounds = time.perf_counter(), 0
    while rounds < 2 or (time.perf_counter() - begin < limit_s and rounds < 40):
        for server in servers:
            server.step()
        rounds += 1
    return [server.end() for server in servers]


def plan(threads: int, layers: int) -> list[list[Case]]:
    """Groups of cases that are run side by side, the headline first; the one for ranks is empty."""

    def group(systems: list[str], length: int, precision: str, rows: int, at_once: int = 2048) -> list[Case]:
        return [Case(system, length, precision, rows, 12, threads, layers, at_once) for system in systems]

    sizes = ((512, 16), (128, 64))
    peers = ("transformers", "transformers compiled")
    groups = [group(["bertrain", "products", peer], length, "bf16", rows) for length, rows in sizes for peer in peers]
    for length, rows in sizes:
        groups.append([*group(["bertrain"], length, "bf16", rows), *group(["bertrain"], length, "fp32", rows, 1024)])
        for precision in ("fp32", "bf32"):
            groups += [group(["bertrain", "products", peer], length, precision, rows // 4, 512) for peer in peers]
    groups.append([])
    for length, rows in sizes:
        groups += [group(["bertrain", peer], length, "bf16", rows) for peer in ("ipex fast_bert", "ipex")]
    for length, rows in sizes:  # few layers, so that all four fit into memory together
        four = group(["bertrain", "bertrain compiled", *peers], length, "fp32", rows // 4, 512)
        groups.append([replace(case, layers=min(layers, 2)) for case in four])
    return groups


def machine(threads: int) -> dict[str, Any]:
    import torch
    import transformers

    from bertrain.base.machine import cpu_name
    from bertrain.ranks.preload import choose

    return {
        "cpu": cpu_name(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "preloaded": [Path(file).name for file in choose("auto", "auto").get("LD_PRELOAD", "").split(":") if file],
    }


def show(results: list[dict[str, Any]]) -> None:
    """A table; ratios and shares are within a group, whose members took turns."""
    columns = f"{'length':>7}{'rows':>6}{'prec.':>6}{'s/step':>9}{'tokens/s':>10}{'GiB':>6}{'first is':>10}{'share':>7}"
    print(f"{'system':<24}{columns}")
    for one in results:
        group = [other for other in results if other.get("group", -1) == one.get("group", -2)]
        ceilings = [other["gflops_of_products"] for other in group if "gflops_of_products" in other]
        if "real_tokens_per_s" not in one:
            continue
        ratio = f"{group[0]['real_tokens_per_s'] / one['real_tokens_per_s']:.2f} x" if group else ""
        share = f"{one['gflops'] / ceilings[0]:.2f}" if ceilings else ""
        print(
            f"{one['system']:<24}{one['max_seq_length']:>7}{one['rows']:>6}{one['precision']:>6}"
            f"{one['ms_per_step'] / 1e3:>9.2f}{one['real_tokens_per_s']:>10,.0f}{one.get('peak_memory_gib', 0):>6.1f}"
            f"{ratio:>10}{share:>7}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ipex", default="", help="the python of an environment with intel-extension-for-pytorch")
    parser.add_argument("--limit", type=float, default=120, help="seconds for each group, once it is ready")
    parser.add_argument("--groups", type=int, nargs="+", help="only these, by number; the others stay in the output")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        serve(Case(**json.loads(arguments.case)), arguments.data)
        return
    groups = plan(arguments.threads, arguments.layers)
    possible = [number for number, group in enumerate(groups) if arguments.ipex or "ipex" not in str(group)]
    numbers = arguments.groups or possible
    if set(numbers) - set(possible):
        raise SystemExit(f"groups are numbered 0 to {len(groups) - 1}, and those of Intel's extension want --ipex")
    results: list[dict[str, Any]] = []
    if arguments.groups and arguments.output and arguments.output.exists():
        results = [one for one in json.loads(arguments.output.read_text()) if one["group"] not in numbers]
    about = machine(arguments.threads)

    def note(case: Case, figures: dict[str, Any], **more: Any) -> None:
        results.append(about | asdict(case) | more | figures)
        print(json.dumps(asdict(case) | more | figures), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        for length, count in ((512, 400), (128, 1000)):
            write_examples(Path(folder) / str(length), length, count)
        for number in numbers:
            if group := groups[number]:
                data = Path(folder) / str(group[0].max_seq_length)
                reached = side_by_side(group, data, arguments.limit, arguments.ipex)
                for case, figures in zip(group, reached, strict=True):
                    note(case, figures, group=number)
                continue
            case = Case("bertrain", 512, "bf16", 16, 5, arguments.threads, arguments.layers)
            for ranks in (1, arguments.threads) * 2:
                one = replace(case, system="bertrain --benchmark", threads=arguments.threads // ranks)
                note(one, ranks_case(Path(folder) / "512", ranks, case), group=number, ranks=ranks)
    show(results)


if __name__ == "__main__":
    main()
