"""The run folder: everything about a run.

config.json        resolved settings, the data and the initial weights
environment.json   machine and versions: one entry for each start
vocab.txt          the vocabulary, so that the weights can be used without the data; or tokenizer.json
generator/         with data.generator: a copy of it
metrics.jsonl      every step once, every evaluation, and the end
telemetry.csv      with log.telemetry, the samples of the sensors; telemetry-N.csv: those of rank N
telemetry.json     what is missing in it; telemetry-N.json
logs/              what each rank prints
tensorboard/
trackers/          the id of this run in each tracker that gives ids
checkpoints/step-…/
.lock              held by the process that trains
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bertrain
from bertrain.base.errors import AgreedError, UserError
from bertrain.base.files import absolute, new_folder, read_text, try_lock, write_atomically, writing
from bertrain.base.formatting import few
from bertrain.base.machine import cpu_name
from bertrain.base.schema import JsonError, check_value, load_json
from bertrain.config.resolve import differing, from_dict
from bertrain.config.settings import Settings
from bertrain.data.formats.shards import VOCABULARY
from bertrain.data.formats.source import DataSource
from bertrain.data.text.vocabulary import Vocabulary

CONFIG, ENVIRONMENT = "config.json", "environment.json"
GENERATOR = "generator"  # folder of a copy of data.generator
TRAIN_PLAN = "plan.json"  # in the folder above a run that `bertrain train` began
SCHEMA_VERSION = 1
ENDING_S = 20


CONTENT = {
    "settings": dict[str, Any],
    "data": {"folder": Path, "fingerprint": str, "vocabulary": str, "lower_case": bool, "generator?": str},
    "init": {"source": str, "fingerprint": str},
    "evaluation?": dict[str, int],
    "task?": dict[str, Any],
    "measured?": {"measured_until?": Any, "max_steps?": Any},
}
"""The schema of config.json."""


@dataclass(frozen=True)
class Run:
    """An existing run folder."""

    folder: Path
    settings: Settings
    data: Path
    data_fingerprint: str
    vocabulary_hash: str
    lower_case: bool
    init: str
    init_fingerprint: str
    evaluation: dict[str, int] = field(default_factory=dict)
    """How the run evaluates to keep its budget (planning/time_budget.py); empty: as its settings say."""
    generator_fingerprint: str = ""
    """Of the copy of data.generator; empty if there is none."""
    task: dict[str, Any] = field(default_factory=dict)
    """What the outputs of a fine-tuned model mean (tasks/task.py); empty for pre-training."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def vocabulary(self) -> Vocabulary:
        path = self.folder / VOCABULARY
        found = Vocabulary.load(path, lower_case=self.lower_case)
        if found.hash != self.vocabulary_hash:
            source = self.init if self.task else self.data  # the data of a task have no vocabulary
            cure = f"put back the vocabulary of {source}"
            raise UserError("changed-vocabulary", f"{path} is not the vocabulary that the run started with; {cure}")
        return found

    @staticmethod
    def exists(folder: str | Path) -> bool:
        return (Path(folder) / CONFIG).is_file()

    @staticmethod
    def open(folder: str | Path) -> Run:
        """Open the run in `folder`; UserError if there is none."""
        folder = Path(folder)
        path = folder / CONFIG
        if not Run.exists(folder):
            what = f"is not a run: it has no {CONFIG}{advise_runs(folder)}" if folder.exists() else "does not exist"
            raise UserError("no-run", f"{folder} {what}")
        try:
            written = load_json(path, {})
            if "model_type" in written:
                raise UserError("no-run", f"{folder} is a Transformers folder; name the run that it was exported from")
            if (version := check_value(written, {"schema_version": int})["schema_version"]) != SCHEMA_VERSION:
                reads = f"this version of bertrain reads layout {SCHEMA_VERSION}; use the version that wrote it"
                raise UserError("other-layout", f"{path} has layout {version}; {reads}")
            content = check_value(written, CONTENT)
            data = content["data"]
            return Run(
                folder=folder,
                settings=_with_fit(from_dict(content["settings"]), content.get("measured", {})),
                data=data["folder"],
                data_fingerprint=data["fingerprint"],
                vocabulary_hash=data["vocabulary"],
                lower_case=data["lower_case"],
                generator_fingerprint=data.get("generator", ""),
                init=content["init"]["source"],
                init_fingerprint=content["init"]["fingerprint"],
                evaluation=content.get("evaluation", {}),
                task=content.get("task", {}),
            )
        except (JsonError, KeyError) as error:
            raise UserError("damaged-run", f"{path} is damaged ({error}); restore it from a copy") from None

    @staticmethod
    def create(
        folder: str | Path,
        settings: Settings,
        data: DataSource,
        init: str,
        init_fingerprint: str,
        task: dict[str, Any] | None = None,
        write_generator: Callable[[Path], str] | None = None,
    ) -> Run:
        """Make a new run folder, whole or not at all.

        `write_generator` writes the weights of data.generator into a folder, and returns their fingerprint.
        """
        folder = Path(folder)
        check_free(folder)
        run = Run(
            folder=folder,
            settings=settings,
            data=data.folder.resolve(),
            data_fingerprint=data.fingerprint,
            vocabulary_hash=data.vocabulary.hash,
            lower_case=data.vocabulary.lower_case,
            init=init,
            init_fingerprint=init_fingerprint,
            task=task or {},
        )
        with new_folder(folder) as partial:
            data.vocabulary.save(partial / VOCABULARY)
            if write_generator is not None:
                run = replace(run, generator_fingerprint=write_generator(partial / GENERATOR))
            run.write_config(partial)
        return run

    def write_config(self, folder: Path) -> None:
        data = {"folder": str(self.data), "fingerprint": self.data_fingerprint}
        data |= {"generator": self.generator_fingerprint} if self.generator_fingerprint else {}
        content = {
            "schema_version": SCHEMA_VERSION,
            "bertrain": bertrain.__version__,
            "settings": self.settings.to_dict(),
            "data": data | {"vocabulary": self.vocabulary_hash, "lower_case": self.lower_case},
            "init": {"source": self.init, "fingerprint": self.init_fingerprint},
            "evaluation": self.evaluation,
            "task": self.task,
        }
        write_atomically(folder / CONFIG, json.dumps(content, indent=1) + "\n")

    def computed(self) -> Settings:
        """The settings to compute with: data.generator is the run's own copy, which does not change."""
        if not self.settings.data.generator:
            return self.settings
        return replace(self.settings, data=replace(self.settings.data, generator=absolute(self.folder / GENERATOR)))

    def continued(self, settings: Settings, data: Path) -> Run:
        """This run with other settings (only those that do not affect the result), and its data at this path."""
        evaluation = self.evaluation if settings.evaluate == self.settings.evaluate else {}
        return replace(self, settings=settings, data=data.resolve(), evaluation=evaluation)

    def refuse_foreign(self, checkpoint: Path, settings: dict[str, Any]) -> None:
        """Refuse a checkpoint of another run; the error names the settings that differ and affect the result."""
        theirs = from_dict(settings)
        ours = self.settings.train
        if ours.budget and ours.fits.startswith(theirs.train.fits):  # it is older than some of the fits
            theirs = replace(theirs, train=replace(theirs.train, max_steps=ours.max_steps, fits=ours.fits))
        fields = differing(self.settings, theirs)
        if fields:
            differs = f"was written by another run, which differs in {', '.join(fields)}"
            raise AgreedError("foreign-checkpoint", f"the checkpoint {checkpoint} {differs}; move it away")

    def refuse_other(self, settings: Settings, init: str) -> None:
        """Refuse to continue this run with other settings, or other initial weights."""
        fields = differing(settings, self.settings)
        if init != self.init:
            fields.append(f"--init ({init or 'none'} here, {self.init or 'none'} there)")
        if fields:
            differs = f"is another run, which differs in {', '.join(fields)}"
            raise AgreedError("other-run", f"{self.folder} {differs}; choose another --run")

    def refuse_other_data(self, data: DataSource) -> None:
        if data.fingerprint != self.data_fingerprint:
            prints = f"fingerprint {data.fingerprint[:12]} now, {self.data_fingerprint[:12]} then"
            found = f"{data.folder} is not the data that this run started with ({prints})"
            raise AgreedError("other-data", f"{found}; put that data back, or start a new run")

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Lock the run for this process; False if another holds it.

        Under a launcher, waits up to ENDING_S seconds: this rank may replace one that is still exiting.
        """
        with writing(self.folder):
            lock = open(self.folder / ".lock", "w")  # noqa: SIM115 - held open until the run ends
        with lock:
            deadline = time.monotonic() + (ENDING_S if "RANK" in os.environ else 0)
            while not (is_ours := try_lock(lock)) and time.monotonic() < deadline:
                time.sleep(0.1)
            yield is_ours

    def note_environment(self, facts: dict[str, Any]) -> None:
        path = self.folder / ENVIRONMENT
        write_atomically(path, json.dumps([*read_starts(path), facts], indent=1) + "\n")

    def add_to_environment(self, facts: dict[str, Any]) -> None:
        """Add facts to those of this start."""
        path = self.folder / ENVIRONMENT
        starts = read_starts(path) or [{}]
        write_atomically(path, json.dumps([*starts[:-1], starts[-1] | facts], indent=1) + "\n")


def _with_fit(settings: Settings, measured: dict[str, Any]) -> Settings:
    """Settings with the fit of `train.budget` that older versions stored outside of the settings."""
    if not measured or settings.train.fits:
        return settings
    fits = f"{measured['measured_until']}:{measured['max_steps']}"
    return replace(settings, train=replace(settings.train, fits=fits))


def read_starts(path: Path, schema: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """The entries of environment.json or telemetry.json, one for each start; invalid entries are left out."""
    starts: list[dict[str, Any]] = []
    with suppress(OSError, JsonError):
        for start in load_json(path, list[Any]):
            with suppress(JsonError):
                starts.append(check_value(start, schema or {}))
    return starts


def refuse_other_vocabulary(data: DataSource, expected_hash: str) -> None:
    """Refuse data whose token ids differ from the model's."""
    if data.vocabulary.hash != expected_hash:
        cure = "prepare it with the vocab.txt of the run or of the weights"
        raise AgreedError("other-vocabulary", f"{data.folder} has a different vocabulary from the model's; {cure}")


def runs_in(folder: Path, depth: int = 1) -> list[Path]:
    """The run folders `depth` levels below a folder, by name."""
    return sorted(
        config.parent for config in folder.glob(f"{'*/' * depth}{CONFIG}") if '"schema_version"' in read_text(config)
    )


def advise_runs(folder: Path) -> str:
    """Advice to name one of the runs in a folder: of `train`, of seeds, or of tasks; "" if it has none."""
    inside = [run.name for run in runs_in(folder)]
    return f"; name a run in it, such as {folder / inside[0]} (it has {few(inside)})" if inside else ""


def check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("occupied-folder", f"{folder} exists and is not a run; choose another --run")


def describe_environment(world: int, device: str, threads: int) -> dict[str, Any]:
    """Machine and versions, for environment.json."""
    import numpy
    import torch

    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": platform.node(),
        "cores": len(os.sched_getaffinity(0)),
        "ranks": world,
        "threads": threads,
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "bertrain": bertrain.__version__,
    }
