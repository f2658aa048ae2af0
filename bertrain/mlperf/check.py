"""`bertrain mlperf check`: MLPerf's own checkers on a folder of results, their score, and a verdict."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Literal, get_args

from bertrain.base.errors import UserError
from bertrain.base.extras import import_extra
from bertrain.mlperf.log import TOKEN, Log, read_log, result_files
from bertrain.mlperf.show import MIN_SCORED, LogSummary, Score, find_mixture, score_runs, summarize_log

RULESETS = {  # of BERT, with the day on which MLPerf published their results
    "1.1.0": "2021-12-01",
    "2.0.0": "2022-06-29",
    "2.1.0": "2022-11-09",
    "3.0.0": "2023-06-27",
    "3.1.0": "2023-11-08",
    "4.0.0": "2024-06-12",
    "4.1.0": "2024-11-13",
    "5.0.0": "2025-06-04",
}
CURRENT = ("4.1.0", "5.0.0")
NUM_RESULTS, MAX_FAILED = 10, 1
"""Results in a submission of BERT, and those that may fail to converge; they count as the slowest."""

Division = Literal["closed", "open"]


@dataclass(frozen=True)
class Compliance:
    """The result of the compliance checker for one log under one ruleset."""

    file: str
    ruleset: str
    passes: bool
    complaints: tuple[str, ...]


@dataclass(frozen=True)
class Convergence:
    """The samples to converge, which must not be far fewer than the reference's."""

    passes: bool
    words: str  # the checker's message: a reference point was found, interpolated, or is missing
    samples: float | None  # Olympic mean of the results
    reference: float | None  # mean of the reference at this batch size, interpolated between two points where needed
    scaling: float  # the factor of the score if the run converged slightly faster than the reference


@dataclass(frozen=True)
class SubmissionCheck:
    """The result of all checks."""

    folder: str
    division: str
    passes: bool
    verdict: tuple[str, ...]
    compliance: tuple[Compliance, ...]
    seeds_pass: bool
    seed_complaints: tuple[str, ...]
    convergence: dict[str, Convergence]  # by ruleset; empty in the open division, which has no such rule
    score: Score
    scaled_minutes: float | None


def check_results(
    folder: str | Path, *, rulesets: Sequence[str] = (), division: Division | None = None
) -> SubmissionCheck:
    """Check the result_*.txt files of a folder as MLPerf does, under each of `rulesets`.

    Without `rulesets`, under those of the round for which the newest log was written, or the last two of BERT.
    `division` checks them as results of that division, whatever they say. Writes nothing.
    """
    import_extra("mlperf_logging")
    if unknown := set(rulesets) - set(RULESETS):
        raise UserError("unknown-ruleset", f"BERT has no ruleset {min(unknown)}; choose {', '.join(RULESETS)}")
    entries = [read_log(file) for file in result_files(folder)]
    # Refuse unknown names: the official checker opens files by them, and runs those.
    for key, known in (("submission_benchmark", ("bert",)), ("submission_division", get_args(Division))):
        for log in entries:
            if wrong := [entry.value for entry in log.all(key) if entry.value not in known]:
                raise UserError("unknown-submission", f"{log.path} has {key} {wrong[0]!r}; use {' or '.join(known)}")
    logs = [summarize_log(log) for log in entries]
    if mixture := find_mixture([replace(log, division=division or log.division) for log in logs]):
        fix = "choose one with --division" if mixture.startswith("division") else "check each in a folder of its own"
        raise UserError("mixed-results", f"{folder} has results of several systems: {mixture}; {fix}")
    chosen, rulesets = division or logs[0].division, rulesets or _choose_rulesets(entries)
    with _copies(entries, division) as copies:
        pairs = list(zip(copies, logs, strict=True))
        compliance = [_check_compliance(copy, log, ruleset) for ruleset in rulesets for copy, log in pairs]
        seed_complaints = _check_seeds(copies, rulesets[-1])
        convergence = {ruleset: _check_convergence(copies, logs, ruleset) for ruleset in rulesets if chosen == "closed"}
    score = score_runs(logs)
    scaling = max((point.scaling for point in convergence.values() if point.passes), default=1.0)
    verdict = _list_objections(logs, compliance, seed_complaints, convergence, score, chosen)
    return SubmissionCheck(
        folder=str(folder),
        division=str(chosen),
        passes=not verdict,
        verdict=tuple(verdict),
        compliance=tuple(compliance),
        seeds_pass=not seed_complaints,
        seed_complaints=tuple(seed_complaints),
        convergence=convergence,
        score=score,
        scaled_minutes=score.minutes * scaling if score.minutes is not None else None,
    )


def _choose_rulesets(logs: Sequence[Log]) -> Sequence[str]:
    """The rules of the first round whose results were published after the newest log; the current ones if none was."""
    newest = datetime.fromtimestamp(max(log.entries[0].time_ms for log in logs) / 1e3, UTC).date().isoformat()
    (ruleset,) = [name for name, published in RULESETS.items() if newest <= published][:1] or [CURRENT[0]]
    return CURRENT if ruleset in CURRENT else (ruleset,)


