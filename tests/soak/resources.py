"""Too little of something: room on the disk, descriptors, memory; and whether a long run needs more and more."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import time
from pathlib import Path

from tests import helpers
from tests.launched import descendants, records
from tests.soak.jobs import JOBS, SETTINGS, Scene, mark, start
from tests.soak.outcome import Outcome, Unavailable, assert_user_error, end_clearly

MB = 1 << 20


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
    if later:  # once it writes: while libraries load, they end a process in their own words (OpenBLAS with code 1)
        launched.wait_until(lambda: any(place.iterdir()), "the first file")
        time.sleep(draw.uniform(0, 0.5 * scene.seconds[name]))
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
