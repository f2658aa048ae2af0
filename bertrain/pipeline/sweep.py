"""`bertrain sweep`: one run for each combination of some settings, several at once on this machine.

OUT/sweep.json       the request, and the names of the runs that are done
OUT/NAME             a run folder for each combination and seed
OUT/output/NAME.txt  what its process printed
OUT/report.html      the runs side by side, best first

Each run is a process of `bertrain pretrain` or `bertrain finetune`, which continues a run that exists. So the same
command continues after an interruption at any point. `sweep_results.py` ranks the runs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType

from bertrain.base.console import warn
from bertrain.base.errors import RequeueError, StoppedError, UserError, nearest
from bertrain.base.files import absolute
from bertrain.base.formatting import GIB, counted
from bertrain.base.machine import under_launcher
from bertrain.config.recipe import recipe_names
from bertrain.config.resolve import Overrides, absolute_overrides, resolve
from bertrain.config.settings import Settings
from bertrain.pipeline.folder import locked, read_begun, write_begun
from bertrain.pipeline.sweep_results import Swept, rank_runs
from bertrain.ranks.signals import LAUNCHER, STOP_SIGNALS, handling
from bertrain.run.folder import Run
from bertrain.tasks.registry import task_names

SWEEP, OUTPUT = "sweep.json", "output"
ARGUMENTS = {"what": "RECIPE_OR_TASK", "settings_file": "--settings"}  # of a request, by its fields
LONGEST_NAME = 160  # of a run folder; file systems allow 255 bytes
POLL_S = 0.1
ENDING_S = 120  # for runs of a killed sweep to save and end

Planned = dict[str, dict[str, str]]
"""Runs of a sweep by their names: the settings in which each differs from the others."""


@dataclass(frozen=True)
class Request:
    """The user's arguments, kept in OUT: a command with the same arguments continues, another one is refused."""

    what: str
    """A recipe, or a task to fine-tune for."""
    data: str
    init: str
    settings_file: str
    overrides: dict[str, str]
    grid: dict[str, list[str]]
    seeds: list[int]

    def resolve(self, changes: Mapping[str, str]) -> Settings:
        from bertrain.training.task_settings import resolve_task

        overrides, file = self.overrides | dict(changes), self.settings_file or None
        if self.what in task_names():
            return resolve_task(self.what, overrides, settings_file=file)
        settings = resolve(self.what, overrides, file)
        settings.refuse_unsettled_task()
        return settings


@dataclass(frozen=True)
class Slots:
    """How many runs train at once, and why; each slot has its own cores, and one of the GPUs."""

    cpus: list[tuple[int, ...]]
    gpus: list[str]
    reason: str


def sweep(
    what: str,
    data: str | Path,
    out: str | Path,
    *,
    grid: Mapping[str, Sequence[object]] | None = None,
    seeds: Sequence[int] = (),
    init: str | Path = "",
    overrides: Overrides | None = None,
    settings_file: str | Path | None = None,
    at_once: int = 0,
) -> Swept:
    """Train a recipe, or fine-tune for a task, with every combination of the values in `grid`, once for each seed.

    `at_once` limits the runs that train at the same time; 0: as many as there are cores, and as fit into memory. Called
    again with the same arguments, it continues. A run that fails does not stop the others; the result names it.

    Example: bertrain.sweep("bert-tiny", "data", "sweep", grid={"train.max_steps": [2, 4]}).points[0].settings
    """
    out, request = Path(out), make_request(what, data, grid or {}, seeds, init, overrides, settings_file)
    planned = plan_runs(request)
    with locked(out, SWEEP):
        done = _read_done(out / SWEEP, request)
        waiting = {name: changes for name, changes in planned.items() if name not in done}
        slots = choose_slots(request, waiting, out, at_once)
        write_begun(out / SWEEP, request, done=done)
        print(f"{out}: {counted(len(planned), 'run')}, {len(done)} of them done; {slots.reason}", flush=True)
        failed = _run_all(request, waiting, out, slots, done, len(planned))
        points = {name: {key: changes[key] for key in request.grid} for name, changes in planned.items()}
        return rank_runs(out, [(point, out / name) for name, point in points.items() if name in done], failed)


def dry_run(out: str | Path, request: Request, at_once: int) -> list[str]:
    """The runs that a sweep would start, and how many at once, in lines; nothing is written."""
    planned = plan_runs(request)
    done = _read_done(Path(out) / SWEEP, request)
    waiting = {name: changes for name, changes in planned.items() if name not in done}
    slots = choose_slots(request, waiting, Path(out), at_once)
    return [slots.reason, *(f"{name}{' (done)' if name in done else ''}" for name in planned)]


