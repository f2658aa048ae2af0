"""Reads and writes profile sets: one measurement of one device each, by `bertrain profile` or by a run's telemetry."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.console import PHASES
from bertrain.base.errors import UserError
from bertrain.base.schema import Count, Finite, parse_json
from bertrain.run.folder import Run
from bertrain.run.stream import MetricsTable, read_metrics
from bertrain.run.telemetry_reader import notes_of, read_numbers

Floats = npt.NDArray[np.float64]

ITERATION_COLUMNS = ("step", "started", "seconds", *(f"{phase}_s" for phase in PHASES), "tokens", "own_tokens", "bins")
LAUNCH_COLUMNS = ("start_ns", "duration_ns", "stream", "kind", "region", "grid", "block", "name")


@dataclass(frozen=True)
class ProfileSet:
    """One measurement of one device: the steps that it ran, and its telemetry meanwhile."""

    folder: Path
    host: str
    device: str
    uuid: str
    repeat: int
    started: Floats
    seconds: Floats
    tokens: Floats  # of each step, over all ranks
    energy_tokens: float
    """Tokens of all steps that the measured energy was spent on: a GPU's own, or those of all ranks of a machine."""
    telemetry: dict[str, Floats]
    """Columns by name, including `time`; NaN for missing samples. `clock_mhz` is the GPU's, or the cores' mean."""
    facts: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    own_seconds: Floats | None = None
    """Forward and backward pass of each step, if this is one of several ranks, which wait for each other."""

    @property
    def identity(self) -> str:
        """The device: its UUID, or its host and name if it has none."""
        return self.uuid or f"{self.host} {self.device}"

    @property
    def compared(self) -> Floats:
        """The times by which devices are compared: their own, so that the slow one of a job is found."""
        return self.seconds if self.own_seconds is None else self.own_seconds

    @property
    def ended(self) -> float:
        return float(self.started[-1] + self.seconds[-1])


def find_sets(folders: Sequence[str | Path]) -> list[ProfileSet]:
    """Every set in or under these folders, by name; a run with telemetry counts as a set.

    Raises UserError for a folder without a set, a damaged set, and a set that is given twice.
    """
    found: list[ProfileSet] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError("missing-folder", f"there is no folder {folder}; check the path")
        if Run.exists(folder):
            found.append(read_run(folder))
            continue
        paths = [path.relative_to(folder).parent for path in folder.rglob("device.json")]
        places = sorted(folder / path for path in paths if not any(part.startswith(".") for part in path.parts))
        if not places:
            raise UserError("not-a-profile", f"{folder} has no profile (a folder with a device.json) and is not a run")
        found += [read_set(place) for place in places]
    if len({one.folder.resolve() for one in found}) < len(found):
        raise UserError(
            "repeated-set", "these folders contain the same profile twice; give each once, and none inside another"
        )
    return found


FACTS = {
    "device": {"kind": str, "name": str, "index?": int, "uuid?": str | None},
    "environment": {"host": str, "ranks": Count},
    "rank?": Count,
    "ranks_on_machine?": Count,
    "repeat": Count,
    "missing": dict[str, str],
    "ceilings?": {"operations_per_s": Finite, "bytes_per_s": Finite, "product": str},
    "settings?": {},
}
"""The schema of device.json, as far as it is used here."""


def read_set(folder: Path) -> ProfileSet:
    written = _existing(folder / "device.json").read_bytes()
    columns = read_columns(folder / "iterations.csv")
    telemetry = read_telemetry(folder / "telemetry.csv")
    try:
        facts = parse_json(written, FACTS)
        device, environment = facts["device"], facts["environment"]
        name, several = device["name"], environment["ranks"] > 1
        if "index" in device:
            name = f"{device['kind']}{device['index']} {name}"
        elif several:
            name += f", rank {facts['rank']}"
        rates = facts.get("ceilings", {"operations_per_s": 1.0, "bytes_per_s": 1.0})
        seconds, least = columns["seconds"], min(rates["operations_per_s"], rates["bytes_per_s"], environment["ranks"])
        if not np.isfinite(seconds).all() or not len(seconds) or min(seconds.min(), least) <= 0:
            raise ValueError
        return ProfileSet(
            folder=folder,
            host=environment["host"],
            device=name,
            uuid=device.get("uuid") or "",
            repeat=facts["repeat"],
            started=columns["started"],
            seconds=seconds,
            tokens=columns["tokens"],
            energy_tokens=_energy_tokens(columns, facts),
            telemetry=telemetry,
            facts=facts,
            missing=facts["missing"] | _missing_of(folder),
            own_seconds=columns["forward_backward_s"] if several else None,
        )
    except (KeyError, ValueError, ZeroDivisionError):
        where = f"the profile set {folder} is damaged, in device.json or iterations.csv"
        raise UserError("damaged-profile", f"{where}; measure it again") from None


