"""Anybody's MLPerf logs: the figures in them, the official checks, the score."""

from __future__ import annotations

import json
import logging
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bertrain.cli.main import app
from bertrain.mlperf.check import CURRENT, check_results
from bertrain.mlperf.log import TOKEN, ResultLog, read_log, result_files
from bertrain.mlperf.show import LogSummary, find_mixture, plot_logs, score_runs, show_logs, summarize_log
from tests import helpers

EXCERPT = Path(__file__).parents[1] / "golden" / "mlperf-h200-result_3.txt"
LOGS = helpers.SHARED / "golden" / "mlperf-logs"
PUBLISHED = summarize_log(read_log(EXCERPT))
needs_logs = pytest.mark.skipif(not LOGS.is_dir(), reason="the published logs are not here (shared/golden/mlperf-logs)")


def h200() -> list[Path]:
    return result_files(LOGS / "nvidia-h200x8-v4.0")


# --- figures ----------------------------------------------------------------------------------------------


def test_the_figures_of_a_published_log() -> None:
    """Result 3 of 8 H200: what its lines say, worked out by hand."""
    (figures,) = show_logs([EXCERPT])
    assert figures.train_samples == 2_249_099
    assert figures.time_to_train_s == (1715254352847 - 1715254071011) / 1e3
    assert figures.ranks == 8
    assert figures.sequences_per_s == pytest.approx(2_249_099 / 281.836)
    assert figures.sequences_per_s_per_rank == pytest.approx(997.5, abs=0.05)
    assert figures.init_s == (1715254071010 - 1715254029746) / 1e3
    assert figures.final_accuracy == pytest.approx(0.72031, abs=5e-6)
    assert figures.seed == 30158
    assert figures.global_batch_size == 768
    assert figures.has_converged
    assert len(figures.evaluations) == 15
    first, second = figures.evaluations[:2]
    assert (first.samples, second.samples) == (150_152, 300_040)
    assert first.sequences_per_s == pytest.approx(150_152 / (1715254089078 - 1715254071011) * 1e3)
    assert second.sequences_per_s == pytest.approx((300_040 - 150_152) / (1715254108855 - 1715254091332) * 1e3)


@needs_logs
def test_ten_published_logs_score_what_was_published() -> None:
    logs = show_logs(h200())
    score = score_runs(logs)
    assert not find_mixture(logs)
    assert score.minutes == pytest.approx(5.2116, abs=1e-4)
    assert mean(log.train_samples or 0 for log in logs) == pytest.approx(2_488_891, abs=1)
    assert mean(log.sequences_per_s_per_rank or 0 for log in logs) == pytest.approx(996.6, abs=0.05)
    assert mean(log.sequences_per_s_between_evaluations or 0 for log in logs) / 8 == pytest.approx(1066.3, abs=0.05)
    assert mean(log.mean_evaluation_s or 0 for log in logs) == pytest.approx(1.20, abs=0.005)


@needs_logs
def test_logs_that_count_otherwise() -> None:
    """Samsung's counts epochs in every evaluation, Intel's 32 ranks write side by side behind their numbers."""
    samsung, intel = show_logs(sorted(LOGS.glob("*.txt"), reverse=True))
    assert samsung.train_samples == 2_932_736
    assert samsung.ranks == 1024
    assert samsung.time_to_train_s == pytest.approx(22.318)
    assert samsung.sequences_per_s_per_rank == pytest.approx(128.3, abs=0.05)
    assert [one.samples for one in samsung.evaluations] == [None] * 9
    assert intel.train_samples == 2_850_816
    assert intel.ranks == 32
    assert intel.sequences_per_s == pytest.approx(545, abs=0.5)
    assert intel.evaluations[-1].samples == 2_850_816
    assert intel.sequences_per_s_between_evaluations is None, "it does not say when an evaluation began"


