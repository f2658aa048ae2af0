"""Fine-tuning on a GPU: every kind of task is trained, evaluated and predicted there as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from bertrain.training.embed import embed
from bertrain.training.finetune import finetune
from bertrain.training.predict import evaluate_task, predict
from bertrain.training.task_results import metrics_of
from tests.miniature_tasks import NO_DROPOUT, Miniature, make_miniature, settings_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

DEVICES: tuple[Literal["cpu"], Literal["cuda"]] = ("cpu", "cuda")
EXACT: dict[str, Any] = {name.replace(".", "__"): value for name, value in NO_DROPOUT.items()} | {
    "train__max_steps": 30
}
TASKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "classify": ("table", "accuracy", {}),
    "regress": ("numbers", "pearson", {"task__target": "number"}),
    "squad/v1.1": ("questions", "f1", {}),
    "multilabel": ("label_sets", "f1_macro", {"task__target": "classes"}),
    "tag": ("names", "f1", {}),
}


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Miniature:
    return make_miniature(tmp_path_factory.mktemp("mini"))


@pytest.mark.parametrize("name", TASKS)
def test_a_task_ends_as_on_the_cpu(mini: Miniature, tmp_path: Path, name: str) -> None:
    folder, metric, given = TASKS[name]
    data, task = getattr(mini, folder), "classify" if name in ("regress", "multilabel") else name
    for device in DEVICES:
        settings = settings_for(task, train__device=device, **EXACT, **given)
        finetune(settings, data, tmp_path / device, init=str(mini.base))
    trained = {device: metrics_of(tmp_path / device)[metric] for device in DEVICES}
    assert trained["cuda"] == pytest.approx(trained["cpu"], rel=0.05), trained
    evaluated = {device: evaluate_task(tmp_path / "cuda", device=device) for device in DEVICES}
    assert evaluated["cuda"][metric] == pytest.approx(evaluated["cpu"][metric], rel=1e-4)
    for device in DEVICES:
        predict(tmp_path / "cuda", next(data.glob("dev*")), tmp_path / f"said-{device}", device=device)
        assert any((tmp_path / f"said-{device}").iterdir())


def test_vectors_are_those_of_the_cpu(mini: Miniature) -> None:
    texts = ["bato kese livi", "", "rago pe " * 12]
    on_cpu, on_gpu = (embed(mini.base, texts, precision="fp32", device=device) for device in DEVICES)
    assert isinstance(on_cpu, np.ndarray)
    assert isinstance(on_gpu, np.ndarray)
    np.testing.assert_allclose(on_gpu, on_cpu, atol=1e-5)
