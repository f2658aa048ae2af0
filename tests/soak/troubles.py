"""One round of each kind of trouble: disturb a command or a file, then check. A failed check raises."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests import fuzz, helpers
from tests.launched import Launched, children, descendants, records
from tests.miniature_tasks import command_line
from tests.soak.jobs import (
    JOBS,
    SETTINGS,
    STEPS,
    Ended,
    Scene,
    assert_all_ended,
    digest,
    files_of,
    in_child,
    mark,
    result_of_run,
    start,
)  # fmt: skip

MB = 1 << 20


class Unavailable(Exception):
    """This machine cannot make this kind of trouble; says what it lacks."""


@dataclass
class Outcome:
    """How often trouble was found (an error with its code, or a warning), and how often the result was equal."""

    found: int = 0
    harmless: int = 0
    shown: int = 0
    """Flips that changed only what a page or a log shows: records carry no checksum."""
    note: str = ""


Trouble = Callable[[random.Random, Scene, Path], Outcome]


def end_clearly(launched: Launched, marked_as: str) -> Ended:
    """Wait for a disturbed command: it ends by itself, in a sentence and not in a traceback, and leaves no process."""
    try:
        code = launched.wait()
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end:\n{launched.err[-2000:]}") from None
    finally:
        launched.kill()
    assert_all_ended(marked_as)
    ended = Ended(code, launched.err)
    assert "Traceback" not in ended.err, f"exit code {code}\n{ended.err[-3000:]}"
    return ended


def assert_user_error(ended: Ended) -> None:
    assert ended.code == 2, f"exit code {ended.code}, not 2:\n{ended.err[-2000:]}"
    assert len(ended.sentences) == 1, f"not one sentence with a code:\n{ended.err[-2000:]}"


# --- processes ---------------------------------------------------------------------------------------------------


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
        moment = draw.uniform(0, 0.9 * scene.seconds[name])
        time.sleep(moment)
        if target == "group":
            launched.kill()
        elif launched.process.poll() is None:
            os.kill(_choose(launched, target, draw), signal.SIGKILL)
        ended = end_clearly(launched, marked_as)
        code = ended.code
        notes.append(f"{target} after {moment:.1f} s: {code}")
    scene.finish(name, place, code)
    return Outcome(harmless=1, note=", ".join(notes))


def _choose(launched: Launched, target: str, draw: random.Random) -> int:
    """The process to kill: a launcher where there is nothing below it (yet)."""
    launcher = launched.process.pid
    below = descendants(launcher)[1:]
    if target == "rank":
        below = [process for process in below if not children(process)]
    elif target == "node":
        below = [process for process in below if children(process)]
    return draw.choice(below) if below and target != "launcher" else launcher


def stop(draw: random.Random, scene: Scene, place: Path) -> Outcome:
    """SIGSTOP for one rank of two: continued in time, the result is equal; else the run ends and names the rank."""
    name, timeout_s = "pretrain on 2", 6
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
    name = draw.choice([name for name in JOBS if name != "launch local"])
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


# --- scarcity ----------------------------------------------------------------------------------------------------


def fill_disk(draw: random.Random, scene: Scene, place: Path) -> Outcome:
    """A disk too small for what a command writes: one user error; with room, the same command continues."""
    name = draw.choice(("pretrain on 1", "pretrain on 2", "data prepare", "finetune", "train"))
    whole = sum(path.stat().st_size for path in scene.place_of(name).rglob("*") if path.is_file())
    size = max(8192, int(whole * draw.uniform(0.02, 1.1)))
    disk, marked_as = place / "disk", mark()
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        raise Unavailable("only root may mount a small disk")
    try:
        ended = end_clearly(start(JOBS[name].words(scene, disk), place, marked_as), marked_as)
        if ended.code:
            assert_user_error(ended)
        subprocess.run(["mount", "-o", f"remount,size={whole + 64 * MB}", str(disk)], check=True)
        scene.finish(name, disk, ended.code)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
    note = f"{name} on {size} of {whole} bytes: {''.join(ended.sentences)}"
    return Outcome(found=1, note=note) if ended.code else Outcome(harmless=1, note=note)


def limit(draw: random.Random, scene: Scene, place: Path) -> Outcome:
    """Few file descriptors or little memory, from the beginning or later: success or one user error."""
    name = draw.choice(("pretrain on 1", "data prepare", "finetune"))
    scene.place_of(name)
    marked_as, later = mark(), draw.random() < 0.5
    launched = start(JOBS[name].words(scene, place), place, marked_as)
    if later:
        time.sleep(draw.uniform(0, 0.9 * scene.seconds[name]))
    if draw.random() < 0.5:
        kind, most = resource.RLIMIT_NOFILE, draw.randint(8, 80)
    else:
        kind, most = resource.RLIMIT_AS, int(draw.uniform(0.5, 4) * 1024 * MB)
    for process in descendants(launched.process.pid):
        try:
            if later and kind == resource.RLIMIT_AS:
                held = int(Path(f"/proc/{process}/statm").read_text().split()[0]) * resource.getpagesize()
                most = held + draw.randrange(200 * MB)
            resource.prlimit(process, kind, (most, most))
        except (OSError, IndexError):
            continue
    ended = end_clearly(launched, marked_as)
    what = f"{name}, {'descriptors' if kind == resource.RLIMIT_NOFILE else 'memory'} {most}, {later=}"
    try:
        if ended.code:
            assert_user_error(ended)
        scene.finish(name, place, ended.code)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None
    note = f"{what}: {''.join(ended.sentences)}"
    return Outcome(found=1, note=note) if ended.code else Outcome(harmless=1, note=note)


# --- files -------------------------------------------------------------------------------------------------------

RECORDS = {"metrics.jsonl", "environment.json", "logs", "tensorboard"}
"""Files of a run that hold what happened. Only pages and lists show them; no other result depends on them."""


def flip(draw: random.Random, scene: Scene, place: Path) -> Outcome:
    """One bit of one file of a run that stopped before its end: each verb finds it or gives the same result."""
    run = scene.folder / "flipped" / "run"
    if run.parent.exists():
        shutil.rmtree(run.parent)
    shutil.copytree(scene.place_of("pretrain on 1") / "run", run)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    look = partial(_use, run, scene.inputs / "data", scene.folder / "flipped")
    if "flipped" not in scene.references:
        scene.references["flipped"] = in_child(look, place / "whole.log")
        return flip(draw, scene, place)
    path = draw.choice(sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    where, bit = draw.randrange(len(content)), draw.randrange(8)
    content[where] ^= 1 << bit
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # which the report shows
    named = path.relative_to(run)
    note = f"bit {bit} of byte {where} of {named} ({bytes(content[max(0, where - 20) : where + 20])!r})"
    try:
        used = in_child(look, place / "flipped.log")
    except AssertionError as error:
        raise AssertionError(f"{note}: {error}") from None
    found = shown = False
    for verb, (code, err, result) in used.items():
        whole = scene.references["flipped"][verb]
        assert "Traceback" not in err, f"{note}, {verb}: {err[-3000:]}"
        if code:
            assert (code, len(Ended(code, err).sentences)) == (2, 1), f"{note}, {verb}: {code}\n{err[-2000:]}"
            found = True
        elif result != whole[2]:
            if "warning:" in err.replace(whole[1], ""):
                found = True
            elif verb in ("report", "logs") and RECORDS & {*named.parts}:
                shown = True
            else:
                raise AssertionError(f"{note}, {verb}: another result without a word:\n{result}\nnot\n{whole[2]}")
        else:
            found = found or "warning:" in err.replace(whole[1], "")
    return Outcome(found=found, shown=shown and not found, harmless=not (found or shown), note=note)


def _use(run: Path, data: Path, folder: Path) -> dict[str, tuple[int, str, object]]:
    """The exit code, the errors and the result of each verb that reads a run; resume comes last, which changes it."""
    exported, page = folder / "exported", folder / "report.html"
    verbs: dict[str, tuple[list[object], Callable[[str], object]]] = {
        "evaluate": (["evaluate", run, "--data", data, "--json"], str),
        "fill-mask": (["fill-mask", run, "bato [MASK] kese", "--json"], str),
        "weights export": (["weights", "export", run, "--out", exported], lambda _: files_of(exported)),
        "report": (["report", run, "--out", page], lambda _: digest(page)),
        "logs": (["logs", run], str),
        "resume": (["resume", run], lambda _: _tensors(run)),
    }
    found = {}
    for verb, (words, result) in verbs.items():
        ended = command_line(*words, check=False)
        found[verb] = (ended.code, ended.err, result(ended.out) if ended.code == 0 else None)
    return found


def _tensors(run: Path) -> dict[str, str]:
    return {name: value for name, value in result_of_run(run).items() if name.endswith(".safetensors")}


READING_S = 4.0


def mutate(draw: random.Random, scene: Scene, place: Path) -> Outcome:
    """Mutations of one file that bertrain reads, for some seconds."""
    reader = draw.choice(fuzz.readers())

    def read() -> list[int]:
        os.environ["XDG_CACHE_HOME"] = str(place / "cache")
        fuzzed, end = fuzz.Fuzzed(reader, place / "fuzzed"), time.monotonic() + READING_S
        while time.monotonic() < end:
            if finding := fuzzed.try_one(draw):
                kept = scene.folder.with_name(f"{scene.folder.name}-{digest(fuzzed.path)}")
                kept.write_bytes(finding.content)
                raise AssertionError(f"{reader.name}: {finding.what} (mutated file: {kept})")
        return [fuzzed.num_read, fuzzed.num_refused]

    num_read, num_refused = in_child(read, place / "reader.log")
    return Outcome(found=num_refused, harmless=num_read, note=reader.name)


# --- a long run --------------------------------------------------------------------------------------------------

LONG_STEPS = 100_000
GROWTH = {"memory_mb": 1.05, "descriptors": 1.0, "threads": 1.0, "cpu_ms_per_step": 1.5}
"""By what each median of the last quarter of a long run may exceed that of the second."""


def run_long(seconds: float, _draw: random.Random, scene: Scene, place: Path) -> Outcome:
    """Tiny steps for this long, at most 100,000, with memory, descriptors, threads and CPU time per step watched."""
    small = {"model__num_layers": 1, "model__hidden_size": 16, "batch__sequences": 2, "log__level": "quiet"}
    settings = {"train__max_steps": LONG_STEPS, "checkpoint__every_steps": 500, "log__every_steps": 10}
    words = ["pretrain", "bert-tiny", "--data", scene.inputs / "data", "--run", place / "run", "--train.max_time",
             f"{max(10, int(seconds))}s", *helpers.tiny_arguments(**SETTINGS | settings | small)]  # fmt: skip
    marked_as = mark()
    launched = start(words, place, marked_as)
    samples = []
    launched.wait_until(lambda: bool(records(place / "run")), "the first steps")
    path = place / "run" / "metrics.jsonl"
    process = Path(f"/proc/{launched.process.pid}")
    while launched.process.poll() is None:
        try:
            words_of = (process / "stat").read_text().rsplit(")", 1)[1].split()
            sample = {"steps": path.read_bytes().count(b'"kind": "step"'),
                      "cpu_s": (int(words_of[11]) + int(words_of[12])) / os.sysconf("SC_CLK_TCK"),
                      "threads": int(words_of[17]), "memory_mb": int(words_of[21]) * resource.getpagesize() / MB,
                      "descriptors": len(list((process / "fd").iterdir()))}  # fmt: skip
        except (OSError, IndexError):
            break
        samples.append(sample)
        time.sleep(max(0.5, seconds / 400))
    ended = end_clearly(launched, marked_as)
    assert ended.code == 0, ended
    steps = len(helpers.losses(place / "run"))
    quarter = len(samples) // 4
    assert quarter >= 2, "too short to compare"
    second, last = ([*samples[begin : begin + quarter]] for begin in (quarter, 3 * quarter))
    before, after = _medians(second), _medians(last)
    note = f"{steps} steps; " + ", ".join(f"{name} {before[name]:.2f} -> {after[name]:.2f}" for name in GROWTH)
    grown = [name for name, most in GROWTH.items() if after[name] > before[name] * most]
    assert not grown, f"{grown} grew: {note}"
    return Outcome(harmless=1, note=note)


def _medians(samples: list[dict[str, float]]) -> dict[str, float]:
    found = {name: sorted(sample[name] for sample in samples)[len(samples) // 2] for name in samples[0]}
    steps = max(1, samples[-1]["steps"] - samples[0]["steps"])
    return found | {"cpu_ms_per_step": 1000 * (samples[-1]["cpu_s"] - samples[0]["cpu_s"]) / steps}


TROUBLES: dict[str, tuple[float, Trouble]] = {
    "kills": (0.3, kill),
    "full disk": (0.1, fill_disk),
    "limits": (0.1, limit),
    "stop": (0.1, stop),
    "clock": (0.05, jump),
    "flips": (0.15, flip),
    "readers": (0.1, mutate),
    "long": (0.1, partial(run_long, 30.0)),
}
"""Each kind with its share of the time."""