def _energy_tokens(columns: dict[str, Floats], facts: dict[str, Any]) -> float:
    """See `ProfileSet.energy_tokens`; assumes that ranks of other machines computed as many tokens as ours."""
    if facts["device"]["kind"] == "cuda":
        return float(columns["own_tokens"].sum())
    world = facts["environment"]["ranks"]
    return float(columns["tokens"].sum()) * facts.get("ranks_on_machine", world) / world


def read_run(folder: Path) -> ProfileSet:
    """Read the steps of a run as a set of its first rank's device."""
    table = read_metrics(_existing(folder / "metrics.jsonl"))
    ended = table.column("ended")
    computed = np.isfinite(ended) & (table.column("skipped") != 1)
    if not computed.any():
        raise UserError(
            "no-timed-steps", f"the run {folder} has no timed step in metrics.jsonl yet; wait for its first steps"
        )
    numbers = [f"seconds.{phase}" for phase in PHASES] + ["tokens"]  # a damaged file may lack some
    *phases, tokens = (np.nan_to_num(table.column(name)[computed].astype(np.float64)) for name in numbers)
    seconds = np.sum(phases, axis=0)
    notes = notes_of(folder)
    device = notes.get("device", {})
    return ProfileSet(
        folder=folder,
        host=notes.get("host", "unknown host"),
        device=device.get("name", "cpu"),
        uuid=device.get("uuid", ""),
        repeat=1,
        started=ended[computed] - seconds,
        seconds=seconds,
        tokens=tokens,
        energy_tokens=float(tokens.sum()) * _share_of_first(table, is_machine=not device),
        telemetry=read_telemetry(folder / "telemetry.csv"),
        missing=_missing_of(folder),
    )


def _share_of_first(table: MetricsTable, *, is_machine: bool) -> float:
    """The share of a run's tokens that the first rank computed, or that all ranks on its machine did."""
    machines = {host for rank, host in table.ranks if rank == 0}
    own = [key for key in table.ranks if key[0] == 0 or (is_machine and key[1] in machines)]
    every = sum(sums.tokens for sums in table.ranks.values())
    return sum(table.ranks[key].tokens for key in own) / every if every else 1.0


def read_telemetry(path: Path) -> dict[str, Floats]:
    """The columns of telemetry.csv in order of time, and `clock_mhz`; empty without the file."""
    columns = read_columns(path) if path.is_file() else {}
    if "time" not in columns:
        return {}
    order = np.argsort(columns["time"], kind="stable")  # the system clock may have been set back
    columns = {name: values[order] for name, values in columns.items()}
    cores = [values for name, values in columns.items() if name.startswith("core") and name.endswith("_mhz")]
    clocks = [columns["sm_clock_mhz"]] if "sm_clock_mhz" in columns else cores
    if clocks:
        columns["clock_mhz"] = np.mean(clocks, axis=0)
    return columns


def read_columns(path: Path) -> dict[str, Floats]:
    """The numbers of a CSV file by column; empty cells are NaN, truncated lines are skipped."""
    table, _ = read_numbers(_existing(path))
    return {name: column.to_numpy() for name, column in zip(table.column_names, table.columns, strict=True)}


def _missing_of(folder: Path) -> dict[str, str]:
    return notes_of(folder).get("missing", {"telemetry": "telemetry.json is not there, or damaged"})


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError("missing-file", f"there is no {path.name} in {path.parent}")
    return path


def write_table(path: Path, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV file, compressed if its name ends in .gz."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def write_objects(path: Path, objects: Sequence[Any], columns: Sequence[str] = ()) -> None:
    """Write these fields of each object, by default all; a tuple as 2x3."""
    if objects and not columns:
        columns = [item.name for item in fields(objects[0])]
    rows = ([getattr(one, column) for column in columns] for one in objects)
    write_table(path, columns, (["x".join(map(str, c)) if isinstance(c, tuple) else c for c in row] for row in rows))
