"""What the person at the console sees: a live bar on a terminal, plain lines in a log, or nothing.

Lines are the same information as the bar, so a log read later misses nothing. Warnings are always said. All of it goes
into the rank's own log too (logs.py), whatever the console shows.
"""

from __future__ import annotations

import sys
from typing import Any

from bertrain.base.logs import note

UNSAID = ("step",)
PHASES = ("data", "forward_backward", "reduction", "optimizer")


def warn(message: str) -> None:
    """One line of warning, apart from the output."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
    note("warning", "warning", message)


def remark(message: str) -> None:
    """One line that is no warning, apart from the output all the same."""
    print(message, file=sys.stderr, flush=True)


class Console:
    """Says what a run does. `level` is quiet, normal or verbose; `style` is auto, bar or lines."""

    def __init__(self, level: str = "normal", style: str = "auto", *, is_speaker: bool = True) -> None:
        self.level, self._is_speaker = level if is_speaker else "quiet", is_speaker
        self._live = self.level != "quiet" and (style == "bar" or (style == "auto" and sys.stdout.isatty()))
        self._bar: Any = None
        self._task: Any = None

    def say(self, message: str) -> None:
        """One line, above the bar if there is one."""
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
        """One line for those who asked for more."""
        if self.level == "verbose":
            self._show(message)

    def start(self, first_step: int, last_step: int | None) -> None:
        """Show the bar, on a terminal; None where the end is not known yet."""
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
            self._bar.stop()
            self._bar = None


def duration(seconds: float) -> str:
    """3 s, 4:05, 2:03:04: as short as it can be read."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def evaluation_text(result: dict[str, float]) -> str:
    """Loss and accuracies in one line; of a task, its figures."""
    if "mlm_accuracy" not in result:
        shown = {name: value for name, value in result.items() if name not in UNSAID}
        return "  ".join(f"{name} {value:.4g}" for name, value in shown.items() if not name.startswith("latency"))
    next_sentence = f"  next sentence {result['nsp_accuracy']:.2%}" if "nsp_accuracy" in result else ""
    ratio = result["mlm_accuracy"] / result["constant_accuracy"]
    hidden = f"{result['hidden_accuracy']:.2%} of those behind [MASK]"
    masked_words = f"masked words {result['mlm_accuracy']:.2%} (loss {result['mlm_loss']:.4f}; {hidden})"
    yardstick = f"{ratio:.2f} x the {result['constant_accuracy']:.2%} of always guessing the most frequent word"
    return f"loss {result['loss']:.4f}  {masked_words}{next_sentence}; {yardstick}"
