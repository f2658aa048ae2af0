"""How fast a device trains, before anything is trained: by the speed of matrix products."""

from __future__ import annotations

import time

import torch

SIZE = {"cuda": 8192, "cpu": 1024}  # of the matrices
SHARE = {"cuda": 0.6, "cpu": 0.35}  # of that speed, which training reaches


def training_speed(device: torch.device, precision: str) -> float:
    """Floating-point operations per second that training will roughly reach on `device`."""
    size, dtype = SIZE[device.type], torch.bfloat16 if precision in ("bf16", "fp8") else torch.float32
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        seconds.append(time.perf_counter() - began)
    return SHARE[device.type] * 2 * size**3 / min(seconds)
