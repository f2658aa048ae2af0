"""`bertrain watch`: the state of a run, from its folder alone, while it runs or afterwards, on any machine.

The cost does not grow with the run: only the ends of its files are read, and the loss at a few places between.
Nothing is written or locked.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertrain.base import logs
from bertrain.base.console import PHASES
from bertrain.base.formatting import YARDSTICKS, amount, counted, duration, is_better_low, show, title_of
from bertrain.config.settings import TrainSettings
from bertrain.run import checkpoint
from bertrain.run.folder import ENVIRONMENT, Run, read_starts
from bertrain.run.progress import computed, seconds_left
from bertrain.run.records import (
    OWN_PHASES,
    EndRecord,
    EvaluationRecord,
    RanksRecord,
    Record,
    StepRecord,
    is_metric,
    newest,
    parse_lines,
    tails,
    to_dict,
)
from bertrain.run.telemetry_reader import newest_samples

if TYPE_CHECKING:
    from rich.console import Group

TAIL_BYTES, MAX_TAIL_BYTES = 256 << 10, 8 << 20  # of metrics.jsonl; a record of many ranks may be this long
NUM_RECENT = 50  # steps that speeds and means are taken over
NUM_PLACES, PLACE_BYTES = 40, 8 << 10  # where the loss is read for its curve
SILENT_S = 120.0  # time without output after which a run is reported as silent
MAX_RANKS, MAX_WARNINGS = 8, 3  # shown
BAR_WIDTH = 30  # characters
BLOCKS = "▁▂▃▄▅▆▇█"


# --- the state of a run ----------------------------------------------------------------------------


def look(run: str | Path) -> dict[str, Any]:
    """Return the state of a run as a dictionary: state, progress, speed, metrics, ranks, telemetry, warnings.

    Only reads the run folder. Raises UserError if it holds no run.
    """
    opened = Run.open(run)
    folder, train_settings = opened.folder, opened.settings.train
    records = _newest_records(folder / "metrics.jsonl")
    steps = [record for record in records if isinstance(record, StepRecord)][-NUM_RECENT:]
    state, why = _state(folder, records)
    evaluation, ranks = newest(records, EvaluationRecord), newest(records, RanksRecord)
    return {
        "run": str(folder),
        "state": state,
        "why": why,
        "last_word_s": _seconds_since_output(folder),
        "starts": len(read_starts(folder / ENVIRONMENT)),
        "max_steps": train_settings.last_step(),
        **(_progress(steps, train_settings) if steps else {"step": 0}),
        "loss_curve": loss_curve(folder / "metrics.jsonl"),
        "evaluation": to_dict(evaluation) if evaluation else None,
        "ranks": to_dict(ranks)["ranks"] if ranks else [],
        "telemetry": dict(sorted(newest_samples(folder).items())),
        "checkpoint": max(map(checkpoint.step_of, checkpoint.whole_checkpoints(opened.checkpoints)), default=None),
        "warnings": _warnings(folder),
    }


def _progress(steps: Sequence[StepRecord], train: TrainSettings) -> dict[str, Any]:
    last, recent = steps[-1], computed(steps)
    seconds = max(sum(step.duration for step in steps), 1e-9)
    names = [name for name, value in to_dict(last).items() if is_metric(name) and value is not None]
    return {
        "step": last.step,
        "samples": last.samples,
        "seconds_left": seconds_left(train, last.step, seconds / len(steps), last.loop_seconds),
        "tokens_per_s": sum(step.tokens for step in steps) / seconds,
        "seconds_per_step": seconds / len(steps),
        "phases": {phase: sum(step.seconds.get(phase, 0.0) for step in steps) / seconds for phase in PHASES},
        "metrics": {name: mean_of(getattr(step, name) for step in recent) for name in names},
        "learning_rate": mean_of([last.learning_rate]),
        "not_finite": last.not_finite,
    }


def _state(folder: Path, records: Sequence[Record]) -> tuple[str, str]:
    """Whether the run is running, ended, stopped, failed or silent, and why; a killed run leaves no reason."""
    end = newest(records, EndRecord)
    if end is not None:
        return "ended", end.reason
    for entry in reversed(logs.newest_entries(folder, 0)):
        if entry.get("event") in ("stop", "failure", "hang"):
            return ("failed" if entry["event"] != "stop" else "stopped"), entry["text"]
        if entry.get("event") in ("start", "steps"):
            break
    silent = _seconds_since_output(folder)
    if silent is not None and silent > SILENT_S:
        return "silent", f"no output for {duration(silent)}: the run is busy, or was killed"
    return "running", ""


def _seconds_since_output(folder: Path) -> float | None:
    """Seconds since metrics or logs were written, by this machine's clock."""
    paths = [folder / "metrics.jsonl", *(folder / logs.FOLDER).glob("rank-*.jsonl")]
    times = [os.stat(path).st_mtime for path in paths if path.is_file()]
    return max(0.0, time.time() - max(times)) if times else None


