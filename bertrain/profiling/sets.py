"""Sets of `bertrain profile`, and runs with telemetry, as they lie on disk: how they are written, and read back."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertrain.base.console import PHASES
from bertrain.base.errors import UserError
from bertrain.profiling.trace import Launch
from bertrain.run.stream import MetricsTable, read_metrics
from bertrain.run.telemetry_reader import notes_of

Floats = npt.NDArray[np.float64]

ITERATION_COLUMNS = ("step", "started", "seconds", *(f"{phase}_s" for phase in PHASES), "tokens", "own_tokens", "bins")
LAUNCH_COLUMNS = ("start_ns", "duration_ns", "stream", "kind", "region", "grid", "block", "name")


@dataclass(frozen=True)
class ProfileSet:
    """What one device did in one repeat."""

    folder: Path
    host: str
    device: str
    uuid: str
    repeat: int
    started: Floats
    seconds: Floats
    tokens: Floats
    """Of each step, all ranks together."""
    energy_tokens: float
    """Of all steps, what the energy in the telemetry was spent on: a GPU's own, or those of all ranks of a machine."""
    telemetry: dict[str, Floats]
    """Columns by name, `time` among them; NaN where nothing was read. `clock_mhz` is the GPU's, or the cores' mean."""
    facts: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Which device this is: its UUID, or where it has none its host and name."""
        return self.uuid or f"{self.host} {self.device}"

    @property
    def ended(self) -> float:
        return float(self.started[-1] + self.seconds[-1])


def find_sets(folders: Sequence[str | Path]) -> list[ProfileSet]:
    """Every set in or under these folders, in the order of their names; runs with telemetry count as sets.

    Raises UserError for a folder without a set, a damaged one, and a set that is named twice.
    """
    found: list[ProfileSet] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}")
        if (folder / "config.json").is_file():
            found.append(read_run(folder))
            continue
        places = sorted(path.parent for path in folder.rglob("device.json") if not _is_partial(path, folder))
        if not places:
            raise UserError(f"{folder} holds no profile (a folder with a device.json) and is no run either")
        found += [read_set(place) for place in places]
    if len({one.folder.resolve() for one in found}) < len(found):
        raise UserError("a set is named twice among these folders; name each of them once, and none inside of another")
    return found


def _is_partial(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def read_set(folder: Path) -> ProfileSet:
    """A set, or a sentence about what is wrong with it."""
    facts = _read_json(folder / "device.json")
    columns = read_columns(folder / "iterations.csv")
    telemetry = read_telemetry(folder / "telemetry.csv")
    try:
        device, environment = facts["device"], facts["environment"]
        if not np.isfinite(columns["seconds"]).all() or not len(columns["seconds"]):
            raise ValueError
        return ProfileSet(
            folder=folder,
            host=environment["host"],
            device=f"{device['kind']}{device['index']} {device['name']}" if "index" in device else device["name"],
            uuid=device.get("uuid") or "",
            repeat=facts["repeat"],
            started=columns["started"],
            seconds=columns["seconds"],
            tokens=columns["tokens"],
            energy_tokens=_energy_tokens(columns, facts),
            telemetry=telemetry,
            facts=facts,
            missing=facts["missing"] | _missing_of(folder),
        )
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{folder} is no whole set of a profile: its device.json or iterations.csv is damaged"
        ) from None


def _energy_tokens(columns: dict[str, Floats], facts: dict[str, Any]) -> float:
    """What the energy of a set was spent on; ranks of other machines are taken to have computed as much as ours."""
    if facts["device"]["kind"] == "cuda":
        return float(columns["own_tokens"].sum())
    world = facts["environment"]["ranks"]
    return float(columns["tokens"].sum()) * facts.get("ranks_on_machine", world) / world


def read_run(folder: Path) -> ProfileSet:
    """The steps of a run, of its first rank's device."""
    table = read_metrics(_existing(folder / "metrics.jsonl"))
    ended = table.columns.get("ended", np.array([]))
    computed = np.isfinite(ended) & (table.columns.get("skipped", np.zeros(len(ended))) != 1)
    if not computed.any():
        raise UserError(f"the run {folder} has no step with its time in metrics.jsonl yet")
    phases = [table.columns[f"seconds.{phase}"][computed].astype(np.float64) for phase in PHASES]
    seconds, tokens = np.sum(phases, axis=0), table.columns["tokens"][computed].astype(np.float64)
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
    """Which share of a run's tokens the first rank computed, or all ranks on its machine."""
    machines = {host for rank, host in table.ranks if rank == 0}
    own = sum(
        sums.tokens for (rank, host), sums in table.ranks.items() if rank == 0 or (is_machine and host in machines)
    )
    every = sum(sums.tokens for sums in table.ranks.values())
    return own / every if every else 1.0


def read_telemetry(path: Path) -> dict[str, Floats]:
    """The columns of telemetry.csv by time, `clock_mhz` added; nothing where there is no such file."""
    columns = read_columns(path) if path.is_file() else {}
    if "time" not in columns:
        return {}
    order = np.argsort(columns["time"], kind="stable")  # a run may have gone on with a clock that was set back
    columns = {name: values[order] for name, values in columns.items()}
    clocks = [columns[name] for name in columns if name == "sm_clock_mhz"]
    clocks = clocks or [values for name, values in columns.items() if name.startswith("core") and name.endswith("_mhz")]
    if clocks:
        columns["clock_mhz"] = np.mean(clocks, axis=0)
    return columns


def read_columns(path: Path) -> dict[str, Floats]:
    """The numbers of a CSV file by column; empty cells are NaN, torn lines are left out."""
    with open(_existing(path), newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        rows = []
        for cells in reader:
            try:
                row = [float(cell) if cell else np.nan for cell in cells]
            except ValueError:
                continue
            if len(row) == len(header):
                rows.append(row)
    if not header:  # an empty file: the disk was full from the start
        return {}
    values = np.array(rows, dtype=np.float64).reshape(-1, len(header))
    return dict(zip(header, values.T, strict=True))


def _missing_of(folder: Path) -> dict[str, str]:
    missing: dict[str, str] = notes_of(folder).get("missing", {"telemetry": "telemetry.json is not there, or damaged"})
    return missing


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"there is no {path.name} in {path.parent}")
    return path


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_existing(path).read_text())
    except ValueError:
        raise UserError(f"{path} is damaged: it is not JSON") from None


# --- writing ------------------------------------------------------------------------------------------


def write_table(path: Path, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def write_objects(path: Path, objects: Iterable[Any]) -> None:
    """Data classes, a line each."""
    found = list(objects)
    columns = [item.name for item in fields(found[0])] if found else []
    write_table(path, columns, ([getattr(one, column) for column in columns] for one in found))


def write_launches(path: Path, launches: Iterable[Launch]) -> None:
    """A line each; a CPU's operators have neither grid nor block."""
    with gzip.open(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(LAUNCH_COLUMNS)
        for launch in launches:
            grid, block = ("x".join(map(str, size)) for size in (launch.grid, launch.block))
            writer.writerow(
                (
                    launch.start_ns, launch.duration_ns, launch.stream, launch.kind, launch.region, grid, block,
                    launch.name,
                )
            )  # fmt: skip
