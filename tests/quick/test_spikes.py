"""Loss spikes: found where they are, and nowhere else."""

from __future__ import annotations

import math
import random

import pytest

from bertrain.run.spikes import MIN_STEPS, WINDOW, DivergenceWatch, SpikeWatch, spike_limit


def falling_losses(steps: int, seed: int) -> list[float]:
    """A loss that falls as a BERT's does, from 11 to about 2, with noise that falls along."""
    draw = random.Random(seed)
    return [2 + 9 * math.exp(-step / 60) + draw.gauss(0, 0.15) for step in range(steps)]


@pytest.mark.parametrize("seed", range(5))
def test_a_usual_curve_has_none_and_one_put_into_it_is_found(seed: int) -> None:
    losses = falling_losses(400, seed)
    watch = SpikeWatch()
    assert not any(watch.is_spike(loss) for loss in losses)
    losses[300] += 3
    losses[301] += 2
    watch = SpikeWatch()
    assert [step for step, loss in enumerate(losses) if watch.is_spike(loss)] == [300, 301]


def test_the_limit_worked_out_by_hand() -> None:
    # Median 3; absolute deviations 2, 1, 0, 1, 2, of which the median is 1.
    assert spike_limit([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(3 + 6 * 1.4826)
    assert spike_limit([2.0] * 10) == pytest.approx(2.1), "quiet steps do not make a ripple a spike"


def test_what_cannot_be_judged_is_not() -> None:
    watch = SpikeWatch([1.0] * (MIN_STEPS - 1))
    assert not watch.is_spike(100.0), "too few before it"
    assert not watch.is_spike(math.nan)
    assert not watch.is_spike(math.inf)
    assert watch.is_spike(100.0), "they were not taken in"


def test_a_higher_level_that_stays_becomes_usual() -> None:
    watch = SpikeWatch([2.0] * WINDOW)
    flags = [watch.is_spike(4.0) for _ in range(WINDOW)]
    assert flags[0]
    assert sum(flags) <= WINDOW // 2 + 1
    assert not flags[-1]


def test_a_watch_goes_on_where_another_left_off() -> None:
    losses = falling_losses(300, 1)
    losses[260] += 4
    whole = SpikeWatch()
    expected = [whole.is_spike(loss) for loss in losses]
    resumed = SpikeWatch(losses[:200][-WINDOW:])
    assert [resumed.is_spike(loss) for loss in losses[200:]] == expected[200:]


def test_divergence_is_found_after_steps_that_were_left_out() -> None:
    """Their loss is NaN, which has no place in a median."""
    watch = DivergenceWatch()
    losses = [math.nan] * MIN_STEPS + [2.0] * MIN_STEPS + [50.0] * WINDOW
    assert [step for step, loss in enumerate(losses) if watch.has_diverged(loss)] == [len(losses) - 1]


def test_divergence_is_judged_by_the_first_steps_of_a_resumed_run() -> None:
    before = [math.nan] * 3 + [2.0] * MIN_STEPS + [1.0] * 100
    resumed = DivergenceWatch(before)
    assert not any(resumed.has_diverged(2.5) for _ in range(2 * WINDOW)), "below the limit, but above the last steps"
    assert [resumed.has_diverged(3.0) for _ in range(WINDOW)].index(True) == WINDOW - 1
