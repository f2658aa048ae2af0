"""bf16 products stay near fp32, and change nothing about what is stored."""

from __future__ import annotations

from pathlib import Path

import torch

from bertrain.train.pretrain import pretrain
from tests import helpers


def test_bf16_follows_fp32(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    runs = {}
    for precision in ("fp32", "bf16"):
        runs[precision] = tmp_path / precision
        pretrain(helpers.tiny_settings(train__precision=precision), data, runs[precision])
    exact, rounded = helpers.losses(runs["fp32"]), helpers.losses(runs["bf16"])
    assert exact != rounded
    for one, other in zip(exact, rounded, strict=True):
        assert abs(one - other) < 0.01 * one
    assert all(tensor.dtype == torch.float32 for tensor in helpers.final_weights(runs["bf16"]).values())