def write_log(path: Path, *entries: tuple[float, str, object, dict[str, object]]) -> Path:
    """A log of seconds, keys, values and metadata."""
    fields = (
        {"time_ms": 1e3 * time, "key": key, "value": value, "metadata": more} for time, key, value, more in entries
    )
    path.write_text("".join(f"{TOKEN}{json.dumps(one)}\n" for one in fields))
    return path


def accuracy(seconds: float, value: float, **metadata: object) -> tuple[float, str, object, dict[str, object]]:
    return seconds, "eval_accuracy", value, metadata


STOP = {"status": "success"}


def test_the_planned_samples_are_not_those_trained_on(tmp_path: Path) -> None:
    """As Habana's log of v2.0: train_samples is the maximum, written before training; one process writes for all."""
    log = write_log(
        tmp_path / "log.txt", (0, "init_start", None, {}), (0, "global_batch_size", 448, {}),
        (0, "train_samples", 3_001_600, {}), (0, "opt_learning_rate_training_steps", 6700, {}),
        (10, "run_start", None, {}), accuracy(610, 0.7, epoch_num=1_200_640), accuracy(1210, 0.72, epoch_num=2_551_360),
        (1210, "run_stop", 0.72, STOP),
    )  # fmt: skip
    (figures,) = show_logs([log])
    assert (figures.train_samples, figures.samples_from) == (2_551_360, "epoch_num")
    assert figures.sequences_per_s == pytest.approx(2_551_360 / 1200)
    assert figures.ranks is None
    (doubt,) = figures.doubts
    assert "3,001,600" in doubt
    shown = CliRunner().invoke(app, ["mlperf", "show", str(log)]).stdout
    assert doubt in shown
    assert "ranks" not in shown


def test_the_size_of_the_data_is_not_believed_during_training_either(tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "log.txt", (0, "global_batch_size", 448, {}), (10, "run_start", None, {}),
        (11, "train_samples", 156_725_653, {}), accuracy(610, 0.7, epoch_num=1), accuracy(1210, 0.72, epoch_num=1),
        (1210, "run_stop", 0.72, STOP),
    )  # fmt: skip
    (figures,) = show_logs([log])
    assert (figures.train_samples, figures.sequences_per_s) == (None, None)
    assert "156,725,653" in figures.doubts[0]


@pytest.mark.parametrize("logged", [1, 0, -5])
def test_fewer_samples_than_a_batch_are_not_believed(tmp_path: Path, logged: int) -> None:
    log = write_log(
        tmp_path / "log.txt", (0, "global_batch_size", 448, {}), (10, "run_start", None, {}),
        accuracy(1210, 0.72, epoch_num=1), (1210, "train_samples", logged, {}), (1210, "run_stop", 0.72, STOP),
    )  # fmt: skip
    (figures,) = show_logs([log])
    assert (figures.train_samples, figures.sequences_per_s) == (None, None)
    assert f"train_samples {logged} is not used" in figures.doubts[0]


def test_a_log_without_a_batch_size_is_read_by_epoch_num_too(tmp_path: Path) -> None:
    for counted, samples in ((2_400_384, 2_400_384), (1, 156_725_653)):
        log = write_log(
            tmp_path / "log.txt", (0, "run_start", None, {}), accuracy(60, 0.72, epoch_num=counted),
            (61, "train_samples", 156_725_653, {}), (61, "run_stop", 0.72, STOP),
        )  # fmt: skip
        (figures,) = show_logs([log])
        assert figures.train_samples == samples


def test_values_that_no_run_can_have_are_doubted(tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "log.txt", (0, "global_batch_size", 0, {}), (10, "run_start", None, {}), accuracy(20, 7.2),
        (9, "run_stop", 0.72, STOP),
    )  # fmt: skip
    (figures,) = show_logs([log])
    assert figures.time_to_train_s is None
    assert not figures.has_converged
    for part in ("run_stop", "eval_accuracy is 7.2", "global_batch_size is 0"):
        assert any(part in doubt for doubt in figures.doubts), part


