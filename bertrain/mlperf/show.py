"""`bertrain mlperf show`: the metrics of any MLPerf log, and the score of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from bertrain.base.schema import is_number
from bertrain.mlperf.log import Entry, Log, read_log

MIN_SCORED = 3  # results; the score drops the fastest and the slowest


COUNTERS = ("epoch_num", "train_samples_since_beginning", "samples_count")
"""Where an evaluation may count the samples; MLPerf's checker of convergence reads the first."""
MOST_EPOCHS = 1000  # what epoch_num counts epochs up to, in a log without a batch size
TOLERANCE = 0.01  # between two counts of samples: some submitters round to whole steps or evaluations
LEAP = 3.0  # times the usual rate before the first evaluation: the run began at a checkpoint


@dataclass(frozen=True)
class Evaluation:
    """The accuracy at one evaluation."""

    samples: int | None  # sequences trained on so far; None if the log does not count them
    seconds: float  # since run_start
    evaluation_s: float | None  # its duration; None if the log does not have its start
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
    ranks: int | None
    train_samples: int | None  # trained on until the last evaluation
    samples_from: str | None  # the key that counts them
    time_to_train_s: float | None
    init_s: float | None
    sequences_per_s: float | None
    sequences_per_s_per_rank: float | None
    sequences_per_s_between_evaluations: float | None
    """Training only, from one evaluation to the start of the next; without the first interval, which has start-up."""
    mean_evaluation_s: float | None
    final_accuracy: float | None
    evaluations: tuple[Evaluation, ...]
    doubts: tuple[str, ...]  # where the counts of the log contradict each other
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
    init_start, init_stop = log.first("init_start"), log.first("init_stop")
    seconds = _seconds(begin, end)
    samples, samples_from, doubts = count_samples(log)
    evaluations = list_evaluations(log)
    if seconds is not None and seconds <= 0:
        doubts.append("run_stop is not after run_start, so there is no time to train")
        seconds = None
    if wrong := [one.accuracy for one in evaluations if not 0 <= one.accuracy <= 1]:
        doubts.append(f"eval_accuracy is {wrong[0]:g}, which is no share")
    timed = [one.evaluation_s for one in evaluations if one.evaluation_s is not None]
    rates = [one.sequences_per_s for one in evaluations[1:] or evaluations if one.sequences_per_s and timed]
    first_samples, first_s = find_beginning(log, evaluations)
    if first_samples:
        doubts.append(f"it began at {first_samples:,} samples; sequences/s count those after them")
        evaluations = [
            replace(one, sequences_per_s=one.sequences_per_s if one.seconds > first_s else None) for one in evaluations
        ]
    trained_s = seconds - first_s if seconds is not None else 0.0
    rate = (samples - first_samples) / trained_s if samples and trained_s > 0 else None
    counted = ranks or count_ranks(log)
    return LogSummary(
        file=str(log.path),
        benchmark=log.text("submission_benchmark"),
        organization=log.text("submission_org"),
        platform=log.text("submission_platform"),
        division=log.text("submission_division"),
        status=log.status,
        seed=_to_int(log.value("seed")),
        global_batch_size=_to_int(log.value("global_batch_size")),
        ranks=counted,
        train_samples=samples,
        samples_from=samples_from,
        time_to_train_s=seconds,
        init_s=_seconds(init_start, init_stop),
        sequences_per_s=rate,
        sequences_per_s_per_rank=rate / counted if rate and counted else None,
        sequences_per_s_between_evaluations=mean(rates) if rates else None,
        mean_evaluation_s=mean(timed) if timed else None,
        final_accuracy=evaluations[-1].accuracy if evaluations else None,
        evaluations=tuple(evaluations),
        doubts=tuple(doubts),
        unreadable_lines=log.unreadable,
    )


def count_ranks(log: Log) -> int | None:
    """The number of ranks: from init_start, or else the number of its entries if each rank wrote one."""
    starts = log.all("init_start")
    counts = (_to_int(entry.metadata.get("ranks")) for entry in starts)
    return next((ranks for ranks in counts if ranks), len(starts) if len(starts) > 1 else None)


