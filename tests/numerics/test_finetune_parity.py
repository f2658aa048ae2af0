"""Fine-tuning against Transformers' models: heads, losses, the gradient of every parameter, and a whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertrain.config.settings import ModelSettings
from bertrain.data.feed.batching import step_by_sequences
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.block import Block
from bertrain.data.formats.shards import Shards
from bertrain.model.batch import IGNORED
from bertrain.model.bert import Bert
from bertrain.model.heads import answer_sums, by_sequence
from bertrain.run.folder import Run
from bertrain.tasks.registry import open_task
from bertrain.training.finetune import finetune
from bertrain.weights.tensors import huggingface_names
from tests import helpers, miniature_tasks, whole_model

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-5
CLASSES = {
    "classify": "BertForSequenceClassification",
    "regress": "BertForSequenceClassification",
    "span": "BertForQuestionAnswering",
    "tag": "BertForTokenClassification",
}


def twin_of(model: Bert) -> Any:
    """Transformers' model of the same head, with the same weights."""
    settings = model.settings
    config = transformers.BertConfig(
        vocab_size=settings.padded_vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        intermediate_size=settings.intermediate_size,
        max_position_embeddings=settings.max_positions,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        num_labels={"regress": 1, "span": 2}.get(settings.head, settings.num_labels),
    )
    twin = getattr(transformers, CLASSES[settings.head])(config)
    ours, names = dict(model.named_parameters()), huggingface_names(settings)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            place = names[name]
            parameter.copy_(place.select(ours[place.parameter]))
    return twin.train()


def padded(values: torch.Tensor, starts: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    out = torch.zeros(len(lengths), max(lengths), dtype=values.dtype)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=True)):
        out[row, :length] = values[start : start + length]
    return out


@pytest.mark.parametrize("head", list(CLASSES))
def test_heads_equal_those_of_transformers(tmp_path: Path, head: str) -> None:
    torch.manual_seed(1)
    plain = helpers.tiny_settings(model__hidden_dropout=0, model__attention_dropout=0, batch__token_budget=512)
    settings: ModelSettings = replace(plain.model, head=head, num_labels=3, head_dropout=0.0)  # type: ignore[arg-type]
    batch = Loader(Shards.open(helpers.make_data(tmp_path)), plain).step(0, 0).bins[0]
    batch = whole_model.with_answers(batch, head, 3)
    model = helpers.build_model(settings).train()
    twin = twin_of(model)

    real = batch.nsp_labels >= 0
    starts = batch.cu_seqlens[:-1][real]
    lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1])[real].tolist()
    inside = torch.arange(max(lengths))[None, :] < torch.tensor(lengths)[:, None]
    theirs = twin(
        input_ids=padded(batch.input_ids, starts, lengths),
        token_type_ids=padded(batch.segment_ids, starts, lengths),
        attention_mask=inside.long(),
    )
    outputs = model(batch)
    ours, answers = outputs.answers, batch.answers
    assert ours is not None
    sums = answer_sums(ours, batch, head)
    if head == "tag":  # a label at the first token of each word, -100 elsewhere, as the Trainer has it
        labels = torch.full_like(batch.input_ids, IGNORED)
        labels[batch.mlm_positions[: batch.num_predictions]] = batch.mlm_labels[: batch.num_predictions]
        labels = padded(labels, starts, lengths).masked_fill(~inside, IGNORED)
        is_labeled = labels != IGNORED
        assert int(is_labeled.sum()) == batch.num_predictions > len(lengths)
        assert helpers.relative_error(ours[: batch.num_predictions], theirs.logits[is_labeled]) <= TOLERANCE
        their_loss = torch.nn.functional.cross_entropy(theirs.logits[is_labeled], labels[is_labeled], reduction="sum")
    elif head == "span":
        assert answers is not None
        # Transformers' own loss runs over the padding too; here its logits are cut off where a sequence ends.
        logits = torch.stack([theirs.start_logits, theirs.end_logits], -1).masked_fill(~inside[:, :, None], -1e30)
        here = by_sequence(ours, batch)[real][:, : max(lengths)]
        assert helpers.relative_error(here[inside], logits[inside]) <= TOLERANCE
        their_loss = sum(
            torch.nn.functional.cross_entropy(logits[:, :, end], answers[real][:, end], reduction="sum") / 2
            for end in (0, 1)
        )
    else:
        assert answers is not None
        assert helpers.relative_error(ours[real], theirs.logits) <= TOLERANCE
        wanted = answers[real][:, 0]
        their_loss = (
            torch.nn.functional.cross_entropy(theirs.logits, wanted, reduction="sum")
            if head == "classify"
            else torch.nn.functional.mse_loss(theirs.logits[:, 0], wanted, reduction="sum")
        )
    our_loss = sums.mlm_loss + sums.sequence_loss  # one of them is zero
    assert helpers.relative_error(our_loss, their_loss) <= TOLERANCE  # type: ignore[arg-type]

    our_loss.backward()
    their_loss.backward()  # type: ignore[union-attr]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    total = sum(float(gradient.norm() ** 2) for gradient in gradients.values() if gradient is not None) ** 0.5
    names = huggingface_names(settings)
    compared = set()
    for name, parameter in twin.named_parameters():
        place = names[name]
        gradient = place.select(gradients[place.parameter])  # type: ignore[arg-type]
        if name.endswith("key.bias") or place.parameter in whole_model.vanishing(settings):  # zero, up to rounding
            assert float((gradient - parameter.grad).abs().max()) <= 1e-6 * total
        else:
            assert helpers.relative_error(gradient, parameter.grad) <= TOLERANCE, name
        compared.add(place.parameter)
    assert compared == set(gradients)


