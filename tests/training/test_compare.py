"""Runs side by side: ratios and differences by hand, and metrics of any name."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from bertrain.base import formatting
from bertrain.config.settings import Settings
from bertrain.planning.devices import find_gpu
from bertrain.planning.plan import AnyInts
from bertrain.planning.prediction import BinTime, Prediction, predict_run
from bertrain.reports import compare
from bertrain.reports.history import History, read
from bertrain.reports.report import report
from bertrain.training import announce
from bertrain.training.start import pretrain
from tests import helpers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    pretrain(helpers.tiny_settings(train__max_steps=1), helpers.make_data(folder), folder / "trained")
    return folder


def history(folder: Path, name: str, step_s: float, records: list[dict[str, Any]], steps: int = 10) -> History:
    """A run whose steps of 100 tokens and 4 examples take `step_s`, with these records beside them."""
    run = folder / name
    if not run.exists():
        shutil.copytree(folder / "trained", run)
    lines: list[dict[str, Any]] = [
        {"kind": "step", "step": number, "samples": 4 * number, "tokens": 100, "loss": 2.0, "gradient_norm": 1.0}
        | {"applied": True, "learning_rate": 0.1, "idle_share": 0.0, "padding_share": 0.25}
        | {"seconds": {"data": 0.0, "forward_backward": step_s, "reduction": 0.0, "optimizer": 0.0}}
        for number in range(1, steps + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *records]))
    return read(run, name)


def evaluated(step: int, **metrics: float) -> dict[str, Any]:
    return {"kind": "evaluation", "step": step, "samples": 4 * step, "examples": 20.0} | metrics


def test_the_first_run_is_the_measure_of_the_others(folder: Path) -> None:
    first = history(folder, "first", 0.5, [evaluated(5, f1=0.5, loss=1.5), evaluated(10, f1=0.8, loss=1.0)])
    second = history(folder, "second", 0.2, [evaluated(5, f1=0.85, loss=1.2), evaluated(10, f1=0.9, loss=1.25)])
    third = history(folder, "third", 1.0, [evaluated(10, f1=0.7)])
    rows = {row[0]: row[1:] for row in compare.against_first([first, second, third])}
    assert rows["Throughput, times"] == ["1.00 ×", "2.50 ×", "0.50 ×"]
    assert rows["Median step, times as fast"] == ["1.00 ×", "2.50 ×", "0.50 ×"]
    assert rows["Time in steps to f1 of 0.8000"] == ["5 s", "1 s", "not reached"]
    assert rows["The same, times as fast"] == ["1.00 ×", "5.00 ×", "–"]
    assert rows["F1, best evaluation"] == ["0.8000", "0.9000 (+0.1000)", "0.7000 (-0.1000)"]
    assert rows["Loss, best evaluation"] == ["1.0000", "1.2000 (+0.2000)", "–"]
    assert rows["Loss, last steps"] == ["2.0000", "2.0000 (+0.0000)", "2.0000 (+0.0000)"]
    page = report([folder / "first", folder / "second"], out=folder / "page.html").read_text()
    assert "Against first" in page
    assert "<td>2.50 &#215;</td>" in page


def test_metrics_of_any_name(folder: Path) -> None:
    """As of a fine-tuned model: the report neither knows nor needs to know what they are called."""
    results = [evaluated(5, exact_match=70.5, f1=81.25, latency_ms_p50=14.5), evaluated(10, exact_match=69.0)]
    tuned = history(folder, "tuned", 0.5, results)
    assert tuned.summary.headline == "exact_match"
    assert tuned.summary.best is not None
    assert tuned.summary.best.step == 5
    assert ("Best evaluation", "70.5000", "exact match, at step 5") in compare.known_facts(tuned)
    page = report([folder / "tuned"]).read_text()
    assert 'aria-label="Exact match by step: from 70.5 to 69"' in page
    assert "<th scope=col>exact match</th>" in page
    assert "<mark>best</mark> 70.5000" in page
    assert "<th scope=col>latency ms p50</th>" in page
    assert "<td>14.5</td>" in page
    assert "Latency" not in page, "it is no metric to be plotted"
    only_loss = history(folder, "loss", 0.5, [evaluated(5, loss=3.0), evaluated(7, loss=2.0), evaluated(10, loss=2.5)])
    assert only_loss.summary.headline == "loss"
    assert only_loss.summary.best is not None
    assert only_loss.summary.best.step == 7


def test_padding_and_energy_are_figures_where_they_are_known(folder: Path) -> None:
    alone = history(folder, "alone", 0.5, [])
    labels = [label for label, _, _ in compare.known_facts(alone)]
    assert ("Padding", "25.00%") in [fact[:2] for fact in compare.known_facts(alone)]
    assert "Energy" not in labels
    assert "Idle ranks" not in labels
    (folder / "alone" / "telemetry.csv").write_text("time,energy_j\n1,1000\n2,1500\n")
    (folder / "alone" / "telemetry-1.csv").write_text("time,energy_j\n1,0\n2,1500\n")
    measured = history(folder, "alone", 0.5, [])
    assert ("Energy", "2 kJ", "2 MJ per million tokens") in compare.known_facts(measured)


def test_a_prediction_stands_beside_the_measured_step(folder: Path) -> None:
    alone = history(folder, "alone", 0.5, [])
    path, measured = folder / "alone" / "environment.json", 1e3 * alone.summary.median_step_s
    (start,) = json.loads(path.read_text())

    def predicted(*times: float | None) -> tuple[str, str]:
        path.write_text(json.dumps([start | {"predicted_step_ms": time} for time in times]))
        shown = compare.known_facts(read(folder / "alone", "alone"))
        return next((value, note) for label, value, note in shown if label == "Predicted step")

    value, note = predicted(0.8 * measured)
    assert value == compare.milliseconds(0.8 * measured / 1e3)
    assert note.endswith("measured +25.0%")
    assert "measured +25.0%" in report([folder / "alone"]).read_text()
    assert predicted(0.7 * measured, 0.8 * measured, None, 0.9 * measured) == (value, note), "measured at each start"
    assert predicted(measured, 2 * measured) == (compare.UNKNOWN, "none: it differed between the starts of the run")
    assert predicted(None)[0] == compare.UNKNOWN
    assert "none: `bertrain plan` did not know" in report([folder / "alone"]).read_text()


def test_a_run_on_a_cpu_is_predicted_from_its_warm_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = helpers.tiny_settings(train__max_steps=2)
    pretrain(settings, folder / "data", folder / "on-cpu")
    (start,) = json.loads((folder / "on-cpu" / "environment.json").read_text())
    printed = f"for 1 rank on this CPU: {start['predicted_step_ms']:.1f} ms a step"
    assert printed in capsys.readouterr().out
    facts = {label: note for label, _, note in compare.known_facts(read(folder / "on-cpu", "on-cpu"))}
    assert facts["Predicted step"].startswith("by `bertrain plan` at the start; measured ")


def test_a_run_on_a_gpu_records_its_prediction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the look at the device, on a CPU: predicted for an H200, recorded, and shown beside the measured step."""
    h200, found = find_gpu("h200"), list[Prediction]()

    def predict(settings: Settings, lengths: AnyInts, world: int, per_node: int, _: BinTime) -> Prediction | None:
        predicted = predict_run(settings, lengths, h200, world, per_node)
        found.extend([predicted] if predicted else [])
        return predicted

    monkeypatch.setattr(announce, "predict_here", predict)
    pretrain(helpers.tiny_settings(train__max_steps=2), folder / "data", folder / "predicted")
    (start,) = json.loads((folder / "predicted" / "environment.json").read_text())
    assert start["predicted_step_ms"] == pytest.approx(1e3 * found[0].step_s, abs=1e-3)
    facts = {label: note for label, _, note in compare.known_facts(read(folder / "predicted", "predicted"))}
    assert facts["Predicted step"].startswith("by `bertrain plan` at the start; measured ")
    assert "Predicted step" in report([folder / "predicted"]).read_text()


