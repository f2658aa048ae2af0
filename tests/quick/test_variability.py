"""Variability: every figure by hand, on sets whose truth is known; and sets that are damaged or half there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertrain.profiling.profile_report import plot_durations, profile_report
from bertrain.profiling.sets import ITERATION_COLUMNS, ProfileSet, find_sets, read_set, write_table
from bertrain.profiling.variability import box_of, compare, correlation, during, joules, summarize, throttled_by
from tests import helpers

START = 1_800_000_000.0


def made_up(
    uuid: str = "GPU-1",
    *,
    host: str = "node1",
    repeat: int = 1,
    seconds: list[float] | None = None,
    **telemetry: list[float],
) -> ProfileSet:
    """A set of steps of 1,000 tokens, sampled once a second from the first step's beginning on."""
    durations = np.array(seconds or [1.0, 1.0, 1.0, 1.0])
    columns = {name: np.array(values, dtype=np.float64) for name, values in telemetry.items()}
    if columns:
        columns["time"] = START + np.arange(len(next(iter(columns.values()))))
    return ProfileSet(
        folder=Path("x"),
        host=host,
        device="H200",
        uuid=uuid,
        repeat=repeat,
        started=START + np.cumsum(durations) - durations,
        seconds=durations,
        tokens=np.full(len(durations), 1000.0),
        energy_tokens=1000.0 * len(durations),
        telemetry=columns,
    )


def write_set(folder: Path, found: ProfileSet, **changes: Any) -> Path:
    """The files of such a set."""
    folder.mkdir(parents=True)
    rows = [
        (number + 1, begin, seconds, 0, seconds, 0, 0, tokens, tokens, 1)
        for number, (begin, seconds, tokens) in enumerate(
            zip(found.started, found.seconds, found.tokens, strict=True)
        )
    ]  # fmt: skip
    write_table(folder / "iterations.csv", ITERATION_COLUMNS, rows)
    names = list(found.telemetry)
    write_table(folder / "telemetry.csv", names, zip(*found.telemetry.values(), strict=True))
    (folder / "telemetry.json").write_text(json.dumps([{"missing": {"energy_j": "not supported"}}]))
    facts = {
        "device": {"kind": "cuda", "index": 0, "name": found.device, "uuid": found.uuid},
        "environment": {"host": found.host, "ranks": 1},
        "repeat": found.repeat,
        "missing": {},
    } | changes
    (folder / "device.json").write_text(json.dumps(facts))
    return folder


def test_the_box_by_hand() -> None:
    box = box_of([10, 11, 12, 13, 14, 30])
    assert (box.lower_quartile, box.median, box.upper_quartile) == (11.25, 12.5, 13.75)
    assert (box.lower_whisker, box.upper_whisker) == (10, 14), "30 is more than 1.5 x 2.5 beyond 13.75"
    assert box.spread == pytest.approx(4 / 12.5)
    assert box.is_outlier(30)
    assert not box.is_outlier(14)
    assert box_of([2, 2, 3.1]).is_outlier(3.1), "1.5 times the median is slow, whatever the box says"


def test_correlation_is_pearsons() -> None:
    draw = np.random.default_rng(0)
    one, other = draw.normal(size=50), draw.normal(size=50)
    assert correlation(one, one + other) == pytest.approx(np.corrcoef(one, one + other)[0, 1])
    assert correlation(one, -2 * one + 5) == pytest.approx(-1)
    assert correlation(one, np.full(50, 1980.0)) is None, "a clock that never changes goes with nothing"
    assert correlation(one[:2], other[:2]) is None
    with_gaps = np.where(np.arange(50) < 40, other, np.nan)
    assert correlation(one, with_gaps) == pytest.approx(np.corrcoef(one[:40], other[:40])[0, 1])


def test_steps_and_samples_are_joined_by_time() -> None:
    found = made_up(seconds=[1.0, 2.0, 1.0], power_w=[100, 200, 300, 400, 500])
    assert during(found, "power_w").tolist() == [150, 300, 450], "in the middle of each: 0.5, 2 and 3.5 s"
    assert np.isnan(during(found, "temperature_c")).all()


