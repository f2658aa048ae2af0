"""Time each kernel for CPUs against what PyTorch has for the same, in turns, on the same data.

    python benchmarks/cpu_kernels.py [--output benchmarks/results/cpu_kernels.json] [--tokens 2048]

Shapes are BERT-Large's (1024 wide, 16 heads of 64, FFN 4096, vocabulary padded to 30,528), bf16, dropout 0.1, one
layer, lengths drawn from Wikipedia's. The machine's speed changes from second to second, so the two take turns, call by
call; a ratio is that of their summed times. Rates count the arithmetic of a product, or of attention (4 H D L^2
forward, 2.5 times that backward), and the bytes that must move (inputs read once, outputs written once).

Peers: torch.mm, which writes bf16 where ours adds to float32; scaled_dot_product_attention, a sequence at a time; eager
PyTorch for the rest, its backward through autograd less its forward; and the fused AdamW, which moves fewer bytes than
LAMB and computes no norms. The products forward and of inputs are torch.mm's on both sides: bertrain leaves them to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from workload import wikipedia_lengths

from bertrain.base.machine import cpu_name
from bertrain.kernels import attention, cpu, cpu_library, cross_entropy, gelu, lamb, layernorm, reduction
from bertrain.kernels.arguments import Dropout, LambBuffers, LambScalars, NormParameters
from bertrain.ranks.preload import keep_memory

HIDDEN, HEADS, HEAD_DIM, FFN, WIDTH, VOCABULARY, DROPOUT = 1024, 16, 64, 4096, 30528, 30522, 0.1
SEED = torch.tensor([1])
Call = Callable[[], object]


def in_turns(*calls: Call, seconds: float = 4.0) -> list[list[float]]:
    """Seconds of each call, one after another and round again."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    while len(times[0]) < 5 or time.perf_counter() - begin < seconds:
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return times


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def row(kernel: str, ours: list[float], theirs: list[float], peer: str, work: float, unit: str) -> dict[str, Any]:
    """Milliseconds and rates by the medians, the ratio by all calls."""
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {
        "kernel": kernel, "ours_ms": round(1e3 * mine, 3), "peer_ms": round(1e3 * other, 3), "peer": peer,
        "ratio": round(sum(theirs) / sum(ours), 2), "ours_rate": round(work / mine / 1e9, 1),
        "peer_rate": round(work / other / 1e9, 1), "unit": unit, "calls": len(ours),
    }  # fmt: skip


