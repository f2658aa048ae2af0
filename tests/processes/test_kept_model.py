"""models/bert-mini, the trained model of the repository: small enough, as good as its card says, taken everywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import bertrain
from bertrain.data.feed.loader import Loader
from bertrain.data.formats.source import open_data
from bertrain.data.prepare.prepare import prepare
from bertrain.training.prediction_settings import prediction_settings
from tests import helpers
from tests.miniature_tasks import command_line
from tests.served import started

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "bert-mini"
MASKED = ["she was born in [MASK] and died in paris .", "the [MASK] [MASK] flows into the sea .", "[MASK]"]


def test_it_stays_small() -> None:
    sizes = [path.stat().st_size for path in MODEL.iterdir()]
    assert max(sizes) <= 16 * 2**20
    assert sum(sizes) <= 25e6
    shown = json.loads(command_line("weights", "show", MODEL, "--json").out)
    assert shown["parameters"] <= 12e6


def test_it_knows_english() -> None:
    """Of words behind [MASK] it knew 39 % on its held-out articles; these few sentences may be harder."""
    sentences = [line.lower().split() for line in (ROOT / "demo" / "held-out.txt").read_text().splitlines() if line]
    chosen = [words for words in sentences if 12 <= len(words) <= 30 and words[6].isalpha()][:200]
    texts = [" ".join([*words[:6], "[MASK]", *words[7:]]) for words in chosen]
    right = [
        masks[0][0].word == words[6] for masks, words in zip(bertrain.fill_mask(MODEL, texts), chosen, strict=True)
    ]
    assert len(right) == 200
    assert sum(right) / len(right) > 0.3
    ((guesses,),) = bertrain.fill_mask(MODEL, "he died in the war in [MASK] .", top=20)
    assert any(guess.word.isdecimal() and len(guess.word) == 4 for guess in guesses), "a year"


def test_it_is_evaluated_as_transformers_would(tmp_path: Path) -> None:
    """With masks that the data has; and masked words alone where there are no pairs."""
    transformers = pytest.importorskip("transformers")
    text = [ROOT / "demo" / "held-out.txt"]
    prepare(text, tmp_path / "pairs", max_seq_length=128, reference=True, max_predictions=20, masked_lm_prob=0.15)
    result = bertrain.evaluate(MODEL, tmp_path / "pairs", max_examples=40)
    assert "step" not in result
    settings = prediction_settings(MODEL)
    loader = Loader(open_data(tmp_path / "pairs"), settings, rank=0, world=1, pin_memory=False)
    model = transformers.BertForPreTraining.from_pretrained(MODEL, dtype=torch.float32).eval()
    words, order = [], []
    for batch in loader.evaluation(40):
        bounds = np.cumsum([0, *batch.sequence_lengths])
        labels = torch.full_like(batch.input_ids, -100)
        labels[batch.mlm_positions] = batch.mlm_labels
        for number in range(batch.num_sequences):
            row = slice(*map(int, bounds[number : number + 2]))
            with torch.no_grad():
                found = model(batch.input_ids[None, row], token_type_ids=batch.segment_ids[None, row])
            chosen = labels[row] >= 0
            words.append(cross_entropy(found.prediction_logits[0][chosen], labels[row][chosen], reduction="none"))
            order.append(cross_entropy(found.seq_relationship_logits, batch.nsp_labels[number : number + 1]))
    assert len(order) == 40
    np.testing.assert_allclose(result["mlm_loss"], torch.cat(words).mean(), rtol=1e-4)
    np.testing.assert_allclose(result["nsp_loss"], torch.stack(order).mean(), rtol=1e-3)

    prepare(text, tmp_path / "sentences", max_seq_length=64, full_sentences=True)
    alone = bertrain.evaluate(MODEL, tmp_path / "sentences", max_examples=40)
    assert alone["loss"] == alone["mlm_loss"] < 4
    assert "nsp_loss" not in alone


def test_exports_hold_the_same_model(tmp_path: Path) -> None:
    """Through PyTorch's and TensorFlow's formats and back, and as Transformers reads it."""
    transformers = pytest.importorskip("transformers")
    command_line("weights", "import", MODEL, "--out", tmp_path / "imported")
    command_line("weights", "export", tmp_path / "imported", "--to", "nvidia", "--out", tmp_path / "nvidia")
    expected = bertrain.fill_mask(tmp_path / "imported", MASKED, top=5)
    assert bertrain.fill_mask(MODEL, MASKED, top=5) == expected
    model = transformers.BertForPreTraining.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    for text, masks in zip(MASKED, expected, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            words = model(**inputs).prediction_logits[0][inputs["input_ids"][0] == tokenizer.mask_token_id]
        for scores, guesses in zip(words.softmax(-1), masks, strict=True):
            ids = tokenizer.convert_tokens_to_ids([guess.word for guess in guesses])
            np.testing.assert_allclose([guess.probability for guess in guesses], scores[ids], rtol=1e-3)


def test_embeddings_know_what_texts_are_about() -> None:
    texts = [
        "The river flows through the valley into the lake.", "A stream runs down from the mountains to the sea.",
        "The footballer scored twice in the final.", "Her team won the match by three goals.",
    ]  # fmt: skip
    vectors = bertrain.embed(MODEL, texts)
    assert isinstance(vectors, np.ndarray)
    likeness = vectors @ vectors.T
    for one, other in ((0, 1), (2, 3)):
        strangers = [text for text in range(4) if text not in (one, other)]
        assert likeness[one, other] > likeness[[one, other]][:, strangers].mean()


def test_served_answers_are_those_of_fill_mask() -> None:
    with started("serve", MODEL, num_addresses=1) as server:
        answers = server.answers("/bert-mini/fill-mask", {"texts": MASKED, "top": 3})
    for masks, expected in zip(answers, bertrain.fill_mask(MODEL, MASKED, top=3), strict=True):
        assert [[guess["word"] for guess in mask] for mask in masks] == [
            [one.word for one in mask] for mask in expected
        ]


def test_pages_say_what_was_measured(tmp_path: Path) -> None:
    """The tables, cards and headers made from speedrun.json are those of the repository."""
    for part in ("benchmarks/speedrun", "benchmarks/results", "bertrain/config/recipes"):
        shutil.copytree(ROOT / part, tmp_path / part)
    table = tmp_path / "benchmarks" / "speedrun" / "table.py"
    subprocess.run([sys.executable, table], check=True, env=helpers.environment())
    for part in ("benchmarks/speedrun/README.md", "bertrain/config/recipes/bert-mini.toml"):
        assert (tmp_path / part).read_text() == (ROOT / part).read_text()
    card = (MODEL / "README.md").read_text()
    records = json.loads((ROOT / "benchmarks" / "results" / "speedrun.json").read_text())
    assert any(f"| loss of masked words | {one['held_out']['mlm_loss']:.3f} |" in card for one in records)