def test_energy_is_counted_between_first_and_last_step() -> None:
    counted = made_up(energy_j=[1000, np.nan, 1600, np.nan, 2400, 9999])
    assert joules(counted) == pytest.approx(1400), "the sample after the last step does not count"
    assert joules(made_up(power_w=[100, 200, 200, 200, 300])) is None
    assert summarize(counted).joules_per_million_tokens == pytest.approx(1400 / 4000 * 1e6)


def test_a_counter_that_begins_anew_and_a_sampler_that_died() -> None:
    """A run that went on elsewhere counts from zero again; what was sampled for a part of the time is no energy."""
    assert joules(made_up(energy_j=[1000, 1100, 0, 50, 150])) == pytest.approx(100 + 50 + 100)
    died = made_up(energy_j=[1000, 1100, 1200], power_w=[100, 100, 100])
    assert joules(died) is None, "two of four seconds"
    assert during(died, "power_w").tolist()[:2] == [100, 100]
    assert np.isnan(during(died, "power_w")[2:]).all(), "nobody knows what came after"


def test_a_gpus_energy_was_spent_on_its_own_tokens(tmp_path: Path) -> None:
    """Of a step of 1,000 tokens on two GPUs, each computed some; a processor's ranks share its counter."""
    found = made_up(energy_j=[0, 100, 200, 300, 400])
    rows = [(n, START + n, 1.0, 0, 1.0, 0, 0, 1000, 600, 1) for n in range(4)]
    write_table(write_set(tmp_path / "gpu", found) / "iterations.csv", ITERATION_COLUMNS, rows)
    on_a_cpu = {
        "device": {"kind": "cpu", "name": "Xeon"},
        "environment": {"host": "node1", "ranks": 8},
        "rank": 0,
        "ranks_on_machine": 4,
    }
    write_table(write_set(tmp_path / "cpu", found, **on_a_cpu) / "iterations.csv", ITERATION_COLUMNS, rows)
    gpu, cpu = (summarize(read_set(tmp_path / name)) for name in ("gpu", "cpu"))
    assert gpu.joules_per_million_tokens == pytest.approx(400 / 2400 * 1e6)
    assert cpu.joules_per_million_tokens == pytest.approx(400 / 2000 * 1e6), "four ranks of eight"
    assert gpu.tokens_per_s == 1000


@pytest.mark.parametrize(("device", "share"), [({"uuid": "GPU-1", "name": "H200"}, 0.25), ({}, 0.75)])
def test_the_energy_of_a_runs_first_rank(tmp_path: Path, device: dict[str, str], share: float) -> None:
    """Of 1,600 tokens in all, a quarter are its own, and three quarters its machine's."""
    phases = {"data": 0.0, "forward_backward": 1.0, "reduction": 0.0, "optimizer": 0.0}
    lines: list[dict[str, Any]] = [
        {"kind": "step", "step": n, "tokens": 800, "skipped": False, "seconds": phases, "ended": START + n}
        for n in (1, 2)
    ]
    ranks = [(0, "here", 200.0), (1, "here", 400.0), (2, "there", 200.0)]
    told = [{"rank": rank, "host": host, "tokens": tokens, "seconds": phases} for rank, host, tokens in ranks]
    lines += [{"kind": "ranks", "step": 2, "ranks": told}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "telemetry.json").write_text(json.dumps([{"host": "here", "device": device, "missing": {}}]))
    (found,) = find_sets([tmp_path])
    assert found.started.tolist() == [START, START + 1]
    assert found.energy_tokens == pytest.approx(1600 * share)


def test_what_held_the_clock_back() -> None:
    found = made_up(throttle_reasons=[0x1, 0x4, 0x4, 0x24, 0x2, 0x40])
    assert throttled_by(found) == "the power limit 60%, temperature (software) 20%", "the sixth is after the steps"


def test_durations_that_follow_the_clock() -> None:
    clocks = [1980.0, 1500, 1980, 1500, 1980]
    summary = summarize(made_up(seconds=[1.0, 1.0, 1.0, 1.0], clock_mhz=clocks, temperature_c=[50.0] * 5))
    assert summary.with_clock is None, "they are all alike"
    summary = summarize(made_up(seconds=[1.0, 1.4, 1.0, 1.4], clock_mhz=[1980, 1980, 1400, 1980, 1400, 1400]))
    assert summary.with_clock is not None
    assert summary.with_clock < 0
    assert summary.temperature_c is None