def test_environments_are_part_of_what_differs(folder: Path) -> None:
    one, other = (history(folder, name, 0.5, []) for name in ("here", "there"))
    starts = json.loads((folder / "there" / "environment.json").read_text())
    (folder / "there" / "environment.json").write_text(json.dumps([starts[0] | {"device": "another"}]))
    other = read(folder / "there", "there")
    every = [compare.settings_of(run) | compare.environment_of(run) for run in (one, other)]
    assert compare.differing(every) == ["environment.device"]


@pytest.mark.parametrize(
    ("metrics", "headline"),
    [
        (["loss", "mlm_loss", "mlm_accuracy", "nsp_accuracy"], "mlm_accuracy"),
        (["loss", "constant_accuracy", "nsp_accuracy"], "nsp_accuracy"),
        (["loss", "matthews_correlation"], "matthews_correlation"),
        (["eval_loss"], "eval_loss"),
        ([], None),
    ],
)
def test_what_a_run_is_judged_by(metrics: list[str], headline: str | None) -> None:
    assert formatting.headline_of(metrics) == headline


def test_quantities_have_units() -> None:
    assert [formatting.amount(value, "J") for value in (0.0, 356.2, 9.566e6, 2.5e12)] == [
        "0 J",
        "356 J",
        "9.57 MJ",
        "2.5 TJ",
    ]
    assert compare.milliseconds(math.nan) == "–"
