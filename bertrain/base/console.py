"""Console output of a run: a progress bar on a terminal, plain lines elsewhere, or nothing.

Lines hold the same information as the bar; long ones are wrapped, also in a pipe. Warnings are always printed.
Everything is also written into the rank's log (logs.py), whatever the console shows.
"""

from __future__ import annotations

import sys
from typing import Any

from bertrain.base.formatting import BASELINE, THRESHOLD, show_brief, wrap
from bertrain.base.logs import note

STARTING = "starting"  # on the bar, before the first step
PHASES = ("data", "forward_backward", "reduction", "optimizer")


def warn(message: str) -> None:
    """Print a warning to stderr, and log it."""
    print(wrap(f"warning: {message}"), file=sys.stderr, flush=True)
    note("warning", "warning", message)


def remark(message: str) -> None:
    print(wrap(message), file=sys.stderr, flush=True)


def tell(message: str) -> None:
    print(wrap(message), flush=True)


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
            self._bar.console.print(wrap(message), markup=False, highlight=False, soft_wrap=True)
        else:
            tell(message)

    def detail(self, message: str) -> None:
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
        self._task = self._bar.add_task(STARTING, total=last_step, completed=first_step, left="")
        self._bar.start()

    def steps(self, step: int, last_step: int | None, *, line: str, brief: str, left: str, detail: str) -> None:
        """Report the steps since the last call: as a line, or on the bar in `brief` with the time `left`."""
        note("info", "steps", line, step=step)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=last_step, description=brief, left=left)
        else:
            self._show(line)
        self.detail(detail)

    def stop(self) -> None:
        if self._bar is not None:
            has_moved = self._bar.tasks[0].description != STARTING  # not so in a run that had ended before
            self._bar.update(self._task, left="", visible=has_moved)
            self._bar.stop()
            self._bar = None


def evaluation_text(result: dict[str, float]) -> str:
    """Loss and accuracies in a line, with the baseline in the next; or the metrics of a task."""
    if "mlm_accuracy" not in result:
        hidden = ("step", "latency", BASELINE, THRESHOLD)
        shown = {name: value for name, value in result.items() if not name.startswith(hidden)}
        baselines = {name: result[BASELINE + name] for name in shown if BASELINE + name in result}
        beside = {name: f" (baseline {show_brief(name, value)})" for name, value in baselines.items()}
        return "  ".join(f"{name} {show_brief(name, value)}{beside.get(name, '')}" for name, value in shown.items())
    next_sentence = f"  next sentence {result['nsp_accuracy']:.2%}" if "nsp_accuracy" in result else ""
    ratio = result["mlm_accuracy"] / result["constant_accuracy"]
    masked_words = f"masked words {result['mlm_accuracy']:.2%}  at [MASK] {result['hidden_accuracy']:.2%}"
    baseline = f"{ratio:.2f} x the {result['constant_accuracy']:.2%} of always guessing the most frequent word"
    return f"loss {result['loss']:.4f}  {masked_words}{next_sentence}\n  masked words: {baseline}"