def test_the_slow_gpu_is_named() -> None:
    def repeats(uuid: str, host: str, seconds: float) -> list[ProfileSet]:
        return [made_up(uuid, host=host, repeat=n, seconds=[seconds + 0.01 * n] * 5) for n in (1, 2)]

    sets = [one for n in range(7) for one in repeats(f"GPU-{n}", "node1", 1 + 0.01 * n)]
    calm = compare(sets)
    assert calm.verdict.startswith("no outlier among 7 devices; the slowest is GPU-6 on host node1, 1.0")
    assert not any(device.is_outlier for device in calm.devices)
    assert calm.spread == pytest.approx(0.06 / calm.median_s)
    slow = compare(sets + repeats("GPU-slow", "node2", 1.6))
    assert [device.uuid for device in slow.devices if device.is_outlier] == ["GPU-slow"]
    assert slow.devices[0].uuid == "GPU-slow"
    assert slow.verdict == f"outliers: GPU-slow on host node2 takes {slow.devices[0].over_median:.3f} times the median"
    assert list(slow.hosts) == ["node2", "node1"]
    assert slow.hosts["node2"] == slow.devices[0].over_median
    assert slow.devices[0].between_repeats == pytest.approx(0.01 / slow.devices[0].median_s)
    once = compare([*sets, made_up("GPU-3", repeat=3, seconds=[1.7] * 5)])
    assert not any(device.is_outlier for device in once.devices), "its median hides one repeat of three"
    (said,) = once.slow_repeats
    assert said == "repeat 3 of GPU-3 on host node1 takes 1.619 times the median of that device"
    assert once.verdict.endswith(said)
    alone = compare(repeats("GPU-1", "node1", 1.0))
    assert alone.verdict == "one device, nothing to compare it with; 1.0% between its repeats"


def test_slow_devices_that_are_hot_correlate_with_temperature() -> None:
    sets = [
        made_up(f"GPU-{n}", seconds=[1 + 0.1 * n] * 4, temperature_c=[50.0 + n] * 5, clock_mhz=[1980.0 - 50 * n] * 5)
        for n in range(4)
    ]
    found = compare(sets)
    assert found.correlations["temperature"] == pytest.approx(1)
    assert found.correlations["clock"] == pytest.approx(-1)
    assert found.correlations["power"] is None


def test_sets_are_read_as_they_were_written(tmp_path: Path) -> None:
    original = made_up("GPU-7", host="node3", energy_j=[100, 200, np.nan, 400, 900])
    folder = write_set(tmp_path / "node3-cuda0" / "repeat-1", original)
    write_set(tmp_path / ".node3-cuda0.partial-77" / "repeat-1", original)
    (found,) = find_sets([tmp_path])
    assert (found.uuid, found.host, found.device) == ("GPU-7", "node3", "cuda0 H200")
    assert found.seconds.tolist() == original.seconds.tolist()
    assert joules(found) == pytest.approx(joules(original))
    assert found.missing == {"energy_j": "not supported"}
    with open(folder / "telemetry.csv", "a") as file:
        file.write("180000000")  # torn
    assert len(read_set(folder).telemetry["time"]) == len(original.telemetry["time"])