def count_samples(log: Log) -> tuple[int | None, str | None, list[str]]:
    """The samples until the last evaluation, the key that counts them, and the counts that contradict it.

    Takes what MLPerf's checker of convergence takes: epoch_num of the last eval_accuracy, unless it counts epochs.
    Some submitters log the size of the data or the planned maximum as train_samples, before training.
    """
    last, batch = next(iter(log.all("eval_accuracy")[::-1]), None), _to_int(log.value("global_batch_size"))
    counts = {key: _count(log, last, key) for key in COUNTERS} if last else {}
    logged, doubts = log.first("train_samples"), []
    if logged is not None and (trained := _to_int(logged.value)) is not None:
        before = last or log.first("run_start")
        if trained < (batch or 1):
            doubts.append(f"train_samples {trained:,} is not used: it is less than a batch")
        elif before is None or log.entries.index(logged) > log.entries.index(before):
            counts["train_samples"] = trained
        else:
            doubts.append(f"train_samples {trained:,} is not used: it was logged before training ended")
    if batch is not None and batch <= 0:
        doubts.append(f"global_batch_size is {batch}")
    steps = _to_int(last.metadata.get("step_num")) if last else None
    counts["global_batch_size x step_num"] = batch * steps if batch and steps else None
    known = [(key, count) for key, count in counts.items() if count is not None]
    if not known:
        return None, None, doubts
    chosen, samples = known[0]
    for key, count in known[1:]:
        if abs(count - samples) > TOLERANCE * samples:
            doubts.append(f"{key} counts {count:,} samples, {chosen} {samples:,}, which is used")
    planned = _to_int(log.value("opt_learning_rate_training_steps"))
    if batch and planned and samples > (1 + TOLERANCE) * batch * planned:
        doubts.append(f"{samples:,} samples are more than the schedule's {planned:,} steps of {batch:,}")
    return samples, chosen, doubts


def find_beginning(log: Log, evaluations: Sequence[Evaluation]) -> tuple[int, float]:
    """The samples and the seconds since run_start from which on this run trained: zero, unless it resumed."""
    first = log.first("block_start")
    before = _to_int(first.metadata.get("train_samples_since_beginning")) if first else None
    if before is not None:
        return before, 0.0
    rates = [one.sequences_per_s or 0.0 for one in evaluations]
    if len(rates) > 1 and rates[0] > LEAP * max(rates[1:]) > 0:
        return evaluations[0].samples or 0, evaluations[0].seconds
    return 0, 0.0


def list_evaluations(log: Log) -> list[Evaluation]:
    """Every accuracy in the log."""
    begin = log.first("run_start") or log.first("eval_accuracy")
    zero = since = begin.time_ms if begin else 0.0
    evaluations, before, started = [], find_beginning(log, [])[0], None
    for entry in log.entries:
        if entry.key == "eval_start":
            started = entry.time_ms
        elif entry.key == "eval_accuracy" and is_number(entry.value):
            samples, until = _samples(log, entry), entry.time_ms if started is None else started
            grew = samples is not None and samples > before and until > since
            rate = (samples - before) / (until - since) * 1e3 if grew and samples else None
            lasted = (entry.time_ms - started) / 1e3 if started is not None else None
            evaluations.append(Evaluation(samples, (entry.time_ms - zero) / 1e3, lasted, float(entry.value), rate))
            before, since, started = samples or before, entry.time_ms, None
    return evaluations


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


def find_mixture(logs: Sequence[LogSummary]) -> str:
    """What the logs do not share, so that they cannot be scored together; empty if they are of one system."""
    for name in ("organization", "platform", "global_batch_size", "division", "ranks"):
        # A log that does not count its ranks may be of any number.
        known = [log for log in logs if name != "ranks" or log.ranks is not None]
        values = {str(getattr(log, name)): log.file for log in known}
        if len(values) > 1:
            return f"{name} is " + ", ".join(f"{value} in {Path(file).name}" for value, file in values.items())
    return ""


def plot_logs(files: Sequence[str | Path], out: str | Path) -> Path:
    """Plot the accuracies of several logs, by samples and by time, into an SVG file."""
    from bertrain.mlperf.plots import draw_logs
    from bertrain.reports.page import check_plot, write_page

    write_page(check_plot(out), draw_logs(show_logs(files)), "plot")
    return Path(out)


def _samples(log: Log, entry: Entry) -> int | None:
    """The samples trained on before an evaluation; None if the log counts only epochs."""
    return next((count for key in COUNTERS if (count := _count(log, entry, key)) is not None), None)


def _count(log: Log, entry: Entry, key: str) -> int | None:
    """A count of samples. In epoch_num some logs count epochs, which are always fewer than a batch has samples."""
    count, batch = _to_int(entry.metadata.get(key)), _to_int(log.value("global_batch_size"))
    return None if (count or 0) < ((batch or MOST_EPOCHS) if key == "epoch_num" else 1) else count


def _seconds(start: Entry | None, stop: Entry | None) -> float | None:
    return (stop.time_ms - start.time_ms) / 1e3 if start and stop else None


def _to_int(value: object) -> int | None:
    return int(value) if is_number(value) else None
