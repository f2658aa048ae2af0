"""Two phases of pre-training by the command line."""

from __future__ import annotations

from pathlib import Path

from bertrain.run import checkpoint
from tests import helpers
from tests.miniature_tasks import command_line


def test_two_phases_by_the_command_line(tmp_path: Path) -> None:
    """128 tokens, then 256, with the optimizer kept: what a user types."""
    helpers.make_data(tmp_path / "short", max_seq_length=128)
    helpers.make_data(tmp_path / "long", max_seq_length=256)
    one, two = tmp_path / "one", tmp_path / "two"
    shape = {"data__max_predictions": 20, "batch__token_budget": 512}
    short = {"model__max_positions": 128, "data__max_seq_length": 128}
    start = ["pretrain", "bert-tiny", "--data", tmp_path / "short" / "data", "--run", one]
    command_line(*start, *helpers.tiny_arguments(**shape, **short), "--train.max_steps", 4)
    arguments = helpers.tiny_arguments(
        **shape, model__max_positions=256, data__max_seq_length=256, train__init_positions="extend",
        train__init_optimizer="keep",
    )  # fmt: skip
    said = command_line(
        "pretrain", "bert-tiny", "--data", tmp_path / "long" / "data", "--run", two, "--init", one, *arguments,
        "--train.max_steps", 3,
    ).out  # fmt: skip
    assert f"beginning with the weights of {one / 'checkpoints' / 'step-00000004'}: 38 tensors taken" in said
    assert "newly initialized: positions 128 to 255" in said
    assert "after 4 updates" in said
    assert len(helpers.losses(two)) == 3
    assert checkpoint.read_progress(two / "checkpoints" / "step-00000003").updates == 4 + 3
