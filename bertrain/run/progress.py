"""The text that reports the newest steps on the console, beside the progress bar and in the log."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bertrain.base.console import PHASES, Console
from bertrain.base.formatting import duration
from bertrain.base.units import parse_duration
from bertrain.config.settings import TrainSettings
from bertrain.run.records import StepRecord

Steps = Sequence[StepRecord]


def report_steps(console: Console, steps: Steps, last_step: int | None, seconds_left: float) -> None:
    rate = f"{steps[-1].sequences_per_s or 0.0:,.1f} sequences/s"
    detail = f"  gradient norm {steps[-1].gradient_norm:.3g}; {rate}; {time_shares(steps)}"
    if steps[-1].rank_tokens is not None:
        detail += f"; ranks idle {_mean(steps, 'idle_share'):.1%}"
    left, line = time_left(seconds_left), console_line(steps, last_step, seconds_left)
    console.steps(steps[-1].step, last_step, line=line, brief=brief(steps), left=left, detail=detail)


def console_line(steps: Steps, last_step: int | None, seconds_left: float) -> str:
    """Mean loss and accuracy, learning rate, real tokens per second, and time left."""
    last = str(last_step or "?")
    return f"step {steps[-1].step:>{len(last)}}/{last}  {metrics_text(steps)}  {time_left(seconds_left)}".rstrip()


def metrics_text(steps: Steps) -> str:
    """Mean loss and accuracy, the newest learning rate, and real tokens per second over these steps."""
    num_skipped = len(steps) - len(computed(steps))
    skipped = f"{num_skipped} skipped" if num_skipped else ""
    if num_skipped == len(steps):
        return skipped
    num_not_finite = sum(not step.applied for step in steps) - num_skipped
    not_finite = f"{num_not_finite} not finite, not applied" if num_not_finite else ""
    loss = f"loss {_mean(steps, 'loss'):.4f}  {accuracy_text(steps, 2)}lr {_rate(steps[-1].learning_rate)}"
    return "  ".join(filter(None, (loss, _speed(steps), not_finite, skipped)))


def brief(steps: Steps) -> str:
    """The text beside the bar, for a terminal of 80 columns."""
    if not computed(steps):
        return f"{len(steps)} skipped"
    return f"loss {_mean(steps, 'loss'):.3f}  {accuracy_text(steps, 1)}{_speed(steps)}"


def accuracy_text(steps: Steps, digits: int) -> str:
    """The mean accuracy of the masked tokens or of a classifier; nothing in regression."""
    for name, title in (("mlm_accuracy", "masked words"), ("accuracy", "accuracy")):
        if getattr(steps[-1], name) is not None:
            return f"{title} {_mean(steps, name):.{digits}%}  "
    return ""


def time_shares(steps: Steps) -> str:
    """The share of the time in each phase; `reduction` only with several ranks."""
    total, has_ranks = _seconds(steps), any(step.rank_tokens is not None for step in steps)
    return " ".join(
        f"{phase.replace('_', '+')} {sum(step.seconds[phase] for step in steps) / total:.0%}"
        for phase in PHASES
        if phase != "reduction" or has_ranks
    )


def time_left(seconds: float) -> str:
    """The time to the end of the run, if it is known."""
    return f"{duration(seconds)} left" if math.isfinite(seconds) else ""


def seconds_left(train: TrainSettings, step: int, seconds_per_step: float, loop_seconds: float | None) -> float | None:
    """Time to the last step at this speed, or to the end of the budget; None if neither is known."""
    last_step = train.last_step()
    by_steps = (last_step - step) * seconds_per_step if last_step else math.inf
    by_time = (parse_duration(train.budget, "train.budget") or math.inf) - (loop_seconds or 0)
    left = min((value for value in (by_steps, by_time) if math.isfinite(value)), default=None)
    return None if left is None else max(0.0, left)


def computed(steps: Steps) -> list[StepRecord]:
    return [step for step in steps if not step.skipped]


def _rate(rate: float) -> str:
    return f"{rate:.2e}" if rate > 1e-12 else "0"  # under a budget whose end is not known yet, a warm-up begins near 0


def _speed(steps: Steps) -> str:
    return f"{sum(step.tokens for step in steps) / _seconds(steps):,.0f} tokens/s"


def _seconds(steps: Steps) -> float:
    return max(sum(step.duration for step in steps), 1e-9)


def _mean(steps: Steps, name: str) -> float:
    values = [getattr(step, name) for step in computed(steps)]
    return sum(values) / len(values) if values else float("nan")
