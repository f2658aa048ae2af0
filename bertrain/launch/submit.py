"""Starting a job, and what can be asked of it afterwards: its logs, its state, its end."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from bertrain.base.errors import UserError
from bertrain.config.settings import Settings
from bertrain.launch.job import SCRIPT, Job, read_job, write_job
from bertrain.launch.scripts import job_script
from bertrain.run.records import StepRecord, last_record

SUBMITTED, EVENTS = "submitted", "events"
ALLOCATIONS = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID"}
"""What tells that we are inside an allocation already."""


def is_inside_allocation(launcher: str, environment: Mapping[str, str]) -> bool:
    """Whether a launcher's scheduler has given us nodes already (salloc, qsub -I)."""
    return launcher in ALLOCATIONS and ALLOCATIONS[launcher] in environment


def submit_job(job: Job, settings: Settings) -> str:
    """Write the folder of a job that `make_job` made, and hand it to the scheduler; returns its number.

    Where there is no scheduler, or we are inside an allocation of it, this process becomes the job.
    """
    in_place = job.launcher not in ALLOCATIONS or is_inside_allocation(job.launcher, os.environ)
    program = {"slurm": "sbatch", "pbs": "qsub", "mpi": shlex.split(job.spec.mpirun)[0]}.get(job.launcher, "bash")
    program = "bash" if in_place and job.launcher != "mpi" else program
    if shutil.which(program) is None:
        raise UserError(
            f"`launch {job.launcher}` needs {program}, which is not on the path here; try --dry-run to see the job"
        )
    write_job(job, settings, job_script(job))
    path = job.folder / SCRIPT
    if in_place:
        if job.launcher in ALLOCATIONS:
            print(f"inside an allocation ({ALLOCATIONS[job.launcher]} is set): it runs here and now")
            os.environ["BERTRAIN_IN_PLACE"] = "1"
        sys.stdout.flush()
        os.execvp("bash", ["bash", str(path)])
    words = ["sbatch", "--parsable", str(path)] if job.launcher == "slurm" else ["qsub", str(path)]
    done = _ask(words)
    if done.returncode:
        raise UserError(
            f"{words[0]} did not take the job in {job.folder}: "
            f"{' '.join(done.stderr.split()) or f'exit code {done.returncode}'}; "
            f"mend it and submit it from there ({words[0]} {shlex.quote(str(path))}), or remove the folder"
        )
    number = done.stdout.strip().partition(";")[0]
    with open(job.folder / SUBMITTED, "a") as file:
        file.write(f"{number}\n")
    return number


def _numbers(job: Job) -> list[str]:
    path = job.folder / SUBMITTED
    return path.read_text().split() if path.is_file() else []


def _outputs(job: Job) -> list[Path]:
    """The folders that hold logs and events: the job's own, or one for each repeat."""
    return sorted(job.folder.glob("repeat-*")) or [job.folder]


def _events(folder: Path) -> list[str]:
    path = folder / EVENTS
    return path.read_text().splitlines() if path.is_file() else []


def job_status(folder: str | Path) -> dict[str, Any]:
    """What a job is doing: the scheduler's word, what its script noted last, and how far its run has come."""
    job = read_job(folder)
    found: list[dict[str, Any]] = []
    for output in _outputs(job):
        repeat = int(output.name.partition("-")[2]) if output != job.folder else 0
        events = _events(output)
        run = Path(job.run_of(repeat))
        found.append(
            {"repeat": repeat, "run": str(run), "last_event": events[-1] if events else "", "step": _last_step(run)}
        )
    return {"job": str(job.folder), "launcher": job.launcher, "state": _state(job), "runs": found}


def _last_step(run: Path) -> int:
    """The newest step in the metrics of a run; 0 where there is none."""
    newest = last_record(run / "metrics.jsonl", StepRecord)
    return newest.step if newest else 0


def _state(job: Job) -> str:
    """One word or a few: the scheduler's where there is one, else by the process that runs the script."""
    numbers = _numbers(job)
    if job.launcher == "slurm" and numbers:
        asked = _ask(["squeue", "--noheader", "--format=%T", f"--jobs={numbers[-1]}"])
        if asked.returncode and "Invalid job id" not in asked.stderr:  # which is what it says of jobs long gone
            raise UserError(f"squeue does not tell the state of job {numbers[-1]}: {' '.join(asked.stderr.split())}")
        return " ".join(sorted(set(asked.stdout.split()))) or _last_word(job)
    if job.launcher == "pbs" and numbers:
        found = re.search(r"job_state = (\w)", _ask(["qstat", "-f", numbers[-1]]).stdout)
        return (
            {"Q": "PENDING", "R": "RUNNING", "B": "RUNNING", "H": "HELD", "E": "ENDING"}.get(found[1], found[1])
            if found
            else _last_word(job)
        )
    process = _process(job)
    if process is None:
        return _last_word(job)
    host, number = process
    if host != platform.node():
        return f"started on {host}, where this can be asked"
    return "RUNNING" if _is_script(number, job) else _last_word(job)


