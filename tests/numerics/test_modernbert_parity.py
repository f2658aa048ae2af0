"""The same function as Transformers' ModernBERT: logits, losses and every gradient, in and out of its folders.

Transformers gets padded rectangles, we get ragged bins; its random weights come in through a folder that it wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bertrain.config.resolve import model_from_bert_config
from bertrain.model.batch import Batch
from bertrain.model.modern import Modern
from bertrain.training.plain_engine import sums_of
from bertrain.weights.huggingface import write_folder
from bertrain.weights.source import build_model, read_weights
from bertrain.weights.tensors import huggingface_names
from tests import helpers, whole_model
from tests.numerics.test_huggingface_parity import padded_rectangle

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-5
SHAPES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "usual": ({}, [128, 7, 64, 1, 100, 128]),
    "odd sizes": (
        {"hidden_size": 42, "num_attention_heads": 3, "intermediate_size": 51, "vocab_size": 79},
        [33, 90, 5],
    ),
    "narrow window": ({"local_attention": 6, "global_attn_every_n_layers": 2}, [61, 3, 128, 17]),
    "odd window": ({"local_attention": 9, "num_hidden_layers": 7}, [128, 40]),
    "other angles": ({"global_rope_theta": 5000.0, "local_rope_theta": 777.0}, [100, 128]),
    "all global": ({"global_attn_every_n_layers": 1}, [50, 70]),
    "512 tokens": ({"num_attention_heads": 2}, [512, 300, 511]),
    "4,096 tokens": ({"num_hidden_layers": 3}, [4096, 1000]),
}
HEADS = {
    "ModernBertForMaskedLM": {},
    "ModernBertForSequenceClassification": {"classifier_pooling": "cls"},
    "ModernBertForTokenClassification": {},
    "ModernBertForQuestionAnswering": {"num_labels": 2},
}


def their_model(kind: str, fields: dict[str, Any]) -> Any:
    """A model of Transformers whose every tensor is random, LayerNorm too, so that no term can hide."""
    config = transformers.ModernBertConfig(**({
        "vocab_size": 100, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 72,
        "max_position_embeddings": 8192, "num_labels": 3, "pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2,
        "sep_token_id": 3, "eos_token_id": 3, "attn_implementation": "eager",
    } | fields))  # fmt: skip
    torch.manual_seed(len(fields))
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name) + (0.3 if parameter.ndim == 1 else 0.1) * torch.randn(parameter.shape))
    return model.train()


def our_model(theirs: Any, folder: Path) -> Modern:
    theirs.save_pretrained(folder)
    model = build_model(read_weights(folder)).train()
    assert isinstance(model, Modern)
    return model


def bin_of(lengths: list[int], vocab_size: int) -> Batch:
    """Ragged sequences and padding after them, at most 8,192 tokens."""
    longest = max(lengths)
    tokens = min(8192, sum(lengths) + longest // 2)
    return whole_model.random_batch(lengths, tokens, len(lengths) + 3, sum(lengths), longest, vocab_size)


def assert_equal_gradients(model: Modern, theirs: Any) -> None:
    names = huggingface_names(model.settings)
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    compared = set()
    for name, parameter in theirs.named_parameters():
        gradient = ours[names[name].parameter]
        assert gradient is not None
        if model.settings.head == "span" and name == "classifier.bias":
            assert float((gradient - parameter.grad).abs().max()) <= 1e-6, "zero: it is added to all scores alike"
        else:
            assert helpers.relative_error(gradient, parameter.grad) <= TOLERANCE, name
        compared.add(names[name].parameter)
    assert compared == set(ours)


@pytest.mark.parametrize("shape", SHAPES)
def test_masked_words(shape: str, tmp_path: Path) -> None:
    fields, lengths = SHAPES[shape]
    theirs = their_model("ModernBertForMaskedLM", fields)
    model = our_model(theirs, tmp_path)
    batch = bin_of(lengths, model.settings.vocab_size)
    rectangle = padded_rectangle(batch)
    labels, mask = rectangle["labels"], rectangle["attention_mask"]
    is_predicted = labels >= 0
    their_logits = theirs(input_ids=rectangle["input_ids"], attention_mask=mask).logits[is_predicted]
    F.cross_entropy(their_logits, labels[is_predicted]).backward()

    outputs = model(batch)
    assert outputs.mlm_logits is not None
    assert outputs.nsp_logits is None
    (sums_of(outputs, batch, "pretrain").mlm_loss / batch.num_predictions).backward()
    assert helpers.relative_error(outputs.mlm_logits[batch.mlm_labels >= 0], their_logits) <= TOLERANCE
    assert_equal_gradients(model, theirs)
    with torch.no_grad():  # where attention takes another path
        again = model.eval()(batch).mlm_logits
    assert helpers.relative_error(again[batch.mlm_labels >= 0], their_logits) <= TOLERANCE


def their_loss(theirs: Any, head: str, batch: Batch, real: Tensor) -> Tensor:
    rectangle = padded_rectangle(batch)
    inputs = {name: rectangle[name] for name in ("input_ids", "attention_mask")}
    if head == "tag":
        return theirs(**inputs, labels=rectangle["labels"]).loss
    assert batch.answers is not None
    answers = batch.answers[real]
    if head == "span":
        return theirs(**inputs, start_positions=answers[:, 0], end_positions=answers[:, 1]).loss
    return theirs(**inputs, labels=answers if head == "multilabel" else answers[:, 0]).loss


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("head", ["classify", "multilabel", "regress", "tag", "span"])
def test_heads_for_fine_tuning(head: str, pooling: str, tmp_path: Path) -> None:
    kind = {"tag": "TokenClassification", "span": "QuestionAnswering"}.get(head, "SequenceClassification")
    problem = {"multilabel": "multi_label_classification", "regress": "regression"}.get(head)
    fields = {"num_labels": {"regress": 1, "span": 2}.get(head, 3), "problem_type": problem}
    theirs = their_model(f"ModernBertFor{kind}", fields | {"classifier_pooling": pooling})
    model = our_model(theirs, tmp_path)
    assert (model.settings.head, model.settings.pooling) == (head, pooling)
    # Transformers' loss of a span counts padding as places where it could be.
    lengths = [77] * 4 if head == "span" else [40, 77, 3, 100]
    batch = whole_model.with_answers(bin_of(lengths, model.settings.vocab_size), head, 3)
    loss = their_loss(theirs, head, batch, batch.is_real)
    loss.backward()
    sums = sums_of(model(batch), batch, head)
    ours = (sums.mlm_loss / batch.num_predictions) if head == "tag" else sums.sequence_loss / len(lengths)
    ours.backward()
    assert helpers.relative_error(ours, loss) <= TOLERANCE
    assert_equal_gradients(model, theirs)


@pytest.mark.parametrize("kind", HEADS)
def test_in_and_out_again(kind: str, tmp_path: Path) -> None:
    """Tensors bit for bit, and a config that Transformers reads as the one it wrote."""
    fields = HEADS[kind] | {"local_attention": 10, "global_attn_every_n_layers": 2, "local_rope_theta": 500.0}
    theirs = their_model(kind, fields)
    theirs.save_pretrained(tmp_path / "theirs")
    weights = read_weights(tmp_path / "theirs")
    assert (weights.left_over, weights.missing) == ((), [])
    write_folder(tmp_path / "ours", weights)
    again, info = getattr(transformers, kind).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = theirs.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    for field in ("layer_types", "rope_parameters", "local_attention", "classifier_pooling", "norm_eps"):
        assert getattr(again.config, field) == getattr(theirs.config, field), field
    assert again.config.architectures == [kind]
    assert kind == "ModernBertForMaskedLM" or again.config.num_labels == theirs.config.num_labels


def test_an_encoder_without_heads_is_read(tmp_path: Path) -> None:
    theirs = their_model("ModernBertForMaskedLM", {})
    theirs.model.save_pretrained(tmp_path)
    weights = read_weights(tmp_path)
    assert sorted(weights.missing) == [f"masked_words.{part}" for part in ("bias", "norm.weight", "transform.weight")]
    assert weights.left_over == ()


def test_configs_of_before_transformers_5(tmp_path: Path) -> None:
    """As answerdotai/ModernBERT-base has them."""
    helpers.write_json(tmp_path / "config.json", {
        "model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"], "hidden_size": 96,
        "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 80, "vocab_size": 200,
        "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_attention": 64, "local_rope_theta": None,
        "norm_eps": 1e-5, "layer_norm_eps": 1e-12, "position_embedding_type": "absolute", "classifier_pooling": "mean",
    })  # fmt: skip
    model = model_from_bert_config(tmp_path / "config.json")
    assert model.windows == (None, 32, 32, None, 32, 32)
    assert (model.global_theta, model.local_theta, model.layer_norm_eps) == (160000.0, 160000.0, 1e-5)
    assert (model.family, model.nsp, model.max_positions) == ("modern", False, 8192)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_bias", True),
        ("decoder_bias", False),
        ("hidden_activation", "silu"),
        ("tie_word_embeddings", False),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"full_attention": {"rope_type": "yarn", "rope_theta": 1.0}}),
        ("layer_types", ["sliding_attention", "full_attention", "full_attention"]),
    ],
)
def test_another_modernbert_is_refused(field: str, value: object, tmp_path: Path) -> None:
    helpers.write_json(tmp_path / "config.json", {"model_type": "modernbert", field: value})
    named = "rope_type" if field == "rope_parameters" else field
    with helpers.refused("other-modernbert", tmp_path / "config.json", named):
        model_from_bert_config(tmp_path / "config.json")
