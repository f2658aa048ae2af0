"""Compares runs: their metrics side by side, ratios and differences to the first run, and settings that differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from bertrain.base.console import PHASES
from bertrain.base.formatting import (
    BASELINE,
    amount,
    compact,
    duration,
    heading_of,
    is_better_low,
    is_share,
    show,
    title_of,
)  # fmt: skip
from bertrain.config.model_size import count_parameters
from bertrain.reports.history import History, best_by_metric
from bertrain.run.progress import seconds_left

UNKNOWN = "–"
MOST_SPREAD = 1.5  # of the predictions of a run's starts: a CPU is measured again at each
Fact = tuple[str, str, str]  # label, value, a small note


def facts(history: History) -> list[Fact]:
    """Label, value and a small note of each metric at the head of the report."""
    summary, settings = history.summary, history.run.settings
    parameters = count_parameters(settings.model)[0]
    last = f"mean of the last {summary.tail} steps" if summary.tail > 1 else "last step"
    length = f"in {settings.train.budget}" if settings.train.budget else f"of {settings.train.last_step():,}"
    per_step = summary.samples / max(summary.steps, 1)
    typical = compact(per_step / summary.median_step_s) if summary.median_step_s > 0 else UNKNOWN
    return [
        ("Model", f"{settings.model.num_layers} × {settings.model.hidden_size}", "layers × width"),
        ("Parameters", compact(parameters), f"{parameters:,}"),
        ("Steps", f"{summary.steps:,}", length),
        ("Samples", compact(summary.samples), f"{summary.samples:,} examples"),
        ("Tokens", compact(summary.tokens), f"{summary.tokens:,}, padding not counted"),
        ("Loss", show("loss", summary.last.get("loss")), last),
        *(
            (heading_of(metric), show(metric, value), last)
            for metric, value in summary.last.items()
            if metric == summary.headline or (summary.headline is None and metric == "mlm_accuracy")
        ),
        ("Best evaluation", *_best(history)),
        ("Throughput", compact(summary.tokens_per_s), "real tokens per second"),
        ("Examples/s", typical, f"in a typical step; {compact(summary.samples_per_s)} overall"),
        ("Step", milliseconds(summary.median_step_s), "median"),
        ("Predicted step", *_prediction(history)),
        ("Time in steps", duration(sum(summary.seconds)), "without evaluation and saving"),
        ("Evaluation", *_part_of_time(history, "evaluation_seconds")),
        ("Saving", *_part_of_time(history, "saving_seconds")),
        ("Time left", *_time_left(history)),
        ("Padding", show("padding_share", summary.padding), "of the computed tokens"),
        ("Idle ranks", show("idle_share", summary.idle if history.table.ranks else None), "of their time, estimated"),
        ("Energy", *_energy(history)),
    ]


def known_facts(history: History) -> list[Fact]:
    """The facts that are known; some in any case, since a reader looks for them."""
    sought = {"Loss", "Best evaluation"} | ({"Predicted step"} if not history.run.settings.task.name else set())
    return [fact for fact in facts(history) if fact[1] != UNKNOWN or fact[0] in sought]


def _best(history: History) -> tuple[str, str]:
    metric, best = history.summary.headline, history.summary.best
    if metric is None or best is None:
        return UNKNOWN, "none"
    baseline = best.metrics.get(f"{BASELINE}{metric}", best.metrics.get("constant_accuracy"))
    beside = f"; baseline {show(metric, baseline)}" if baseline is not None else ""
    return show(metric, best.metrics[metric]), f"{title_of(metric)}, at step {best.step:,}{beside}"


def _prediction(history: History) -> tuple[str, str]:
    """The step time that was predicted at the start, or at several starts that agree: on similar machines."""
    predicted = [found for start in history.starts if (found := start.get("predicted_step_ms") or 0) > 0]
    measured = 1e3 * history.summary.median_step_s
    if not predicted or not measured > 0:
        return UNKNOWN, "none: `bertrain plan` did not know this device, engine or task"
    if max(predicted) > MOST_SPREAD * min(predicted):
        return UNKNOWN, "none: it differed between the starts of the run"
    found = statistics.median(predicted)
    return milliseconds(found / 1e3), f"by `bertrain plan` at the start; measured {measured / found - 1:+.1%}"


def _part_of_time(history: History, name: str) -> tuple[str, str]:
    end = history.table.end
    seconds = getattr(end, name) if end else None
    if end is None or seconds is None:
        return UNKNOWN, "recorded at the end"
    return duration(seconds), f"{seconds / max(end.loop_seconds, 1e-9):.1%} of the time"


def _time_left(history: History) -> tuple[str, str]:
    speed, clock = history.summary.median_step_s, float(history.column("loop_seconds")[-1])
    left = seconds_left(history.run.settings.train, history.summary.steps, speed, clock)
    is_known = left is not None and history.table.end is None
    return duration(left or 0.0) if is_known else UNKNOWN, "at the speed of a typical step"


def _energy(history: History) -> tuple[str, str]:
    joules, tokens = history.telemetry.joules, history.summary.tokens
    if not joules:
        return UNKNOWN, "no telemetry"
    return amount(joules, "J"), f"{amount(joules / max(tokens, 1) * 1e6, 'J')} per million tokens"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.4g} ms" if math.isfinite(seconds) else UNKNOWN


# --- against the first run -------------------------------------------------------------------------


def against_first(histories: Sequence[History]) -> list[list[str]]:
    """Rows of the comparison with a cell for each run; the first run is the baseline."""
    first = histories[0]
    rows = [
        ["Throughput, times", *_ratios([run.summary.tokens_per_s for run in histories])],
        ["Examples per second, times", *_ratios([run.summary.samples_per_s for run in histories])],
        ["Median step, times as fast", *_ratios([1 / run.summary.median_step_s for run in histories])],
    ]
    metric, best = first.summary.headline, first.summary.best
    if metric is not None and best is not None:
        target = best.metrics[metric]
        reached = [_seconds_to_reach(run, metric, target) for run in histories]
        times = [duration(seconds) if math.isfinite(seconds) else "not reached" for seconds in reached]
        rows.append([f"Time in steps to {title_of(metric)} of {show(metric, target)}", *times])
        rows.append(["The same, times as fast", *_ratios([1 / max(seconds, 1e-9) for seconds in reached])])
    energies = [run.telemetry.joules / max(run.summary.tokens, 1) for run in histories]
    if all(energies):
        rows.append(["Energy per token, times", *_ratios(energies)])
    for metric in dict.fromkeys(metric for run in histories for metric in run.summary.last):
        values = [run.summary.last.get(metric, math.nan) for run in histories]
        rows.append([f"{heading_of(metric)}, last steps", *_differences(metric, values)])
    every_best = [best_by_metric(run) for run in histories]
    for metric in dict.fromkeys(metric for one in every_best for metric in one):
        values = [one.get(metric, math.nan) for one in every_best]
        rows.append([f"{heading_of(metric)}, best evaluation", *_differences(metric, values)])
    return rows


def _seconds_to_reach(history: History, metric: str, target: float) -> float:
    """Time in steps until an evaluation was as good as `target`; infinite if none was."""
    sign = -1 if is_better_low(metric) else 1
    with_metric = (one for one in history.evaluations if metric in one.metrics)
    step = next((one.step for one in with_metric if sign * one.metrics[metric] >= sign * target), None)
    if step is None:
        return math.inf
    until = history.column("step") <= step
    return float(sum(history.phase(phase)[until].sum(dtype=np.float64) for phase in PHASES))


def _ratios(values: Sequence[float]) -> list[str]:
    is_usable = 1e-12 < values[0] < math.inf
    return [f"{value / values[0]:.2f} ×" if is_usable and 1e-8 < value < math.inf else UNKNOWN for value in values]


def _differences(metric: str, values: Sequence[float]) -> list[str]:
    """Each value with its difference to the first, of shares in percentage points."""
    shown = [show(metric, value) for value in values]
    for number, value in enumerate(values[1:], start=1):
        if math.isfinite(value) and math.isfinite(values[0]):
            difference = value - values[0]
            shown[number] += f" ({100 * difference:+.2f} points)" if is_share(metric) else f" ({difference:+.4f})"
    return shown


# --- what they differ in ---------------------------------------------------------------------------


def settings_of(history: History) -> dict[str, str]:
    run = history.run
    given = {"run.data": str(run.data), "run.data_fingerprint": run.data_fingerprint[:12], "run.init": run.init}
    return given | run.settings.dotted()


def environment_of(history: History) -> dict[str, str]:
    last: dict[str, Any] = history.starts[-1] if history.starts else {}
    return {f"environment.{name}": str(value) for name, value in last.items() if name != "started"}


def differing(every: Sequence[dict[str, str]]) -> list[str]:
    """Names whose values are not the same in all, in order of appearance."""
    names = dict.fromkeys(name for one in every for name in one)
    return [name for name in names if len({one.get(name, "") for one in every}) > 1]
