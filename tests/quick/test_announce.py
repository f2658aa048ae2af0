"""What a run says about its length, and how its evaluations read."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bertrain.base.console import evaluation_text
from bertrain.config.resolve import resolve
from bertrain.planning.devices import Network
from bertrain.planning.plan import deal_steps, time_text
from bertrain.planning.prediction import BinTime, Prediction, cpu_like, predict_on_cpu
from bertrain.planning.speed import Ceilings
from bertrain.planning.step_time import Cluster, Design, Load, optimizer_seconds
from bertrain.ranks import parallel
from bertrain.run.spikes import MIN_STEPS, WINDOW, DivergenceWatch
from bertrain.training.announce import predict_here, remarks
from bertrain.training.evaluate import reporting
from tests import helpers

NO_LINKS = Network("none", 1.0, 0.0, 1.0, 0.0)


def test_odd_lengths_are_remarked_on() -> None:
    settings = helpers.tiny_settings(train__max_steps=1000)
    assert remarks(settings, 0.1) == []
    (many,) = remarks(settings, 0.5)
    assert "500 times" in many
    assert "6.0 times" in remarks(settings, 6.0)[0]
    assert remarks(helpers.tiny_settings(train__budget="1h"), 0.5) == [], "the length is not known yet"


@pytest.mark.filterwarnings("error")  # nor says anything of it
def test_only_gpus_of_the_table_have_a_prediction_and_no_run_fails_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = resolve("mlperf-nvidia-1x8x48-packed", [("train.device", "cuda")])
    lengths = np.full(4096, 512, dtype=np.int32)
    monkeypatch.setattr(parallel, "choose_device", lambda wish: (torch.device(wish), ""))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def found(name: str, **changes: int) -> Prediction | None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        return predict_here(settings, lengths, **{"world": 8, "per_node": 8} | changes)

    here = found("NVIDIA H200")
    assert here is not None
    assert "for 8 h200:" in here.text()
    assert found("NVIDIA T400") is None
    assert found("NVIDIA H200", per_node=16) is None, "two ranks share a GPU"
    on_cpu = resolve("mlperf-nvidia-1x8x48-packed", [("train.device", "cpu")])
    assert predict_here(on_cpu, lengths, 8, 8) is None, "a CPU must be measured"
    assert predict_here(settings, lengths[:0], 8, 8) is None, "no lengths: an error of the planner, not of the run"


def test_a_cpu_is_predicted_from_one_bin() -> None:
    """Bins like the measured one take as long as it; the exchange as it was measured; the optimizer its bytes."""
    given = [("model.vocab_size", "1000"), ("data.max_seq_length", "64"), ("data.max_predictions", "10"),
             ("batch.token_budget", "512"), ("batch.sequences", "32"), ("train.precision", "fp32"),
             ("train.max_steps", "100")]  # fmt: skip
    settings = resolve("bert-tiny", given)
    lengths, one_bin = np.full(4096, 64, dtype=np.int32), deal_steps(settings, np.full(4096, 64), 4)[0][0]
    load = Load(*(of_ranks[:1] for of_ranks in one_bin.__dict__.values()))
    assert (load.bins[0], load.tokens[0]) == (1, 512)
    rates = Ceilings(1e11, 1e10, "")
    measured = BinTime(settings, load, "plain", rates, 0.5, 0.25)
    update = optimizer_seconds(settings, Cluster(cpu_like("fp32", rates), NO_LINKS, 1), Design())
    assert 0 < update < 0.1
    for ranks, bins in ((1, 4), (2, 2), (4, 1)):
        found = predict_on_cpu(settings, lengths, ranks, measured)
        assert found is not None
        assert found.step_s == pytest.approx(0.5 * bins + 0.25 + update, rel=0.03)  # ranks vary by 1 %
        assert found.text().endswith(f"{time_text(100 * found.step_s)} for 100 steps")
    alone = predict_on_cpu(settings, lengths, 4, replace(measured, exchange_s=None))
    assert alone is not None
    assert "4 ranks on this CPU, without their exchange" in alone.text()
    assert alone.step_s < 0.65
    deeper = replace(settings, model=replace(settings.model, num_layers=12))
    small = predict_on_cpu(deeper, lengths, 4, measured)
    assert small is not None
    assert 1.5 < small.step_s < 6 * 0.75, "measured with two layers, predicted for twelve; the heads stay"
    tuned = replace(settings, task=replace(settings.task, name="glue/rte"))
    assert predict_on_cpu(tuned, lengths, 1, measured) is None


def test_an_evaluation_fits_into_100_columns() -> None:
    names = ("loss", "mlm_loss", "mlm_accuracy", "hidden_accuracy", "nsp_accuracy", "constant_accuracy")
    lines = f"evaluation at step 1000000: {evaluation_text(dict.fromkeys(names, 0.999))}".splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 100


def test_a_loss_that_stays_above_its_start_is_named_once() -> None:
    watch = DivergenceWatch()
    losses = [10.0] * MIN_STEPS + [5.0] * 20 + [14.0] * (WINDOW - 1) + [9.0] + [math.inf] + [14.0] * (3 * WINDOW)
    found = [index for index, loss in enumerate(losses) if watch.has_diverged(loss)]
    assert found == [MIN_STEPS + 20 + 2 * WINDOW - 1]


def test_progress_of_an_evaluation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Batch:
        num_sequences = 25

    times = iter([0.0, 4.0, 11.0, 12.0, 22.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    batches = [Batch() for _ in range(4)]
    with reporting(lambda batch: batch, 100) as predict:  # type: ignore[arg-type, return-value]
        assert [predict(batch) for batch in batches] == batches  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines() == [
        "50 of 100 examples  11 s left",
        "100 of 100 examples  0 s left",
    ]


@pytest.mark.parametrize("seconds", [0.1, 1.0])
def test_the_bar_of_an_evaluation_is_erased_before_the_result(
    seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Batch:
        num_sequences = 50

    times = iter([0.0, seconds])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with reporting(lambda batch: batch, 100) as predict:  # type: ignore[arg-type, return-value]
        predict(Batch())  # type: ignore[arg-type]
    written = capsys.readouterr().err
    assert ("50 of 100 examples" in written) == (seconds > 0.5)
    assert written.endswith("\r\x1b[K") if seconds > 0.5 else not written
