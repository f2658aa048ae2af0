"""Records of metrics.jsonl: the lines of older versions, key by key, and what is missing, unknown or not finite."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bertrain.run import records
from bertrain.run.records import (
    ClassScores,
    EndRecord,
    EvaluationRecord,
    RankMeans,
    RanksRecord,
    Record,
    StepRecord,
    from_dict,
    is_metric,
    last_record,
    read_records,
    to_dict,
)

OLDER = Path(__file__).parents[1] / "data" / "written-by-8764bd3"


@pytest.mark.parametrize("run", ["pretrained", "finetuned"])
def test_lines_of_older_runs_come_back_as_they_were(run: str) -> None:
    path = OLDER / run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    assert [json.dumps(to_dict(record)) for record in read_records(path)] == lines


@pytest.mark.parametrize(
    "record",
    [
        StepRecord(3, 30, 300, 0.5, accuracy=0.25, seconds={"data": 1.0}, rank_tokens=(1, 2), rank_attention=(3, 4)),
        StepRecord(4, loss_scale=2.0, applied=False, skipped=True, not_finite=2, spike=True),
        EvaluationRecord(3, 30, {"f1": 0.5, "examples": 7.0}),
        EvaluationRecord(
            3, 30, {"f1": 0.5}, (ClassScores("a/b", 1.0, 0.5, 2 / 3, 2), ClassScores("", 0.0, 0.0, 0.0, 0))
        ),
        RanksRecord(3, (RankMeans(0, "one", 5.0, {"data": 0.5}), RankMeans(1, "two", 6.0, {"data": 0.25}))),
        EndRecord(3, 30, "done", 1.5, joules=2.0, joules_per_million_tokens=3.0),
    ],
)
def test_a_record_survives_its_line(record: Record) -> None:
    line = json.loads(json.dumps(to_dict(record)), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    # NaN differs from itself, but its line is the same.
    assert to_dict(from_dict(line | {"of_tomorrow": {"a": [1]}}) or record) == to_dict(record)


def test_not_finite_is_null_and_none_is_absent() -> None:
    line = to_dict(StepRecord(1, loss=math.inf, mlm_loss=math.nan, ended=math.nan))
    assert line["loss"] is line["mlm_loss"] is line["ended"] is None
    assert not {"nsp_loss", "accuracy", "loss_scale", "rank_tokens"} & line.keys()
    read = from_dict(line)
    assert isinstance(read, StepRecord)
    assert read.mlm_loss is not None
    assert math.isnan(read.loss + read.mlm_loss + read.ended)
    assert read.nsp_loss is None
    energy = to_dict(EndRecord(1, joules=math.nan))
    assert (energy["joules"], "joules_per_million_tokens" in energy) == (None, False)


def test_missing_keys_have_defaults_and_unknown_kinds_are_ignored() -> None:
    assert from_dict({"kind": "step", "step": 7}) is not None
    assert from_dict({"kind": "evaluation", "step": 7}) == EvaluationRecord(7)
    assert from_dict({"kind": "of tomorrow", "step": 7}) is None


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_records(path) == []
    assert last_record(path, StepRecord) is None
    path.write_bytes(b'{"kind": "step", "step": 1}\n\0\0\n[]\n{"kind": 5}\n{"kind": "step"}\n{"kind": "step", "st')
    assert [record.step for record in read_records(path)] == [1]


@pytest.mark.parametrize("seconds", ["null", "NaN", "1e999", '"x"'])
def test_a_line_whose_seconds_are_no_numbers_is_left_out(tmp_path: Path, seconds: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "step", "step": 1, "seconds": {{"data": {seconds}}}}}\n')
    assert read_records(tmp_path / "metrics.jsonl") == []


def test_a_resumed_run_keeps_damaged_lines_and_drops_a_torn_end(tmp_path: Path) -> None:
    """A flipped bit in a record must not take the record away: a report counts the line as unreadable."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(to_dict(StepRecord(number))) + "\n" for number in range(1, 6)]
    damaged = lines[1].replace('"step": 2', '"step"; 2')
    path.write_text("".join([lines[0], damaged, *lines[2:]]) + lines[0][:9])
    assert [record.step for record in records.drop_after(path, 4, num_kept=2)] == [3, 4]
    assert path.read_text() == lines[0] + damaged + lines[2] + lines[3]


def test_the_last_record_is_found_however_far_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records.tails, "__defaults__", (100, math.inf))
    lines: list[Record] = [EvaluationRecord(1), *(StepRecord(number) for number in range(1, 50))]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(to_dict(line)) + "\n" for line in lines))
    assert last_record(path, EvaluationRecord) == EvaluationRecord(1)
    newest = last_record(path, StepRecord)
    assert newest is not None
    assert newest.step == 49
    assert last_record(path, EndRecord) is None


def test_metrics_are_told_from_counters_and_speeds() -> None:
    names = ("loss", "mlm_accuracy", "f1", "step", "kind", "gradient_norm", "seconds.data", "examples", "reason")
    assert [name for name in (*names, "tokens_per_s", "latency_ms_p50") if is_metric(name)] == [
        "loss",
        "mlm_accuracy",
        "f1",
    ]