def test_counts_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    """Graphcore's train_samples differs by a thousandth, which is no contradiction."""
    for logged, doubts in ((2_976_795, 0), (4_000_000, 1)):
        log = write_log(
            tmp_path / "log.txt", (0, "global_batch_size", 3072, {}), (0, "run_start", None, {}),
            accuracy(100, 0.72, epoch_num=2_975_000, step_num=970), (100, "train_samples", logged, {}),
            (100, "run_stop", None, STOP),
        )  # fmt: skip
        (figures,) = show_logs([log])
        assert figures.train_samples == 2_975_000
        assert len(figures.doubts) == doubts
        assert all("train_samples counts 4,000,000" in doubt for doubt in figures.doubts)
    log.write_text(log.read_text().replace('"step_num": 970', '"step_num": 500'))
    assert "global_batch_size x step_num counts 1,536,000" in show_logs([log])[0].doubts[-1]
    log.write_text(
        log.read_text()
        + f'{TOKEN}{{"time_ms": 1, "key": "opt_learning_rate_training_steps", "value": 9, "metadata": {{}}}}'
    )
    assert "9 steps of 3,072" in show_logs([log])[0].doubts[-1]


def test_a_log_that_counts_epochs_has_no_speed_between_evaluations(tmp_path: Path) -> None:
    """As Baidu's log of v2.0: epoch_num is 1 at every evaluation; train_samples is written at the end."""
    timed = [
        ((60.0 * n, "eval_start", None, {"epoch_num": 1}), accuracy(60.0 * n + 2, 0.7, epoch_num=1)) for n in (1, 2)
    ]
    log = write_log(
        tmp_path / "log.txt", (0, "global_batch_size", 448, {}), (0, "run_start", None, {}),
        *(entry for pair in timed for entry in pair), (122, "train_samples", 2_400_384, {}),
        (122, "run_stop", None, STOP),
    )  # fmt: skip
    (figures,) = show_logs([log])
    assert (figures.train_samples, figures.samples_from, figures.doubts) == (2_400_384, "train_samples", ())
    assert figures.sequences_per_s_between_evaluations is None
    assert figures.mean_evaluation_s == pytest.approx(2)
    assert "between" not in CliRunner().invoke(app, ["mlperf", "show", str(log)]).stdout


@pytest.mark.parametrize("says_so", [True, False])
def test_a_run_that_began_at_a_checkpoint(tmp_path: Path, says_so: bool) -> None:
    """As Google's open logs of v1.1: train_samples is the size of the data; one of them says where the run began."""
    began = {"train_samples_since_beginning": 99_532_800} if says_so else {}
    counter = "train_samples_since_beginning" if says_so else "epoch_num"
    log = write_log(
        tmp_path / "log.txt", (0, "global_batch_size", 4096, {}), (0, "train_samples", 156_725_653, {}),
        (10, "run_start", None, {}), (10, "block_start", None, began),
        *(accuracy(10 + 1700 * n, 0.8, **{"epoch_num": 1, counter: 99_532_800 + 409_600 * n}) for n in (1, 2, 3, 4)),
        (6810, "run_stop", None, STOP),
    )  # fmt: skip
    (figures,) = show_logs([log])
    assert (figures.train_samples, figures.samples_from) == (101_171_200, counter)
    assert figures.sequences_per_s == pytest.approx(409_600 / 1700)
    assert max(one.sequences_per_s or 0.0 for one in figures.evaluations) == pytest.approx(409_600 / 1700)
    assert "156,725,653" in figures.doubts[0]
    assert f"{99_532_800 if says_so else 99_942_400:,}" in figures.doubts[1]


@needs_logs
def test_entries_are_those_of_the_official_parser() -> None:
    from mlperf_logging.compliance_checker import mlp_parser

    for path in (*h200(), *LOGS.glob("*.txt")):
        theirs, errors = mlp_parser.parse_file(str(path), ruleset="5.0.0")
        log = read_log(path)
        assert not errors
        assert log.unreadable == 0
        expected = [(line.timestamp, line.key, line.value["value"], line.value["metadata"]) for line in theirs]
        assert [(entry.time_ms, entry.key, entry.value, entry.metadata) for entry in log.entries] == expected