# --- what to run ------------------------------------------------------------------------------------------------


def make_request(
    what: str,
    data: str | Path,
    grid: Mapping[str, Sequence[object]],
    seeds: Sequence[int],
    init: str | Path,
    overrides: Overrides | None,
    settings_file: str | Path | None,
) -> Request:
    """The arguments of `sweep`, checked; paths are absolute, so that the command may be repeated from elsewhere."""
    if under_launcher():
        raise UserError("not-launchable", "a sweep starts its runs itself; run it on one machine, without a launcher")
    if not what.endswith(".toml") and what not in (names := [*recipe_names(), *task_names()]):
        raise UserError("unknown-recipe", f"{what!r} is neither a recipe nor a task{nearest(what, names)}")
    if not (grid or seeds):
        raise UserError("missing-option", "nothing to vary: give --grid SETTING=VALUE,VALUE, or --seeds 3")
    given = absolute_overrides(overrides)
    for key in [*grid, *(["train.seed"] if seeds else [])]:
        if key in given or (key == "train.seed" and seeds and key in grid):
            raise UserError(
                "conflicting-options", f"{key} is given as a setting and also varied; give only one of them"
            )
    return Request(
        what=str(Path(what).resolve()) if what.endswith(".toml") else what,
        data=str(Path(data).resolve()),
        init=absolute(init),
        settings_file=str(Path(settings_file).resolve()) if settings_file else "",
        overrides=given,
        grid={key: [str(value) for value in values] for key, values in grid.items()},
        seeds=list(seeds),
    )


def plan_runs(request: Request) -> Planned:
    """Every point of the grid with the first seed, then with the next one."""
    endings = [key.rpartition(".")[2] for key in request.grid]
    short = {
        key: key if endings.count(ending) > 1 else ending for key, ending in zip(request.grid, endings, strict=True)
    }
    planned: Planned = {}
    for seed in [{"train.seed": str(seed)} for seed in request.seeds] or [{}]:
        for values in product(*request.grid.values()):
            changes = dict(zip(request.grid, values, strict=True)) | seed
            words = (f"{short.get(key, 'seed')}={value}" for key, value in changes.items())
            name = re.sub(r"[^\w.,=+-]", "_", ",".join(words), flags=re.ASCII)
            if len(name) > LONGEST_NAME or name in planned or name in (SWEEP, OUTPUT):
                name = f"run={len(planned) + 1}"
            planned[name] = changes
    return planned


def _read_done(path: Path, request: Request) -> list[str]:
    """The names of the runs that are done."""
    done: list[str] = read_begun(path, request, {"done": list[str]}, ARGUMENTS).get("done", [])
    return done


# --- how many at once -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The memory that the largest run needs, the memory there is, and how many such runs fit into it."""

    needed: int
    available: str
    count: int
    num_gpus: int


def choose_slots(request: Request, planned: Planned, out: Path, asked: int) -> Slots:
    """How many of these runs to start at once, each on a share of the cores, and on one of the GPUs."""
    from bertrain.ranks.binding import assign_cores, read_topology, usable_cpus
    from bertrain.ranks.parallel import gpu_nodes

    if not planned:
        return Slots([], [], "nothing left to train")
    fit, cores = check_runs(request, planned, out), read_topology(usable_cpus())
    count, because = count_at_once(len(planned), fit.count, len(cores), asked)
    bindings = assign_cores(cores, count, gpu_nodes(count) if fit.num_gpus else ())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(fit.num_gpus)))
    reason = f"{count} at once ({because}); a run needs about {fit.needed / GIB:.2f} of {fit.available}"
    return Slots([one.cpus for one in bindings], visible.split(",") if fit.num_gpus else [], reason)


def count_at_once(left: int, fitting: int, num_cores: int, asked: int) -> tuple[int, str]:
    """How many runs to start at once, and what limits them; without `asked`, at most one for each core."""
    wish = (asked, f"--at-once {asked}") if asked else (num_cores, counted(num_cores, "core"))
    return min((left, "all that are left"), wish, (fitting, "no more fit into memory"), key=lambda limit: limit[0])


