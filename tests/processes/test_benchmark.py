"""`pretrain --benchmark`: the real loop, timed; nothing is kept."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from bertrain.training.start import pretrain
from tests import helpers


def test_a_benchmark_times_the_loop_and_keeps_nothing(tmp_path: Path) -> None:
    data = helpers.make_data(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    arguments = helpers.tiny_arguments(train__max_steps=3, checkpoint__every_steps=1)
    command = ["pretrain", "bert-tiny", "--data", data, "--benchmark", "--benchmark-steps", "4", "--warm-up-steps", "2"]
    done = subprocess.run(
        helpers.command(*command, "--json", *arguments),
        env=helpers.environment(), cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    figures = json.loads(done.stdout)
    assert figures["steps"] == 4
    assert figures["warm_up_steps"] == 2
    assert figures["real_tokens_per_s"] > 0
    assert figures["sequences_per_s"] > 0
    assert set(figures["phase_ms"]) == {"data", "forward_backward", "reduction", "optimizer"}
    assert sorted(tmp_path.rglob("*")) == before


def test_a_benchmark_of_replaced_tokens_on_two_ranks(tmp_path: Path) -> None:
    data, generator = helpers.make_data(tmp_path), tmp_path / "generator"
    pretrain(helpers.tiny_settings(train__max_steps=1), data, generator)
    arguments = helpers.tiny_arguments(model__rtd=50, data__generator=generator)
    command = ["pretrain", "bert-tiny", "--data", data, "--benchmark", "--benchmark-steps", "2", "--warm-up-steps", "1"]
    assert json.loads(helpers.bertrain(*command, "--json", "--nproc", 2, *arguments).stdout)["ranks"] == 2
