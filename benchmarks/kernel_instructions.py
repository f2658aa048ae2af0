"""What the compiler makes of the GPU kernels: instructions in and around their loops, registers, spills. Needs no GPU.

    python benchmarks/kernel_instructions.py [NAME ...] [--capability 90] [--listing FOLDER]

Compiles the kernels of a BERT-Large layer with the configurations they ship with, in bf16 and with 8-bit results, and
reads the machine code with the disassembler that comes with Triton. For each loop: its instructions, how many of them
belong to the tensor cores, and how many come to one element of what a thread does in a turn. What stands outside the
loops is executed once by each program; in attention that is a third of all it executes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from workload import FFN, HEAD_DIM, HEADS, HIDDEN

from bertrain.kernels import attention, gelu, layernorm
from bertrain.kernels.random import attention_threshold, dropout_threshold

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
DROPOUT = 0.1
ALIGNED = "!"  # behind a type: divisible by 16, as Triton finds what PyTorch allocates
BF16, FLOAT, INT = "*bf16" + ALIGNED, "*fp32" + ALIGNED, "i32" + ALIGNED
EIGHT = {448.0: "*fp8e4nv" + ALIGNED, 57344.0: "*fp8e5" + ALIGNED}


@dataclass(frozen=True)
class Kernel:
    """A kernel to compile: types of its arguments, its constants, warps, and elements of a thread in a turn."""

    name: str
    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int
    elements: float
    registers: int | None = None


def named(types: str, **others: str) -> dict[str, str]:
    """Types of arguments, where most are given by their names alone."""
    known = {"seed": "*i64" + ALIGNED, "site": "i32", "num_rows": INT, "scale": "*fp32", "tiles": "*i32" + ALIGNED}
    known |= {"pitch": INT, "scale_log2": "fp32", "eps": "fp32"}
    known |= dict.fromkeys(("peaks", "sums", "statistics", "partials", "largest", "bias", "weight", "ln_bias"), FLOAT)
    return {name: others.get(name, known.get(name, BF16)) for name in types.split()}


def attention_kernels(limit: float, gradient_limit: float) -> Iterator[Kernel]:
    full = limit == 0
    bits = "8 bits" if limit else "bf16"
    constants = {"H": HEADS, "D": HEAD_DIM, "KEEP": attention_threshold(DROPOUT), "PAIRS": True, "PRECISION": "ieee"}
    constants |= {"INVERSE_KEEP": 1 / (1 - DROPOUT), "CHUNK": attention.CHUNK, "WINDOW": 0}
    constants |= {"cosines": None, "sines": None}

    def block(rows: int) -> str:
        return f"tensordesc<bf16[{rows}, {HEAD_DIM}]>"

    def kernel(which: str, function: Any, names: str, limit: float, others: dict[str, str], **more: Any) -> Kernel:
        config = attention.CONFIGS[which]
        own = constants | {"BM": config.rows, "BN": config.columns, "STAGES": config.stages, "LIMIT": limit} | more
        scores = config.rows * config.columns / (32 * config.warps)
        types = named(names, **others)
        return Kernel(f"attention {which}, {bits}", function, types, own, config.warps, scores, config.registers)

    keys = block(attention.CONFIGS["forward"].columns)
    yield kernel(
        "forward", attention._attention_forward_kernel,
        "qkv keys_in out out8 scale peaks sums tiles seed site pitch scale_log2", limit,
        {"keys_in": keys, "out8": EIGHT.get(limit, BF16)},
    )  # fmt: skip
    eight = {"dqkv8": EIGHT.get(gradient_limit, BF16)}
    keys = block(attention.CONFIGS["query"].columns)
    yield kernel(
        "query", attention._backward_query_kernel,
        "qkv keys_in out dout sums dqkv dqkv8 scale peaks partials tiles seed site pitch scale_log2", gradient_limit,
        {"keys_in": keys} | eight, FULL=full,
    )  # fmt: skip
    rows = attention.CONFIGS["key"].rows
    yield kernel(
        "key", attention._backward_key_kernel,
        "qkv queries_in dout_in sums_in dqkv dqkv8 scale peaks partials tiles seed site scale_log2", gradient_limit,
        {"queries_in": block(rows), "dout_in": block(rows), "sums_in": f"tensordesc<fp32[1, {2 * rows}]>"} | eight,
        FULL=full,
    )  # fmt: skip


def layernorm_kernels(limit: float, gradient_limit: float) -> Iterator[Kernel]:
    bits = "8 bits" if limit else "bf16"
    constants: dict[str, Any] = {"N": HIDDEN, "COLUMNS": HIDDEN, "THRESHOLD": dropout_threshold(DROPOUT)}
    constants |= {"INVERSE_KEEP": 1 / (1 - DROPOUT)}
    rows, warps, _, stages = layernorm.FORWARD_FP8 if limit else layernorm.FORWARD
    names = "x bias residual weight ln_bias y y8 scale peaks statistics seed site num_rows eps"
    yield Kernel(
        f"LayerNorm forward, {bits}", layernorm._norm_forward_kernel,
        named(names, y8=EIGHT.get(limit, BF16)),
        constants | {"ROWS": rows, "STAGES": stages, "LIMIT": limit}, warps, rows * HIDDEN / (32 * warps),
    )  # fmt: skip
    rows, warps, _, stages = layernorm.BACKWARD
    names = "dy second x bias residual weight statistics dx dx8 scale peaks dresidual partials seed site num_rows"
    yield Kernel(
        f"LayerNorm backward, {bits}", layernorm._norm_backward_kernel,
        named(names, dx8=EIGHT.get(gradient_limit, BF16)),
        constants | {"ROWS": rows, "STAGES": stages, "LIMIT": gradient_limit, "PAIR": True, "FULL": limit == 0},
        warps, rows * HIDDEN / (32 * warps),
    )  # fmt: skip


def gelu_kernels(limit: float, gradient_limit: float) -> Iterator[Kernel]:
    if limit == 0:
        rows, columns, warps, _, stages = gelu.BACKWARD
        constants: dict[str, Any] = {"N": FFN, "ROWS": rows, "COLUMNS": columns, "STAGES": stages}
        types = named("dy x bias dx partials num_rows")
        elements = rows * columns / (32 * warps)
        yield Kernel("GELU backward, bf16", gelu._gelu_backward_kernel, types, constants, warps, elements)
        return
    quads, columns, warps, _ = gelu.FORWARD_FP8
    constants = {"N": FFN, "QUADS": quads, "COLUMNS": columns, "FULL": False, "LIMIT": limit}
    types = named("x bias y y8 y8_t scale largest num_rows", y8=EIGHT[limit], y8_t=EIGHT[limit])
    elements = 4 * quads * columns / (32 * warps)
    yield Kernel("GELU forward, 8 bits", gelu._gelu_forward_fp8_kernel, types, constants, warps, elements)
    quads, columns, warps, _, stages = gelu.BACKWARD_FP8
    constants = {"N": FFN, "QUADS": quads, "COLUMNS": columns, "STAGES": stages, "FULL": False}
    eight = EIGHT[gradient_limit]
    types = named("dy x bias dx dx8 dx8_t scale largest partials num_rows", dx8=eight, dx8_t=eight)
    elements = 4 * quads * columns / (32 * warps)
    constants |= {"LIMIT": gradient_limit}
    yield Kernel("GELU backward, 8 bits", gelu._gelu_backward_fp8_kernel, types, constants, warps, elements)


def all_kernels() -> Iterator[Kernel]:
    for kind in (attention_kernels, layernorm_kernels, gelu_kernels):
        yield from kind(0.0, 0.0)
        yield from kind(448.0, 57344.0)


def compiled(kernel: Kernel, capability: int) -> Any:
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(kernel.function.arg_names):
        if name in kernel.constants:
            signature[name], constants[(place,)] = "constexpr", kernel.constants[name]
            continue
        signature[name] = kernel.types[name].rstrip(ALIGNED)
        if kernel.types[name].endswith(ALIGNED):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel.function, signature, constants, attributes)
    options = {"num_warps": kernel.warps, "maxnreg": kernel.registers}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def disassembled(binary: bytes) -> tuple[list[tuple[int, str]], str, str]:
    """Address and text of every instruction; registers of a thread, and bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()

        def ask(question: str) -> str:
            command = [str(TOOLS / "cuobjdump"), question, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        found = re.finditer(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", ask("-sass"), re.MULTILINE)
        usage = re.search(r"REG:(\d+) STACK:(\d+)", ask("-res-usage"))
    assert usage is not None, "cuobjdump does not say what the kernel uses"
    return [(int(match[1], 16), match[2]) for match in found], usage[1], usage[2]


def loops(instructions: list[tuple[int, str]]) -> list[tuple[int, int]]:
    """First and last address of each innermost loop; a wait for a copy, which only jumps to itself, is none."""
    jumps = [(re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text), address) for address, text in instructions]
    all_of_them = [(int(jump[1], 16), address) for jump, address in jumps if jump and int(jump[1], 16) < address]
    inner = [
        (first, last)
        for first, last in all_of_them
        if not any((first, last) != other and first <= other[0] and other[1] <= last for other in all_of_them)
    ]
    return [(first, last) for first, last in inner if last - first > 64 * 16]


def describe(kernel: Kernel, capability: int, write: Callable[[str, str], None]) -> str:
    binary = compiled(kernel, capability)
    instructions, registers, stack = disassembled(binary.asm["cubin"])
    write(kernel.name, "\n".join(f"{address:05x}  {text}" for address, text in instructions) + "\n")
    turns = []
    for first, last in loops(instructions):
        inside = [text for address, text in instructions if first <= address <= last]
        products = sum("GMMA" in text for text in inside)
        turns.append(f"{len(inside)} ({products} products, {len(inside) / kernel.elements:.1f} an element)")
    return (
        f"{kernel.name:<28}{registers:>5} registers{stack:>4} B of stack{binary.metadata.shared:>7} B shared"
        f"{len(instructions):>6} instructions, in loops: {'; '.join(turns)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="kernels whose name contains one of these; all if none is given")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU, times ten")
    parser.add_argument("--listing", type=Path, help="write the machine code of each into this folder")
    arguments = parser.parse_args()

    def write(name: str, listing: str) -> None:
        if arguments.listing:
            arguments.listing.mkdir(parents=True, exist_ok=True)
            (arguments.listing / f"{name.replace(', ', '-').replace(' ', '-')}.sass").write_text(listing)

    for kernel in all_kernels():
        if not arguments.names or any(name in kernel.name for name in arguments.names):
            print(describe(kernel, arguments.capability, write), flush=True)


if __name__ == "__main__":
    main()
