"""Submits a job, follows its logs, reports its state and cancels it."""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.config.settings import Settings
from bertrain.launch.job import SCRIPT, Job, read_job, write_job
from bertrain.launch.scripts import job_script
from bertrain.run.records import StepRecord, last_record

SUBMITTED, EVENTS = "submitted", "events"
PBS_STATE = re.compile(r"job_state = (\w)")
ASK_S = 15.0  # between two questions to a scheduler while logs are followed
PBS_STATES = {"Q": "PENDING", "R": "RUNNING", "B": "RUNNING", "H": "HELD", "E": "ENDING"}
ALLOCATIONS = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID"}
"""The variable that each scheduler sets inside an allocation."""


def is_inside_allocation(launcher: str, environment: Mapping[str, str]) -> bool:
    """Whether this process runs inside an allocation of the launcher's scheduler (salloc, qsub -I)."""
    return launcher in ALLOCATIONS and ALLOCATIONS[launcher] in environment


def submit_job(job: Job, settings: Settings | None) -> str:
    """Write the folder of a job that `make_job` made and submit it to the scheduler; returns the job number.

    Without a scheduler, or inside one of its allocations, this process becomes the job.
    """
    in_place = job.launcher not in ALLOCATIONS or is_inside_allocation(job.launcher, os.environ)
    program = {"slurm": "sbatch", "pbs": "qsub", "mpi": shlex.split(job.spec.mpirun)[0]}.get(job.launcher, "bash")
    program = "bash" if in_place and job.launcher != "mpi" else program
    if shutil.which(program) is None:
        needs = f"`launch {job.launcher}` needs {program}"
        raise UserError("missing-program", f"{needs}, which is not on the PATH; use a login node, or try --dry-run")
    write_job(job, settings, job_script(job))
    path = job.folder / SCRIPT
    if in_place:
        if job.launcher in ALLOCATIONS:
            print(f"inside an allocation ({ALLOCATIONS[job.launcher]} is set): the job runs here and now")
            os.environ["BERTRAIN_IN_PLACE"] = "1"
        sys.stdout.flush()
        os.execvp("bash", ["bash", str(path)])
    command = ["sbatch", "--parsable", str(path)] if job.launcher == "slurm" else ["qsub", str(path)]
    done = _run(command)
    if done.returncode:
        reason = done.stderr or f"exit code {done.returncode}"
        raise UserError(
            "job-refused", f"{program} refused {path}: {reason}; edit and submit the script, or remove its folder"
        )
    number = done.stdout.strip().partition(";")[0]
    with open(job.folder / SUBMITTED, "a") as file:
        file.write(f"{number}\n")
    return number


def _outputs(job: Job) -> list[Path]:
    """The folders that hold logs and events: the job's own, or one for each task that has begun."""
    own = [job.output(number) for number in range(1, len(job.tasks) + 1)]
    return [path for path in own if path.is_dir()]


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


def job_status(folder: str | Path) -> dict[str, Any]:
    """The state of a job, and of each task the last event and the last step of its run."""
    job = read_job(folder)
    tasks: list[dict[str, Any]] = []
    for number, task in enumerate(job.tasks, start=1):
        newest = _newest_step(Path(task.folder)) if task.folder else None
        event, step = (_lines(job.output(number) / EVENTS) or [""])[-1], newest.step if newest else 0
        tasks.append({"command": shlex.join(task.command), "folder": task.folder, "last_event": event, "step": step})
    return {"job": str(job.folder), "launcher": job.launcher, "state": _state(job), "tasks": tasks}


def _newest_step(folder: Path) -> StepRecord | None:
    """The last step of a run, or of the one of several that wrote last."""
    found = [path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}metrics.jsonl")]
    return last_record(max(found, key=lambda path: path.stat().st_mtime), StepRecord) if found else None


def _state(job: Job) -> str:
    """The state as the scheduler reports it; without one, by the process that runs the script."""
    numbers = _lines(job.folder / SUBMITTED)
    if job.launcher == "slurm" and numbers:
        asked = _run(["squeue", "--noheader", "--format=%T", f"--jobs={numbers[-1]}"])
        if asked.returncode and "Invalid job id" not in asked.stderr:  # printed for jobs that ended long ago
            raise UserError("unknown-job-state", f"squeue failed for job {numbers[-1]}: {asked.stderr}")
        return " ".join(sorted(set(asked.stdout.split()))) or _state_by_events(job)
    if job.launcher == "pbs" and numbers:  # an array, and the elements of it that were submitted again
        answers = [_run(["qstat", "-f", number]) for number in numbers]
        for asked in answers:
            if asked.returncode and not re.search("Unknown Job|has finished", asked.stderr, re.IGNORECASE):
                raise UserError("unknown-job-state", f"qstat failed for job {numbers[-1]}: {asked.stderr}")
        states = {state for asked in answers for state in PBS_STATE.findall(asked.stdout)}
        return " ".join(sorted(PBS_STATES.get(state, state) for state in states)) or _state_by_events(job)
    host, number = _process(job) or (platform.node(), 0)
    if host != platform.node():
        return f"started on {host}; ask there"
    return "RUNNING" if _is_script(number, job) else _state_by_events(job)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of the scheduler; its errors become one line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(
            "missing-program", f"this job needs {command[0]}, which is not on the PATH; use a login node"
        ) from None
    done.stderr = " ".join(done.stderr.split())
    return done


