"""How a run stands now, from its files alone: from another shell, another machine, while it goes on or after.

A look costs the same however long the run is: it reads the ends of its files, and the loss at some places between.
Nothing is written, and no lock is touched.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertrain.base import logs
from bertrain.base.console import PHASES, computed, seconds_left
from bertrain.base.formatting import YARDSTICKS, amount, duration, is_better_low, is_metric, show, title_of
from bertrain.run import checkpoint
from bertrain.run.folder import Run
from bertrain.run.samples import newest

if TYPE_CHECKING:
    from rich.console import Group

TAIL_BYTES, MOST_TAIL_BYTES = 256 << 10, 8 << 20  # of metrics.jsonl: more, where one line of all ranks is as long
RECENT = 50  # steps that rates and means are over
NUM_PLACES, PLACE_BYTES = 40, 8 << 10  # where the loss is looked up for its curve
SILENT_S = 120.0  # without a word: long enough to be said
MOST_RANKS, MOST_WARNINGS = 8, 3  # that are shown
BAR = 30  # characters
BLOCKS = "▁▂▃▄▅▆▇█"


# --- one look --------------------------------------------------------------------------------------


def look(run: str | Path) -> dict[str, Any]:
    """How a run stands now, as a dictionary: state, progress, rate, metrics, ranks, telemetry, warnings.

    It only reads the run folder. Raises UserError where there is no run.
    """
    opened = Run.open(run)
    folder, how = opened.folder, opened.settings.train
    records = _tail_of(folder / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "step"][-RECENT:]
    max_steps = None if how.budget and not opened.measured else how.max_steps
    state, why = _state(folder, records)
    return {
        "run": str(folder),
        "state": state,
        "why": why,
        "last_word_s": _last_word(folder),
        "starts": _count_starts(folder),
        "max_steps": max_steps,
        **(_progress(steps, max_steps) if steps else {"step": 0}),
        "loss_curve": loss_curve(folder / "metrics.jsonl"),
        "evaluation": _newest(records, "evaluation"),
        "ranks": (_newest(records, "ranks") or {}).get("ranks", []),
        "telemetry": dict(sorted(newest(folder).items())),
        "checkpoint": max(map(checkpoint.step_of, checkpoint.whole_checkpoints(opened.checkpoints)), default=None),
        "warnings": _warnings(folder),
    }


def _progress(steps: Sequence[dict[str, Any]], max_steps: int | None) -> dict[str, Any]:
    """What the newest steps say."""
    last, good = steps[-1], computed(list(steps))
    seconds = max(sum(sum(record["seconds"].values()) for record in steps), 1e-9)
    names = [name for name in last if is_metric(name) and isinstance(last[name], float)]
    return {
        "step": last["step"],
        "samples": last.get("samples"),
        "seconds_left": seconds_left(list(steps), max_steps) if max_steps else None,
        "tokens_per_s": sum(record.get("tokens", 0) for record in steps) / seconds,
        "seconds_per_step": seconds / len(steps),
        "phases": {phase: sum(record["seconds"].get(phase, 0.0) for record in steps) / seconds for phase in PHASES},
        "metrics": {name: mean_of(record.get(name) for record in good) for name in names},
        "learning_rate": last.get("learning_rate"),
        "not_finite": last.get("not_finite", 0),
    }


def _state(folder: Path, records: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Whether it runs, has ended, stopped, or failed, and why; a run that was killed says nothing more."""
    end = _newest(records, "end")
    if end is not None:
        return "ended", end["reason"]
    for entry in reversed(logs.newest_entries(folder, 0)):
        if entry.get("event") in ("stop", "failure", "hang"):
            return ("failed" if entry["event"] != "stop" else "stopped"), entry["text"]
        if entry.get("event") in ("start", "steps"):
            break
    silent = _last_word(folder)
    if silent is not None and silent > SILENT_S:
        return "silent", f"nothing was written for {duration(silent)}: busy with something long, or killed"
    return "running", ""


def _last_word(folder: Path) -> float | None:
    """Seconds since anything was written, by this machine's clock."""
    paths = [folder / "metrics.jsonl", *(folder / logs.FOLDER).glob("rank-*.jsonl")]
    times = [os.stat(path).st_mtime for path in paths if path.is_file()]
    return max(0.0, time.time() - max(times)) if times else None


def _count_starts(folder: Path) -> int:
    try:
        return len(json.loads((folder / "environment.json").read_text()))
    except (OSError, ValueError, TypeError):
        return 0


def _warnings(folder: Path) -> list[str]:
    """The newest warnings and errors of all ranks, as far as the ends of their logs tell."""
    entries = [entry for rank in logs.ranks_with_logs(folder) for entry in logs.newest_entries(folder, rank)]
    told = [entry for entry in entries if logs.LEVELS.get(entry["level"], 0) >= logs.LEVELS["warning"]]
    return [logs.describe(entry) for entry in sorted(told, key=lambda entry: entry["time"])[-MOST_WARNINGS:]]


def _tail_of(path: Path) -> list[dict[str, Any]]:
    """The records at the end of a metrics file: enough of them to hold some steps."""
    num_bytes, records = TAIL_BYTES, list[dict[str, Any]]()
    while num_bytes <= MOST_TAIL_BYTES:
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - num_bytes))
                records = _records(file.read())
        except OSError:
            return []
        if num_bytes >= size or sum(record["kind"] == "step" for record in records) >= RECENT:
            break
        num_bytes *= 4
    return records