def both_ways(function: Callable[..., Any], inputs: list[torch.Tensor], gradient: torch.Tensor) -> tuple[Call, Call]:
    """A differentiable function forward, and forward and backward."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    return lambda: function(*leaves), lambda: torch.autograd.grad(function(*leaves), leaves, gradient)


def less(both: list[float], forward: list[float]) -> list[float]:
    usual = statistics.median(forward)
    return [max(1e-9, one - usual) for one in both]


def compare_products(tokens: int) -> list[dict[str, Any]]:
    rows = []
    for name, inputs, outputs in (("query, key, value", 1024, 3072), ("feed-forward in", 1024, 4096)):
        x, dy, weight = normal(tokens, inputs), normal(tokens, outputs), normal(outputs, inputs)
        into = torch.zeros(outputs, inputs)
        forward, of_inputs, ours, theirs = in_turns(
            partial(torch.mm, x, weight.t()),
            partial(torch.mm, dy, weight),
            partial(cpu.weight_gradient, dy, x, into, accumulate=True),
            partial(torch.mm, dy.t(), x),
        )
        flop = 2 * tokens * inputs * outputs
        rows += [
            row(f"{name}: product, forward", forward, forward, "the same", flop, "GFLOP/s"),
            row(f"{name}: product, inputs", of_inputs, of_inputs, "the same", flop, "GFLOP/s"),
            row(f"{name}: gradient of weights", ours, theirs, "torch.mm", flop, "GFLOP/s"),
        ]
    return rows


def compare_attention(tokens: int) -> list[dict[str, Any]]:
    lengths: list[int] = []
    for length in wikipedia_lengths(1000, seed=0).tolist():
        lengths.append(min(length, tokens - sum(lengths)))
        if sum(lengths) == tokens:
            break
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    qkv, dout = normal(tokens, 3, HEADS, HEAD_DIM), normal(tokens, HEADS, HEAD_DIM)
    plan = attention.plan_attention(bounds, tokens)
    kept = attention.ragged_attention_forward(qkv, plan, Dropout(DROPOUT, SEED, 0))[:2]

    def stock(qkv: torch.Tensor) -> torch.Tensor:
        parts = []
        for one in qkv.split(lengths):
            query, key, value = one.permute(1, 2, 0, 3)[:, None]  # [1, heads, length, size] each
            parts.append(
                functional.scaled_dot_product_attention(query, key, value, dropout_p=DROPOUT)[0].transpose(0, 1)
            )
        return torch.cat(parts)

    forward, both = both_ways(stock, [qkv], dout)
    mine, back, theirs, theirs_both = in_turns(
        lambda: attention.ragged_attention_forward(qkv, plan, Dropout(DROPOUT, SEED, 0)),
        lambda: attention.ragged_attention_backward(qkv, *kept, dout, plan, Dropout(DROPOUT, SEED, 0)),
        forward,
        both,
    )
    flop = 4 * HEADS * HEAD_DIM * sum(length**2 for length in lengths)
    peer = "scaled_dot_product_attention"
    return [
        row("attention forward", mine, theirs, peer, flop, "GFLOP/s"),
        row("attention backward", back, less(theirs_both, theirs), peer, 2.5 * flop, "GFLOP/s"),
    ]


def compare_rows(tokens: int) -> list[dict[str, Any]]:
    """The kernels whose floor is memory: dropout + residual + LayerNorm, and bias + GELU."""
    inputs = [normal(tokens, HIDDEN), normal(HIDDEN), normal(tokens, HIDDEN), normal(HIDDEN), normal(HIDDEN)]
    x, bias, residual, weight, ln_bias = inputs
    gradient, sums = normal(tokens, HIDDEN), [torch.empty(HIDDEN) for _ in range(3)]
    parameters, dropout = NormParameters(bias, weight, ln_bias), Dropout(DROPOUT, SEED, 1)

    def norm_forward() -> Any:
        return layernorm.dropout_add_layernorm_forward(x, residual, parameters, dropout, 1e-12)

    statistics_of_rows = norm_forward()[1]

    def norm_backward() -> None:
        kept = (x, residual, parameters, statistics_of_rows)
        partials = layernorm.dropout_add_layernorm_backward(gradient, None, *kept, dropout)[2]
        reduction.column_sums(partials, sums)

    def stock_norm(*given: torch.Tensor) -> torch.Tensor:
        x, bias, residual, weight, ln_bias = given
        hidden = residual + functional.dropout(x + bias, DROPOUT, True)
        return functional.layer_norm(hidden, (HIDDEN,), weight, ln_bias, 1e-12)

    wide, wide_bias, wide_gradient = normal(tokens, FFN), normal(FFN), normal(tokens, FFN)

    def gelu_backward() -> None:
        reduction.column_sums(gelu.bias_gelu_backward(wide_gradient, wide, wide_bias)[2], [torch.empty(FFN)])

    def stock_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x + bias)

    rows = []
    for name, ours, stock, given, dy, width in (
        ("dropout + add + LayerNorm", (norm_forward, norm_backward), stock_norm, inputs, gradient, HIDDEN),
        (
            "bias + GELU",
            (lambda: gelu.bias_gelu_forward(wide, wide_bias), gelu_backward),
            stock_gelu,
            [wide, wide_bias],
            wide_gradient,
            FFN,
        ),
    ):
        forward, backward, theirs, theirs_both = in_turns(*ours, *both_ways(stock, given, dy))
        size, reads = tokens * width * 2, len(given) // 2
        rows += [
            row(f"{name} forward", forward, theirs, "eager", (reads + 1) * size, "GB/s"),
            row(f"{name} backward", backward, less(theirs_both, theirs), "eager", (2 * reads + 1) * size, "GB/s"),
        ]
    return rows


def compare_cross_entropy(tokens: int) -> list[dict[str, Any]]:
    count = int(0.15 * tokens)
    logits, labels = normal(count, WIDTH), torch.randint(0, VOCABULARY, (count,))
    written, leaf, scale = logits.clone(), logits.clone().requires_grad_(), torch.tensor([1 / count])

    def stock() -> Any:
        real = leaf[:, :VOCABULARY].float()
        correct = (real.argmax(1) == labels).sum()
        return torch.autograd.grad(functional.cross_entropy(real, labels), leaf), correct

    ours, theirs = in_turns(lambda: cross_entropy.cross_entropy(written, labels, VOCABULARY, scale), stock)
    return [row("cross-entropy both ways", ours, theirs, "eager", 2 * count * WIDTH * 2, "GB/s")]


def compare_lamb(parameters: int = 1 << 26) -> list[dict[str, Any]]:
    size = 1 << 22
    parts = [lamb.Part(first, first + size, first // size, True, True) for first in range(0, parameters, size)]
    table = lamb.LambTable.build(parts, len(parts), "cpu")
    buffers = [0.02 * torch.randn(parameters) for _ in range(4)]
    buffers[3].square_()
    copy = torch.empty(parameters, dtype=torch.bfloat16)
    scalars = LambScalars(*(torch.tensor([value]) for value in (1e-4, 1.0, 1.0, 10.0)))
    flat = torch.nn.Parameter(0.02 * torch.randn(parameters))
    flat.grad = 0.02 * torch.randn(parameters)
    optimizer = torch.optim.AdamW([flat], lr=1e-4, fused=True)
    ours, theirs = in_turns(lambda: lamb.lamb_step(LambBuffers(*buffers), table, scalars, copy=copy), optimizer.step)
    peer = "fused AdamW (28 bytes, no norms, no copy)"
    return [row("LAMB step, 67M parameters", ours, theirs, peer, parameters * 42, "GB/s")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cpu_kernels.json")
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    fit, reason = cpu_library.available()
    if not fit:
        raise SystemExit(f"nothing to measure: {reason}")
    keep_memory()  # as the command does: else every call begins with page faults, on both sides
    torch.manual_seed(0)
    rows = []
    for compare in (compare_products, compare_attention, compare_rows, compare_cross_entropy):
        rows += compare(arguments.tokens)
    rows += compare_lamb()
    about = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__, "kernels": reason}
    result = about | {"tokens": arguments.tokens, "rows": rows}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'kernel':44}{'ours ms':>9}{'peer ms':>9}{'ratio':>7}{'ours':>9}{'peer':>9}")
    for one in rows:
        rates = f"{one['ours_rate']:9,.0f}{one['peer_rate']:9,.0f} {one['unit']}"
        print(f"{one['kernel']:44}{one['ours_ms']:9.2f}{one['peer_ms']:9.2f}{one['ratio']:7.2f}{rates}")


if __name__ == "__main__":
    main()
