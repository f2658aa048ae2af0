"""What every test on a GPU begins with."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Leave NaN in the blocks the caching allocator will hand out, small and large; draw fresh numbers."""
    print(f"torch seed {torch.seed()}")
    large = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(8)]
    small = [torch.full((size,), float("nan"), device="cuda") for size in (64, 256, 1024, 4096) for _ in range(64)]
    del large, small
