"""Would MLPerf take these results? Its own checkers, MLPerf's score, and a verdict in plain words."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bertrain.base.errors import UserError
from bertrain.mlperf.log import TOKEN, Log, read_log, require_library, result_files
from bertrain.mlperf.show import CAN_BE_SCORED, LogFigures, Score, figures_of, score_of

RULESETS = ("4.1.0", "5.0.0")
RESULTS = 10
"""That a submission of BERT has."""
MAY_FAIL = 1
"""Of those; it then counts as the slowest."""

Division = Literal["closed", "open"]


@dataclass(frozen=True)
class Compliance:
    """What the compliance checker says of one log under one set of rules."""

    file: str
    ruleset: str
    passes: bool
    complaints: tuple[str, ...]


@dataclass(frozen=True)
class Convergence:
    """The samples to converge beside the reference's, which they may not undercut by much."""

    passes: bool
    words: str
    """What the checker made of it: a point found, interpolated, or missing."""
    samples: float | None
    """Olympic mean of the results."""
    reference: float | None
    """Mean of the reference at this batch size, by its own points or between two of them."""
    scaling: float
    """What a score is multiplied by where it converged faster than the reference, yet not too fast."""


@dataclass(frozen=True)
class Checked:
    """All of it."""

    folder: str
    division: str
    passes: bool
    verdict: tuple[str, ...]
    compliance: tuple[Compliance, ...]
    seeds_pass: bool
    seed_complaints: tuple[str, ...]
    convergence: dict[str, Convergence]
    """By ruleset. Empty in the open division, which asks for none."""
    score: Score
    scaled_minutes: float | None


