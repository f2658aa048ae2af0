"""What is due after a step, worked out by hand: limits, intervals, the clock, the best, a budget's length."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bertrain.optim.schedules import learning_rate
from bertrain.planning.time_budget import TIMED_STEPS, WARM_UP_STEPS, measure, without_an_end
from bertrain.ranks.signals import END, GO_ON, SAVE, STOP
from bertrain.run.checkpoint import Progress
from bertrain.training.agenda import Agenda, mlperf_interval, passes_multiple, time_limit
from tests import helpers


class Clock:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def steps_where(agenda: Agenda, name: str, steps: int = 20, sequences: int = 24) -> list[int]:
    """The steps after which something is due."""
    found = []
    for step in range(1, steps + 1):
        before, after = Progress(step - 1, sequences * (step - 1)), Progress(step, sequences * step)
        if getattr(agenda.after(before, after, GO_ON), name):
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("sequences", "interval"),
    [
        (256, 150_000), (2048, 150_000), (3072, 175_000), (4096, 175_000), (4608, 200_000), (6144, 200_000),
        (8192, 225_000), (12_288, 275_000), (13_888, 300_000), (16_384, 325_000),
    ],
)  # fmt: skip
def test_mlperfs_rule_gives_the_published_intervals(sequences: int, interval: int) -> None:
    assert mlperf_interval(sequences) == interval


def test_mlperfs_rule_is_obeyed() -> None:
    settings = helpers.tiny_settings(evaluate__rule="mlperf", evaluate__data="x")
    agenda = Agenda(settings, Progress())
    assert not agenda.after(Progress(1, 149_999 - 24), Progress(2, 149_999), GO_ON).evaluates
    assert agenda.after(Progress(1, 149_990), Progress(2, 150_014), GO_ON).evaluates


def test_passing_a_multiple() -> None:
    assert [passes_multiple(10 * n, 10 * n + 10, 25) for n in range(6)] == [False, False, True, False, True, False]
    assert not passes_multiple(0, 10**9, 0)
    assert not passes_multiple(25, 26, 25), "it was passed when it was reached"


def test_saves_by_steps_and_samples_together_but_not_too_early() -> None:
    settings = helpers.tiny_settings(
        checkpoint__every_steps=6, checkpoint__every_samples=100, checkpoint__first_after_samples=150
    )
    by_samples = [step for step in range(1, 21) if 24 * step // 100 > 24 * (step - 1) // 100]
    expected = sorted(step for step in {6, 12, 18, *by_samples, 20} if 24 * step >= 150)
    assert steps_where(Agenda(settings, Progress()), "saves") == expected
    never = helpers.tiny_settings(checkpoint__every_steps=0)
    assert steps_where(Agenda(never, Progress()), "saves") == [20], "always at the end"
    nothing = helpers.tiny_settings(checkpoint__enabled=False, checkpoint__every_steps=1)
    assert steps_where(Agenda(nothing, Progress()), "saves") == []


def test_a_run_that_is_stopped_writes_down_its_steps_though_it_saves_nothing() -> None:
    agenda = Agenda(helpers.tiny_settings(checkpoint__enabled=False, log__every_steps=50), Progress())
    assert not agenda.after(Progress(6, 144), Progress(7, 168), GO_ON).flushes
    due = agenda.after(Progress(6, 144), Progress(7, 168), STOP)
    assert due.flushes
    assert not due.saves


def test_the_first_ranks_clock_asks_for_saves_and_for_the_end() -> None:
    clock = Clock()
    settings = helpers.tiny_settings(checkpoint__every_minutes=2, train__max_time="10m", checkpoint__every_steps=0)
    agenda = Agenda(settings, Progress(3, 72, seconds=400.0), now=clock)
    other = Agenda(settings, Progress(3, 72, seconds=400.0), keeps_time=False, now=clock)
    assert agenda.clock_request() == GO_ON
    clock.time += 120
    assert (agenda.clock_request(), other.clock_request()) == (SAVE, GO_ON)
    before, after = Progress(3, 72), Progress(4, 96)
    assert other.after(before, after, SAVE).saves, "the others learn it from the agreed word"
    assert agenda.stamp(after).seconds == 520.0
    assert agenda.clock_request() == GO_ON, "minutes count from the last save"
    clock.time += 80
    assert agenda.clock_request() == END, "400 seconds were trained before this start"
    due = other.after(before, after, END)
    assert due.ending == "train.max_time 10m is over"
    assert due.saves
    assert due.evaluates
    stopped = other.after(before, after, STOP)
    assert stopped.saves
    assert not stopped.ending
    assert not stopped.evaluates


def test_the_shorter_of_two_limits_of_time_counts() -> None:
    settings = helpers.tiny_settings(train__max_time="1h", train__budget="20m").train
    assert time_limit(settings) == (1200.0, "train.budget 20m is over")
    assert time_limit(replace(settings, max_time="90s"))[0] == 90.0
    assert time_limit(replace(settings, max_time="", budget=""))[0] == float("inf")


def test_a_run_that_is_over_says_why() -> None:
    settings = helpers.tiny_settings(
        train__max_samples=100, train__max_time="1m", evaluate__data="x", evaluate__target_accuracy=0.5
    )
    agenda = Agenda(settings, Progress())
    assert agenda.why_over(Progress(20, 90)) == "all 20 steps are done"
    assert agenda.why_over(Progress(5, 120)) == "train.max_samples 100 is reached"
    assert agenda.why_over(Progress(4, 96, seconds=60.0)) == "train.max_time 1m is over"
    assert agenda.why_over(Progress(4, 96, best_accuracy=0.5)) == "evaluate.target_accuracy 0.5 is reached"
    assert agenda.why_over(Progress(4, 96, seconds=59.0, best_accuracy=0.49)) == ""


def test_the_best_is_saved_and_the_target_ends_the_run() -> None:
    settings = helpers.tiny_settings(
        evaluate__data="x", evaluate__target_accuracy=0.5, checkpoint__keep_best=True, checkpoint__every_steps=0,
        checkpoint__first_after_samples=48,
    )  # fmt: skip
    agenda, saved = Agenda(settings, Progress()), []
    for step, accuracy in enumerate([0.4, 0.2, 0.1, 0.3, 0.2], start=1):
        before, after = Progress(step - 1, 24 * step - 24), Progress(step, 24 * step)
        if agenda.judge(agenda.after(before, after, GO_ON), after, accuracy).saves:
            saved.append(step)
    assert saved == [2, 4], "nothing is saved before 48 samples, and only what is better than all that was"
    assert agenda.stamp(Progress(5)).best_step == 4
    after = Progress(6, 144)
    due = agenda.judge(agenda.after(Progress(5, 120), after, GO_ON), after, 0.5)
    assert due.ending == "evaluate.target_accuracy 0.5 is reached"
    assert due.saves


def test_steps_are_left_out_by_their_numbers() -> None:
    agenda = Agenda(helpers.tiny_settings(train__skip_steps="3-5,9"), Progress())
    assert [step for step in range(1, 21) if agenda.leaves_out(step)] == [3, 4, 5, 9]


# --- a budget -----------------------------------------------------------------------------------------


def test_a_budgets_length_worked_out_by_hand() -> None:
    settings = helpers.tiny_settings(train__budget="10m")
    durations = [0.5] * 15 + [3.0] * 5  # five steps that something else slowed down
    plain = measure(
        settings, durations, Progress(25, 600), seconds=40.0, seconds_per_evaluation=0.0, evaluation_interval=0
    )
    assert plain.seconds_per_step == 0.5
    assert plain.max_steps == 25 + int(560 * 0.98 / 0.5)
    with_evaluations = measure(
        settings, durations, Progress(25, 600), seconds=40.0, seconds_per_evaluation=6.0, evaluation_interval=240
    )
    # 24 samples a step: an evaluation of 6 s every tenth step, and one at the end
    assert with_evaluations.max_steps == 25 + int((560 * 0.98 - 6) / (0.5 + 0.6))
    over = measure(
        settings, durations, Progress(25, 600), seconds=700.0, seconds_per_evaluation=0.0, evaluation_interval=0
    )
    assert over.max_steps == 25, "what was done counts"
    assert "0.5 s a step" in plain.describe("10m")
    assert "2% kept for saving" in plain.describe("10m")


def test_while_it_is_measured_the_rate_is_the_warm_ups_or_the_base_rate() -> None:
    settings = helpers.tiny_settings(train__budget="10m", schedule__warmup_steps=10)
    agenda = Agenda(settings, Progress())

    def rate(step: int) -> float:
        used = agenda.settings_of(step)
        return learning_rate(step - 1, used.optimizer.learning_rate, used.schedule, used.train.max_steps)

    assert [rate(step) for step in range(1, 40)] == [1e-3 * min(step - 1, 10) / 10 for step in range(1, 40)]
    fixed = replace(settings, train=replace(settings.train, max_steps=100))
    agenda.fix(agenda.after(Progress(24, 576), Progress(25, 600), GO_ON), fixed, Progress(25, 600))
    assert rate(25) == 1e-3, "a step that is done again is done as it was"
    assert rate(26) == learning_rate(25, 1e-3, settings.schedule, 100) < 1e-3
    assert without_an_end(fixed).schedule == settings.schedule


def test_the_length_is_fixed_once_enough_steps_were_timed() -> None:
    settings = helpers.tiny_settings(train__budget="10m", train__skip_steps="2-4")
    agenda = Agenda(settings, Progress())
    assert steps_where(agenda, "measures", steps=28)[0] == WARM_UP_STEPS + TIMED_STEPS + 3
    assert agenda.is_open_ended
    assert agenda.why_over(Progress(500, 12000)) == "", "max_steps of the recipe does not count"
    known = Agenda(settings, Progress(), {"measured_until": 25})
    assert not known.is_open_ended
    assert steps_where(known, "measures", steps=28) == []


def test_a_budget_and_a_fixed_end_of_the_decay_contradict_each_other() -> None:
    with helpers.refused("conflicting-settings", "train.budget", "schedule.decay_steps 50"):
        helpers.tiny_settings(train__budget="10m", schedule__decay_steps=50)
