"""`bertrain mlperf show`: the metrics of any MLPerf log, and the score of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import TypeGuard

from bertrain.mlperf.log import Entry, Log, read_log

MIN_SCORED = 3  # results; the score drops the fastest and the slowest


@dataclass(frozen=True)
class Evaluation:
    """The accuracy at one evaluation."""

    samples: int | None  # sequences trained on so far; None if the log does not count them
    seconds: float  # since run_start
    accuracy: float
    sequences_per_s: float | None
    """Since the previous evaluation, or run_start; excludes the evaluation itself if the log has its start."""


@dataclass(frozen=True)
class LogSummary:
    """The metrics of one run; None for those that its log does not contain."""

    file: str
    benchmark: str | None
    organization: str | None
    platform: str | None
    division: str | None
    status: str  # see `Log.status`
    seed: int | None
    global_batch_size: int | None
    ranks: int
    train_samples: int | None
    time_to_train_s: float | None
    init_s: float | None
    sequences_per_s: float | None
    sequences_per_s_per_rank: float | None
    sequences_per_s_between_evaluations: float | None
    """Training only: from the end of one evaluation to the start of the next."""
    mean_evaluation_s: float | None
    final_accuracy: float | None
    evaluations: tuple[Evaluation, ...]
    unreadable_lines: int

    @property
    def has_converged(self) -> bool:
        return self.status == "success" and self.time_to_train_s is not None


@dataclass(frozen=True)
class Score:
    """The score of several runs of one system by MLPerf's rules."""

    results: int
    converged: int
    minutes: float | None
    """Olympic mean: without the fastest and the slowest run; one that did not converge counts as the slowest."""
    samples: float | None  # samples to converge, likewise
    reason: str  # why there is no score; empty if there is one


def show_logs(files: Sequence[str | Path], *, ranks: int = 0) -> list[LogSummary]:
    """The metrics of each log. `ranks` overrides the number of accelerators in the logs."""
    return [summarize_log(read_log(file), ranks=ranks) for file in files]


def summarize_log(log: Log, *, ranks: int = 0) -> LogSummary:
    """The metrics of one log. `ranks` overrides the number of accelerators in it."""
    begin, end = log.first("run_start"), log.first("run_stop")
    seconds = (end.time_ms - begin.time_ms) / 1e3 if begin and end else None
    init_start, init_stop = log.first("init_start"), log.first("init_stop")
    samples = _to_int(log.value("train_samples"))
    ranks = ranks or count_ranks(log)
    rate = samples / seconds if samples and seconds else None
    evaluations = list_evaluations(log)
    pauses = timed_evaluations(log)
    return LogSummary(
        file=str(log.path),
        benchmark=log.text("submission_benchmark"),
        organization=log.text("submission_org"),
        platform=log.text("submission_platform"),
        division=log.text("submission_division"),
        status=log.status,
        seed=_to_int(log.value("seed")),
        global_batch_size=_to_int(log.value("global_batch_size")),
        ranks=ranks,
        train_samples=samples,
        time_to_train_s=seconds,
        init_s=(init_stop.time_ms - init_start.time_ms) / 1e3 if init_stop and init_start else None,
        sequences_per_s=rate,
        sequences_per_s_per_rank=rate / ranks if rate and ranks else None,
        sequences_per_s_between_evaluations=training_rate(pauses, begin),
        mean_evaluation_s=mean((stop.time_ms - start.time_ms) / 1e3 for start, stop in pauses) if pauses else None,
        final_accuracy=evaluations[-1].accuracy if evaluations else None,
        evaluations=tuple(evaluations),
        unreadable_lines=log.unreadable,
    )


def count_ranks(log: Log) -> int:
    """The number of ranks: from init_start, or else the number of its entries."""
    starts = log.all("init_start")
    counts = (_to_int(entry.metadata.get("ranks")) for entry in starts)
    return next((ranks for ranks in counts if ranks), len(starts))


