"""Any tokenizer.json: preparation, whole-word masking, fill-mask and export, for a small byte-level BPE."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bertrain.data.formats.convert import convert
from bertrain.data.formats.masking import MaskingRules
from bertrain.data.formats.shards import Shards
from bertrain.data.formats.source import open_data
from bertrain.data.prepare.prepare import prepare
from bertrain.data.text.tokenizer import FileTokenizer, Tokenizer, tokenizer_of
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.families import new_model
from bertrain.tasks.squad.windows import tokenize
from bertrain.tasks.tag.encode import _split_words
from bertrain.training.fill_mask import fill_mask
from bertrain.weights.huggingface import write_folder, write_tokenizer
from bertrain.weights.source import read_weights
from bertrain.weights.tensors import Weights
from tests import bpe, helpers

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=[bpe.BERT_LIKE, bpe.ROBERTA_LIKE], ids=["as ModernBERT", "as RoBERTa"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bpe.write_bpe(tmp_path_factory.mktemp("bpe"), special=request.param)


def test_tokens_are_those_of_the_library(tokenizer: Path) -> None:
    vocabulary = Vocabulary.load(tokenizer)
    ours = tokenizer_of(vocabulary)
    assert isinstance(ours, FileTokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer.parent)
    texts = ["bato sevi, bakeda!", " mora  nuse", "Zu\u00df \u4e2d\U0001f600", ""]
    assert ours.encode(texts) == [theirs.encode(text, add_special_tokens=False) for text in texts]
    assert [np.frombuffer(ours.encode_raw(text), ours.dtype).tolist() for text in texts] == ours.encode(texts)
    assert ours.encode([f"a {theirs.mask_token}"]) != [
        theirs.encode(f"a {theirs.mask_token}", add_special_tokens=False)
    ]
    for word, role in (("[PAD]", "pad"), ("[UNK]", "unk"), ("[CLS]", "cls"), ("[SEP]", "sep"), ("[MASK]", "mask")):
        assert vocabulary.id_of(word) == getattr(theirs, f"{role}_token_id")


def test_words_of_several_pieces_are_masked_as_a_whole(tokenizer: Path) -> None:
    vocabulary = Vocabulary.load(tokenizer)
    (tokens,) = tokenizer_of(vocabulary).encode(["batoxyz, sevi bato's"])
    words = [vocabulary.words[token] for token in tokens]
    continues = MaskingRules.of(vocabulary, whole_word=True, probability=0.3, max_predictions=5).continues_word
    assert continues is not None
    joined: list[str] = []
    for word, continued in zip(words, continues[tokens], strict=True):
        joined = [*joined[:-1], joined[-1] + word] if continued and joined else [*joined, word]
    assert joined[0] == "batoxyz"
    assert joined[1] == ","
    assert joined[2] == "\u0120sevi"
    assert not continues[[vocabulary.id_of(word) for word in helpers.SPECIAL]].any()


def test_prepared_data_has_the_tokens_of_running_text(tokenizer: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("bato sevi.\nmora nuse.\n\nkeda lifu.\n")
    prepare([text], tmp_path / "data", vocab=tokenizer, max_seq_length=64, full_sentences=True)
    shards = Shards.open(tmp_path / "data")
    assert shards.vocabulary == Vocabulary.load(tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "data")
    tokens = shards.read(np.arange(len(shards))).tokens.tolist()
    assert theirs.decode(tokens, skip_special_tokens=True) in (
        "bato sevi. mora nuse.keda lifu.",
        "keda lifu.bato sevi. mora nuse.",
    )


def test_words_and_answers_of_tasks(tokenizer: Path) -> None:
    """Words of tags are tokenized as in running text; tokens of answers are found without the space before them."""
    vocabulary = Vocabulary.load(tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer.parent)
    words = [["bato", "sevi", "mora"], ["nuse"]]
    tokens, counts = _split_words(vocabulary, words)
    assert tokens.tolist() == [
        token for one in words for token in theirs.encode(" ".join(one), add_special_tokens=False)
    ]
    assert len(counts) == 4
    text = "bato sevi, mora"
    found = tokenize([text], vocabulary)
    pieces = [text[begin:end] for begin, end in zip(found.begins, found.ends, strict=True)]
    assert [piece for piece in pieces if piece != " " and piece != piece.strip()] == []
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "")


def test_a_folder_is_written_with_its_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    vocabulary = Vocabulary.load(tokenizer)
    size = len(vocabulary.words)
    settings = helpers.tiny_settings(model__family="modern", model__vocab_size=size).model
    tensors = dict(new_model(settings).state_dict())
    write_folder(tmp_path / "out", Weights("made", "", tensors, settings, vocabulary))
    assert read_weights(tmp_path / "out").vocabulary == vocabulary
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    inputs = theirs(f"bato {theirs.mask_token} sevi", return_tensors="pt")
    place = inputs["input_ids"][0].tolist().index(theirs.mask_token_id)
    best = model(**inputs).logits[0, place].softmax(-1).topk(3)
    ((guesses,),) = fill_mask(tmp_path / "out", "bato [MASK] sevi", top=3)
    assert [guess.probability for guess in guesses] == pytest.approx(best.values.tolist(), rel=1e-4)
    assert (model.config.pad_token_id, model.config.cls_token_id) == (theirs.pad_token_id, theirs.cls_token_id)


def test_a_wordpiece_tokenizer_json_is_berts_own(tmp_path: Path) -> None:
    words = Vocabulary.load(helpers.write_vocabulary(tmp_path / "vocab.txt"))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "theirs")
    found = Vocabulary.load(tmp_path / "theirs" / "tokenizer.json")
    assert found.hash == words.hash
    assert isinstance(tokenizer_of(found), Tokenizer)


def test_files_that_are_no_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    for content in ({}, {"model": {"vocab": {"a": 5}}}, {"model": {"type": "BPE", "vocab": {"a": 0}}}):
        with helpers.refused("bad-vocabulary", tmp_path / "tokenizer.json"):
            Vocabulary.load(helpers.write_json(tmp_path / "tokenizer.json", content))
    with helpers.refused("missing-vocabulary", tmp_path / "none.json"):
        Vocabulary.load(tmp_path / "none.json")


def test_converted_data_are_read_with_their_own_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    corpus = helpers.write_corpus(tmp_path / "corpus.txt")
    prepare([corpus], tmp_path / "data", vocab=tokenizer, max_seq_length=64)
    convert(tmp_path / "data", tmp_path / "hdf5", to="hdf5-varlength")
    assert open_data(tmp_path / "hdf5").vocabulary.hash == Vocabulary.load(tokenizer).hash


def test_an_exported_tokenizer_adds_special_words_even_if_the_original_did_not(tokenizer: Path, tmp_path: Path) -> None:
    content = json.loads(tokenizer.read_text())
    whole = Vocabulary.load(tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer.parent / name).read_bytes())
    helpers.write_json(tmp_path / "tokenizer.json", content | {"post_processor": None})
    bare = Vocabulary.load(tmp_path / "tokenizer.json")
    assert bare.hash == whole.hash, "training has its own rule for them"
    write_tokenizer(tmp_path, bare, helpers.tiny_settings().model)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (
        theirs("bato sevi")["input_ids"]
        == transformers.AutoTokenizer.from_pretrained(tokenizer.parent)("bato sevi")["input_ids"]
    )


def test_a_word_piece_with_rules_of_its_own_keeps_them_when_exported(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Pipeline
    from tokenizers import models, normalizers, pre_tokenizers

    words = {word: number for number, word in enumerate([*helpers.SPECIAL, "a", "##b", "a-b", "-", "b"])}
    pipeline = Pipeline(models.WordPiece(words, unk_token="[UNK]"))
    pipeline.normalizer, pipeline.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.WhitespaceSplit()
    pipeline.save(str(tmp_path / "tokenizer.json"))
    before = Vocabulary.load(tmp_path / "tokenizer.json")
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "out", before, helpers.tiny_settings().model)
    after = Vocabulary.load(tmp_path / "out" / "tokenizer.json")
    assert after.hash == before.hash
    assert (
        tokenizer_of(after).encode(["a-b b"]) == tokenizer_of(before).encode(["a-b b"]) == [[words["a-b"], words["b"]]]
    )


def test_a_tokenizer_that_knows_no_latin_letter(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Pipeline
    from tokenizers import models

    words = {word: number for number, word in enumerate([*helpers.SPECIAL, "\u72ac"])}
    Pipeline(models.BPE(words, [])).save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_of(Vocabulary.load(tmp_path / "tokenizer.json")).encode(["\u72ac"]) == [[5]]
