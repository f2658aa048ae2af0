"""Whole sets that others published: SQuAD, GLUE and MLPerf's results, by the counts that they give."""

from __future__ import annotations

import pytest

from bertrain.mlperf.check import check_results
from bertrain.tasks.glue import TASKS
from tests.helpers import SHARED_DATA
from tests.quick.test_mlperf_logs import LOGS, needs_logs
from tests.quick.test_squad import SQUAD, dev_of, open_task, right_outputs
from tests.quick.test_text_tasks import open_named


@pytest.mark.skipif(not SQUAD.is_dir(), reason="needs ../shared/data/squad")
def test_the_whole_development_set_has_as_many_windows_as_in_the_official_code() -> None:
    """MLPerf Inference, which cuts this file as Google's BERT does (384 tokens, stride 128), counts 10,833 samples."""
    split = dev_of(open_task(SQUAD / "dev-v1.1.json"))
    assert split.num_examples == 10_570
    assert len(split.block) == 10_833
    assert split.metrics(right_outputs(split))["f1"] > 99.5


@pytest.mark.skipif(not (SHARED_DATA / "glue").is_dir(), reason="needs ../shared/data/glue")
def test_row_counts_are_the_published_ones() -> None:
    checked = []
    for name, known in TASKS.items():
        if not (SHARED_DATA / "glue" / known.folder).is_dir():
            continue
        task = open_named(f"glue/{name}", SHARED_DATA / "glue")
        splits = {**task.held_out(), **task.to_predict()}
        if any((SHARED_DATA / "glue" / known.folder).glob("train.*")):
            splits["train"] = task.training()
        for split, found in splits.items():
            assert found.num_examples == known.rows[split], (name, split)
            checked.append((name, split))
        assert not any("published" in note for note in task.notes)
    assert len(checked) == 6 * 3 + 2 + 1  # six whole tasks, QNLI without train, MNLI's matched dev set


@needs_logs
@pytest.mark.parametrize("division", [None, "open"])
def test_published_results_pass(division: str | None) -> None:
    checked = check_results(LOGS / "nvidia-h200x8-v4.0", division=division)  # type: ignore[arg-type]
    assert checked.passes, checked.verdict
    assert [one.ruleset for one in checked.compliance] == ["4.0.0"] * 10, "the round that the logs were written for"
    assert checked.seeds_pass
    assert checked.scaled_minutes == pytest.approx(5.2116, abs=1e-4)
    if division is None:
        for point in checked.convergence.values():
            assert point.reference == pytest.approx(2_443_934, abs=1)
            assert point.samples == pytest.approx(2_492_563, abs=1)
            assert point.scaling == 1.0
