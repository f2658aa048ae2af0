"""Console output of a run: a progress bar on a terminal, plain lines elsewhere, or nothing.

Lines hold the same information as the bar. Warnings are always printed. Everything is also written into the rank's log
(logs.py), whatever the console shows.
"""

from __future__ import annotations

import sys
from typing import Any

from bertrain.base.formatting import duration
from bertrain.base.logs import note

UNSAID = ("step",)
PHASES = ("data", "forward_backward", "reduction", "optimizer")


def warn(message: str) -> None:
    """Print a warning to stderr, and log it."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
    note("warning", "warning", message)


def remark(message: str) -> None:
    """Print a remark to stderr."""
    print(message, file=sys.stderr, flush=True)


class Console:
    """Prints what a run does. `level` is quiet, normal or verbose; `style` is auto, bar or lines."""

    def __init__(self, level: str = "normal", style: str = "auto", *, is_speaker: bool = True) -> None:
        self.level, self._is_speaker = level if is_speaker else "quiet", is_speaker
        self._live = self.level != "quiet" and (style == "bar" or (style == "auto" and sys.stdout.isatty()))
        self._bar: Any = None
        self._task: Any = None

    def say(self, message: str) -> None:
        """Print and log one line, above the bar if there is one."""
        if self._is_speaker:
            note("info", "said", message)
        self._show(message)

    def _show(self, message: str) -> None:
        if self.level == "quiet":
            return
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        else:
            print(message, flush=True)

    def detail(self, message: str) -> None:
        """Print one line at level verbose."""
        if self.level == "verbose":
            self._show(message)

    def start(self, first_step: int, last_step: int | None) -> None:
        """Show the bar, on a terminal; `last_step` is None where it is not known yet."""
        if not self._live:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        fixed = Column(no_wrap=True)
        self._bar = Progress(
            MofNCompleteColumn(table_column=fixed),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            TextColumn("{task.description}", table_column=fixed),
            TextColumn("{task.fields[left]}", table_column=fixed),
            expand=True,
        )
        self._task = self._bar.add_task("starting", total=last_step, completed=first_step, left="")
        self._bar.start()

    def steps(self, records: list[dict[str, Any]], last_step: int | None) -> None:
        """The steps since the last call, in one line or on the bar."""
        line = console_line(records, last_step)
        note("info", "steps", line, step=records[-1]["step"])
        if self._bar is not None:
            shown = {"description": brief(records), "left": time_left(records, last_step)}
            self._bar.update(self._task, completed=records[-1]["step"], total=last_step, **shown)
        else:
            self._show(line)
        self.detail(f"  gradient norm {records[-1]['gradient_norm']:.3g}; {time_shares(records)}{idle_ranks(records)}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def console_line(records: list[dict[str, Any]], last_step: int | None) -> str:
    """The steps since the last line: means, real tokens per second, where the time went, what is left."""
    newest, last = records[-1]["step"], str(last_step or "?")
    line = f"step {newest:>{len(last)}}/{last}  {figures(records)}  {time_shares(records)}"
    return f"{line}  {time_left(records, last_step)}".rstrip()


def time_left(records: list[dict[str, Any]], last_step: int | None) -> str:
    """How long it will take at the speed of these steps, if the end is known."""
    return f"{duration(seconds_left(records, last_step))} left" if last_step else ""


def figures(records: list[dict[str, Any]]) -> str:
    """Mean loss and accuracy, the newest rate, and real tokens per second over these steps."""
    left_out = len(records) - len(computed(records))
    if left_out == len(records):
        return f"{left_out} left out"
    not_finite = sum(not record["applied"] for record in records) - left_out
    note = f"  {not_finite} not finite, not applied" if not_finite else ""
    note += f"  {left_out} left out" if left_out else ""
    speed = sum(record["tokens"] for record in records) / max(_seconds(records), 1e-9)
    return (
        f"loss {_mean(records, 'loss'):.4f}  {accuracy_text(records, 2)}"
        f"lr {records[-1]['learning_rate']:.2e}  {speed:,.0f} tokens/s{note}"
    )


def brief(records: list[dict[str, Any]]) -> str:
    """What fits beside a bar on a terminal of 80 columns."""
    if not computed(records):
        return f"{len(records)} left out"
    speed = sum(record["tokens"] for record in records) / max(_seconds(records), 1e-9)
    return f"loss {_mean(records, 'loss'):.3f}  {accuracy_text(records, 1)}{speed:,.0f} tokens/s"


def accuracy_text(records: list[dict[str, Any]], digits: int) -> str:
    """The share of right answers, of masked words or of a task; nothing where answers are numbers."""
    for name, what in (("mlm_accuracy", "masked words"), ("accuracy", "right")):
        if name in records[-1]:
            return f"{what} {_mean(records, name):.{digits}%}  "
    return ""


def time_shares(records: list[dict[str, Any]]) -> str:
    """Which share of the time went into each phase; one rank alone has nothing to sum."""
    total = max(_seconds(records), 1e-9)
    return " ".join(
        f"{phase.replace('_', '+')} {sum(record['seconds'][phase] for record in records) / total:.0%}"
        for phase in PHASES
        if phase != "reduction" or any("rank_tokens" in record for record in records)
    )


def idle_ranks(records: list[dict[str, Any]]) -> str:
    """Which share of their time the ranks wait for the busiest, where there are several."""
    return f"; ranks idle {_mean(records, 'idle_share'):.1%}" if "rank_tokens" in records[-1] else ""


def seconds_left(records: list[dict[str, Any]], last_step: int) -> float:
    """Time to the last step at the speed of these."""
    return (last_step - records[-1]["step"]) * _seconds(records) / len(records)


def evaluation_text(result: dict[str, float]) -> str:
    """Loss and accuracies, or the metrics of a task, in one line."""
    if "mlm_accuracy" not in result:
        shown = {name: value for name, value in result.items() if name not in UNSAID}
        return "  ".join(f"{name} {value:.4g}" for name, value in shown.items() if not name.startswith("latency"))
    next_sentence = f"  next sentence {result['nsp_accuracy']:.2%}" if "nsp_accuracy" in result else ""
    ratio = result["mlm_accuracy"] / result["constant_accuracy"]
    hidden = f"{result['hidden_accuracy']:.2%} of those behind [MASK]"
    masked_words = f"masked words {result['mlm_accuracy']:.2%} (loss {result['mlm_loss']:.4f}; {hidden})"
    yardstick = f"{ratio:.2f} x the {result['constant_accuracy']:.2%} of always guessing the most frequent word"
    return f"loss {result['loss']:.4f}  {masked_words}{next_sentence}; {yardstick}"


def computed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps that were not left out by train.skip_steps."""
    return [record for record in records if not record.get("skipped")]


def _seconds(records: list[dict[str, Any]]) -> float:
    return sum(sum(record["seconds"].values()) for record in records)


def _mean(records: list[dict[str, Any]], name: str) -> float:
    values = [record[name] for record in computed(records)]
    return sum(values) / len(values) if values else float("nan")
