"""What is due after a step, worked out by hand: limits, intervals, the clock, the best, a budget's length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from bertrain.base.units import parse_fits
from bertrain.data.feed.step_size import StepSize
from bertrain.optim.schedules import learning_rate
from bertrain.planning.convergence import mlperf_interval
from bertrain.planning.time_budget import LEAST_EXAMPLES, RESERVE, UNKNOWN_STEPS, BudgetPlan, plan_budget
from bertrain.ranks.signals import CONTINUE, END, FIT, SAVE, STOP
from bertrain.run.checkpoint import Progress
from bertrain.training.agenda import Agenda, Due, passes_multiple, time_limit
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
        if getattr(agenda.after(before, after, CONTINUE), name):
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
    assert not agenda.after(Progress(1, 149_999 - 24), Progress(2, 149_999), CONTINUE).evaluates
    assert agenda.after(Progress(1, 149_990), Progress(2, 150_014), CONTINUE).evaluates


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
    assert agenda.after(Progress(5, 120), Progress(6, 144), CONTINUE).flushes, "the first step of a start is reported"
    assert not agenda.after(Progress(6, 144), Progress(7, 168), CONTINUE).flushes
    due = agenda.after(Progress(6, 144), Progress(7, 168), STOP)
    assert due.flushes
    assert not due.saves


def test_the_first_ranks_clock_asks_for_saves_and_for_the_end() -> None:
    clock = Clock()
    settings = helpers.tiny_settings(checkpoint__every_minutes=2, train__max_time="10m", checkpoint__every_steps=0)
    agenda = Agenda(settings, Progress(3, 72, seconds=400.0), now=clock)
    other = Agenda(settings, Progress(3, 72, seconds=400.0), keeps_time=False, now=clock)
    assert agenda.clock_request(4) == CONTINUE
    clock.time += 120
    assert (agenda.clock_request(4), other.clock_request(4)) == (SAVE, CONTINUE)
    before, after = Progress(3, 72), Progress(4, 96)
    assert other.after(before, after, SAVE).saves, "the others learn it from the agreed word"
    assert agenda.stamp(after).seconds == 520.0
    assert agenda.clock_request(4) == CONTINUE, "minutes count from the last save"
    clock.time += 80
    assert agenda.clock_request(4) == END, "400 seconds were trained before this start"
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
    assert agenda.end_reason(Progress(20, 90)) == "all 20 steps are done"
    assert agenda.end_reason(Progress(5, 120)) == "train.max_samples 100 is reached"
    assert agenda.end_reason(Progress(4, 96, seconds=60.0)) == "train.max_time 1m is over"
    assert agenda.end_reason(Progress(4, 96, best_accuracy=0.5)) == "evaluate.target_accuracy 0.5 is reached"
    assert agenda.end_reason(Progress(4, 96, seconds=59.0, best_accuracy=0.49)) == ""


def test_the_best_is_saved_and_the_target_ends_the_run() -> None:
    settings = helpers.tiny_settings(
        evaluate__data="x", evaluate__target_accuracy=0.5, checkpoint__keep_best=True, checkpoint__every_steps=0,
        checkpoint__first_after_samples=48,
    )  # fmt: skip
    agenda, saved = Agenda(settings, Progress()), []
    for step, accuracy in enumerate([0.4, 0.2, 0.1, 0.3, 0.2], start=1):
        before, after = Progress(step - 1, 24 * step - 24), Progress(step, 24 * step)
        if agenda.after_evaluation(agenda.after(before, after, CONTINUE), after, accuracy).saves:
            saved.append(step)
    assert saved == [2, 4], "nothing is saved before 48 samples, and only what is better than all that was"
    assert agenda.stamp(Progress(5)).best_step == 4
    after = Progress(6, 144)
    due = agenda.after_evaluation(agenda.after(Progress(5, 120), after, CONTINUE), after, 0.5)
    assert due.ending == "evaluate.target_accuracy 0.5 is reached"
    assert due.saves


def test_steps_are_left_out_by_their_numbers() -> None:
    agenda = Agenda(helpers.tiny_settings(train__skip_steps="3-5,9"), Progress())
    assert [step for step in range(1, 21) if agenda.skips_step(step)] == [3, 4, 5, 9]


# --- a budget -----------------------------------------------------------------------------------------


def plan(**given: object) -> BudgetPlan:
    """The plan of a run of 10 minutes after 25 steps of 24 samples in 40 s, with 0.5 s a step."""
    values = {"seconds": 40.0, "seconds_per_step": 0.5, "seconds_per_evaluation": 0.0, "can_shrink": True} | given
    before = values.pop("before", BudgetPlan(UNKNOWN_STEPS, 0, 1000))
    settings = helpers.tiny_settings(**({"train__budget": "10m"} | values.pop("settings", {})))
    progress = Progress(25, 600, seconds=values.pop("seconds"), evaluation_seconds=values.pop("evaluating", 0.0))
    return plan_budget(settings, before, progress, **values)


def test_a_budgets_plan_worked_out_by_hand() -> None:
    assert plan() == BudgetPlan(25 + int(560 * (1 - RESERVE) / 0.5), 0, 1000)
    # An evaluation of 3 s every 200th step, and one at the end: below 5 % of the budget, so they stay as they are.
    often = plan(before=BudgetPlan(UNKNOWN_STEPS, 4800, 1000), seconds_per_evaluation=3.0)
    assert often == BudgetPlan(25 + int((560 * (1 - RESERVE) - 3) / (0.5 + 3 / 200)), 4800, 1000)
    assert plan(seconds=700.0).last_step == 25, "what was done counts"
    capped = plan(settings={"train__epochs": 2, "train__max_steps": 300, "task__name": "classify"})
    assert capped.last_step == 300, "of epochs and a budget, the shorter counts"


def test_a_plan_stays_where_it_hardly_changes() -> None:
    fitted = plan().last_step
    before = BudgetPlan(fitted, 0, 1000)
    assert plan(before=before, seconds_per_step=0.504) == before
    assert plan(before=before, seconds_per_step=0.51).last_step < fitted
    assert plan(before=before, seconds_per_step=0.49).last_step > fitted
    near = BudgetPlan(26, 0, 1000)
    assert plan(before=near, seconds=600.0).last_step == 25, "the end is always recorded"


def test_evaluations_take_a_twentieth_of_a_budget() -> None:
    dear = plan(before=BudgetPlan(UNKNOWN_STEPS, 240, 8577), seconds_per_evaluation=54.6)
    assert dear.num_examples == 1500, "an evaluation may take 10 s, a third of 5 %"
    each = 54.6 * 1500 / 8577
    left = 560 / 0.5 * 24
    assert dear.evaluation_interval == 14_000
    assert (left / dear.evaluation_interval + 1) * each <= 0.05 * 600
    assert plan(before=dear, seconds_per_evaluation=each).evaluation_interval == 14_000, "it is not changed again"
    only_last = plan(before=BudgetPlan(UNKNOWN_STEPS, 240, 50), seconds_per_evaluation=29.0, can_shrink=False)
    assert (only_last.evaluation_interval, only_last.num_examples) == (0, 50)
    assert plan(before=BudgetPlan(500, 4800, 50), seconds_per_evaluation=2.0, evaluating=29.0).evaluation_interval == 0
    # 18 s a step of 24 samples, of which a forward pass takes 0.3 s each: 100 examples would take 30 s of 60.
    slow = plan(settings={"train__budget": "1m"}, seconds=20.0, seconds_per_step=18.0, seconds_per_evaluation=300.0)
    assert (slow.num_examples, slow.last_step) == (40, 26), "a fifth of the budget, 12 s; so one more step fits"
    slower = plan(settings={"train__budget": "1m"}, seconds=20.0, seconds_per_step=99.0, seconds_per_evaluation=9000.0)
    assert slower.num_examples == LEAST_EXAMPLES
    said = dear.describe(BudgetPlan(0, 240, 8577), "10m", 54.6)
    assert all(word in said for word in ("55 s", "9.1%", "14,000", "1,500", "8,577"))
    assert dear.describe(dear, "10m", 54.6) == ""


def budgeted(
    seconds_of: Callable[[int], float], agenda: Agenda, clock: Clock, stop: int = UNKNOWN_STEPS
) -> tuple[list[float], str]:
    """Steps of an agenda whose clock goes as told: the rates, and why it ended."""
    rates, ending, step = [], "", agenda._progress.step
    while not ending and step < stop:
        step += 1
        used = agenda.settings_of(step)
        rates.append(learning_rate(step - 1, 1.0, used.schedule, used.train.max_steps))
        clock.time += seconds_of(step)
        agreed = agenda.clock_request(step)
        due = agenda.after(Progress(step - 1, 24 * step - 24), Progress(step, 24 * step), agreed)
        if due.flushes:
            agenda.seconds_left()
        if due.fits:
            due = agenda.apply(agenda.replan(can_shrink=True), due)
        ending = due.ending
        assert due.evaluates or not ending, "the end is always evaluated, also one that a fit has moved here"
    return rates, ending


def agenda_at(clock: Clock, progress: Progress | None = None, **given: object) -> Agenda:
    settings = helpers.tiny_settings(schedule__warmup_steps=10, log__every_steps=10, **given)
    return Agenda(settings, progress or Progress(), now=clock)


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_rate_reaches_its_end_in_time_on_a_machine_whose_speed_changes(factor: float) -> None:
    clock = Clock()
    agenda = agenda_at(clock, train__budget="10m")
    rates, _ = budgeted(lambda step: 20.0 if step == 1 else 0.3 if step < 800 else 0.3 * factor, agenda, clock)
    assert rates[:11] == [step / 10 for step in range(10)] + [pytest.approx(1.0, abs=0.02)]
    assert rates[-1] < 0.02, "of the base rate"
    assert 0.97 * 600 < clock.time - 100 < 601
    fits = agenda.settings.train.fits.split(",")
    assert int(fits[0].partition(":")[0]) <= 8, "the warm-up may be a share of the length, so that must be known early"
    assert (1 if factor == 1 else 3) <= len(fits) < 60


def test_a_budget_of_a_few_slow_steps_ends_and_is_evaluated() -> None:
    clock = Clock()
    rates, ending = budgeted(lambda _: 2.5, agenda_at(clock, train__budget="5s"), clock)
    assert 1 <= len(rates) <= 2
    assert ending


def test_compiling_kernels_does_not_shorten_the_warm_up() -> None:
    """Each fit is near the length that the run comes to, so the rate never rises faster than its warm-up says."""
    clock = Clock()
    agenda, step, due = Agenda(helpers.tiny_settings(train__budget="2m"), Progress(), now=clock), 0, Due()
    while not due.ending:
        step += 1
        clock.time += 3.0 if step == 1 else 1.5 if step in (2, 3) else 0.017
        due = agenda.after(Progress(step - 1, step - 1), Progress(step, step), agenda.clock_request(step))
        if due.flushes:
            agenda.seconds_left()
        if due.fits:
            due = agenda.apply(agenda.replan(can_shrink=True), due)
    fits = [tuple(map(int, fit.split(":"))) for fit in agenda.settings.train.fits.split(",")]
    assert step > 6000
    assert fits[0][0] <= 32
    assert min(last for _, last in fits) > 0.9 * step


def test_the_rate_does_not_jump_at_the_first_fit() -> None:
    clock = Clock()
    settings = helpers.tiny_settings(train__budget="1m", schedule__warmup_steps=0, schedule__warmup_share=0.05)
    rates, _ = budgeted(lambda _: 0.1, Agenda(settings, Progress(), now=clock), clock)
    assert max(after - before for before, after in pairwise(rates[:60])) < 0.06, "a warm-up of about 30 steps"
    assert max(rates) == 1, "the decay begins where the warm-up ends"


@pytest.mark.parametrize("length", [1, 5, 20, 90])
def test_epochs_end_a_run_before_its_budget_is_fitted(length: int) -> None:
    clock = Clock()
    given = {"train__epochs": 1, "train__max_steps": length, "train__budget": "1h", "task__name": "classify"}
    settings = helpers.tiny_settings(schedule__warmup_steps=0, schedule__warmup_share=0.2, **given)
    agenda = Agenda(settings, Progress(), now=clock)
    rates, _ = budgeted(lambda step: 30.0 / step, agenda, clock)
    assert len(rates) == length
    assert max(rates) > 0.9 or length == 1
    parse_fits(agenda.settings.train.fits, "train.fits")


def test_slow_steps_after_a_resume_do_not_shorten_the_run() -> None:
    clock = Clock()
    given = {"train__budget": "10m", "train__fits": "4:9900"}
    agenda = agenda_at(clock, Progress(5000, 24 * 5000, seconds=300.0), **given)
    budgeted(lambda step: 3.0 if step <= 5004 else 0.06, agenda, clock)
    fits = parse_fits(agenda.settings.train.fits, "train.fits")
    assert min(last for _, last in fits) > 9000


def test_a_budget_counts_with_steps_that_grow() -> None:
    """Time is by the example: the fits made within the ramp know that later steps take longer."""
    clock, sizes = Clock(), StepSize(80, 8, 8000, Fraction(1))
    agenda = Agenda(helpers.tiny_settings(train__budget="10m"), Progress(), step_size=sizes, now=clock)
    position, step, due = 0, 0, Due()
    while not due.ending:
        step, before = step + 1, position
        position += sizes.at(before)
        clock.time += 0.01 * (position - before)
        due = agenda.after(Progress(step - 1, before), Progress(step, position), agenda.clock_request(step))
        if due.flushes:
            left = agenda.seconds_left()
        if due.fits:
            due = agenda.apply(agenda.replan(can_shrink=True), due)
    assert 0.97 * 600 < clock.time - 100 < 601
    fits = [tuple(map(int, fit.split(":"))) for fit in agenda.settings.train.fits.split(",")]
    assert fits[0][0] <= 8
    assert all(last == pytest.approx(step, rel=0.05) for _, last in fits), "the first fit is right already"
    assert left < 10


def test_the_time_left_counts_with_steps_that_grow() -> None:
    clock, sizes = Clock(), StepSize(80, 8, 8000, Fraction(1))
    agenda = Agenda(helpers.tiny_settings(train__max_steps=400), Progress(), step_size=sizes, now=clock)
    position = 0
    for step in range(1, 21):
        before, position = position, position + sizes.at(position)
        clock.time += 0.01 * (position - before)
        agenda.after(Progress(step - 1, before), Progress(step, position), CONTINUE)
        agenda.seconds_left()
    assert agenda.seconds_left() == pytest.approx(0.01 * sizes.examples_in(380, position))


def test_fits_are_replayed_without_a_clock() -> None:
    clock = Clock()
    agenda = agenda_at(clock, train__budget="10m")
    rates, ending = budgeted(lambda step: 0.5 if step < 400 else 1.5, agenda, clock)
    fits = agenda.settings.train.fits
    repeated, again = budgeted(lambda step: 9.0, agenda_at(clock, train__fits=fits), clock)
    assert repeated == rates
    assert ending
    assert again == f"all {len(rates):,} steps are done"


def test_a_resumed_run_replays_the_fits_that_are_there_and_then_looks_at_the_clock() -> None:
    clock = Clock()
    begun = agenda_at(clock, train__budget="10m")
    rates, _ = budgeted(lambda step: 0.5 if step < 400 else 1.5, begun, clock, stop=550)
    fits = begun.settings.train.fits
    last = int(fits.rpartition(",")[2].partition(":")[0])
    assert last > 410
    resumed = agenda_at(clock, Progress(405, 405 * 24, seconds=215.0), train__budget="10m", train__fits=fits)
    again, _ = budgeted(lambda step: 0.1, resumed, clock, stop=last)
    assert again == rates[405:last], "though the machine is faster now"
    assert resumed.settings.train.fits == fits
    budgeted(lambda step: 0.1, resumed, clock)
    assert resumed.settings.train.fits.startswith(f"{fits},")


def test_before_the_first_fit_the_rate_is_the_warm_ups_or_the_base_rate_and_nothing_is_evaluated() -> None:
    clock = Clock()
    agenda = agenda_at(clock, train__budget="10m", evaluate__data="x", evaluate__every_samples=24)
    assert agenda.settings_of(3).train.max_steps == UNKNOWN_STEPS
    assert not agenda.after(Progress(0, 0), Progress(1, 24), CONTINUE).evaluates
    assert agenda.end_reason(Progress(500, 12000)) == "", "max_steps of the recipe does not count"
    follower = Agenda(agenda.settings, Progress(), keeps_time=False, now=clock)
    clock.time += 13
    assert (agenda.clock_request(2), follower.clock_request(2)) == (FIT, CONTINUE), "2 % of the budget are over"


def test_the_time_left_is_that_of_the_steps_or_of_the_budget() -> None:
    clock = Clock()
    agenda = agenda_at(clock, train__max_steps=100, train__max_time="1m")
    budgeted(lambda step: 9.0 if step == 1 else 0.5, agenda, clock, stop=20)
    assert agenda.seconds_left() == 80 * 0.5
    slow = agenda_at(clock, train__max_steps=100, train__max_time="1m")
    budgeted(lambda step: 2.0, slow, clock, stop=20)
    assert slow.seconds_left() == 20.0


@pytest.mark.parametrize("fits", ["4", "4:", "4:3", "9:20,4:30", "4:30,4:31", "0:0", "a:b", "4:30,"])
def test_fits_that_make_no_sense_are_refused(fits: str) -> None:
    with helpers.refused("invalid-fits", fits):
        helpers.tiny_settings(train__fits=fits)


def test_a_budget_works_with_any_schedule() -> None:
    for key, value in (("warmup_share", 0.1), ("decay_steps", 50), ("decay_start", 10)):
        given = {"warmup_steps": 0} | {key: value}
        helpers.tiny_settings(train__budget="10m", **{f"schedule__{name}": one for name, one in given.items()})


def test_dear_evaluations_and_the_first_estimate_are_said_once() -> None:
    clock = Clock()
    given = {"train__max_steps": 100, "evaluate__data": "x", "evaluate__every_samples": 240}
    agenda = Agenda(helpers.tiny_settings(**given), Progress(), num_examples=50, now=clock)
    assert not agenda.is_first_estimate()
    budgeted(lambda step: 0.5, agenda, clock, stop=20)
    assert [agenda.is_first_estimate() for _ in range(2)] == [True, False]
    with agenda.timing("evaluation"):
        clock.time += 0.4
    assert not agenda.evaluations_are_slow(), "0.4 s after each 5 s"
    with agenda.timing("evaluation"):
        clock.time += 1.0
    assert [agenda.evaluations_are_slow() for _ in range(2)] == [True, False]
    assert agenda.stamp(Progress(20)).evaluation_seconds == pytest.approx(1.4)
