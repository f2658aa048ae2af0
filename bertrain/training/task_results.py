"""The metrics of fine-tuned runs, over seeds and tasks: a table for people, and results.json for programs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertrain.base.console import warn
from bertrain.base.files import write_atomically
from bertrain.base.formatting import BASELINE, THRESHOLD, show_brief
from bertrain.run import checkpoint
from bertrain.run.folder import Run
from bertrain.run.records import (
    ClassScores,
    EndRecord,
    EvaluationRecord,
    Record,
    StepRecord,
    read_records,
    to_dict,
)

RESULTS, METRICS = "results.json", "metrics.jsonl"
SPEED, SPEED_OVERALL = "train_examples_per_s", "train_examples_per_s_overall"
NO_SCORES = ("examples", "latency", "train_examples", BASELINE, THRESHOLD)
"""Prefixes of metrics of speed, size, and nothing."""


@dataclass(frozen=True)
class Outcome:
    """The metrics of the runs of one task, one run for each seed."""

    task: str
    seeds: tuple[int, ...]
    metrics: dict[str, tuple[float, ...]]
    """By name, one value for each seed."""
    keeps_best: bool = False
    """Whether they are of each run's best evaluation, whose checkpoint it keeps, instead of the last."""
    by_class: dict[str, dict[str, tuple[float, ...]]] = field(default_factory=dict)
    """The scores of each class by label and name, one value for each seed."""

    @staticmethod
    def of(task: str, seeds: Sequence[int], runs: Sequence[Path]) -> Outcome:
        """The outcome of the `runs` of the first of `seeds`, from the metrics and classes that all of them have."""
        by_class = [{one.pop("label"): one for one in map(to_dict, classes_of(run))} for run in runs]
        classes = {label: _join([one[label] for one in by_class]) for label in _common(by_class)}
        keeps_best = checkpoint_of(runs[-1]) == "best"
        return Outcome(task, tuple(seeds[: len(runs)]), _join([metrics_of(run) for run in runs]), keeps_best, classes)

    def mean(self, name: str) -> float:
        return statistics.fmean(self.metrics[name])

    def deviation(self, name: str) -> float:
        return sample_deviation(self.metrics[name])

    def to_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "seeds": list(self.seeds),
            "evaluation": "best" if self.keeps_best else "last",
            "figures": _over_seeds(self.metrics),
            "by_class": [{"label": label} | _over_seeds(scores) for label, scores in self.by_class.items()],
        }


def _common(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in found[0] if all(name in one for one in found)]


def _join(found: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, ...]]:
    """The values of several runs under each name that all of them have."""
    return {name: tuple(one[name] for one in found) for name in _common(found)}


def sample_deviation(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 for a single run."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _over_seeds(metrics: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    return {
        name: {"mean": statistics.fmean(values), "deviation": sample_deviation(values), "values": list(values)}
        for name, values in metrics.items()
    }


def write_results(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the outcomes as JSON; a failure is only warned of, since they can be read again from the runs."""
    try:
        write_atomically(path, json.dumps([one.to_dict() for one in outcomes], indent=1) + "\n")
    except OSError as error:
        warn(f"could not write {path}: {error.strerror or error}; the runs themselves are complete")


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as text: each task's metrics, mean and deviation over seeds, and its training speed.

    Several tasks of GLUE have an average in the last line, to which each task contributes the mean of its metrics.
    """
    width = max(len(outcome.task) for outcome in outcomes)
    lines, means = [], []
    for outcome in outcomes:
        seeds = f" ({len(outcome.seeds)} seeds)" if len(outcome.seeds) > 1 else ""
        of_splits = [name for name in outcome.metrics if not name.startswith(THRESHOLD)]  # whose labels may have a /
        scores = [name for name in of_splits if not name.rpartition("/")[2].startswith(NO_SCORES)]
        shown = [
            f"{name} {show_brief(name, outcome.mean(name))}"
            + (f" +- {show_brief(name, outcome.deviation(name), 2)}" if seeds else "")
            + (
                f" (baseline {show_brief(name, outcome.mean(BASELINE + name))})"
                if BASELINE + name in outcome.metrics
                else ""
            )
            for name in scores
        ]
        best = "  at the best evaluation" if outcome.keeps_best else ""
        speed = f"  {outcome.mean(SPEED):,.0f} sentences/s" if SPEED in outcome.metrics else ""
        speed += f", {outcome.mean(SPEED_OVERALL):,.0f} overall" if SPEED_OVERALL in outcome.metrics else ""
        lines.append(f"{outcome.task:<{width}}{seeds}  {'  '.join(shown)}{best}{speed}")
        means += [statistics.fmean(outcome.mean(name) for name in scores)] if scores else []
    if len(means) > 1 and all(outcome.task.startswith("glue/") for outcome in outcomes):
        lines.append(f"{'average':<{width}}  {statistics.fmean(means):.4g} of {len(means)} tasks")
    return "\n".join(lines)


def checkpoint_of(run: str | Path) -> str:
    """The checkpoint that a run's metrics belong to: `best` if the run keeps one, else `newest`."""
    return "newest" if checkpoint.read_best(Run.open(run).checkpoints) is None else "best"


def metrics_of(run: str | Path) -> dict[str, float]:
    """A run's metrics at its last evaluation, or at its best if it keeps that one; and its training speed."""
    records = read_records(Path(run) / METRICS)
    metrics = _evaluation(run, records).metrics
    return {name: value for name, value in metrics.items() if math.isfinite(value)} | training_speed(records)


def classes_of(run: str | Path) -> tuple[ClassScores, ...]:
    """The scores of each class at the evaluation of `metrics_of`; empty of a task without classes."""
    return _evaluation(run, read_records(Path(run) / METRICS)).by_class or ()


def _evaluation(run: str | Path, records: Sequence[Record]) -> EvaluationRecord:
    """The evaluation that counts; without metrics if there was none."""
    best = checkpoint.read_best(Run.open(run).checkpoints)
    evaluations = [one for one in records if isinstance(one, EvaluationRecord) and best in (None, one.step)]
    return evaluations[-1] if evaluations else EvaluationRecord(0)


def training_speed(records: Sequence[Record]) -> dict[str, float]:
    """Examples per second of the median step, and of the whole loop with its evaluations and checkpoints."""
    steps = [record for record in records if isinstance(record, StepRecord) and not record.skipped]
    if len(steps) < 2:
        return {}
    per_step = (steps[-1].samples - steps[0].samples) / (len(steps) - 1)
    speed = {SPEED: per_step / statistics.median(step.duration for step in steps)}
    end = records[-1]
    if isinstance(end, EndRecord) and end.loop_seconds > 0:
        speed[SPEED_OVERALL] = end.samples / end.loop_seconds
    return speed