def _records(text: bytes) -> list[dict[str, Any]]:
    """The whole lines of a piece of a metrics file; those torn by its edges, or by a crash, are left out."""
    records = []
    for line in text.split(b"\n"):
        try:
            record = json.loads(line)
            if isinstance(record["step"], int) and isinstance(record["kind"], str):
                records.append(record)
        except (ValueError, KeyError, TypeError):
            continue
    return records


def loss_curve(path: Path) -> list[float | None]:
    """The loss from the beginning to now; in a long file looked up at equal distances, the mean of the steps there."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            if size <= NUM_PLACES * PLACE_BYTES:
                file.seek(0)
                losses = [record.get("loss") for record in _records(file.read()) if record["kind"] == "step"]
                group = max(1, -(-len(losses) // NUM_PLACES))
                return [mean_of(losses[first : first + group]) for first in range(0, len(losses), group)]
            curve = []
            for place in range(NUM_PLACES):
                file.seek(size * place // NUM_PLACES)
                nearby = _records(file.read(PLACE_BYTES))
                curve.append(mean_of(record.get("loss") for record in nearby if record["kind"] == "step"))
            return curve
    except OSError:
        return []


def _newest(records: Sequence[dict[str, Any]], kind: str) -> dict[str, Any] | None:
    return next((record for record in reversed(records) if record["kind"] == kind), None)


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


# --- on a terminal ---------------------------------------------------------------------------------


def watch(run: str | Path, *, once: bool = False, every_s: float = 2.0, as_json: bool = False) -> None:
    """Show how a run stands on the terminal, again and again, until it has ended; `once`: one look.

    A run that stops to be started again is followed. With `as_json`, a look is one line of JSON.
    """
    from rich.console import Console
    from rich.live import Live

    with ExitStack() as stack:
        console, live = Console(highlight=False), None
        if not as_json and not once:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
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
    """One look for people: as wide as the terminal, with what is known and nothing else."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    colour = {"running": "green", "ended": "blue", "silent": "yellow"}.get(seen["state"], "red")
    head = Text.assemble((seen["run"], "bold"), "  ", (seen["state"], colour), f"  {seen['why']}".rstrip())
    lines = Table.grid(padding=(0, 2))
    lines.add_column(no_wrap=True, style="dim")
    for label, text in describe(seen):
        lines.add_row(Text(label), Text(text))
    return Group(head, lines, *(Text(warning, style="yellow") for warning in seen["warnings"]))


def describe(seen: dict[str, Any]) -> list[tuple[str, str]]:
    """What a look shows below its head: labels and lines."""
    lines = [("step", _step_text(seen))]
    if seen["step"]:
        rate = f"{seen['tokens_per_s']:,.0f} tokens/s  {1e3 * seen['seconds_per_step']:,.1f} ms a step"
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
    kept = f"step {seen['checkpoint']:,}" if seen["checkpoint"] is not None else "none yet"
    word = f"{duration(seen['last_word_s'])} ago" if seen["last_word_s"] is not None else "none"
    return [*lines, ("checkpoint", f"{kept}; {seen['starts']} start(s); last word {word}")]


def _step_text(seen: dict[str, Any]) -> str:
    total, step = seen["max_steps"], seen["step"]
    if not total:
        return f"{step:,} of ?, until the budget is measured"
    bar = "█" * round(BAR * min(1.0, step / total))
    is_going_on = step and seen["state"] in ("running", "silent")
    left = f"  {duration(seen['seconds_left'])} left" if is_going_on else ""
    return f"{bar:░<{BAR}}  {step:,} of {total:,}  {step / total:.1%}{left}"


def _metric_text(values: dict[str, Any]) -> str:
    """The loss, and whatever is no loss; parts of a loss are in the report."""
    names = [name for name in values if is_metric(name) and name not in YARDSTICKS]
    shown = [name for name in names if name == "loss" or not is_better_low(name)]
    return "  ".join(f"{title_of(name)} {show(name, values[name])}" for name in shown or names)


def _rank_lines(ranks: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Each rank's own time of a step and its wait for the others; of many, those that take longest."""

    def own(entry: dict[str, Any]) -> float:
        seconds: float = entry["seconds"]["data"] + entry["seconds"]["forward_backward"]
        return seconds

    slowest = sorted(ranks, key=own, reverse=True)[:MOST_RANKS]
    lines = []
    for entry in sorted(slowest, key=lambda entry: int(entry["rank"])):
        times = f"{1e3 * own(entry):,.1f} ms of its own  {1e3 * entry['seconds']['reduction']:,.1f} ms waiting"
        lines.append((f"rank {entry['rank']}", f"{times}  {entry['host']}"))
    return lines + [("", f"and {len(ranks) - len(slowest):,} ranks that take less")] * (len(ranks) > len(slowest))


def _sample_text(sample: dict[str, float]) -> str:
    """The numbers of a sample that are known here, power first."""
    units = {"power_w": "W", "temperature_c": "°C", "sm_clock_mhz": "MHz"}
    parts = [f"{sample[name]:,.0f} {unit}" for name, unit in units.items() if name in sample]
    parts += [f"{name.replace('_', ' ')} {value:.3g}" for name, value in sample.items() if "utilisation" in name]
    parts += [
        f"{name.removesuffix('_bytes').replace('_', ' ')} {amount(value, 'B')}"
        for name, value in sample.items()
        if name.endswith("_bytes")
    ]
    return "  ".join(parts) or f"{len(sample)} numbers, none of which is known here"


def sparkline(values: Sequence[float | None]) -> str:
    """A curve in one line of text; a gap where nothing is known."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else BLOCKS[round((value - low) * scale)] for value in values)