def _state_by_events(job: Job) -> str:
    """The state of a job that is not running, by the last events of its script."""
    lasts = [events[-1] for output in _outputs(job) if (events := _lines(output / EVENTS))]
    if not lasts:
        is_submitted = bool(_lines(job.folder / SUBMITTED))
        return "GONE: the scheduler does not know it, and it never started" if is_submitted else "NOT STARTED"
    codes = [found[1] for last in lasts if (found := re.search(r"ended with exit code (\d+)$", last))]
    if len(codes) < len(lasts):
        return "GONE: its script noted no end"
    if set(codes) != {"0"}:
        return f"ENDED with exit code {max(codes, key=int)}"
    if len(codes) < len(job.tasks):
        return f"GONE: {len(codes)} of {len(job.tasks)} tasks are done"
    return "DONE"


def _process(job: Job) -> tuple[str, int] | None:
    """The host and process number of the script's last start."""
    for output in reversed(_outputs(job)):
        for line in reversed(_lines(output / EVENTS)):
            if found := re.search(r" started on (\S+) as process (\d{1,15})", line):
                return found[1], int(found[2])
    return None


def _is_script(process: int, job: Job) -> bool:
    try:
        return str(job.folder / SCRIPT).encode() in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def cancel_job(folder: str | Path) -> str:
    """Stop a job; its ranks save first, if the scheduler gives them time. Returns a line that says what was done."""
    job = read_job(folder)
    numbers = _lines(job.folder / SUBMITTED)
    if job.launcher in ALLOCATIONS and numbers:
        program = "scancel" if job.launcher == "slurm" else "qdel"
        done = {number: _run([program, number]) for number in numbers}
        canceled = [number for number, one in done.items() if not one.returncode]  # the others may have ended
        if not canceled:
            raise UserError("cancel-failed", f"`{program} {numbers[-1]}` failed: {done[numbers[-1]].stderr}")
        return f"canceled job {', '.join(canceled)} with {program}"
    process = _process(job)
    if process is None:
        raise UserError("job-not-started", f"the job in {job.folder} was never started; there is nothing to cancel")
    host, number = process
    if host != platform.node():
        raise UserError("job-on-other-host", f"the job runs on {host}; cancel it there")
    if not _is_script(number, job):
        raise UserError("job-not-running", f"the job in {job.folder} is no longer running")
    os.kill(number, signal.SIGTERM)
    return f"sent SIGTERM to process {number}: it finishes the current step and saves"


def job_logs(folder: str | Path, *, rank: int | None = None, follow: bool = False) -> Iterator[str]:
    """The log lines of the newest start, prefixed with their rank, or of one `rank`; `follow`: until the job ends."""
    job = read_job(folder)
    seen: dict[Path, int] = {}
    is_over, asked_at = not follow, -math.inf
    while True:
        # A scheduler is not for being asked several times a second, and may be too busy to answer.
        if follow and time.monotonic() - asked_at >= (ASK_S if job.launcher in ALLOCATIONS else 0):
            with suppress(UserError) if math.isfinite(asked_at) else nullcontext():
                is_over = _state(job).startswith(("DONE", "ENDED", "GONE"))
            asked_at = time.monotonic()
        for output in _outputs(job):
            starts = sorted((output / "logs").glob("start-*"))
            followed = {path.parent for path in seen} | set(starts[-1:])
            for start in (start for start in starts if start in followed):
                for path in sorted(start.glob("rank-*.log" if rank is None else f"rank-{rank:05d}.log")):
                    yield from _new_lines(path, seen, output, is_over)
        if is_over:
            break
        time.sleep(0.3)
    if not seen:
        which = "any rank" if rank is None else f"rank {rank}"
        raise UserError("missing-log", f"there is no log of {which} in {job.folder} yet")


def _new_lines(path: Path, seen: dict[Path, int], output: Path, is_over: bool) -> Iterator[str]:
    with open(path, "rb") as file:
        file.seek(seen.get(path, 0))
        text = file.read()
    if not is_over:
        text = text[: text.rfind(b"\n") + 1]  # the rest of an unfinished line comes later
    seen[path] = seen.get(path, 0) + len(text)
    name = int(path.stem.partition("-")[2])
    task = f"{output.name} " if output.name.startswith("task-") else ""
    for line in text.decode(errors="replace").splitlines():
        yield f"[{task}{name}] {line}"
