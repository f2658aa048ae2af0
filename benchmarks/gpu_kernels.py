"""Time each kernel of bertrain against its stock peer on one GPU, in the same process and on the same data.

    python benchmarks/gpu_kernels.py [--output benchmarks/results/gpu_kernels.json] [--tokens 24576 57344]

Shapes are BERT-Large's (1024 wide, 16 heads of 64, FFN 4096, vocabulary padded to 30,528), bf16, dropout 0.1, one
layer, sequence lengths drawn from Wikipedia's (wikipedia-512.csv beside this file), for attention also equal rows of
128 to 8,192 tokens. Biases and LayerNorm's weights are float32 in our kernels, as the trainer gives them, and bf16 in
the peers' 16-bit functions. Each figure is the median over replays of a CUDA graph of eight calls, so launch costs stay
out. Our forward and backward are functions, timed apart, column sums included; the backward of a peer under autograd is
the time of both less that of the forward. Rates count the arithmetic a dense attention needs (4 H D L^2 forward, 2.5
times that backward) and the bytes that must move (inputs read once, outputs written once).

Peers: PyTorch's built-in flash attention over cu_seqlens (its three gradients still have to be stacked, which is
not counted), torch.compile of the plain PyTorch functions, and for LAMB the fused AdamW of PyTorch, which moves as
many bytes but computes no norms.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as functional
import triton
from torch import Tensor
from workload import FFN, HEAD_DIM, HEADS, HIDDEN

from bertrain.kernels import attention, cross_entropy, fp8, gelu, lamb, layernorm, reduction
from bertrain.kernels.arguments import Cast, Dropout, LambBuffers, LambScalars, NormParameters

WIDTH, VOCABULARY, DROPOUT = 30528, 30522, 0.1
CALLS_PER_GRAPH, REPLAYS = 8, 25


def draw_lengths(num_tokens: int) -> list[int]:
    """Wikipedia lengths that fill the bin exactly; the last sequence is cut."""
    with (Path(__file__).parent / "wikipedia-512.csv").open() as file:
        counts = [(int(row["length"]), int(row["sequences"])) for row in csv.DictReader(file)]
    generator, lengths = random.Random(0), list[int]()
    while sum(lengths) < num_tokens:
        drawn = generator.choices([length for length, _ in counts], [count for _, count in counts])[0]
        lengths.append(min(drawn, num_tokens - sum(lengths)))
    return lengths


def median_us(call: Callable[[], object]) -> float:
    """Median time of one call in microseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS_PER_GRAPH)
    return statistics.median(times)