def list_evaluations(log: Log) -> list[Evaluation]:
    """Every accuracy in the log. In epoch_num some logs count samples, others epochs, and some nothing."""
    found = [entry for entry in log.all("eval_accuracy") if _is_number(entry.value)]
    begin = log.first("run_start")
    zero = begin.time_ms if begin else (found[0].time_ms if found else 0.0)
    counts = [_count(entry) for entry in found]
    known = [count for count in counts if count is not None]
    batch, trained = _to_int(log.value("global_batch_size")) or 1, _to_int(log.value("train_samples"))
    grows = len(known) == len(counts) and all(a < b for a, b in pairwise(known))
    are_samples = grows and bool(known) and (known[0] >= batch or known[-1] == trained)
    began_at = {_count(start): start.time_ms for start, _ in timed_evaluations(log)}
    evaluations, before, since = [], 0, zero
    for entry, count in zip(found, counts, strict=True):
        samples, rate = count if are_samples else None, None
        until = began_at.get(count, entry.time_ms)
        if samples is not None and until > since:
            rate = (samples - before) / (until - since) * 1e3
        evaluations.append(Evaluation(samples, (entry.time_ms - zero) / 1e3, float(entry.value), rate))
        before, since = samples or 0, entry.time_ms
    return evaluations


def timed_evaluations(log: Log) -> list[tuple[Entry, Entry]]:
    """The evaluations that the log times: each eval_start with the eval_stop after it."""
    pairs, begun = [], None
    for entry in log.entries:
        if entry.key == "eval_start":
            begun = entry
        elif entry.key == "eval_stop" and begun is not None:
            pairs.append((begun, entry))
            begun = None
    return pairs


def training_rate(pauses: Sequence[tuple[Entry, Entry]], begin: Entry | None) -> float | None:
    """Sequences per second of training: the mean over the intervals from one evaluation to the next.

    The first interval, from run_start, includes start-up; it counts only if there is no other.
    """
    rates = []
    for (_, before), (after, _) in pairwise(pauses):
        trained = (_count(after) or 0) - (_count(before) or 0)
        if trained > 0 and after.time_ms > before.time_ms:
            rates.append(trained / (after.time_ms - before.time_ms) * 1e3)
    if not rates and pauses and begin and pauses[0][0].time_ms > begin.time_ms:
        trained = _count(pauses[0][0]) or 0
        rates = [trained / (pauses[0][0].time_ms - begin.time_ms) * 1e3] if trained else []
    return mean(rates) if rates else None


def score_runs(logs: Sequence[LogSummary]) -> Score:
    """MLPerf's score of several runs: the mean without the fastest and the slowest."""
    converged = [log for log in logs if log.has_converged]
    times = sorted(log.time_to_train_s or 0.0 for log in converged)
    samples = sorted(float(log.train_samples or 0) for log in converged)
    failed = len(logs) - len(converged)
    if len(logs) < MIN_SCORED or failed > 1:
        reason = f"{failed} of {len(logs)} runs did not converge; only one may fail"
        too_few = f"a score needs at least {MIN_SCORED} results"
        return Score(len(logs), len(converged), None, None, too_few if len(logs) < MIN_SCORED else reason)
    last = len(times) if failed else len(times) - 1  # the run that failed is the slowest
    return Score(len(logs), len(converged), mean(times[1:last]) / 60, mean(samples[1:last]), "")


def are_of_one_system(logs: Sequence[LogSummary]) -> bool:
    """Whether all logs are of one system, so that they can be scored together."""
    return len({(log.organization, log.platform, log.division, log.global_batch_size) for log in logs}) == 1


def plot_logs(files: Sequence[str | Path], out: str | Path) -> Path:
    """Plot the accuracies of several logs, by samples and by time, into an SVG file."""
    from bertrain.mlperf.plots import draw_logs
    from bertrain.reports.page import check_plot, write_page

    write_page(check_plot(out), draw_logs(show_logs(files)), "plot")
    return Path(out)


def _count(entry: Entry) -> int | None:
    return _to_int(entry.metadata.get("epoch_num", entry.metadata.get("samples_count")))


def _to_int(value: object) -> int | None:
    return int(value) if _is_number(value) else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
