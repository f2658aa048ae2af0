"""Trouble for processes: they are killed or stopped, or the clock jumps."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.launched import Launched, children, descendants, records
from tests.soak.jobs import JOBS, STEPS, Scene, mark, start
from tests.soak.outcome import Outcome, Unavailable, end_clearly


def kill(draw: random.Random, scene: Scene, place: Path) -> Outcome:
    """SIGKILL for all processes of a command, one rank or worker, its launcher, or a node's agent; at any moment."""
    name = draw.choice(list(JOBS))
    scene.place_of(name)
    notes, code = [name], 1
    for _ in range(draw.randint(1, 3)):
        if code == 0:
            break
        target, marked_as = draw.choice(("group", "rank", "launcher", "node")), mark()
        launched = start(JOBS[name].words(scene, place), place, marked_as)
        moment = _wait_for_a_moment(launched, place, 0.9 * scene.seconds[name], draw)
        if target == "group":
            launched.kill()
        elif launched.process.poll() is None:
            os.kill(_choose(launched, target, draw), signal.SIGKILL)
        ended = end_clearly(launched, marked_as)
        code = ended.code
        notes.append(f"{target} after {moment}: {code}")
    scene.finish(name, place, code)
    return Outcome(harmless=1, note=", ".join(notes))


def _wait_for_a_moment(launched: Launched, place: Path, seconds: float, draw: random.Random) -> str:
    """Wait for a time, or for a number of steps, of a command that may end before."""
    end, steps = time.monotonic() + draw.uniform(0, seconds), STEPS
    if draw.random() < 0.6:
        end, steps = time.monotonic() + 2 * seconds, draw.randrange(STEPS)
    began, done = time.monotonic(), 0
    while launched.process.poll() is None and time.monotonic() < end:
        with suppress(FileNotFoundError):  # of a checkpoint that has just been removed
            done = sum(len(records(path.parent)) for path in place.rglob("metrics.jsonl"))
        if done > steps:
            time.sleep(draw.uniform(0, 0.1))
            return f"step {steps}"
        time.sleep(0.01)
    return f"{time.monotonic() - began:.1f} s"


def _choose(launched: Launched, target: str, draw: random.Random) -> int:
    """The process to kill: a launcher where there is nothing below it (yet)."""
    launcher = launched.process.pid
    below = [process for process in descendants(launcher)[1:] if not _is_pythons_own(process)]
    if target == "rank":
        below = [process for process in below if not children(process)]
    elif target == "node":
        below = [process for process in below if children(process)]
    return draw.choice(below) if below and target != "launcher" else launcher


def _is_pythons_own(process: int) -> bool:
    """Whether it is multiprocessing's resource tracker, which complains on stderr, harmlessly, if it is killed."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return b"resource_tracker" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def stop(draw: random.Random, scene: Scene, place: Path) -> Outcome:
    """SIGSTOP for one rank of two: continued in time, the result is equal; else the run ends and names the rank."""
    name, timeout_s = "pretrain on 2", 12
    scene.place_of(name)
    marked_as, rank = mark(), draw.randrange(2)
    words = [*JOBS[name].words(scene, place), "--train.hang_timeout", f"{timeout_s}s"]
    launched = start(words, place, marked_as)
    step = draw.randrange(STEPS - 5)
    launched.wait_until(lambda: len(records(place / "run")) > step, f"step {step}")
    process = launched.ranks()[rank]
    os.kill(process, signal.SIGSTOP)
    if draw.random() < 0.5:
        time.sleep(draw.uniform(0, timeout_s / 3))
        os.kill(process, signal.SIGCONT)
        ended = end_clearly(launched, marked_as)
        assert ended.code == 0, ended
        scene.finish(name, place, ended.code)
        return Outcome(harmless=1)
    ended = end_clearly(launched, marked_as)
    assert ended.code, "it ended well with a stopped rank"
    assert f"rank {rank} on host" in ended.err, ended.err[-2000:]
    scene.finish(name, place, ended.code)
    return Outcome(found=1, note=f"rank {rank}")


CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long long *jump;
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_JUMP"), O_RDONLY);
    void *place = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (place != MAP_FAILED) jump = place;
    if (file >= 0) close(file);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && jump && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *jump;
    return failed;
}
time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *now, void *zone) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}
"""
"""A preloaded library that adds the seconds in the file CLOCK_JUMP to the time of day."""


def jump(draw: random.Random, scene: Scene, place: Path) -> Outcome:
    """The time of day jumps back and forth by up to a day while a command runs: the result is equal."""
    compiler, library = shutil.which("cc"), scene.folder / "clock.so"
    if not compiler:
        raise Unavailable("no C compiler (cc) for the clock")
    if not library.is_file():
        (scene.folder / "clock.c").write_text(CLOCK)
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, scene.folder / "clock.c"], check=True)
    name = draw.choice([name for name in JOBS if name not in ("launch local", "mlperf run", "profile run")])
    scene.place_of(name)
    seconds, marked_as = place / "jump", mark()
    seconds.write_bytes(struct.pack("q", draw.randint(-86400, 86400)))
    variables = {"LD_PRELOAD": str(library), "CLOCK_JUMP": str(seconds)}
    launched = start(JOBS[name].words(scene, place), place, marked_as, **variables)
    while launched.process.poll() is None:
        with open(seconds, "r+b") as file:
            file.write(struct.pack("q", draw.choice((0, draw.randint(-5, 5), draw.randint(-86400, 86400)))))
        time.sleep(draw.uniform(0, 2))
    ended = end_clearly(launched, marked_as)
    assert ended.code == 0, ended
    scene.check(name, place)
    return Outcome(harmless=1, note=name)