def labels_of(block: Block, rows: np.ndarray[Any, Any]) -> torch.Tensor:
    """Labels as Transformers takes them: a class for each row, or for each token, -100 where no word begins."""
    if block.masks is None:
        assert block.answers is not None
        return torch.from_numpy(block.answers[rows, 0]).long()
    masks = block.masks.take(rows)
    labels = torch.full((len(rows), int(block.lengths[rows].max())), IGNORED)
    labels[np.repeat(np.arange(len(rows)), masks.counts), masks.positions] = torch.from_numpy(masks.labels).long()
    return labels


@pytest.mark.parametrize(("task", "limit"), [("classify", 1.5), ("tag", 0.95)])
def test_a_whole_run_equals_transformers_under_torchs_optimizer(tmp_path: Path, task: str, limit: float) -> None:
    """Order of rows, rates, clipping and weight decay included: 40 steps of several bins, over two passes."""
    mini, steps, warm_up = miniature_tasks.make_miniature(tmp_path), 40, 4
    data = mini.names if task == "tag" else mini.table
    settings = miniature_tasks.settings_for(
        task, batch__sequences=16, batch__token_budget=96, train__seed=3, optimizer__learning_rate=1e-3,
        optimizer__weight_decay=0.1, optimizer__clip_norm=limit, schedule__warmup_share=0,
        schedule__warmup_steps=warm_up, schedule__decay_start=warm_up, train__max_steps=steps,
        schedule__decay_steps=steps,
        **{name.replace(".", "__"): value for name, value in miniature_tasks.NO_DROPOUT.items()},
    )  # fmt: skip
    # The rate of the first step is 0, so that a run of one step holds what both begin with.
    for run, length in ((tmp_path / "one", 1), (tmp_path / "whole", steps)):
        finetune(replace(settings, train=replace(settings.train, max_steps=length)), data, run, init=str(mini.base))
    opened = Run.open(tmp_path / "whole")
    model = Bert(opened.settings.model)
    model.load_state_dict(helpers.final_weights(tmp_path / "one"))
    twin = twin_of(model)
    twin.config.problem_type = "single_label_classification"
    block = open_task(opened.settings, data, opened.vocabulary()).training().block

    matrices = [parameter for parameter in twin.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in twin.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=settings.optimizer.epsilon)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, warm_up, steps)
    starts, lengths = torch.from_numpy(block.offsets[:-1]), torch.from_numpy(block.lengths)
    tokens, their_losses, was_clipped = torch.from_numpy(block.tokens.astype("int64")), [], 0
    for step in range(steps):
        _, rows = step_by_sequences(16 * step, 16, len(block), seed=3)
        inside = torch.arange(int(lengths[rows].max()))[None, :] < lengths[rows][:, None]
        ids = padded(tokens, starts[rows], lengths[rows].tolist())
        loss = twin(input_ids=ids, attention_mask=inside.long(), labels=labels_of(block, rows)).loss
        optimizer.zero_grad()
        loss.backward()
        was_clipped += int(torch.nn.utils.clip_grad_norm_(twin.parameters(), limit) > limit)
        optimizer.step()
        schedule.step()
        their_losses.append(loss.item())
    assert 0 < was_clipped < steps, "some steps clipped, some not"
    ours = helpers.losses(tmp_path / "whole")
    assert ours == pytest.approx(their_losses, rel=TOLERANCE)
    assert ours[-1] < 0.9 * ours[0], "it learnt something"
    names, weights = huggingface_names(model.settings), helpers.final_weights(opened.folder)
    for name, parameter in twin.named_parameters():
        if not name.endswith("key.bias"):  # its gradient is zero, up to rounding, which Adam makes large
            assert helpers.relative_error(names[name].select(weights[names[name].parameter]), parameter) <= 1e-4, name