def _list_objections(
    logs: Sequence[LogSummary],
    compliance: Sequence[Compliance],
    seed_complaints: Sequence[str],
    convergence: dict[str, Convergence],
    score: Score,
    division: str | None,
) -> list[str]:
    """The reasons why MLPerf would refuse these results, a sentence each."""
    found = []
    if len(logs) != NUM_RESULTS:
        found.append(f"a submission needs {NUM_RESULTS} results; there are {len(logs)}")
    failed = [Path(log.file).name for log in logs if not log.has_converged]
    if len(failed) > MAX_FAILED:
        found.append(f"{len(failed)} runs did not converge ({', '.join(failed)}); {MAX_FAILED} may fail")
    for ruleset in dict.fromkeys(one.ruleset for one in compliance):
        refused = [Path(one.file).name for one in compliance if one.ruleset == ruleset and not one.passes]
        if len(refused) > MAX_FAILED or set(refused) - set(failed):
            found.append(f"the compliance checker refuses {', '.join(refused)} under ruleset {ruleset}")
    if seed_complaints and division == "closed":
        found.append("the runs do not all have different seeds")
    for ruleset, point in convergence.items():
        if not point.passes:
            found.append(f"the samples to converge are refused under ruleset {ruleset}: {_explain(point)}")
    if score.reason:
        found.append(f"there is no score: {score.reason}")
    return found


def _explain(point: Convergence) -> str:
    if point.samples is None or point.reference is None:
        return point.words
    if point.samples >= point.reference:
        return f"{point.words} ({point.samples:,.0f} against the reference's {point.reference:,.0f})"
    below = f"{point.samples:,.0f} is further below the reference's {point.reference:,.0f} than chance explains"
    return f"{below}; the usual cause is easier data or another evaluation"


def _check_compliance(copy: Path, log: LogSummary, ruleset: str) -> Compliance:
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    with _captured_logs():
        mlp_compliance.enqueued_configs.clear()  # left over from an interrupted check
        checker.check_file(str(copy), f"training_{ruleset}/common.yaml")
    complaints = []
    for text in (*checker.overwritable.values(), *checker.not_overwritable):
        first, *dump = text.replace(TOKEN, "").splitlines()
        complaints.append("; ".join([first, *(line for line in dump if line.startswith("failed test"))]))
    if log.unreadable_lines:
        complaints.append(f"lines that are truncated or not JSON: {log.unreadable_lines}")
    return Compliance(log.file, ruleset, not complaints, tuple(complaints))


def _check_seeds(files: Sequence[Path], ruleset: str) -> list[str]:
    import warnings

    from mlperf_logging.package_checker.seed_checker import SeedChecker

    with _captured_logs() as records, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about runs with several seeds, which are allowed
        passes = SeedChecker(ruleset).check_seeds([str(file) for file in files])
    if passes:
        return []
    folder = f"{files[0].parent}/"
    lines = [line for record in records for line in record.getMessage().splitlines()]
    return [line.replace(folder, "") for line in lines if "seed" in line.lower()]


def _check_convergence(files: Sequence[Path], logs: Sequence[LogSummary], ruleset: str) -> Convergence:
    """Compare the samples to converge with the library's reference convergence points (RCP)."""
    import numpy as np
    from mlperf_logging.rcp_checker import rcp_checker

    reason, counters = "", {log.samples_from for log in logs if log.has_converged}
    if len(logs) < MIN_SCORED:
        reason = f"it needs at least {MIN_SCORED} results"
    elif logs[0].global_batch_size is None:
        reason = "the results have no global batch size"
    elif any(log.benchmark is None for log in logs):
        reason = "a result does not name its benchmark"
    elif any(log.status == "unknown" for log in logs):
        reason = "the run_stop of a result has no status"
    elif len(counters) != 1 or not counters <= {"epoch_num", "train_samples"}:
        keys = ", ".join(sorted(str(key) for key in counters)) or "nothing"
        reason = f"the checker reads epoch_num or train_samples; those that converged count samples in {keys}"
    if reason:
        return Convergence(False, reason, None, None, 1.0)
    with _captured_logs():
        points = rcp_checker.RCP_Checker("training", ruleset, "bert", False).pruned_rcp_data.values()
        try:
            passes, message, scaling = rcp_checker.check_directory(
                str(files[0].parent), "training", ruleset, False, counters == {"train_samples"}, rcp_pass="pruned_rcps"
            )
        except (KeyError, TypeError) as error:  # such as an evaluation without epoch_num
            return Convergence(False, f"MLPerf's checker fails on the results: {error!r}", None, None, 1.0)
    sizes, batch, reference = [point["BS"] for point in points], logs[0].global_batch_size, None
    if batch and batch <= sizes[-1]:  # below the smallest size, the smallest point counts
        reference = float(np.interp(batch, sizes, [point["RCP Mean"] for point in points]))
    return Convergence(bool(passes), str(message), score_runs(logs).samples, reference, float(scaling))


@contextmanager
def _captured_logs() -> Iterator[list[logging.LogRecord]]:
    """Capture the records that the checkers log, whatever the logging settings, instead of printing them."""
    handler = BufferingHandler(capacity=sys.maxsize)
    root, disabled = logging.getLogger(), logging.root.manager.disable
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    logging.disable(logging.NOTSET)
    try:
        yield handler.buffer
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)


@contextmanager
def _copies(logs: Sequence[Log], division: Division | None) -> Iterator[list[Path]]:
    """Copies of the readable entries in a folder of their own, each on a line, with another division if given.

    The checkers fail on truncated lines, which `_check_compliance` counts, and see only the last entry of a line.
    """
    changed = {} if division is None else {"submission_division": {"value": division}}
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / log.path.name for log in logs]
        for log, copy in zip(logs, copies, strict=True):
            entries = [entry.fields | changed.get(entry.key, {}) for entry in log.entries]
            copy.write_text("".join(f"{TOKEN}{json.dumps(fields)}\n" for fields in entries), encoding="utf-8")
        yield copies