def test_a_log_of_a_killed_run_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    text = EXCERPT.read_text()
    torn = tmp_path / "torn.txt"
    torn.write_text(text[: text.index('"key": "eval_accuracy"') + 40])
    (figures,) = show_logs([torn])
    assert figures.status == "unfinished"
    assert figures.unreadable_lines == 1
    assert figures.train_samples is None
    assert figures.time_to_train_s is None
    assert not figures.has_converged


def test_words_before_a_line_and_two_lines_in_one(tmp_path: Path) -> None:
    lines = EXCERPT.read_text().splitlines()
    messy = tmp_path / "messy.txt"
    messy.write_text("0: start\n\xff\n" + "".join(f"[{n}] {one}{two}\n" for n, (one, two) in enumerate(_pairs(lines))))
    assert read_log(messy).entries == read_log(EXCERPT).entries


def _pairs(lines: list[str]) -> list[tuple[str, str]]:
    return list(zip(lines[::2], [*lines[1::2], ""], strict=False))


def test_what_is_no_log_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("nothing of the kind\n")
    with helpers.refused("not-an-mlperf-log", tmp_path / "other.txt"):
        read_log(tmp_path / "other.txt")
    with helpers.refused("unreadable-file", tmp_path / "absent.txt"):
        read_log(tmp_path / "absent.txt")
    with helpers.refused("missing-results", tmp_path):
        result_files(tmp_path)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "result.txt")
    logging.disable(logging.CRITICAL)  # somebody's wish for a quiet console
    try:
        log.event("seed", 7)
        log.start("eval_start", 3, epoch_num=3)
        log.close()
    finally:
        logging.disable(logging.NOTSET)
    entries = read_log(log.path).entries
    assert [(entry.key, entry.value) for entry in entries] == [("seed", 7), ("eval_start", 3)]
    assert entries[1].metadata["epoch_num"] == 3
    assert entries[0].metadata["file"].endswith("test_mlperf_logs.py"), "the author's place, not the logger's"
    with helpers.refused("unwritable-file", tmp_path / "result.txt"):
        ResultLog(tmp_path / "result.txt")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_line_that_cannot_be_written_is_not_lost_in_silence(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "result.txt")
    log._file.close()
    log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - the log closes it
    with helpers.refused("unwritable-file", tmp_path / "result.txt", "No space left on device"):
        log.event("seed", 7)


# --- the score ----------------------------------------------------------------------------------------------


def figures(minutes: float, *, converged: bool = True) -> LogSummary:
    return replace(PUBLISHED, time_to_train_s=60 * minutes, status="success" if converged else "aborted")


@given(st.lists(st.floats(0.1, 1000), min_size=3, max_size=12))
def test_a_score_leaves_out_the_fastest_and_the_slowest(minutes: list[float]) -> None:
    score = score_runs([figures(one) for one in minutes])
    assert score.minutes == pytest.approx(mean(sorted(minutes)[1:-1]))


def test_one_run_may_fail_and_is_then_the_slowest() -> None:
    runs = [figures(4.0), figures(1.0, converged=False), figures(2.0), figures(3.0)]
    assert score_runs(runs).minutes == pytest.approx(mean([3.0, 4.0]))
    two = score_runs([*runs, figures(1.0, converged=False)])
    assert two.minutes is None
    assert two.reason.startswith("2 of 5 runs")
    assert score_runs(runs[:2]).minutes is None


# --- the checks ---------------------------------------------------------------------------------------------