def both_ways(function: Callable, inputs: list[Tensor], gradient: Tensor) -> tuple[float, float]:
    """Forward and backward time of a differentiable function."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    forward = median_us(lambda: function(*leaves))
    total = median_us(lambda: torch.autograd.grad(function(*leaves), leaves, gradient))
    return forward, total - forward


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def compare_attention(num_tokens: int, row_length: int = 0) -> list[dict]:
    """On Wikipedia's lengths, or on rows that all have one length."""
    lengths = [row_length] * (num_tokens // row_length) if row_length else draw_lengths(num_tokens)
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    qkv, dout = normal(num_tokens, 3, HEADS, HEAD_DIM), normal(num_tokens, HEADS, HEAD_DIM)
    dropout = Dropout(DROPOUT, torch.tensor([1], device="cuda"), 0)
    plan = attention.plan_attention(cu_seqlens, num_tokens)

    query, key, value = (part.contiguous() for part in qkv.unbind(1))
    common = (cu_seqlens, cu_seqlens, max(lengths), max(lengths), DROPOUT, False)

    def peer_forward() -> tuple:
        return torch.ops.aten._flash_attention_forward(query, key, value, *common, False)

    out, logsumexp, state, unused = peer_forward()[:4]

    def peer_backward() -> tuple:
        backward = torch.ops.aten._flash_attention_backward
        return backward(dout, query, key, value, out, logsumexp, *common, state, unused)

    forward = median_us(lambda: attention.ragged_attention_forward(qkv, plan, dropout))
    out_and_lse = attention.ragged_attention_forward(qkv, plan, dropout)[:2]
    backward = median_us(lambda: attention.ragged_attention_backward(qkv, *out_and_lse, dout, plan, dropout))
    flop = 4 * HEADS * HEAD_DIM * sum(length**2 for length in lengths)
    peer = "aten flash attention 2, cu_seqlens"
    planning = median_us(lambda: attention.plan_attention(cu_seqlens, num_tokens))
    of_rows = f", rows of {row_length:,}" if row_length else ""
    return [
        row(f"attention forward{of_rows}", num_tokens, forward, median_us(peer_forward), peer, flop, "TFLOP/s"),
        row(
            f"attention backward{of_rows}", num_tokens, backward, median_us(peer_backward), peer, 2.5 * flop, "TFLOP/s"
        ),
        row("attention plan (once per batch)", num_tokens, planning, None, "none", 0, ""),
    ]


def compare_rows(num_tokens: int) -> list[dict]:
    """The kernels whose floor is memory: dropout + residual + LayerNorm, and bias + GELU."""
    return compare_layernorm(num_tokens) + compare_gelu(num_tokens)


def compare_layernorm(num_tokens: int) -> list[dict]:
    dropout = Dropout(DROPOUT, torch.tensor([1], device="cuda"), 1)
    inputs = [normal(num_tokens, HIDDEN), normal(HIDDEN), normal(num_tokens, HIDDEN), normal(HIDDEN), normal(HIDDEN)]
    x, residual = inputs[0], inputs[2]
    parameters = NormParameters(*(inputs[place].float() for place in (1, 3, 4)))
    gradient, second = normal(num_tokens, HIDDEN), normal(num_tokens, HIDDEN)

    def forward() -> tuple:
        return layernorm.dropout_add_layernorm_forward(x, residual, parameters, dropout, 1e-12)

    _, rows_statistics, _ = forward()
    sums = [torch.empty(HIDDEN, device="cuda") for _ in range(3)]

    def backward(other: Tensor | None) -> None:
        _, _, partials, _ = layernorm.dropout_add_layernorm_backward(
            gradient, other, x, residual, parameters, rows_statistics, dropout
        )
        reduction.column_sums(partials, sums)

    def stock(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, ln_bias: Tensor) -> Tensor:
        hidden = residual + functional.dropout(x + bias, DROPOUT, True)
        return functional.layer_norm(hidden, (HIDDEN,), weight, ln_bias, 1e-12)

    mine = median_us(forward), median_us(lambda: backward(None)), median_us(lambda: backward(second))
    theirs = both_ways(torch.compile(stock), inputs, gradient)
    adding = theirs[1] + median_us(lambda: gradient + second)
    size, peer = num_tokens * HIDDEN * 2, "torch.compile"
    both = "torch.compile, and adding the two gradients"
    return [
        row("dropout + add + LayerNorm forward", num_tokens, mine[0], theirs[0], peer, 3 * size, "TB/s"),
        row("dropout + add + LayerNorm backward", num_tokens, mine[1], theirs[1], peer, 5 * size, "TB/s"),
        row("the same, two gradients", num_tokens, mine[2], adding, both, 6 * size, "TB/s"),
    ]


def cast_to(dtype: torch.dtype) -> Cast:
    return Cast(dtype, torch.ones(1, device="cuda"), torch.zeros(fp8.PROGRAMS, device="cuda"))


def stock_cast(values: Tensor, cast: Cast) -> tuple:
    """What `fp8.cast_both_ways` does, in plain PyTorch."""
    eight = fp8.cast_plain(values, cast.scale, cast.dtype)
    return eight, eight.t().contiguous(), values.abs().max()


def compare_gelu(num_tokens: int) -> list[dict]:
    x, narrow_bias, gradient = normal(num_tokens, FFN), normal(FFN), normal(num_tokens, FFN)
    bias = narrow_bias.float()
    activation, backprop = cast_to(torch.float8_e4m3fn), cast_to(torch.float8_e5m2)
    sums = [torch.empty(FFN, device="cuda")]

    def backward(cast: Cast | None = None, full: bool = True) -> None:
        reduction.column_sums(gelu.bias_gelu_backward(gradient, x, bias, cast, full=full)[2], sums)

    def stock(x: Tensor, bias: Tensor) -> Tensor:
        return functional.gelu(x + bias)

    def stock_eight(x: Tensor, bias: Tensor) -> tuple:
        return stock_cast(functional.gelu(x.float() + bias.float()), activation)

    def stock_backward_eight(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple:
        dx = torch.ops.aten.gelu_backward(gradient.float(), x.float() + bias.float())
        return *stock_cast(dx, backprop), dx.sum(0)

    theirs = both_ways(torch.compile(stock), [x, narrow_bias], gradient)
    compiled, compiled_backward = torch.compile(stock_eight), torch.compile(stock_backward_eight)
    ours_us = [
        median_us(lambda: gelu.bias_gelu_forward(x, bias)),
        median_us(backward),
        median_us(lambda: gelu.bias_gelu_forward(x, bias, activation, full=False)),
        median_us(lambda: backward(backprop, False)),
    ]
    theirs_us = [*theirs, median_us(lambda: compiled(x, bias)), median_us(lambda: compiled_backward(gradient, x, bias))]
    names = [f"bias + GELU {way}{form}" for form in ("", ", 8 bits") for way in ("forward", "backward")]
    moved = [2 * 2, 3 * 2, 2 + 1 + 1, 2 * 2 + 1 + 1]  # bytes an element
    peer = "torch.compile"
    return [
        row(name, num_tokens, ours, stock_us, peer, num_tokens * FFN * size, "TB/s")
        for name, ours, stock_us, size in zip(names, ours_us, theirs_us, moved, strict=True)
    ]


def compare_casts(num_tokens: int) -> list[dict]:
    """8-bit copies of tensors whose kernels do not write them: hidden states, and the gradient of the projection."""
    rows = []
    for width in (HIDDEN, 3 * HIDDEN):
        values, cast = normal(num_tokens, width), cast_to(torch.float8_e5m2)
        compiled = torch.compile(lambda values, cast=cast: stock_cast(values, cast))
        mine = median_us(partial(fp8.cast_both_ways, values, cast))
        theirs = median_us(partial(compiled, values))
        name, moved = f"cast both ways, {width:,} wide", num_tokens * width * 4
        rows.append(row(name, num_tokens, mine, theirs, "torch.compile", moved, "TB/s"))
    return rows


def compare_cross_entropy(num_tokens: int) -> list[dict]:
    num_predictions = int(0.15 * num_tokens)
    logits = normal(num_predictions, WIDTH)
    labels = torch.randint(0, VOCABULARY, (num_predictions,), device="cuda")
    known = torch.arange(0, num_predictions, 2, device="cuda")
    logits[known, labels[known]] = 9.0  # half of the predictions are right, as in training
    scale = torch.tensor([1 / num_predictions], device="cuda")
    leaf, written = logits.clone().requires_grad_(), logits.clone()

    def ours() -> tuple:
        written.copy_(logits)  # the gradient overwrote them; the copy is timed apart and taken off
        return cross_entropy.cross_entropy(written, labels, VOCABULARY, scale)

    def stock(tensor: Tensor) -> tuple:
        real = tensor[:, :VOCABULARY].float()
        correct = ((real.argmax(1) == labels) & (labels != -100)).sum()
        return functional.cross_entropy(real, labels, ignore_index=-100, reduction="sum") * scale[0], correct

    compiled = torch.compile(stock)

    def peer() -> tuple:
        loss, correct = compiled(leaf)
        return torch.autograd.grad(loss, leaf), correct

    copy = median_us(lambda: written.copy_(logits))
    mine, theirs = median_us(ours) - copy, median_us(peer)
    moved = 2 * num_predictions * WIDTH * 2
    return [row("cross-entropy both ways", num_tokens, mine, theirs, "torch.compile", moved, "TB/s")]


def compare_lamb() -> list[dict]:
    sizes = [WIDTH * HIDDEN, 512 * HIDDEN] + [HIDDEN] * 200 + [4 * HIDDEN * HIDDEN] * 24 + [HIDDEN * FFN] * 48
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    parts = [
        lamb.Part(start, start + size, number, size > HIDDEN, size > HIDDEN)
        for number, (start, size) in enumerate(zip(offsets, sizes, strict=False))
    ]
    table = lamb.LambTable.build(parts, len(parts), "cuda")
    buffers = [0.02 * torch.randn(offsets[-1], device="cuda") for _ in range(4)]
    buffers[3].square_()
    copy = torch.empty(offsets[-1], dtype=torch.bfloat16, device="cuda")
    scalars = LambScalars(*(torch.tensor([value], device="cuda") for value in (1e-4, 1.0, 1.0, 10.0)))
    mine = median_us(lambda: lamb.lamb_step(LambBuffers(*buffers), table, scalars, copy=copy))
    flat = torch.nn.Parameter(buffers[0])
    flat.grad = buffers[1]
    optimizer = torch.optim.AdamW([flat], lr=1e-4, fused=True, capturable=True)
    theirs = median_us(optimizer.step)
    moved = offsets[-1] * 42  # first pass reads 16 and writes 12 bytes, second reads 8 and writes 6
    entry = row("LAMB step, 335M parameters", 0, mine, theirs, "fused AdamW (28 bytes, no norms)", moved, "TB/s")
    return [{**entry, "peer_rate": round(offsets[-1] * 28 / theirs * 1e-6, 2)}]


def row(kernel: str, tokens: int, ours: float, peer_us: float | None, peer: str, work: float, unit: str) -> dict:
    scale = 1e-6  # operations or bytes per microsecond to Tera per second
    return {
        "kernel": kernel, "tokens": tokens, "ours_us": round(ours, 1),
        "peer_us": None if peer_us is None else round(peer_us, 1), "peer": peer,
        "speedup": None if peer_us is None else round(peer_us / ours, 2),
        "ours_rate": round(work / ours * scale, 2), "peer_rate": round(work / (peer_us or 1e30) * scale, 2),
        "unit": unit,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu_kernels.json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[24576, 57344])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for num_tokens in arguments.tokens:
        for compare in (compare_attention, compare_rows, compare_casts, compare_cross_entropy):
            rows += compare(num_tokens)
    for row_length in (128, 512, 2048, 8192):
        rows += compare_attention(32768, row_length)[:2]
    rows += compare_lamb()
    versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({**versions, "rows": rows}, indent=1) + "\n")
    print(f"{versions['gpu']}, torch {versions['torch']}, triton {versions['triton']}")
    print(f"{'kernel':36}{'tokens':>8}{'ours us':>10}{'peer us':>10}{'ratio':>7}{'ours':>9}{'peer':>9}")
    for entry in rows:
        rate, peer_rate = (f"{entry[key]:9.2f}" for key in ("ours_rate", "peer_rate"))
        numbers = f"{entry['ours_us']:10}{entry['peer_us'] or '-':>10}{entry['speedup'] or '-':>7}"
        print(f"{entry['kernel']:36}{entry['tokens']:8}{numbers}{rate}{peer_rate} {entry['unit']}")


if __name__ == "__main__":
    main()
