"""How fast a device is, before anything is trained on it: the speed of matrix products and of copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bertrain.base import isa
from bertrain.run.metrics import Stopwatch

SIZE = {"cuda": 8192, "cpu": 1024}  # of the matrices
SHARE = {"cuda": 0.6, "cpu": 0.35}  # of that speed, which training reaches


def training_speed(device: torch.device, precision: str) -> float:
    """Floating-point operations per second that training will roughly reach on `device`."""
    # A CPU that does not multiply bf16 takes a minute for it; training in bf16 there is no faster than in fp32.
    has_bf16 = device.type == "cuda" or isa.usable("auto") == "amx"
    dtype = torch.bfloat16 if precision in ("bf16", "fp8") and has_bf16 else torch.float32
    size = SIZE[device.type]
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    return SHARE[device.type] * 2 * size**3 / fastest(lambda: matrix @ matrix, device, 0.02)


@dataclass(frozen=True)
class Ceilings:
    """The speed of the device, measured in this run."""

    operations_per_s: float
    bytes_per_s: float
    product: str  # the product that was measured


def measure_ceilings(device: torch.device, precision: str, *, seconds: float = 0.3) -> Ceilings:
    """The speed of the fastest of some large products in the run's precision, and of some copies."""
    on_gpu = device.type == "cuda"
    side = 8192 if on_gpu else 1024
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(precision, torch.float32)
    draw = torch.Generator(device).manual_seed(0)  # a run's own draws stay what they are
    a, b = (torch.randn(side, side, device=device, generator=draw).to(dtype) for _ in range(2))
    product: Callable[[], object] = lambda: torch.mm(a, b)  # noqa: E731
    if precision == "fp8":
        one, fp8_a, fp8_b = torch.ones((), device=device), a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        product = lambda: torch._scaled_mm(fp8_a, fp8_b.t(), one, one, out_dtype=dtype, use_fast_accum=True)  # noqa: E731
    fastest_product = fastest(product, device, seconds)
    source = torch.empty((1 << 30) if on_gpu else (1 << 26), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    fastest_copy = fastest(lambda: target.copy_(source), device, seconds)
    name = f"{side} x {side} x {side}, {precision}"
    return Ceilings(2 * side**3 / fastest_product, 2 * source.numel() / fastest_copy, name)


def fastest(action: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest repetition within `seconds`, at least of three, after a warm-up."""
    stopwatch, times = Stopwatch(device), list[float]()
    action()
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        stopwatch.start()
        action()
        stopwatch.mark()
        times += stopwatch.seconds(stopwatch.lap())
    return min(times)
