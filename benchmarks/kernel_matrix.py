"""Compile every Triton kernel, as the fused engine launches it, for every kind of NVIDIA GPU. Needs no GPU.

    python benchmarks/kernel_matrix.py [--output FILE] [--capabilities 80 100] [--case "BERT-Large"]

A training step of the fused engine runs on tensors without memory (PyTorch's meta device), for models that cover head
sizes, widths, precisions and dropout. Each launch is compiled for the target instead of being launched, so the matrix
holds exactly the kernels, types and constants that a run would use. Each compilation's shared memory is checked against
the chip, and its stack against a limit: what does not fit into registers goes there, so registers are never exceeded.
The compiler can end its process by a fatal error: so a child process compiles, and the parent starts it again behind
the kernel that ended it.

The result is merged by Triton version and capability into the JSON, with a hash of the kernels' sources: a test refuses
a stale one. Kernels whose forms are in the JSON already, by a hash of sources and arguments, are not compiled again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
MOST_SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
"""Bytes of shared memory that one program may have, by compute capability."""
MOST_STACK = 256
"""Bytes of stack of one thread, where registers are spilled. On Hopper the worst form takes 96; the limit was set to
find forms of 416 to 1,400 bytes on Ampere, Ada and RTX Blackwell."""
Summary = dict[str, dict[str, Any]]  # by kernel
FP8_FROM = 89  # the first capability with FP8 tensor cores
PATIENCE_S = 6000  # for all kernels of one capability, on a busy machine


@dataclass(frozen=True)
class Case:
    """A model whose step is compiled."""

    name: str
    hidden: int
    heads: int
    dropout: float = 0.1
    precision: str = "bf16"
    head: str = "pretrain"
    activation_checkpointing: str = "none"
    family: str = "bert"


def cases(capability: int) -> Iterator[Case]:
    """Head sizes 16 to 128, narrow and wide rows, with and without dropout; every head of the model."""
    for precision in ("bf16", "fp8") if capability >= FP8_FROM else ("bf16",):
        for name, hidden, heads in (
            ("heads of 16", 256, 16), ("heads of 32", 384, 12), ("heads of 64", 768, 12), ("heads of 128", 1024, 8),
            ("BERT-Large", 1024, 16),
        ):  # fmt: skip
            yield Case(name, hidden, heads, precision=precision)
        yield Case("BERT-Base, small dropout", 768, 12, dropout=0.01, precision=precision)
        yield Case("BERT-Base, no dropout", 768, 12, dropout=0.0, precision=precision)
        yield Case("BERT-Base, recomputed", 768, 12, precision=precision, activation_checkpointing="full")
        for head in ("classify", "regress", "span", "tag"):
            yield Case(f"BERT-Base that has to {head}", 768, 12, precision=precision, head=head)
        for name, hidden, heads, dropout, checkpointing in (
            ("ModernBERT-Base", 768, 12, 0.0, "none"), ("ModernBERT-Large, dropout", 1024, 16, 0.1, "selective"),
            ("ModernBERT, heads of 16", 256, 16, 0.0, "none"), ("ModernBERT, heads of 128", 1024, 8, 0.1, "none"),
        ):  # fmt: skip
            yield Case(name, hidden, heads, dropout, precision, "pretrain", checkpointing, "modern")


def source_hash() -> str:
    """Of what the kernels' modules do: comments and layout do not count."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "bertrain" / "kernels").glob("*.py")):
        if not path.name.startswith(("cpu", "self_test")):
            digest.update(f"{path.name}\n{ast.dump(ast.parse(path.read_text()))}\n".encode())
    return digest.hexdigest()[:16]


# --- the child: a GPU of the given capability that compiles and never runs --------------------------------------------


