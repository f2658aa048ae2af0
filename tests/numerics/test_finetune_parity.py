"""Heads to fine-tune against Transformers' models: what they say, the loss, and the gradient of every parameter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bertrain.data.loader import Loader
from bertrain.data.shards import Shards
from bertrain.model.bert import Bert
from bertrain.model.heads import answer_sums, by_sequence
from bertrain.settings import ModelSettings
from bertrain.weights.names import huggingface_names
from tests import helpers, whole_model

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-5
CLASSES = {
    "classify": "BertForSequenceClassification",
    "regress": "BertForSequenceClassification",
    "span": "BertForQuestionAnswering",
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
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            place = huggingface_names(settings.num_layers, head=settings.head)[name]
            parameter.copy_(place.within(ours[place.ours]))
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
    assert answers is not None
    sums = answer_sums(ours, batch, head)
    if head == "span":
        # Transformers' own loss runs over the padding too; here its logits are cut off where a sequence ends.
        logits = torch.stack([theirs.start_logits, theirs.end_logits], -1).masked_fill(~inside[:, :, None], -1e30)
        here = by_sequence(ours, batch)[real][:, : max(lengths)]
        assert helpers.relative_error(here[inside], logits[inside]) <= TOLERANCE
        their_loss = sum(
            torch.nn.functional.cross_entropy(logits[:, :, end], answers[real][:, end], reduction="sum") / 2
            for end in (0, 1)
        )
    else:
        assert helpers.relative_error(ours[real], theirs.logits) <= TOLERANCE
        wanted = answers[real][:, 0]
        their_loss = (
            torch.nn.functional.cross_entropy(theirs.logits, wanted, reduction="sum")
            if head == "classify"
            else torch.nn.functional.mse_loss(theirs.logits[:, 0], wanted, reduction="sum")
        )
    assert helpers.relative_error(sums.nsp_loss, their_loss) <= TOLERANCE  # type: ignore[arg-type]

    sums.nsp_loss.backward()
    their_loss.backward()  # type: ignore[union-attr]
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    total = sum(float(gradient.norm() ** 2) for gradient in gradients.values() if gradient is not None) ** 0.5
    names = huggingface_names(settings.num_layers, head=head)
    compared = set()
    for name, parameter in twin.named_parameters():
        place = names[name]
        gradient = place.within(gradients[place.ours])  # type: ignore[arg-type]
        if name.endswith("key.bias") or place.ours in whole_model.vanishing(settings):  # zero, up to rounding
            assert float((gradient - parameter.grad).abs().max()) <= 1e-6 * total
        else:
            assert helpers.relative_error(gradient, parameter.grad) <= TOLERANCE, name
        compared.add(place.ours)
    assert compared == set(gradients)