def check_results(
    folder: str | Path, *, rulesets: Sequence[str] = RULESETS, division: Division | None = None
) -> Checked:
    """Check the result_*.txt of a folder as MLPerf would, under each of `rulesets`.

    `division` asks how they would fare in the other division than the one they name. Nothing is written there.
    """
    require_library()
    for ruleset in rulesets:
        if ruleset not in RULESETS:
            raise UserError(f"there is no ruleset {ruleset} here for BERT; take {' or '.join(RULESETS)}")
    files = result_files(folder)
    entries = [read_log(file) for file in files]
    for log in entries:
        _refuse_strange(log)
    logs = [figures_of(log) for log in entries]
    named = {log.division for log in logs} if division is None else {division}
    if len(named) > 1:
        raise UserError(
            f"the results in {folder} name different divisions ({', '.join(sorted(map(str, named)))}); "
            "say which is meant with --division"
        )
    (chosen,) = named
    with _copies(files, division) as copies:
        compliance = [
            _comply(copy, log, ruleset) for ruleset in rulesets for copy, log in zip(copies, logs, strict=True)
        ]
        seed_complaints = _check_seeds(copies, rulesets[-1])
        convergence = {ruleset: _converge(copies, logs, ruleset) for ruleset in rulesets if chosen == "closed"}
    score = score_of(logs)
    scaling = max((point.scaling for point in convergence.values() if point.passes), default=1.0)
    verdict = _judge(logs, compliance, seed_complaints, convergence, score, chosen)
    return Checked(
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


def _refuse_strange(log: Log) -> None:
    """Refuse logs of anything but BERT in a division there is.

    The official checker opens files by these two names, and runs what stands in them.
    """
    for key, known in (("submission_benchmark", ("bert",)), ("submission_division", get_args(Division))):
        for entry in log.all(key):
            if entry.value not in known:
                raise UserError(
                    f"{log.path} has the {key} {entry.value!r}; what is checked here is {' or '.join(known)}"
                )


def _judge(
    logs: Sequence[LogFigures],
    compliance: Sequence[Compliance],
    seed_complaints: Sequence[str],
    convergence: dict[str, Convergence],
    score: Score,
    division: str | None,
) -> list[str]:
    """What stands against these results, a sentence each; nothing, if nothing does."""
    found = []
    if len(logs) != RESULTS:
        found.append(f"a submission has {RESULTS} results, and there are {len(logs)}")
    failed = [Path(log.file).name for log in logs if not log.has_converged]
    if len(failed) > MAY_FAIL:
        found.append(f"{len(failed)} runs did not converge ({', '.join(failed)}), and {MAY_FAIL} may")
    for ruleset in dict.fromkeys(one.ruleset for one in compliance):
        refused = [Path(one.file).name for one in compliance if one.ruleset == ruleset and not one.passes]
        if len(refused) > MAY_FAIL or set(refused) - set(failed):
            found.append(f"the compliance checker refuses {', '.join(refused)} under the rules {ruleset}")
    if seed_complaints and division == "closed":
        found.append("the seeds are not one for each run, all different")
    for ruleset, point in convergence.items():
        if not point.passes:
            found.append(f"the samples to converge are not accepted under the rules {ruleset}: {_explain(point)}")
    if score.reason:
        found.append(f"there is no score: {score.reason}")
    return found


def _explain(point: Convergence) -> str:
    if point.samples is None or point.reference is None:
        return point.words
    if point.samples >= point.reference:
        return f"{point.words} ({point.samples:,.0f} against the reference's {point.reference:,.0f})"
    return (
        f"{point.samples:,.0f} is further below the reference's {point.reference:,.0f} than chance explains; more "
        "often than not that is easier data or another evaluation"
    )


# --- the official checkers, quietly ---------------------------------------------------------------------


def _comply(copy: Path, log: LogFigures, ruleset: str) -> Compliance:
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", ruleset, quiet=False, werror=False)
    with _overheard():
        mlp_compliance.enqueued_configs.clear()  # what a check that was broken off has left there
        checker.check_file(str(copy), f"training_{ruleset}/common.yaml")
    complaints = [_shorten(text) for text in (*checker.overwritable.values(), *checker.not_overwritable)]
    if log.unreadable_lines:
        complaints.append(f"{log.unreadable_lines} line(s) are torn or no JSON")
    return Compliance(log.file, ruleset, not complaints, tuple(complaints))


def _shorten(complaint: str) -> str:
    """A complaint without the checker's dump of its state."""
    lines = complaint.replace(TOKEN, "").splitlines()
    tests = [line for line in lines if line.startswith("failed test")]
    return "; ".join([lines[0], *tests])


def _check_seeds(files: Sequence[Path], ruleset: str) -> list[str]:
    import warnings

    from mlperf_logging.package_checker.seed_checker import SeedChecker

    with _overheard() as said, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a run with several seeds, which is allowed
        passes = SeedChecker(ruleset).check_seeds([str(file) for file in files])
    if passes:
        return []
    folder = f"{files[0].parent}/"
    return [line.replace(folder, "") for text in said for line in text.splitlines() if "seed" in line.lower()]


def _converge(files: Sequence[Path], logs: Sequence[LogFigures], ruleset: str) -> Convergence:
    """Samples to converge against the reference's points, as the library's own tables and checker have them."""
    import numpy as np
    from mlperf_logging.rcp_checker import rcp_checker

    reason = ""
    if len(logs) < CAN_BE_SCORED:
        reason = f"it takes {CAN_BE_SCORED} results at least"
    elif len({log.global_batch_size for log in logs}) > 1 or logs[0].global_batch_size is None:
        reason = "the results do not name one global batch size"
    elif any(log.benchmark is None for log in logs):
        reason = "a result does not name its benchmark"
    elif any(log.status == "unknown" for log in logs):
        reason = "the run_stop of a result does not say how it ended"
    elif any(log.has_converged and log.train_samples is None for log in logs):
        reason = "a result that converged does not say after how many samples (train_samples)"
    if reason:
        return Convergence(False, reason, None, None, 1.0)
    with _overheard():
        points = rcp_checker.RCP_Checker("training", ruleset, "bert", False).pruned_rcp_data.values()
        passes, words, scaling = rcp_checker.check_directory(
            str(files[0].parent), "training", ruleset, False, True, rcp_pass="pruned_rcps"
        )
    sizes = [point["BS"] for point in points]
    batch = logs[0].global_batch_size
    reference = None
    if batch and batch <= sizes[-1]:  # below the smallest size, the smallest one's counts
        reference = float(np.interp(batch, sizes, [point["RCP Mean"] for point in points]))
    return Convergence(bool(passes), str(words), score_of(logs).samples, reference, float(scaling))


@contextmanager
def _overheard() -> Iterator[list[str]]:
    """Keep what the checkers log off the console, whatever logging was set to; gives what they said."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    root, disabled = logging.getLogger(), logging.root.manager.disable
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = [Listener()]
    logging.disable(logging.NOTSET)
    try:
        yield said
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)


@contextmanager
def _copies(files: Sequence[Path], division: Division | None) -> Iterator[list[Path]]:
    """The logs in a folder by themselves, where checkers may look about, under the name of another division if asked.

    Lines that are torn are left out, since some of the checkers stumble over them; they are complained of by number.
    """
    with tempfile.TemporaryDirectory() as folder:
        copies = []
        for file in files:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            copy = Path(folder) / file.name
            copy.write_text("".join(f"{_in_division(line, division)}\n" for line in lines), encoding="utf-8")
            copies.append(copy)
        yield copies


def _in_division(line: str, division: Division | None) -> str:
    """A line as the checkers are to see it."""
    _, token, body = line.rpartition(TOKEN)
    if not token:
        return ""
    try:
        fields: dict[str, Any] = json.loads(body)
    except ValueError:
        return ""
    if division is not None and fields.get("key") == "submission_division":
        fields["value"] = division
    return f"{TOKEN}{json.dumps(fields)}"