def test_damaged_sets_end_in_a_sentence(tmp_path: Path) -> None:
    with helpers.refused("missing-folder", tmp_path / "nowhere"):
        find_sets([tmp_path / "nowhere"])
    with helpers.refused("not-a-profile", tmp_path):
        find_sets([tmp_path])
    folder = write_set(tmp_path / "a", made_up())
    (folder / "device.json").write_text("{")
    with helpers.refused("damaged-profile", folder):
        find_sets([folder])
    (folder / "device.json").write_text("{}")
    with helpers.refused("damaged-profile", folder):
        find_sets([folder])
    folder = write_set(tmp_path / "c", made_up(), ceilings={"operations_per_s": 1.0, "bytes_per_s": None})
    with helpers.refused("damaged-profile", folder):
        find_sets([folder])
    for number, ceilings in enumerate([(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)]):
        measured = dict(zip(("operations_per_s", "bytes_per_s"), ceilings, strict=True)) | {"product": "8 x 8 x 8"}
        folder = write_set(tmp_path / f"c{number}", made_up(), ceilings=measured)
        with helpers.refused("damaged-profile", folder):
            find_sets([folder])
    facts = json.loads((write_set(tmp_path / "d", made_up()) / "device.json").read_text())
    (tmp_path / "d" / "device.json").write_text(json.dumps(facts | {"environment": {"host": "node", "ranks": 0}}))
    with helpers.refused("damaged-profile", tmp_path / "d"):
        find_sets([tmp_path / "d"])
    other = write_set(tmp_path / "b", made_up())
    (other / "iterations.csv").unlink()
    with helpers.refused("missing-file", "iterations.csv", other):
        find_sets([other])
    (other / "iterations.csv").write_text(",".join(ITERATION_COLUMNS) + "\n")
    with helpers.refused("damaged-profile", other):
        find_sets([other])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("roofline.csv", "part,gflop\nGELU,none\n"),
        ("kernels.csv", "name\nx"),
        ("kernels.csv", "name,median_us,share\nx,inf,0"),
    ],
)
def test_damaged_tables_end_in_a_sentence(tmp_path: Path, name: str, content: str) -> None:
    folder = write_set(tmp_path / "a", made_up(), ceilings={"operations_per_s": 1, "bytes_per_s": 1, "product": ""})
    (folder / name).write_text(content)
    with helpers.refused("damaged-file", name):
        profile_report([folder], out=tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_marks_beyond_the_whiskers_are_picked_where_there_are_many() -> None:
    calm = [0.1, 0.101, 0.102, 0.103] * 500
    few = plot_durations([made_up(seconds=[*calm, 0.2, 0.3])])
    many = plot_durations([made_up(seconds=calm + [0.2 + n / 1e4 for n in range(500)])])
    assert "evenly picked" in many.note
    assert "evenly picked" not in few.note
    assert few.svg.count("<use") < many.svg.count("<use") < 300


def test_a_set_counts_once_and_the_page_is_a_page(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "sets" / "a", made_up())
    with helpers.refused("repeated-set"):
        profile_report([folder.parent, folder])
    with helpers.refused("out-not-html", tmp_path / "found.json"):
        profile_report([folder], out=tmp_path / "found.json")
    (folder / "telemetry.json").write_text("[]")
    assert find_sets([folder])[0].missing == {"telemetry": "telemetry.json is not there, or damaged"}


def test_a_set_without_telemetry_is_reported_all_the_same(tmp_path: Path) -> None:
    """The sampler may have died, the disk been full: what is left is shown, and what is missing is said."""
    one, two = (write_set(tmp_path / f"n{n}", made_up(f"GPU-{n}", energy_j=[0, 100, 200, 300, 400])) for n in (1, 2))
    (two / "telemetry.csv").write_text("")
    (two / "telemetry.json").write_text(json.dumps([{"missing": {"sampler": "it died: <b>boom</b>"}}]))
    path, found = profile_report([one, two], out=tmp_path / "page.html")
    page = path.read_text()
    assert "sampler: it died: &lt;b&gt;boom&lt;/b&gt; (1 of 2 sets)" in page
    assert found.sets[1].joules_per_million_tokens is None
    assert found.joules_per_million_tokens == pytest.approx(1e5)
    assert json.loads((tmp_path / "page.json").read_text())["devices"][0]["median_s"] == 1.0
    assert len((tmp_path / "page.csv").read_text().splitlines()) == 3
    with helpers.refused("out-is-folder", tmp_path):
        profile_report([one], out=tmp_path)


@pytest.mark.parametrize("name", ["page.html", "page.json", "page.csv"])
def test_a_page_replaces_only_pages(tmp_path: Path, name: str) -> None:
    """Such as device.json of the set itself, if --out is device.html."""
    folder = write_set(tmp_path / "a", made_up())
    (tmp_path / name).write_text("somebody's")
    with helpers.refused("file-exists", tmp_path / name):
        profile_report([folder], out=tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [name]
    assert (tmp_path / name).read_text() == "somebody's"
    (tmp_path / name).unlink()
    first, _ = profile_report([folder], out=tmp_path / "page.html")
    first.write_text(first.read_text().replace("<footer>", "<footer>old "))
    assert "<footer>old" not in profile_report([folder], out=first)[0].read_text(), "its own is replaced"
