"""Copies of a run's settings and metrics in TensorBoard, MLflow and Weights & Biases (`log.trackers`).

Each tracker works in a thread of its own, off a queue: a slow disk or network does not delay the training, and the
first failure ends that tracker alone, with one warning. metrics.jsonl has everything in any case.
"""

from __future__ import annotations

import math
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bertrain.base.console import Console, warn
from bertrain.base.extras import is_installed, missing_package
from bertrain.base.files import write_atomically
from bertrain.config.settings import LogSettings

IDS = "trackers"
"""Folder in the run folder: a file for each tracker that gives runs an id."""
PROJECT = "bertrain"  # unless the tracker's own environment variable names another
MOST_WAITING = 10_000  # points that a tracker may be behind
CLOSE_S = 60.0  # that the end of a run waits for a tracker; on a busy machine, importing one takes 20
MLFLOW_BATCH = 900  # metrics in a request; 1,000 are allowed
MLFLOW_PARAMS = 100

Points = Sequence[tuple[int, dict[str, float]]]
"""Numbers by name, each time with the step they belong to."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets when a run starts or continues."""

    folder: Path
    first_step: int
    settings: dict[str, str]
    paths: dict[str, str]
    """Folders of data, checkpoints and initial weights, and the metrics file."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def id_of(self, tracker: str) -> str:
        """The id that this run has had at a tracker since its first start; empty if it has none yet."""
        path = self.folder / IDS / tracker
        return path.read_text().strip() if path.is_file() else ""

    def keep_id(self, tracker: str, run_id: str) -> str:
        (self.folder / IDS).mkdir(exist_ok=True)
        write_atomically(self.folder / IDS / tracker, f"{run_id}\n")
        return run_id


class Tracker(Protocol):
    """One place that receives a copy. Any exception ends it."""

    def log(self, points: Points) -> None: ...

    def close(self, *, is_complete: bool) -> None: ...


class TensorBoard:
    """Events in the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step + 1)
        rows = (f"| {name} | {value} |" for name, value in (run.settings | run.paths).items())
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]), run.first_step)

    def log(self, points: Points) -> None:
        for step, numbers in points:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def close(self, *, is_complete: bool) -> None:
        self._writer.close()


class Mlflow:
    """A run at MLFLOW_TRACKING_URI, in the experiment MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        if known := run.id_of("mlflow"):
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        created = self._client.create_run(experiment, run_name=run.name, tags=run.paths)
        self._id = run.keep_id("mlflow", created.info.run_id)
        params = [Param(name, value) for name, value in run.settings.items()]
        for first in range(0, len(params), MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MLFLOW_PARAMS])

    def log(self, points: Points) -> None:
        now_ms = time.time_ns() // 1_000_000
        metrics = [
            self._metric(re.sub(r"[^\w\-./ ]", "_", name), value, now_ms, step)
            for step, numbers in points
            for name, value in numbers.items()
            if math.isfinite(value)
        ]
        for first in range(0, len(metrics), MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + MLFLOW_BATCH])

    def close(self, *, is_complete: bool) -> None:
        self._client.set_terminated(self._id, status="FINISHED" if is_complete else "KILLED")


class Wandb:
    """A run of Weights & Biases, in the project WANDB_PROJECT; WANDB_MODE=offline writes it into the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        run_id = run.id_of("wandb") or run.keep_id("wandb", uuid.uuid4().hex)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run_id,
            resume="allow",
            dir=str(run.folder),
            config=run.settings | run.paths,
            settings=wandb.Settings(console="off", silent=True),
        )
        # Steps may come again after a crash or `resume --from-step`; W&B's own step only grows.
        self._run.define_metric("*", step_metric="step")

    def log(self, points: Points) -> None:
        for step, numbers in points:
            self._run.log({"step": step, **numbers})

    def close(self, *, is_complete: bool) -> None:
        self._run.finish(exit_code=0 if is_complete else 1)


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {"tensorboard": TensorBoard, "mlflow": Mlflow, "wandb": Wandb}


class TrackerThread:
    """Sends points to a tracker, which it opens in its thread; after a failure, drops them."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name = name
        self._queue: queue.Queue[Points | None] = queue.Queue(MOST_WAITING)
        self._has_failed = threading.Event()
        self.is_complete = False
        """Whether the run is complete; set before `close`."""
        self._thread = threading.Thread(target=self._work, args=(run,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, points: Points) -> None:
        if self._has_failed.is_set():
            return
        try:
            self._queue.put_nowait(points)
        except queue.Full:
            self._fail(f"it is {MOST_WAITING:,} writes behind")

    def close(self) -> None:
        """Wait until everything is written, for a while."""
        if self._has_failed.is_set():
            return
        with suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._fail(f"it has not finished after {CLOSE_S:.0f} s")

    def _work(self, run: TrackedRun) -> None:
        try:
            tracker = TRACKERS[self.name](run)
            while (points := self._queue.get()) is not None:
                if self._has_failed.is_set():
                    return
                tracker.log(points)
            tracker.close(is_complete=self.is_complete)
        except (Exception, SystemExit) as error:
            self._fail(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")

    def _fail(self, why: str) -> None:
        if not self._has_failed.is_set():
            self._has_failed.set()
            warn(f"the tracker {self.name} is left out from here on ({why}); metrics.jsonl has everything")


def check_trackers(log: LogSettings) -> None:
    """Refuse a run that names a tracker whose package is missing."""
    for name in log.tracker_names():
        if log.trackers != "auto" and not is_installed(name):
            raise missing_package(name)


def start_trackers(log: LogSettings, run: TrackedRun, console: Console) -> list[TrackerThread]:
    """Start the trackers of `log.trackers`; with `auto`, only those that are installed."""
    started = []
    for name in log.tracker_names():
        if is_installed(name):
            started.append(TrackerThread(name, run))
        else:
            console.detail(f"without TensorBoard events: {missing_package(name)}")
    return started