def _warnings(folder: Path) -> list[str]:
    """The newest warnings and errors at the ends of all ranks' logs."""
    entries = [entry for rank in logs.ranks_with_logs(folder) for entry in logs.newest_entries(folder, rank)]
    warnings = [entry for entry in entries if logs.LEVELS.get(entry["level"], 0) >= logs.LEVELS["warning"]]
    return [logs.describe(entry) for entry in sorted(warnings, key=lambda entry: entry["time"])[-MAX_WARNINGS:]]


def _newest_records(path: Path) -> list[Record]:
    """The records at the end of a metrics file, enough to hold the recent steps."""
    records: list[Record] = []
    for records in tails(path, TAIL_BYTES, MAX_TAIL_BYTES):
        if sum(isinstance(record, StepRecord) for record in records) >= NUM_RECENT:
            break
    return records


def loss_curve(path: Path) -> list[float | None]:
    """The loss from the first step to the newest; of a long file, means at evenly spaced places."""

    def losses_in(text: bytes) -> list[float]:
        return [record.loss for record in parse_lines(text) if isinstance(record, StepRecord)]

    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size <= NUM_PLACES * PLACE_BYTES:
                file.seek(0)
                losses = losses_in(file.read())
                group = max(1, -(-len(losses) // NUM_PLACES))
                return [mean_of(losses[first : first + group]) for first in range(0, len(losses), group)]
            curve = []
            for place in range(NUM_PLACES):
                file.seek(size * place // NUM_PLACES)
                curve.append(mean_of(losses_in(file.read(PLACE_BYTES))))
            return curve
    except OSError:
        return []


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of the finite values, or None."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


# --- on a terminal ---------------------------------------------------------------------------------


def watch(run: str | Path, *, once: bool = False, every_s: float = 2.0, as_json: bool = False) -> None:
    """Show the state of a run on the terminal every `every_s` seconds until the run ends, or `once`.

    A run that stops and is started again is followed. `as_json` prints one line of JSON each time.
    """
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    live = None if as_json or once else Live(console=console, auto_refresh=False)
    with live or nullcontext():
        while True:
            seen = look(run)
            if as_json:
                print(json.dumps(seen), flush=True)
            elif live is None:
                console.print(frame(seen))
            else:
                live.update(frame(seen), refresh=True)
            if once or seen["state"] == "ended":
                return
            time.sleep(every_s)


def frame(seen: dict[str, Any]) -> Group:
    """The state of a run as text, as wide as the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    color = {"running": "green", "ended": "blue", "silent": "yellow"}.get(seen["state"], "red")
    head = Text.assemble((seen["run"], "bold"), "  ", (seen["state"], color), f"  {seen['why']}".rstrip())
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True, style="dim")
    for label, text in describe(seen):
        lines.add_row(Text(label), Text(text))
    return Group(head, lines, *(Text(warning, style="yellow") for warning in seen["warnings"]))


def describe(seen: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("step", step_text(seen))]
    if seen["step"]:
        rate = f"{seen['tokens_per_s']:,.0f} tokens/s  {1e3 * seen['seconds_per_step']:,.1f} ms per step"
        phases = "  ".join(f"{phase.replace('_', '+')} {share:.0%}" for phase, share in seen["phases"].items())
        known = [loss for loss in seen["loss_curve"] if loss is not None]
        ends = f"  {known[0]:.3f} to {known[-1]:.3f}" if known else ""
        learning = f"  learning rate {seen['learning_rate']:.2e}" if seen["learning_rate"] is not None else ""
        lines += [
            ("rate", rate),
            ("time", phases),
            ("now", _metric_text(seen["metrics"]) + learning),
            ("loss", sparkline(seen["loss_curve"]) + ends),
        ]
    if seen["evaluation"]:
        lines.append(("evaluation", f"step {seen['evaluation']['step']:,}: {_metric_text(seen['evaluation'])}"))
    lines += _rank_lines(seen["ranks"])
    lines += [(device, _sample_text(sample)) for device, sample in seen["telemetry"].items()]
    saved = f"step {seen['checkpoint']:,}" if seen["checkpoint"] is not None else "none yet"
    output = f"{duration(seen['last_word_s'])} ago" if seen["last_word_s"] is not None else "none"
    return [*lines, ("checkpoint", f"{saved}; {counted(seen['starts'], 'start')}; last output {output}")]


def step_text(seen: dict[str, Any], bar_width: int = BAR_WIDTH) -> str:
    """The newest step of all, and the time left, behind a bar in characters."""
    total, step = seen["max_steps"], seen["step"]
    if not total:
        return f"{step:,} of ?, until the time of some steps is known"
    bar = "█" * round(bar_width * min(1.0, step / total))
    is_running = step and seen["state"] in ("running", "silent")
    left = f", {duration(seen['seconds_left'])} left" if is_running and seen["seconds_left"] is not None else ""
    return f"{bar:░<{bar_width}}  {step:,} of {total:,}, {step / total:.1%}{left}".strip()


def _metric_text(values: dict[str, Any]) -> str:
    """The total loss and the other metrics; the parts of the loss are in the report."""
    names = [name for name in values if is_metric(name) and not name.startswith(YARDSTICKS)]
    shown = [name for name in names if name == "loss" or not is_better_low(name)]
    return "  ".join(f"{title_of(name)} {show(name, values[name])}" for name in shown or names)


def _rank_lines(ranks: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Each rank's own time per step and its wait for the others; of many ranks, the slowest."""

    def seconds(entry: dict[str, Any], *phases: str) -> float:
        return sum(entry["seconds"].get(phase) or 0.0 for phase in phases)

    slowest = sorted(ranks, key=lambda entry: seconds(entry, *OWN_PHASES), reverse=True)[:MAX_RANKS]
    lines = []
    for entry in sorted(slowest, key=lambda entry: int(entry["rank"])):
        own, waiting = seconds(entry, *OWN_PHASES), seconds(entry, "reduction")
        times = f"{1e3 * own:,.1f} ms own work  {1e3 * waiting:,.1f} ms waiting"
        lines.append((f"rank {entry['rank']}", f"{times}  {entry['host']}"))
    return lines + [("", f"and {len(ranks) - len(slowest):,} faster ranks")] * (len(ranks) > len(slowest))


def _sample_text(sample: dict[str, float]) -> str:
    units = {"power_w": "W", "temperature_c": "°C", "sm_clock_mhz": "MHz"}
    parts = [f"{sample[name]:,.0f} {unit}" for name, unit in units.items() if name in sample]
    parts += [f"{name.replace('_', ' ')} {value:.3g}" for name, value in sample.items() if "utilisation" in name]
    in_bytes = {name.removesuffix("_bytes"): value for name, value in sample.items() if name.endswith("_bytes")}
    parts += [f"{name.replace('_', ' ')} {amount(value, 'B')}" for name, value in in_bytes.items()]
    return "  ".join(parts) or f"{len(sample)} other values"


def sparkline(values: Sequence[float | None]) -> str:
    """A curve in one line of text, with gaps for None."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else BLOCKS[round((value - low) * scale)] for value in values)
