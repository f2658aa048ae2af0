"""How fast a device trains, before anything is trained: by the speed of matrix products."""

from __future__ import annotations

import time

import torch

SHARE = {"cuda": 0.6, "cpu": 0.35}  # of the speed of large matrix products, that training reaches
SECONDS = 0.3


def training_speed(device: torch.device) -> float:
    """Floating-point operations per second that training will roughly reach on `device`."""
    on_gpu = device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if on_gpu else (1024, torch.float32)
    left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(3):
        (left @ right)[0, 0].item()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        (left @ right)[0, 0].item()  # waits for the device
        count += 1
    return SHARE[device.type] * 2 * size**3 * count / (time.perf_counter() - began)
