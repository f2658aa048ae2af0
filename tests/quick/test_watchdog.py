"""Who stopped, who is slow, who failed: the judgements, apart from the threads and processes that lead to them."""

from __future__ import annotations

import os
import signal

import pytest
from torch.distributed import HashStore

from bertrain.base.errors import EXIT_HUNG, EXIT_LOST_RANK
from bertrain.launch.local import describe_failure
from bertrain.ranks.watchdog import (
    PLACES,
    STARTING,
    Beat,
    Heartbeat,
    Watchdog,
    describe_hang,
    have_stopped,
    waited_for,
)
from bertrain.run.records import RankMeans
from bertrain.run.stragglers import slow_ranks
from tests import helpers


def word(
    rank: int, step: int = 12, place: str = "sum over ranks", *, is_still: bool = True, is_silent: bool = False
) -> Beat:
    return Beat(rank, f"node{rank // 2}", 100 + rank, step, place, is_still, 1, is_silent)


def test_a_run_has_stopped_when_nobody_moves() -> None:
    still, moving, silent = word(0), word(1, is_still=False), word(1, is_still=False, is_silent=True)
    assert have_stopped([still, still])
    assert not have_stopped([still, moving]), "one evaluates, the other waits for it"
    assert have_stopped([still, silent]), "the word of one who is not heard of is an old one"


def test_the_one_that_came_least_far_is_waited_for() -> None:
    words = [word(0), word(1), word(2, place="forward and backward"), word(3)]
    assert [one.rank for one in waited_for(words)] == [2]
    assert describe_hang(words, "10m") == (
        "rank 2 on host node1 has not moved since step 12, in forward and backward; the others wait for it (nothing "
        "moved for 10m, train.hang_timeout)"
    )
    ahead = [word(0, 13, "data"), word(1, 12, "saving"), word(2, 12, "saving"), word(3, 13, "data")]
    assert [one.rank for one in waited_for(ahead)] == [1, 2]
    assert describe_hang(ahead, "10m").count("; the others wait for them") == 1


def test_one_that_is_not_heard_of_is_named_before_those_that_are() -> None:
    words = [word(0, place="data"), word(1, 0, STARTING, is_still=False, is_silent=True)]
    assert [one.rank for one in waited_for(words)] == [1]
    assert describe_hang(words, "5s").startswith(
        "rank 1 on host node0 has not moved, nor answered, since it was started; the others wait for it"
    )


def test_nobody_is_blamed_where_all_came_equally_far() -> None:
    said = describe_hang([word(0), word(1)], "5s")
    assert said.count("has not moved since step 12, in sum over ranks") == 2
    assert "no rank is behind the others" in said
    assert "wait" not in describe_hang([word(0)], "5s"), "there is no other"


def test_what_may_take_long() -> None:
    here = Heartbeat()
    assert here.may_take_long, "it starts"
    here.enter("data", 101)
    assert here.may_take_long, "its first step may compile"
    here.enter("data", 102)
    assert not here.may_take_long
    for place in PLACES[1:-1]:
        here.enter(place)
        assert not here.may_take_long
        assert here.now[:2] == (102, place)
    here.enter("saving")
    assert here.may_take_long
    before = here.now
    here.move()
    assert here.now[:2] == before[:2]
    assert here.now[2] > before[2]


def times(rank: int, own: float, waiting: float, tokens: float = 1000) -> RankMeans:
    seconds = {"data": 0.25 * own, "forward_backward": 0.75 * own, "reduction": waiting, "optimizer": 0.1}
    return RankMeans(rank, "node", tokens, seconds)


def test_the_slow_rank_is_the_one_that_does_not_wait() -> None:
    assert slow_ranks([times(0, 1.0, 1.0), times(1, 2.0, 0.0)], 1.3) == {1: pytest.approx(2.0)}
    assert slow_ranks([times(0, 1.0, 0.2), times(1, 1.2, 0.0)], 1.3) == {}
    many = [times(rank, 1.0, 1.0) for rank in range(7)]
    assert slow_ranks([*many, times(7, 1.5, 0.0)], 1.3) == {7: pytest.approx(1.5)}


def test_a_rank_with_more_work_is_not_slow() -> None:
    assert slow_ranks([times(0, 1.0, 1.0, tokens=500), times(1, 2.0, 0.0, tokens=1000)], 1.3) == {}
    assert slow_ranks([times(0, 1.0, 0.0), times(1, 0.001, 1.0, tokens=0)], 1.3) == {}, "nor one without any"


@pytest.mark.parametrize("factor", [0.5, 1])
def test_a_factor_that_would_name_everybody_is_refused(factor: float) -> None:
    with helpers.refused("out-of-range", "log.straggler_factor"):
        helpers.tiny_settings(log__straggler_factor=factor)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({1: -9}, "rank 1 was killed by SIGKILL"),
        ({0: EXIT_LOST_RANK, 1: -9}, "rank 1 was killed by SIGKILL"),
        ({0: -15, 2: 1, 1: EXIT_LOST_RANK}, "rank 2 failed with exit code 1"),
        ({3: -11, 0: -15}, "rank 3 was killed by SIGSEGV"),
        ({0: EXIT_HUNG, 1: -9}, "a rank hung"),
        ({1: EXIT_LOST_RANK, 0: EXIT_LOST_RANK}, f"rank 1 failed with exit code {EXIT_LOST_RANK}"),
    ],
)
def test_the_rank_that_failed_is_told_from_those_that_lost_it(codes: dict[int, int], expected: str) -> None:
    assert describe_failure(codes) == expected


@pytest.mark.parametrize("place", PLACES)
def test_a_hang_in_any_place_is_described(place: str) -> None:
    assert f"in {place}" in describe_hang([word(0, place=place)], "10m") or place == STARTING


def test_a_process_that_nobody_launched_may_outlive_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as `nohup bertrain pretrain ... &` from a shell that ends."""
    stopped = list[int]()
    monkeypatch.setattr(os, "kill", lambda process, signal: stopped.append(signal))
    for store in (None, HashStore()):
        watchdog = Watchdog(Heartbeat(), "1000s", 1000, 0, 1, store)
        watchdog._parent += 1
        watchdog._end_without_launcher()
        watchdog.stop()
        assert stopped == ([] if store is None else [signal.SIGTERM])
