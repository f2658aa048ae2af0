"""The learning rate of a step: linear warm-up, then polynomial decay."""

from __future__ import annotations

from bertrain.settings import ScheduleSettings


def learning_rate(step: int, base: float, schedule: ScheduleSettings, max_steps: int) -> float:
    """The rate of `step` (the first is 0), as MLPerf's reference sets it.

    While step - start_warmup_step < warmup_steps the rate rises along base * (step - start) / warmup_steps; then
    it *jumps onto* the decay line base * (1 - step / decay_steps) ** power, which counts from step 0 too.
    """
    since_start = step - schedule.start_warmup_step
    if since_start < schedule.warmup_steps:
        return base * since_start / schedule.warmup_steps
    decay_steps = schedule.decay_steps or max_steps
    return base * (1 - min(step, decay_steps) / decay_steps) ** schedule.power