def write_results(folder: Path, *, samples: int = 2_249_099, same_seed: bool = False, failed: int = 0) -> Path:
    """Ten results made of the excerpt: of other seeds, other counts of samples, some of them not converged."""
    for number in range(10):
        lines = []
        for line in EXCERPT.read_text().splitlines():
            entry = json.loads(line.removeprefix(TOKEN))
            if entry["key"] == "seed" and not same_seed:
                entry["value"] += number
            if entry["key"] == "train_samples":
                entry["value"] = samples
            if entry["metadata"].get("epoch_num") == PUBLISHED.train_samples:
                entry["metadata"]["epoch_num"] = samples
            if entry["key"] == "run_stop" and number < failed:
                entry["metadata"]["status"] = "aborted"
            if entry["key"] == "eval_accuracy" and number < failed:
                entry["value"] = min(entry["value"], 0.71)
            lines.append(TOKEN + json.dumps(entry))
        (folder / f"result_{number}.txt").write_text("\n".join(lines) + "\n")
    return folder


def test_a_score_is_scaled_where_it_converged_a_little_faster_than_the_reference(tmp_path: Path) -> None:
    checked = check_results(write_results(tmp_path, samples=2_324_351), rulesets=CURRENT)
    assert checked.passes, checked.verdict
    scaling = 1.05145  # as HPE's scaling.json of v5.0 has it for the same mean
    assert all(point.scaling == pytest.approx(scaling, abs=1e-5) for point in checked.convergence.values())
    assert checked.scaled_minutes == pytest.approx(281.836 / 60 * scaling, rel=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"result_{number}.txt" for number in range(10)]