class FakeDriver:
    """What Triton asks its driver for before a launch."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_step(case: Case) -> None:
    """Two steps of the fused engine on the meta device: FP8 measures its scales in the first."""
    from bertrain.config.resolve import resolve
    from bertrain.data.feed.balance import Balance
    from bertrain.data.feed.loader import Step
    from bertrain.model.arena import Arena
    from bertrain.model.encoder import split_parts
    from bertrain.model.initialization import uninitialized
    from bertrain.optim.registry import build_optimizer
    from bertrain.ranks.parallel import Ranks
    from bertrain.training.exchange import Exchange
    from bertrain.training.fused_engine import FusedEngine
    from tests.whole_model import random_batch, with_answers

    overrides: dict[str, Any] = {
        "model.hidden_size": case.hidden, "model.num_heads": case.heads, "model.intermediate_size": 4 * case.hidden,
        "model.family": case.family, "model.num_layers": 2, "model.hidden_dropout": case.dropout,
        "model.attention_dropout": case.dropout,
        "train.precision": case.precision, "train.activation_checkpointing": case.activation_checkpointing,
    }  # fmt: skip
    if case.head != "pretrain":
        overrides |= {"task.name": "glue/mnli", "model.head": case.head}
    if case.family == "modern":
        overrides |= {"model.intermediate_size": 41 * case.hidden // 16, "model.nsp": False}  # 2,624 for 1,024
    settings = resolve("bert-base-phase1", overrides)
    device = torch.device("meta")
    model, ranks = uninitialized(settings.model, device), Ranks(0, 1, device)
    arena = Arena(model, split_parts)
    exchange = Exchange(arena, ranks, settings)
    optimizer = build_optimizer(arena, settings.optimizer, span=exchange.span)
    engine = FusedEngine(model, arena, optimizer, exchange, ranks, settings)
    engine._pool = 0  # type: ignore[assignment]  # bins keep their padding, as on a GPU; graphs stay off
    batch = random_batch([128, 17, 100], 512, 16, 80, 128, settings.model.vocab_size)
    if case.head != "pretrain":
        batch = with_answers(batch, case.head, settings.model.num_labels)
    step = Step(
        0, [batch], Balance(2, [], [], []), num_tokens=245, num_sequences=3, num_predictions=60, first_position=0
    )
    for _ in range(2):
        engine.begin(step)
        engine.add_bin(batch.to(device), step, is_last=False)
        engine.add_bin(batch.to(device), step, is_last=True)
        engine.update(1e-3)
    engine.outputs(batch.to(device))


def shape_of_product(
    a: Tensor, b: Tensor, *_: Any, out_dtype: torch.dtype, out: Tensor | None = None, **__: Any
) -> Tensor:
    """Stands for `torch._scaled_mm`, which the meta device has only in part."""
    return a.new_empty(len(a), b.shape[1], dtype=out_dtype) if out is None else out


def usage(binary: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack, from the disassembler that comes with Triton."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        said = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return {"registers": int(found[1]), "stack": int(found[2])}


def child(capability: int, name: str, done: set[str] | None) -> None:
    """Compile what is not in `done`, of one case if it is named; prints a JSON line before and after each form.

    Without `done`, it compiles nothing and prints only the lines before.
    """
    from bertrain.kernels import backend

    backend.INTERPRETED = True  # launchers take tensors that are on no GPU
    backend.generation = lambda _device: capability // 10  # type: ignore[assignment]  # that one is cached
    from bertrain.kernels import arithmetic

    arithmetic.HAS_ASSEMBLY = backend.tl.constexpr(True)
    from bertrain.kernels import reduction

    reduction.INTERPRETED = False  # type: ignore[attr-defined]  # its copy alone: products have the types they have on a GPU
    torch._scaled_mm = shape_of_product  # type: ignore[assignment]  # takes what our calls give it
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(FakeDriver(capability))
    run, seen = JITFunction.run, set()

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        _, specialization, _ = kernel.device_caches[0][4](*args, debug=False, **kwargs)
        form = repr((kernel.cache_key, specialization, kwargs))  # the first: of the source and all it calls
        key = f"{kernel.__name__} {hashlib.sha256(form.encode()).hexdigest()[:12]}"
        if key in seen or key in (done or ()):
            return
        seen.add(key)
        constants = {name: value for name, value in kwargs.items() if isinstance(value, int | float | str)}
        print(json.dumps({"begin": key, "case": case.name, "precision": case.precision, **constants}), flush=True)
        if done is None:
            return
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        found = {"shared": compiled.metadata.shared, **usage(compiled.asm["cubin"])}
        print(json.dumps({"end": key, **found}), flush=True)

    JITFunction.run = compile_only
    for case in cases(capability):
        if name in ("", case.name):
            compile_step(case)


# --- the parent ---------------------------------------------------------------------------------------------------


def run_child(capability: int, case: str, done: list[str] | None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--child", str(capability), "--case", case]
        return subprocess.run(
            command, input=json.dumps(done), capture_output=True, text=True, check=False,
            env=os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": path}, timeout=PATIENCE_S,
        )  # fmt: skip


def hashes_of(capability: int, case: str = "") -> tuple[dict[str, str], dict[str, str]]:
    """The kernel of each form by the form's key, and a hash of each kernel's forms."""
    listed = run_child(capability, case, None)
    if listed.returncode:
        raise RuntimeError(f"the step itself failed for {capability}:\n{listed.stderr[-3000:]}")
    forms = sorted(json.loads(line)["begin"] for line in listed.stdout.splitlines())
    digests: dict[str, Any] = {}
    for form in forms:
        digests.setdefault(form.split()[0], hashlib.sha256()).update(form.encode())
    return {form: form.split()[0] for form in forms}, {name: h.hexdigest()[:16] for name, h in digests.items()}


def compile_all(capability: int, known: Summary, case: str = "") -> Summary:
    """For each kernel: how many forms of it there are, the most that one of them needs, and why some do not compile."""
    forms, hashes = hashes_of(capability, case)
    summary = {name: known[name] for name, digest in hashes.items() if known.get(name, {}).get("hash") == digest}
    done = [form for form, name in forms.items() if name in summary]
    for name in hashes.keys() - summary.keys():
        summary[name] = {"hash": hashes[name], "forms": 0, "shared": 0, "registers": 0, "stack": 0, "errors": []}
    while True:
        ended = run_child(capability, case, done)
        begun: dict[str, Any] | None = None
        for line in ended.stdout.splitlines():
            record = json.loads(line)
            if "begin" in record:
                begun = record
                done.append(record["begin"])
                summary[record["begin"].split()[0]]["forms"] += 1
                continue
            kernel, begun = summary[record["end"].split()[0]], None
            for need in ("shared", "registers", "stack"):
                kernel[need] = max(kernel[need], record[need])
        if ended.returncode == 0:
            return {name: summary[name] for name in hashes}
        if begun is None:
            raise RuntimeError(f"the step itself failed for {capability}:\n{ended.stderr[-3000:]}")
        lines = [line for line in ended.stderr.splitlines() if re.search(r"[Ee]rror", line)]
        why = (lines or ["ended without a word"])[-1][:300]
        summary[begun["begin"].split()[0]]["errors"].append(f"{begun['case']}, {begun['precision']}: {why}")


def faults(summary: Summary, capability: int) -> list[str]:
    """What cannot run on a chip of this capability, or would be slow there."""
    found = []
    for name, kernel in summary.items():
        found += [f"{name} does not compile for {capability / 10} ({error})" for error in kernel["errors"]]
        for need, limit in (("shared", MOST_SHARED[capability]), ("stack", MOST_STACK)):
            if kernel[need] > limit:
                found.append(f"{name} on {capability / 10} needs {kernel[need]} bytes of {need}, more than {limit}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--capabilities", type=int, nargs="+", choices=sorted(MOST_SHARED), default=sorted(MOST_SHARED))
    parser.add_argument("--case", default="", help="the name of one case, instead of all; writes no output")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        done = json.load(sys.stdin)
        child(given.child, given.case, None if done is None else set(done))
        return
    import triton

    known = json.loads(given.output.read_text()) if given.output and given.output.is_file() else {"triton": {}}
    matrix = known["triton"].setdefault(triton.__version__, {})
    wrong: list[str] = []

    def compiled(capability: int) -> Summary:
        return compile_all(capability, matrix.get(str(capability), {}).get("kernels", {}), given.case)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for capability, summary in zip(given.capabilities, pool.map(compiled, given.capabilities), strict=True):
            failed, forms = faults(summary, capability), sum(kernel["forms"] for kernel in summary.values())
            wrong += failed
            matrix[str(capability)] = {
                "sources": source_hash(), "capability": capability, "forms": forms, "failed": failed, "kernels": summary
            }  # fmt: skip
            shared, stack = (max(kernel[what] for kernel in summary.values()) for what in ("shared", "stack"))
            print(
                f"capability {capability / 10}, Triton {triton.__version__}: {forms} forms of {len(summary)} "
                f"kernels, {len(failed)} fail; at most {shared:,} of {MOST_SHARED[capability]:,} bytes of shared "
                f"memory, {stack} bytes of stack",
                flush=True,
            )
    print("\n".join(wrong))
    if given.output and not given.case:
        given.output.write_text(json.dumps(known, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
