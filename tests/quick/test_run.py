"""Metrics files and console lines, without a run."""

from __future__ import annotations

import math
from pathlib import Path

from bertrain.run.progress import console_line, seconds_left, time_shares
from bertrain.run.records import StepRecord, drop_after
from tests import helpers


def test_drop_after_keeps_whole_lines_up_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [f'{{"kind": "step", "step": {number}, "loss": {number}, "of_tomorrow": []}}\n' for number in (1, 2, 3)]
    evaluation = '{"kind": "evaluation", "step": 2}\n'
    end = '{"kind": "end", "step": 2, "reason": "done"}\n'
    path.write_text(steps[0] + steps[1] + evaluation + end + steps[2] + '{"st')
    assert [(step.step, step.loss) for step in drop_after(path, 2, num_kept=1)] == [(2, 2.0)]
    assert path.read_text() == steps[0] + steps[1] + evaluation


def test_console_line_worked_out_by_hand() -> None:
    def record(step: int, loss: float, seconds: float) -> StepRecord:
        shares = {"data": 0.1, "forward_backward": 0.7, "reduction": 0.1, "optimizer": 0.1}
        phases = {name: share * seconds for name, share in shares.items()}
        return StepRecord(
            step=step,
            loss=loss,
            mlm_accuracy=0.25,
            learning_rate=1e-3,
            tokens=500,
            seconds=phases,
            applied=step != 4,
            rank_tokens=(250, 250),
        )

    steps = [record(3, 2.0, 1.0), record(4, 4.0, 3.0)]
    assert console_line(steps, 100, 192.0) == (
        "step   4/100  loss 3.0000  masked words 25.00%  lr 1.00e-03  250 tokens/s  1 not finite, not applied"
        "  3 min 12 s left"
    )
    assert len(console_line(steps[:1], 1_000_000, 86400 * 99)) <= 100
    assert time_shares(steps) == "data 10% forward+backward 70% reduction 10% optimizer 10%"


def test_a_line_of_steps_that_were_all_left_out() -> None:
    seconds = {"data": 0.1, "forward_backward": 0.0, "reduction": 0.0, "optimizer": 0.0}
    skipped = StepRecord(5, skipped=True, applied=False, learning_rate=0.0, seconds=seconds)
    assert console_line([skipped], None, math.nan) == "step 5/?  1 skipped"


def test_the_time_left_by_the_records_alone() -> None:
    assert seconds_left(helpers.tiny_settings(train__max_steps=30).train, 10, 0.5, 590.0) == 20 * 0.5
    budgeted = helpers.tiny_settings(train__budget="10m", train__fits="4:100").train
    assert seconds_left(budgeted, 10, 0.5, 590.0) == 10.0, "what is left of the budget"
    assert seconds_left(helpers.tiny_settings(train__budget="10m").train, 10, 0.5, 590.0) == 10.0
    assert seconds_left(budgeted, 10, 0.5, math.nan) == 90 * 0.5, "older records have no clock"
    assert seconds_left(helpers.tiny_settings(train__budget="10m").train, 10, 0.5, math.nan) is None
