"""Fine-tuning: layers that are computed again, have rates of their own, or are frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bertrain.data.feed.loader import Loader
from bertrain.model.bert import Bert
from bertrain.model.heads import answer_sums
from bertrain.model.initialization import initialize
from bertrain.ranks.parallel import Ranks
from bertrain.training.finetune import finetune
from bertrain.training.resolved_run import resolve_run
from bertrain.training.state import TrainState
from bertrain.weights.source import copy_weights, read_weights
from tests import helpers
from tests.miniature_tasks import Miniature, settings_for


@pytest.mark.parametrize("task", ["classify", "squad/v1.1"])
def test_what_is_computed_again_is_the_same(mini: Miniature, tmp_path: Path, task: str) -> None:
    found = []
    for what in ("none", "selective", "full"):
        settings = settings_for(task, train__max_steps=4, train__activation_checkpointing=what)
        data = mini.table if task == "classify" else mini.questions
        finetune(settings, data, tmp_path / what, init=str(mini.base))
        found.append(helpers.losses(tmp_path / what))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)


def test_layers_have_the_rates_they_are_given(mini: Miniature, tmp_path: Path) -> None:
    """Three steps of PyTorch's own AdamW, a group for each parameter."""
    asked = settings_for(
        train__max_steps=3, optimizer__layer_decay=0.5, optimizer__clip_norm=0, schedule__warmup_share=0,
        schedule__decay="constant", model__hidden_dropout=0, model__attention_dropout=0, model__head_dropout=0,
    )  # fmt: skip
    resolved = resolve_run(asked, mini.table, tmp_path / "run", init=str(mini.base))
    settings = resolved.settings
    finetune(asked, mini.table, tmp_path / "run", init=str(mini.base))

    model = Bert(settings.model)
    initialize(model, settings.train.seed)
    with torch.no_grad():
        copy_weights(dict(model.named_parameters()), read_weights(mini.base))
    rates = {"embeddings": 0.5**3, "layers.0": 0.5**2, "layers.1": 0.5, "answer": 1.0}
    groups: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        rate = next(rate for prefix, rate in rates.items() if name.startswith(prefix))
        decay = settings.optimizer.weight_decay if parameter.ndim > 1 else 0.0
        groups.append({"params": [parameter], "lr": settings.optimizer.learning_rate * rate, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=settings.optimizer.epsilon)
    loader = Loader(resolved.data, settings)
    for number in range(3):
        step = loader.step(number, 32 * number)
        optimizer.zero_grad()
        for batch in step.bins:
            outputs = model.train()(batch).answers
            assert outputs is not None
            (answer_sums(outputs, batch, "classify").sequence_loss / step.num_sequences).backward()
        optimizer.step()
    trained = helpers.final_weights(tmp_path / "run")
    for name, parameter in model.named_parameters():
        # The bias of a key has no gradient but rounding, which Adam makes as large as any other.
        tolerance = 1e-3 if name.endswith("qkv.bias") else 1e-5
        assert helpers.relative_error(trained[name], parameter) <= tolerance, name


def test_frozen_layers_have_no_say_in_clipping(mini: Miniature, tmp_path: Path) -> None:
    norms = {}
    for clipping in ("global", "local", "bucket"):
        settings = settings_for(
            train__max_steps=1, optimizer__frozen_layers=1, optimizer__clip_norm=1e-3, optimizer__clipping=clipping
        )
        settled = resolve_run(settings, mini.table, tmp_path / "x", init=str(mini.base)).settings
        state = TrainState.build(settled, Ranks(0, 1, torch.device("cpu")))
        state.arena.gradients.fill_(1e-9)
        for name, gradient in state.arena.named(state.arena.gradients).items():
            if name.startswith(("embeddings.", "layers.0.")):
                gradient.fill_(torch.nan)
        before = state.arena.gradients.clone()
        state.exchange.begin()
        state.exchange.finish()
        norms[clipping], _ = state.exchange.norm_and_factor()
        for name, gradient in state.arena.named(state.arena.gradients).items():
            is_frozen = name.startswith(("embeddings.", "layers.0."))
            assert torch.equal(
                gradient, torch.zeros_like(gradient) if is_frozen else before.new_full(gradient.shape, 1e-9)
            )
    assert norms["global"] == norms["local"] == norms["bucket"] > 0


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_layers_stay_as_they_are(mini: Miniature, tmp_path: Path, name: str) -> None:
    rule = {"optimizer__name": name, "optimizer__learning_rate": 1e-3, "optimizer__layer_decay": 0.9}
    settings = settings_for(train__max_steps=3, optimizer__frozen_layers=1, **rule)
    finetune(settings, mini.table, tmp_path / "run", init=str(mini.base))
    began, trained = read_weights(mini.base).tensors, helpers.final_weights(tmp_path / "run")
    for name, tensor in trained.items():
        if name in began:
            is_frozen = name.startswith(("embeddings.", "layers.0."))
            assert torch.equal(tensor, began[name]) == is_frozen, name
    assert not torch.equal(trained["answer.pool.weight"], began["next_sentence.pool.weight"])
