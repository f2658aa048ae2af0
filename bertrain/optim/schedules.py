"""The learning rate of a step: linear warm-up, base rate, decay; a pure function of the step's number."""

from __future__ import annotations

import math
from dataclasses import replace

from bertrain.config.settings import ScheduleSettings


def learning_rate(step: int, base: float, schedule: ScheduleSettings, max_steps: int) -> float:
    """The rate of `step`; steps count from 0.

    While step - start_warmup_step < warmup_steps, the rate is base * (step - start_warmup_step) / warmup_steps. Then it
    follows the decay, which counts from decay_start independently of the warm-up: from step 0 in MLPerf's reference,
    with a jump after the warm-up; from the end of the warm-up, without a jump. After decay_steps, the rate is base *
    floor. With warmup_share, the warm-up is that share of `max_steps`, and the decay counts from its end; with
    decay_share, from that share before `max_steps`.
    """
    schedule = in_steps(schedule, max_steps)
    since_start = step - schedule.start_warmup_step
    if since_start < schedule.warmup_steps:
        return base * since_start / schedule.warmup_steps
    length = (schedule.decay_steps or max_steps) - schedule.decay_start
    share = min(max(step - schedule.decay_start, 0) / max(length, 1), 1.0)
    return base * (schedule.floor + (1 - schedule.floor) * remaining(share, schedule))


def in_steps(schedule: ScheduleSettings, max_steps: int) -> ScheduleSettings:
    """The schedule with shares of `max_steps` converted to steps."""
    if schedule.warmup_share:
        steps = round(schedule.warmup_share * max_steps)
        end = schedule.start_warmup_step + steps
        schedule = replace(schedule, warmup_share=0.0, warmup_steps=steps, decay_start=end)
    if schedule.decay_share:
        steps = round(schedule.decay_share * max_steps)
        schedule = replace(schedule, decay_share=0.0, decay_start=max_steps - steps)
    return schedule


def remaining(share: float, schedule: ScheduleSettings) -> float:
    """The factor of a decay, from 1 to 0, after `share` of it."""
    match schedule.decay:
        case "polynomial":
            return (1 - share) ** schedule.power
        case "linear":
            return 1 - share
        case "square-root":
            return math.sqrt(1 - share)
        case "1-sqrt":
            return 1 - math.sqrt(share)
        case "cosine":
            return (1 + math.cos(math.pi * share)) / 2
        case "constant":
            return 1.0