def check_runs(request: Request, planned: Planned, out: Path) -> Fit:
    """Resolve every run as its process will, refuse invalid ones, and estimate the memory of the largest."""
    import torch

    from bertrain.planning.memory_fit import with_budget
    from bertrain.training.resolve_auto import estimate_token_budget, place_for
    from bertrain.training.resolved_run import ResolvedRun, resolve_run

    last: ResolvedRun | None = None
    checked: list[Settings] = []
    fits: list[Fit] = []
    for name, changes in planned.items():
        settings = request.resolve(changes)
        if settings in checked:
            raise UserError(
                "repeated-value", f"the run {name} has the same settings as another run; give each value once"
            )
        same = last if checked and (checked[-1].task, checked[-1].data) == (settings.task, settings.data) else None
        checked.append(settings)
        last = resolve_run(settings, request.data, out / name, init=request.init, same_task=same)
        last.check_memory()
        settings, place = last.settings, place_for(last.settings, last.data, 1)
        if settings.batch.auto and last.begun is None:
            settings = with_budget(settings, estimate_token_budget(settings, place) or settings.batch.token_budget)
        needed, num_gpus = place.needs(settings).total, torch.cuda.device_count() if place.on_gpu else 0
        count = max(1, place.bytes // needed) * max(1, num_gpus)
        fits.append(Fit(needed, f"{place.bytes / GIB:.1f} GiB {place.label}", count, num_gpus))
    return min(fits, key=lambda fit: fit.count)


# --- running ----------------------------------------------------------------------------------------------------


def _run_all(
    request: Request, waiting: Planned, out: Path, slots: Slots, done: list[str], total: int
) -> dict[str, str]:
    """Run the waiting runs, and record in sweep.json those that are done; returns the errors of failed runs by name.

    A signal is forwarded to the runs, which then save and exit, and no other run is started.
    """
    queue, free = [*reversed(waiting.items())], [*reversed(range(len(slots.cpus)))]
    running: dict[int, tuple[subprocess.Popen[bytes], str]] = {}  # by slot
    failed: dict[str, str] = {}
    received: list[signal.Signals] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        if len(received) == 1:
            os.write(2, b"\nstopping the runs after their step; Ctrl-C again to quit now\n")
        for process, _ in list(running.values()):
            process.send_signal(number)

    (out / OUTPUT).mkdir(exist_ok=True)
    try:
        with handling(STOP_SIGNALS, forward):
            while running or (queue and not received):
                while queue and free and not received:
                    (name, changes), slot = queue.pop(), free.pop()
                    running[slot] = _start(request, name, changes, out, slots, slot), name
                    if received:  # between the two
                        running[slot][0].send_signal(received[-1])
                time.sleep(POLL_S)
                for slot, (process, name) in list(running.items()):
                    if (code := process.poll()) is None:
                        continue
                    del running[slot]
                    free.append(slot)
                    if code == 0:
                        done.append(name)
                        write_begun(out / SWEEP, request, done=done)
                        print(f"{name}: done, {len(done)} of {total}", flush=True)
                    elif not received:
                        failed[name] = _last_words(out / OUTPUT / f"{name}.txt", code)
                        warn(f"{name} failed: {failed[name]}")
    finally:  # no process is left to stop, unless this one fails
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.wait()
    if received:
        error = StoppedError if received[0] == signal.SIGINT else RequeueError
        ended = f"stopped by {received[0].name}; {len(done)} of {total} runs are done"
        raise error("stopped-by-signal", f"{ended}; the same command continues")
    return failed


def _start(
    request: Request, name: str, changes: dict[str, str], out: Path, slots: Slots, slot: int
) -> subprocess.Popen[bytes]:
    """Start the process of a run on the cores and the GPU of its slot."""
    folder = out / name
    _wait_until_free(folder)
    kind = "finetune" if request.what in task_names() else "pretrain"
    command = [sys.executable, "-u", "-m", "bertrain", kind, request.what, "--data", request.data, "--run", str(folder)]
    command += ["--init", request.init] if request.init else []
    command += ["--settings", request.settings_file] if request.settings_file else []
    command += [f"--{key}={value}" for key, value in (request.overrides | changes).items()]
    environment = os.environ | {LAUNCHER: str(os.getpid())}  # it ends if this process is killed
    if slots.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = slots.gpus[slot % len(slots.gpus)]
    with open(out / OUTPUT / f"{name}.txt", "wb") as printed, _bound(slots.cpus[slot]):
        return subprocess.Popen(
            command, start_new_session=True, env=environment, stdout=printed, stderr=subprocess.STDOUT
        )


@contextmanager
def _bound(cpus: Sequence[int]) -> Iterator[None]:
    """Run the body on these processors; a process that it starts stays on them."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _wait_until_free(folder: Path) -> None:
    """Wait until a run that a killed sweep had started has saved and exited."""
    deadline = time.monotonic() + ENDING_S
    while Run.exists(folder) and time.monotonic() < deadline:
        with Run.open(folder).lock() as is_ours:
            if is_ours:
                return
        time.sleep(POLL_S)


def _last_words(path: Path, code: int) -> str:
    """Why a run failed: its error, or the last line that it printed."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("bertrain: ")), lines[-1] if lines else "")
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{said.removeprefix('bertrain: ')} ({how}; {path})".lstrip()
