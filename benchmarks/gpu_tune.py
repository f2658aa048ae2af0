"""Configurations of the row-wise and attention kernels, timed one after another, for the tables in their files.

    python benchmarks/gpu_tune.py [NAME ...] [--tokens 98304] [--output FILE]

The shipped configuration is timed first and last, so that what the chip's clock did meanwhile can be seen. A
configuration that a GPU refuses (too much shared memory, say) is left out with the reason. Compiling takes longer than
timing: name the kernels that matter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import median_us
from gpu_pretrain import versions
from workload import FFN, HEAD_DIM, HEADS, HIDDEN, wikipedia_lengths

from bertrain.kernels import attention, fp8, gelu, layernorm
from bertrain.kernels.arguments import Cast, Dropout, NormParameters

DROPOUT = 0.1


@dataclass(frozen=True)
class Tuned:
    """A kernel, where its configuration stands, and others to try."""

    name: str
    call: Callable[[], object]
    get: Callable[[], Any]
    set: Callable[[Any], None]
    others: tuple[Any, ...]


def in_module(name: str, call: Callable[[], object], module: Any, table: str, others: tuple[Any, ...]) -> Tuned:
    return Tuned(name, call, lambda: getattr(module, table), lambda config: setattr(module, table, config), others)


def set_attention(which: str, config: tuple[Any, ...]) -> None:
    attention.CONFIGS[which] = attention._Config(*config)


def tuned(tokens: int, device: torch.device) -> Iterator[Tuned]:
    def narrow(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    def wide(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device)

    seed, scale = torch.tensor([7], device=device), torch.ones(1, device=device)
    forward, backward = (
        Cast(dtype, scale, torch.empty(fp8.PROGRAMS, device=device))
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    )

    # --- LayerNorm: rows, warps, programs per multiprocessor, stages -----------------------------------------
    x, residual, dy, second = (narrow(tokens, HIDDEN) for _ in range(4))
    parameters, dropout = NormParameters(wide(HIDDEN), wide(HIDDEN), wide(HIDDEN)), Dropout(DROPOUT, seed, 1)

    def norm(cast: Cast | None = None) -> Any:
        return layernorm.dropout_add_layernorm_forward(x, residual, parameters, dropout, 1e-12, cast)

    _, statistics, _ = norm()

    def norm_backward(cast: Cast | None = None) -> Any:
        return layernorm.dropout_add_layernorm_backward(
            dy, second, x, residual, parameters, statistics, dropout, cast, full=cast is None
        )

    walks: tuple[tuple[int, ...], ...]
    walks = ((1, 4, 6, 3), (1, 4, 8, 3), (1, 4, 5, 3), (1, 4, 6, 2), (2, 4, 8, 2), (2, 4, 6, 3), (1, 2, 12, 3))
    yield in_module("LayerNorm forward, bf16", norm, layernorm, "FORWARD", walks)
    yield in_module("LayerNorm forward, 8 bits", lambda: norm(forward), layernorm, "FORWARD_FP8", walks)
    walks = ((1, 4, 4, 3), (1, 4, 5, 3), (1, 4, 4, 4), (1, 8, 2, 3), (1, 8, 3, 3))
    yield in_module("LayerNorm backward, bf16", norm_backward, layernorm, "BACKWARD", walks)
    yield in_module("LayerNorm backward, 8 bits", lambda: norm_backward(backward), layernorm, "BACKWARD", walks)

    # --- GELU: rows (fours of them), columns, warps, programs per multiprocessor, stages -----------------------
    inner, dinner, inner_bias = narrow(tokens, FFN), narrow(tokens, FFN), wide(FFN)
    yield in_module(
        "GELU forward, 8 bits", lambda: gelu.bias_gelu_forward(inner, inner_bias, forward, full=False),
        gelu, "FORWARD_FP8", ((16, 128, 16, 2), (16, 128, 8, 2), (8, 128, 4, 4), (32, 64, 8, 2), (8, 256, 8, 2)),
    )  # fmt: skip
    yield in_module(
        "GELU backward, 8 bits", lambda: gelu.bias_gelu_backward(dinner, inner, inner_bias, backward, full=False),
        gelu, "BACKWARD_FP8", ((8, 128, 8, 2, 3), (16, 64, 8, 2, 3), (16, 128, 8, 2, 3), (8, 128, 8, 2, 4)),
    )  # fmt: skip
    yield in_module(
        "GELU backward, bf16", lambda: gelu.bias_gelu_backward(dinner, inner, inner_bias),
        gelu, "BACKWARD", ((2, 1024, 4, 4, 3), (2, 1024, 8, 3, 3), (4, 512, 4, 4, 3), (2, 512, 4, 8, 3)),
    )  # fmt: skip

    # --- 8-bit copies: fours of rows, columns, warps, programs per multiprocessor ------------------------------
    yield in_module(
        "cast both ways", lambda: fp8.cast_both_ways(inner, forward),
        fp8, "CAST", ((32, 64, 8, 12), (32, 128, 8, 4), (16, 128, 8, 8), (32, 64, 8, 6)),
    )  # fmt: skip
    _, _, rows = norm(forward)
    yield in_module(
        "transpose bytes", lambda: fp8.transpose(rows, forward),
        fp8, "TRANSPOSE", ((32, 128, 8, 8), (32, 128, 4, 8), (32, 64, 8, 8), (32, 128, 8, 4)),
    )  # fmt: skip

    # --- attention: queries, keys, warps, stages, registers -----------------------------------------------------
    lengths = torch.tensor(wikipedia_lengths(tokens // 8, seed=5)).cumsum(0)
    bounds = torch.cat([torch.zeros(1), lengths[lengths <= tokens]]).to(device, torch.int32)
    plan, of_attention = attention.plan_attention(bounds, tokens), Dropout(DROPOUT, seed, 3)
    qkv, dout = narrow(tokens, 3, HEADS, HEAD_DIM), narrow(tokens, HEADS, HEAD_DIM)
    out, sums, _ = attention.ragged_attention_forward(qkv, plan, of_attention)

    def attend(cast: Cast | None = None) -> Any:
        return attention.ragged_attention_forward(qkv, plan, of_attention, cast)

    def attend_backward(cast: Cast | None = None) -> Any:
        arguments = (qkv, out, sums, dout, plan, of_attention, cast)
        return attention.ragged_attention_backward(*arguments, full=cast is None)

    configs = {
        "forward": ((64, 32, 4, 3, None), (64, 64, 4, 3, 128), (64, 32, 4, 4, 96), (64, 32, 4, 2, 80)),
        "query": ((64, 32, 4, 3, 96), (64, 64, 4, 2, 128), (64, 32, 4, 4, 96), (64, 32, 4, 2, 96)),
        "key": ((32, 64, 4, 3, 128), (32, 64, 4, 4, 128), (32, 64, 4, 3, 144), (64, 64, 4, 2, 168)),
    }
    for which, others in configs.items():
        for bits, cast in (("bf16", None), ("8 bits", forward if which == "forward" else backward)):
            yield Tuned(
                f"attention {'forward' if which == 'forward' else f'backward, {which}'}, {bits}",
                partial(attend if which == "forward" else attend_backward, cast),
                partial(attention.CONFIGS.__getitem__, which),
                partial(set_attention, which),
                others,
            )


def time_all(kernel: Tuned) -> Iterator[tuple[Any, float | str]]:
    """Each configuration and its microseconds, or why there are none; the shipped one first and last."""
    shipped = kernel.get()
    try:
        for config in (shipped, *(other for other in kernel.others if other != shipped), shipped):
            kernel.set(config)
            try:
                yield config, round(median_us(kernel.call), 1)
            except Exception as error:  # whatever Triton or CUDA have against it
                yield config, str(error).splitlines()[0]
    finally:
        kernel.set(shipped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="kernels whose name contains one of these; all if none is given")
    parser.add_argument("--tokens", type=int, default=98304)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = []
    for kernel in tuned(arguments.tokens, torch.device("cuda")):
        if arguments.names and not any(name in kernel.name for name in arguments.names):
            continue
        for config, figure in time_all(kernel):
            print(f"{kernel.name:<32}{config!s:<28}{figure}", flush=True)
            name = "microseconds" if isinstance(figure, float) else "refused"
            results.append({"kernel": kernel.name, "config": config, "tokens": arguments.tokens, name: figure})
        if arguments.output:  # after each, so that a run that is cut short leaves what it had
            arguments.output.write_text(json.dumps([one | versions() for one in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