def test_what_would_not_be_taken_is_said(tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    checked = check_results(write_results(tmp_path / "fast", same_seed=True, failed=2), rulesets=CURRENT)
    assert not checked.passes
    assert "2 runs did not converge (result_0.txt, result_1.txt); 1 may fail" in checked.verdict
    assert any("different seeds" in line for line in checked.verdict)
    assert any("result_0.txt, result_1.txt under ruleset 5.0.0" in line for line in checked.verdict)
    assert any("logs seed 30158" in line for line in checked.seed_complaints)
    assert checked.scaled_minutes is None
    (tmp_path / "faster").mkdir()
    checked = check_results(write_results(tmp_path / "faster"), rulesets=CURRENT)
    assert len(checked.verdict) == 2
    assert all("2,249,099" in line and "2,443,934" in line for line in checked.verdict)


def test_one_run_that_did_not_converge_is_borne(tmp_path: Path) -> None:
    checked = check_results(write_results(tmp_path, samples=2_500_000, failed=1), rulesets=CURRENT)
    assert checked.passes, checked.verdict
    assert checked.score.converged == 9
    assert [one.passes for one in checked.compliance] == [False] + 9 * [True] + [False] + 9 * [True]


@pytest.mark.parametrize(
    ("key", "changed", "said"),
    [
        ("eval_accuracy", {"metadata": {}}, "count samples in epoch_num, train_samples"),
        ("eval_accuracy", {"metadata": {"samples_count": 2_500_000}}, "count samples in epoch_num, samples_count"),
        ("run_stop", {"metadata": {}}, "run_stop"),
    ],
)
def test_a_log_without_what_the_checker_relies_on(
    tmp_path: Path, key: str, changed: dict[str, object], said: str
) -> None:
    path = write_results(tmp_path, samples=2_500_000) / "result_4.txt"
    entries = [json.loads(line.removeprefix(TOKEN)) for line in path.read_text().splitlines()]
    kept = [entry | changed if entry["key"] == key else entry for entry in entries]
    path.write_text("".join(f"{TOKEN}{json.dumps(entry)}\n" for entry in kept))
    checked = check_results(tmp_path, rulesets=["5.0.0"])
    assert not checked.passes
    assert said in checked.convergence["5.0.0"].words


def test_an_evaluation_that_the_checker_cannot_read(tmp_path: Path) -> None:
    path = write_results(tmp_path, samples=2_500_000) / "result_4.txt"
    before, key, after = path.read_text().partition('"key": "eval_accuracy"')
    path.write_text(before + key + after.replace('"epoch_num"', '"epoch"', 1))
    checked = check_results(tmp_path, rulesets=["5.0.0"])
    assert "KeyError('epoch_num')" in checked.convergence["5.0.0"].words
    assert not checked.passes


def test_what_makes_no_sense_in_a_log_is_unknown(tmp_path: Path) -> None:
    lines = EXCERPT.read_text().splitlines()
    strange = {"eval_accuracy": "high", "train_samples": float("nan"), "submission_org": ["two", "of them"]}
    for number, line in enumerate(lines):
        entry = json.loads(line.removeprefix(TOKEN))
        lines[number] = TOKEN + json.dumps(entry | {"value": strange.get(entry["key"], entry["value"])})
    (tmp_path / "result_0.txt").write_text("\n".join(lines))
    (figures,) = show_logs([tmp_path / "result_0.txt"])
    assert (figures.train_samples, figures.final_accuracy, figures.evaluations) == (2_249_099, None, ())


def test_a_torn_log_is_complained_of(tmp_path: Path) -> None:
    write_results(tmp_path, samples=2_500_000)
    text = (tmp_path / "result_4.txt").read_text()
    (tmp_path / "result_4.txt").write_text(text[: text.rindex('"key": "eval_accuracy"') + 30])
    checked = check_results(tmp_path, rulesets=["5.0.0"])
    assert any(
        complaint.startswith("lines that are truncated or not JSON: 1")
        for complaint in checked.compliance[4].complaints
    )
    assert checked.passes, "one of ten may fail"


def test_the_check_and_the_summary_read_the_same_entries(tmp_path: Path) -> None:
    """Entries that two ranks wrote onto one line, with something behind them."""
    write_results(tmp_path, samples=2_500_000)
    for path in result_files(tmp_path):
        path.write_text(path.read_text().replace("\n:::", " and the rest:::"))
    assert show_logs(result_files(tmp_path))[0].final_accuracy == PUBLISHED.final_accuracy
    checked = check_results(tmp_path, rulesets=["5.0.0"])
    assert checked.passes, checked.verdict
    assert all(one.passes for one in checked.compliance)


def test_too_few_results_are_counted(tmp_path: Path) -> None:
    write_results(tmp_path)
    for number in range(2, 10):
        (tmp_path / f"result_{number}.txt").unlink()
    checked = check_results(tmp_path, division="open")
    few, no_score = checked.verdict
    assert few == "a submission needs 10 results; there are 2"
    assert no_score == f"there is no score: {checked.score.reason}"
    with helpers.refused("unknown-ruleset", "9.9.0"):
        check_results(tmp_path, rulesets=["9.9.0"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("global_batch_size", 896),
        ("submission_platform", "DGX"),
        ("submission_org", "X"),
        ("submission_division", "open"),
    ],
)
def test_results_of_several_systems_are_not_checked_together(tmp_path: Path, key: str, value: object) -> None:
    path = write_results(tmp_path) / "result_3.txt"
    entries = [json.loads(line.removeprefix(TOKEN)) for line in path.read_text().splitlines()]
    changed = [entry | ({"value": value} if entry["key"] == key else {}) for entry in entries]
    path.write_text("".join(f"{TOKEN}{json.dumps(entry)}\n" for entry in changed))
    with helpers.refused("mixed-results", tmp_path, f"{value} in result_3.txt"):
        check_results(tmp_path)
    done = CliRunner().invoke(app, ["mlperf", "show", "--json", *map(str, result_files(tmp_path))])
    assert '"score"' not in done.stdout, "show does not score them either"


def test_results_of_more_and_fewer_ranks_are_not_scored_together(tmp_path: Path) -> None:
    for number, ranks in enumerate((8, 8, 32)):
        write_log(
            tmp_path / f"result_{number}.txt", (0, "init_start", None, {"ranks": ranks}),
            (0, "global_batch_size", 448, {}), (10, "run_start", None, {}), accuracy(610, 0.72, epoch_num=2_551_360),
            (610, "run_stop", 0.72, STOP),
        )  # fmt: skip
    logs = show_logs(sorted(tmp_path.iterdir()))
    assert find_mixture(logs) == "ranks is 8 in result_1.txt, 32 in result_2.txt"
    assert not find_mixture([*logs[:2], replace(logs[2], ranks=None)])


@pytest.mark.parametrize(
    ("day", "rulesets"),
    [("2021-10-15", ["1.1.0"]), ("2022-06-16", ["2.0.0"]), ("2023-10-10", ["3.1.0"]), ("2025-05-01", [*CURRENT])],
)
def test_the_rules_are_those_of_the_logs_date(tmp_path: Path, day: str, rulesets: list[str]) -> None:
    """Baidu's results of v2.0 are of 16 June 2022, two weeks before they were published."""
    write_results(tmp_path)
    later = (
        int(datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp() * 1e3) - read_log(EXCERPT).entries[0].time_ms
    )
    for path in result_files(tmp_path):
        entries = [json.loads(line.removeprefix(TOKEN)) for line in path.read_text().splitlines()]
        moved = [entry | {"time_ms": entry["time_ms"] + int(later)} for entry in entries]
        path.write_text("".join(f"{TOKEN}{json.dumps(entry)}\n" for entry in moved))
    checked = check_results(tmp_path)
    assert list(dict.fromkeys(one.ruleset for one in checked.compliance)) == rulesets
    assert all(point.reference for point in checked.convergence.values())
    older = check_results(tmp_path, rulesets=["3.0.0"])
    assert {one.ruleset for one in older.compliance} == set(older.convergence) == {"3.0.0"}


@pytest.mark.parametrize(("key", "value"), [("submission_benchmark", "resnet"), ("submission_division", "../../mine")])
def test_strange_names_never_reach_the_checker_which_would_open_them(tmp_path: Path, key: str, value: str) -> None:
    write_results(tmp_path)
    path = tmp_path / "result_3.txt"
    (line,) = [line for line in path.read_text().splitlines() if f'"{key}"' in line]
    entry = json.loads(line.removeprefix(TOKEN))
    path.write_text(path.read_text() + TOKEN + json.dumps(entry | {"value": value}) + "\n")
    with helpers.refused("unknown-submission", path, f"{key} '{value}'"):
        check_results(tmp_path)


# --- the commands ----------------------------------------------------------------------------------------------


def test_show_prints_a_json_line_for_each_log_and_the_score(tmp_path: Path) -> None:
    files = result_files(write_results(tmp_path))[:3]
    done = CliRunner().invoke(app, ["mlperf", "show", "--json", *map(str, files)])
    *lines, last = map(json.loads, done.stdout.splitlines())
    assert [line["train_samples"] for line in lines] == [2_249_099] * 3
    assert lines[0]["time_to_train_s"] == 281.836
    assert last["score"]["minutes"] == pytest.approx(281.836 / 60)
    (one,) = CliRunner().invoke(app, ["mlperf", "show", "--json", str(files[0])]).stdout.splitlines()
    assert json.loads(one)["seed"] == 30158


def test_check_says_its_verdict_and_ends_with_it(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["mlperf", "check", str(write_results(tmp_path))])
    assert done.exit_code == 1
    assert "verdict: checks failed, closed division:" in done.stdout
    done = CliRunner().invoke(app, ["mlperf", "check", str(tmp_path), "--division", "open", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["passes"]


def test_logs_are_drawn_over_each_other(tmp_path: Path) -> None:
    files = result_files(write_results(tmp_path))
    picture = ElementTree.parse(plot_logs([*files, EXCERPT], tmp_path / "logs.svg"))
    texts = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert sum("NVIDIA, 1xNVIDIA HGX H200, 281.8 s" in text for text in texts) == 11
    with helpers.refused("plot-not-svg", tmp_path / "logs.png"):
        plot_logs(files, tmp_path / "logs.png")
