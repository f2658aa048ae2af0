"""Files that an older version wrote can still be used: runs, data and weights of commit 8764bd3."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from bertrain.base.errors import UserError
from bertrain.reports.report import report
from bertrain.training.evaluate import evaluate
from bertrain.training.fill_mask import fill_mask
from bertrain.training.predict import evaluate_task
from bertrain.training.start import resume
from bertrain.weights.export import export
from bertrain.weights.source import open_source
from tests import helpers
from tests.launched import records

WRITTEN = Path(__file__).parents[1] / "data" / "written-by-8764bd3"
ON_CPU = [("train.device", "cpu"), ("log.trackers", "none")]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A copy of the files, whose runs find their data and their initial weights in it."""
    folder = tmp_path / "written"
    shutil.copytree(WRITTEN, folder)
    for run in ("pretrained", "finetuned"):
        config = folder / run / "config.json"
        config.write_text(config.read_text().replace("/nowhere/", f"{folder}/"))
    return folder


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(run, "step")}


def metrics(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of each evaluation, without those of speed."""
    return {
        record["step"]: {
            name: value
            for name, value in record.items()
            if isinstance(value, float) and not name.startswith(("examples_per_s", "latency"))
        }
        for record in records(run, "evaluation")
    }


def test_a_pretrained_run_is_evaluated_and_reported(written: Path, tmp_path: Path) -> None:
    run = written / "pretrained"
    found = evaluate(run, written / "held-out", device="cpu")
    assert found.pop("step") == 8
    assert found == pytest.approx(metrics(run)[8], abs=1e-4)
    assert "pretrained" in report([run], out=tmp_path / "report.html").read_text()


def test_a_pretrained_run_resumes_and_is_exported(written: Path, tmp_path: Path) -> None:
    run, expected = written / "pretrained", losses(WRITTEN / "pretrained")
    assert list(expected) == list(range(1, 13))
    assert resume(run, ON_CPU).step == 12
    assert losses(run) == pytest.approx(expected, abs=1e-4)
    assert list(metrics(run)) == list(metrics(WRITTEN / "pretrained"))
    for step, known in metrics(WRITTEN / "pretrained").items():
        assert metrics(run)[step] == pytest.approx(known, abs=1e-3)
    export(run, tmp_path / "from-run")
    export(written / "exported", tmp_path / "from-weights")
    theirs = helpers.load_weights(written / "exported")
    ours, again = (helpers.load_weights(tmp_path / name) for name in ("from-run", "from-weights"))
    assert list(theirs) == list(ours) == list(again)
    assert all(torch.equal(theirs[name], again[name]) for name in theirs)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_a_finetuned_run_is_evaluated_and_resumes(written: Path) -> None:
    run, expected = written / "finetuned", losses(WRITTEN / "finetuned")
    found = evaluate_task(run, device="cpu")
    assert found["step"] == 3
    assert found["accuracy"] == metrics(run)[3]["accuracy"]
    assert resume(run, ON_CPU).step == 6
    assert losses(run) == pytest.approx(expected, abs=1e-4)
    assert list(metrics(run)) == list(metrics(WRITTEN / "finetuned"))
    now = metrics(run)[6]
    assert now.pop("baseline_accuracy") > 0, "which runs did not have then"
    assert now == pytest.approx(metrics(WRITTEN / "finetuned")[6])


@pytest.mark.parametrize("bit", range(8))
def test_a_vocabulary_with_a_changed_bit_is_refused_wherever_a_run_is_used(
    written: Path, tmp_path: Path, bit: int
) -> None:
    for run in ("pretrained", "finetuned"):
        path = written / run / "vocab.txt"
        content = bytearray(path.read_bytes())
        place = content.index(b"\n", 1000) + 1  # the first letter of a word
        content[place] ^= 1 << bit
        path.write_bytes(content)
    run, code = written / "pretrained", ("changed-vocabulary", "bad-vocabulary")  # the latter: not UTF-8, or twice
    for use in (
        lambda: export(run, tmp_path / "exported"),
        lambda: evaluate(run, written / "held-out", device="cpu"),
        lambda: fill_mask(run, "a [MASK]"),
        lambda: open_source(str(run)),
        lambda: evaluate_task(written / "finetuned", written / "table"),
    ):
        with pytest.raises(UserError) as caught:
            use()
        assert caught.value.code in code
        assert str(run.parent) in str(caught.value)
    assert not (tmp_path / "exported").exists()
