"""How fast a device trains, before anything is trained: by the speed of matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable

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


def fastest(action: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest repetition within `seconds`, after a warm-up."""
    stopwatch, times = Stopwatch(device), list[float]()
    action()
    begin = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - begin < seconds:
        stopwatch.start()
        action()
        stopwatch.mark()
        times += stopwatch.seconds(stopwatch.lap())
    return min(times)
