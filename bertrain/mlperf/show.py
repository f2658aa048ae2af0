"""The figures of MLPerf logs, whoever wrote them: `bertrain mlperf show`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import TypeGuard

from bertrain.base.errors import UserError
from bertrain.mlperf.log import Entry, Log, read_log

CAN_BE_SCORED = 3  # results, of which the fastest and the slowest are left out


@dataclass(frozen=True)
class Evaluation:
    """An accuracy on the way."""

    samples: int | None
    """Sequences trained on by then; None where the log does not tell."""
    seconds: float
    """Since run_start."""
    accuracy: float
    sequences_per_s: float | None
    """Since the evaluation before, or run_start. Without the evaluation itself where the log tells when it began."""


@dataclass(frozen=True)
class LogFigures:
    """What a log tells of a run."""

    file: str
    benchmark: str | None
    organization: str | None
    platform: str | None
    division: str | None
    status: str
    """success, aborted, unknown where run_stop does not say, or unfinished where there is none."""
    seed: int | None
    global_batch_size: int | None
    ranks: int
    train_samples: int | None
    time_to_train_s: float | None
    init_s: float | None
    sequences_per_s: float | None
    sequences_per_s_per_rank: float | None
    sequences_per_s_between_evaluations: float | None
    """From the end of one evaluation to the beginning of the next; None where the log does not tell the two apart."""
    mean_evaluation_s: float | None
    final_accuracy: float | None
    evaluations: tuple[Evaluation, ...]
    unreadable_lines: int

    @property
    def has_converged(self) -> bool:
        return self.status == "success" and self.time_to_train_s is not None


@dataclass(frozen=True)
class Score:
    """Several runs of one system as MLPerf scores them."""

    results: int
    converged: int
    minutes: float | None
    """Olympic mean: without the fastest and the slowest, a run that did not converge being the slowest."""
    samples: float | None
    """Samples to converge, in the same way."""
    reason: str
    """Why there is no score; nothing where there is one."""


def show_logs(files: Sequence[str | Path], *, ranks: int = 0) -> list[LogFigures]:
    """The figures of each of these logs. `ranks` is the number of accelerators, where the log tells it wrong."""
    return [figures_of(read_log(file), ranks=ranks) for file in files]


def figures_of(log: Log, *, ranks: int = 0) -> LogFigures:
    """What the log tells, None for all that it does not."""
    begin, end = log.first("run_start"), log.first("run_stop")
    seconds = (end.time_ms - begin.time_ms) / 1e3 if begin and end else None
    samples = _whole(log.value("train_samples"))
    ranks = ranks or count_ranks(log)
    rate = samples / seconds if samples and seconds else None
    evaluations = evaluations_of(log)
    pauses = bracketed(log)
    first_init, init_stop = log.first("init_start"), log.first("init_stop")
    return LogFigures(
        file=str(log.path),
        benchmark=_text(log.value("submission_benchmark")),
        organization=_text(log.value("submission_org")),
        platform=_text(log.value("submission_platform")),
        division=_text(log.value("submission_division")),
        status=log.status,
        seed=_whole(log.value("seed")),
        global_batch_size=_whole(log.value("global_batch_size")),
        ranks=ranks,
        train_samples=samples,
        time_to_train_s=seconds,
        init_s=(init_stop.time_ms - first_init.time_ms) / 1e3 if init_stop and first_init else None,
        sequences_per_s=rate,
        sequences_per_s_per_rank=rate / ranks if rate and ranks else None,
        sequences_per_s_between_evaluations=rate_between(pauses, begin),
        mean_evaluation_s=mean((stop.time_ms - start.time_ms) / 1e3 for start, stop in pauses) if pauses else None,
        final_accuracy=evaluations[-1].accuracy if evaluations else None,
        evaluations=tuple(evaluations),
        unreadable_lines=log.unreadable,
    )


def count_ranks(log: Log) -> int:
    """Ranks that took part: as init_start says, or else as many as wrote one."""
    starts = log.all("init_start")
    said = (_whole(entry.metadata.get("ranks")) for entry in starts)
    return next((ranks for ranks in said if ranks), len(starts))


def evaluations_of(log: Log) -> list[Evaluation]:
    """Every accuracy in the log. Some count samples in epoch_num, others epochs, and some count nothing there."""
    found = [entry for entry in log.all("eval_accuracy") if _is_number(entry.value)]
    begin = log.first("run_start")
    zero = begin.time_ms if begin else (found[0].time_ms if found else 0.0)
    counts = [_whole(_count(entry)) for entry in found]
    known = [count for count in counts if count is not None]
    batch, trained = _whole(log.value("global_batch_size")) or 1, _whole(log.value("train_samples"))
    grows = len(known) == len(counts) and all(a < b for a, b in pairwise(known))
    are_samples = grows and bool(known) and (known[0] >= batch or known[-1] == trained)
    began_at = {_whole(_count(start)): start.time_ms for start, _ in bracketed(log)}
    evaluations, before, since = [], 0, zero
    for entry, count in zip(found, counts, strict=True):
        samples, rate = count if are_samples else None, None
        until = began_at.get(count, entry.time_ms)
        if samples is not None and until > since:
            rate = (samples - before) / (until - since) * 1e3
        evaluations.append(Evaluation(samples, (entry.time_ms - zero) / 1e3, float(entry.value), rate))
        before, since = samples or 0, entry.time_ms
    return evaluations


def bracketed(log: Log) -> list[tuple[Entry, Entry]]:
    """Evaluations that the log brackets: each eval_start with the eval_stop after it."""
    pairs, begun = [], None
    for entry in log.entries:
        if entry.key == "eval_start":
            begun = entry
        elif entry.key == "eval_stop" and begun is not None:
            pairs.append((begun, entry))
            begun = None
    return pairs


def rate_between(pauses: Sequence[tuple[Entry, Entry]], begin: Entry | None) -> float | None:
    """Sequences per second while it trained: the mean over the stretches from one evaluation to the next.

    The first stretch, from run_start, holds start-up too; it counts only where there is no other.
    """
    rates = []
    for (_, before), (after, _) in pairwise(pauses):
        trained = (_whole(_count(after)) or 0) - (_whole(_count(before)) or 0)
        if trained > 0 and after.time_ms > before.time_ms:
            rates.append(trained / (after.time_ms - before.time_ms) * 1e3)
    if not rates and pauses and begin and pauses[0][0].time_ms > begin.time_ms:
        trained = _whole(_count(pauses[0][0])) or 0
        rates = [trained / (pauses[0][0].time_ms - begin.time_ms) * 1e3] if trained else []
    return mean(rates) if rates else None


def score_of(logs: Sequence[LogFigures]) -> Score:
    """MLPerf's score of several runs: the fastest and the slowest left out, the mean of the others."""
    converged = [log for log in logs if log.has_converged]
    times = sorted(log.time_to_train_s or 0.0 for log in converged)
    samples = sorted(float(log.train_samples or 0) for log in converged)
    failed = len(logs) - len(converged)
    reason = ""
    if len(logs) < CAN_BE_SCORED:
        reason = f"a score takes {CAN_BE_SCORED} results at least"
    elif failed > 1:
        reason = f"{failed} of {len(logs)} runs did not converge, and one may"
    if reason:
        return Score(len(logs), len(converged), None, None, reason)
    last = len(times) if failed else len(times) - 1  # the run that failed is the slowest
    return Score(len(logs), len(converged), mean(times[1:last]) / 60, mean(samples[1:last]), "")


def of_one_system(logs: Sequence[LogFigures]) -> bool:
    """Whether these are runs of one system, which can be scored together."""
    return len({(log.organization, log.platform, log.division, log.global_batch_size) for log in logs}) == 1


def plot_logs(files: Sequence[str | Path], out: str | Path) -> Path:
    """Draw the accuracy of logs over each other, by samples and by time, as an SVG file."""
    from bertrain.base.files import write_atomically
    from bertrain.mlperf.plots import draw_logs

    out = Path(out)
    if out.suffix != ".svg":
        raise UserError(f"--plot writes an SVG file; give {out} a name that ends in .svg")
    try:
        write_atomically(out, draw_logs(show_logs(files)))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None
    return out


def _count(entry: Entry) -> object:
    return entry.metadata.get("epoch_num", entry.metadata.get("samples_count"))


def _whole(value: object) -> int | None:
    return int(value) if _is_number(value) else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