def _ask(words: list[str]) -> subprocess.CompletedProcess[str]:
    """What one of a scheduler's commands answers."""
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"the job is in the hands of {words[0]}, which is not on the path here") from None


def _last_word(job: Job) -> str:
    lasts = [events[-1] for output in _outputs(job) if (events := _events(output))]
    if not lasts:
        return "GONE: its scheduler does not know it, and it never started" if _numbers(job) else "NOT STARTED"
    codes = [found[1] for last in lasts if (found := re.search(r"ended with exit code (\d+)$", last))]
    if len(codes) < len(lasts):
        return "GONE: its script noted no end"
    if set(codes) != {"0"}:
        return f"ENDED with exit code {max(codes, key=int)}"
    if len(codes) < job.spec.repeats:
        return f"GONE: {len(codes)} of {job.spec.repeats} repeats are done"
    return "DONE"


def _process(job: Job) -> tuple[str, int] | None:
    """Where the script ran last, and as which process."""
    for output in reversed(_outputs(job)):
        for line in reversed(_events(output)):
            if found := re.search(r" started on (\S+) as process (\d+)", line):
                return found[1], int(found[2])
    return None


def _is_script(process: int, job: Job) -> bool:
    try:
        return str(job.folder / SCRIPT).encode() in Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def cancel_job(folder: str | Path) -> str:
    """Have a job end: its ranks save first, as far as the scheduler gives them time. Returns what was done."""
    job = read_job(folder)
    numbers = _numbers(job)
    if job.launcher in ALLOCATIONS and numbers:
        words = ["scancel", numbers[-1]] if job.launcher == "slurm" else ["qdel", numbers[-1]]
        done = _ask(words)
        if done.returncode:
            raise UserError(f"{' '.join(words)} failed: {' '.join(done.stderr.split())}")
        return f"told {words[0]} to end {numbers[-1]}"
    process = _process(job)
    if process is None:
        raise UserError(f"{job.folder} was never started, so there is nothing to cancel")
    host, number = process
    if host != platform.node():
        raise UserError(f"the job runs on {host}; cancel it there")
    if not _is_script(number, job):
        raise UserError(f"the job in {job.folder} is not running any more")
    os.kill(number, signal.SIGTERM)
    return f"sent SIGTERM to process {number}: the step in hand is finished and saved"


def job_logs(folder: str | Path, *, rank: int | None = None, follow: bool = False) -> Iterator[str]:
    """The lines of the newest start, each with its rank before it, or of one rank; `follow`: until the job ends."""
    job = read_job(folder)
    seen: dict[Path, int] = {}
    while True:
        is_over = not follow or _is_over(job)
        for output in _outputs(job):
            starts = sorted((output / "logs").glob("start-*"))
            begun = {path.parent for path in seen}
            for start in [one for one in starts if one in begun] + [one for one in starts[-1:] if one not in begun]:
                for path in sorted(start.glob("rank-*.log" if rank is None else f"rank-{rank:05d}.log")):
                    yield from _new_lines(path, seen, output, is_over)
        if is_over:
            break
        time.sleep(0.3)
    if not seen:
        raise UserError(
            f"no rank of {job.folder} has said anything yet" if rank is None else f"there is no log of rank {rank}"
        )


def _new_lines(path: Path, seen: dict[Path, int], output: Path, is_over: bool) -> Iterator[str]:
    with open(path, "rb") as file:
        file.seek(seen.get(path, 0))
        text = file.read()
    if not is_over:
        text = text[: text.rfind(b"\n") + 1]  # a line in the making is left for later
    seen[path] = seen.get(path, 0) + len(text)
    name = int(path.stem.partition("-")[2])
    repeat = f"{output.name} " if output.name.startswith("repeat-") else ""
    for line in text.decode(errors="replace").splitlines():
        yield f"[{repeat}{name}] {line}"


def _is_over(job: Job) -> bool:
    """Whether there is nothing more to come: every script has noted its end, and the scheduler knows of no more."""
    return _state(job).startswith(("DONE", "ENDED", "GONE"))
