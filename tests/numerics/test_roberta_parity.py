"""The same function as Transformers' RoBERTa, in and out of its folders: logits, losses, gradients, pairs of texts.

Our model is BERT's with one segment; positions are counted from 0, and Transformers' from pad_token_id + 1.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.batch import Batch
from bertrain.run.folder import Run
from bertrain.tasks.encode import encode_texts
from bertrain.tasks.registry import open_task
from bertrain.training.fill_mask import fill_mask
from bertrain.training.plain_engine import sums_of
from bertrain.weights.export import export
from bertrain.weights.huggingface import to_huggingface, write_folder
from bertrain.weights.roberta import as_roberta
from bertrain.weights.source import build_model, read_weights
from tests import bpe, helpers, whole_model
from tests.docs.test_documents import DOCS, commands_of, words_of
from tests.miniature_tasks import command_line, outputs_of, questions
from tests.numerics.test_huggingface_parity import padded_rectangle
from tests.numerics.test_modernbert_parity import their_loss

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-5
HEADS = {
    "pretrain": ("MaskedLM", {}),
    "classify": ("SequenceClassification", {"num_labels": 3}),
    "multilabel": ("SequenceClassification", {"num_labels": 3, "problem_type": "multi_label_classification"}),
    "regress": ("SequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "tag": ("TokenClassification", {"num_labels": 3}),
    "span": ("QuestionAnswering", {"num_labels": 2}),
}


def their_model(head: str, **fields: Any) -> Any:
    """A model of odd sizes whose every tensor is random, except the row of padding."""
    kind, of_head = HEADS[head]
    config = transformers.RobertaConfig(**({
        "vocab_size": 79, "hidden_size": 21, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 37,
        "max_position_embeddings": 67, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    } | of_head | fields))  # fmt: skip
    torch.manual_seed(len(head))
    model = getattr(transformers, f"RobertaFor{kind}")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = name.endswith(("LayerNorm.weight", "layer_norm.weight"))
            parameter.copy_(is_scale + (0.3 if parameter.ndim == 1 else 0.1) * torch.randn(parameter.shape))
    return model.train()


def bin_of(lengths: list[int]) -> Batch:
    longest = max(lengths)
    batch = whole_model.random_batch(lengths, sum(lengths) + 9, len(lengths) + 3, sum(lengths), longest, 79)
    return replace(batch, segment_ids=torch.zeros_like(batch.segment_ids))


@pytest.mark.parametrize("pad_id", [1, 0, 4])
@pytest.mark.parametrize("head", HEADS)
def test_losses_and_gradients(head: str, pad_id: int, tmp_path: Path) -> None:
    theirs = their_model(head, pad_token_id=pad_id, max_position_embeddings=61 + pad_id)
    theirs.save_pretrained(tmp_path)
    weights = read_weights(tmp_path)
    assert (weights.left_over, weights.missing) == ((), [])
    assert (weights.settings.head, weights.settings.max_positions, weights.settings.is_roberta) == (head, 60, True)
    model = build_model(replace(weights, settings=replace(weights.settings, hidden_dropout=0, head_dropout=0))).train()
    # Transformers' loss of a span counts padding as places where it could be.
    batch = bin_of([60] * 4 if head == "span" else [33, 60, 1, 17])
    batch = batch if head == "pretrain" else whole_model.with_answers(batch, head, 3)
    outputs = model(batch)
    sums = sums_of(outputs, batch, head)
    if head == "pretrain":
        rectangle = padded_rectangle(batch)
        is_predicted = rectangle["labels"] >= 0
        logits = theirs(input_ids=rectangle["input_ids"], attention_mask=rectangle["attention_mask"]).logits
        assert outputs.mlm_logits is not None
        ours = outputs.mlm_logits[batch.mlm_labels >= 0]
        assert helpers.relative_error(ours, logits[is_predicted]) <= TOLERANCE
        loss = F.cross_entropy(logits[is_predicted], rectangle["labels"][is_predicted])
    else:
        loss = their_loss(theirs, head, batch, batch.is_real)
    of_words = head in ("pretrain", "tag")
    our_loss = sums.mlm_loss / batch.num_predictions if of_words else sums.sequence_loss / batch.num_sequences
    assert helpers.relative_error(our_loss, loss) <= TOLERANCE
    loss.backward()
    our_loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(found) == len(list(model.parameters()))
    named = replace(weights, tensors=found)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    gradients = as_roberta(to_huggingface(named), named)
    positions = "roberta.embeddings.position_embeddings.weight"
    assert not expected[positions][: pad_id + 1].any(), "a token had a reserved position"
    # Without a vocabulary, the padding is that of RoBERTa's own.
    gradients[positions] = torch.cat([torch.zeros(pad_id + 1, 21), gradients[positions][2:]])
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        if expected[name].abs().max() <= 1e-6:  # it is added to all scores alike, so it has none
            assert gradient.abs().max() <= 1e-6, name
        else:
            assert helpers.relative_error(gradient, expected[name]) <= 3 * TOLERANCE, name


@pytest.mark.parametrize("head", HEADS)
def test_in_and_out_again(head: str, tmp_path: Path) -> None:
    theirs = their_model(head)
    theirs.save_pretrained(tmp_path / "theirs")
    write_folder(tmp_path / "ours", read_weights(tmp_path / "theirs"))
    again, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.architectures == [type(theirs).__name__]
    for field in ("pad_token_id", "bos_token_id", "eos_token_id", "layer_norm_eps", "max_position_embeddings"):
        assert getattr(again.config, field) == getattr(theirs.config, field), field
    for name, tensor in again.state_dict().items():
        first = 2 if "position_embeddings" in name else 0
        assert torch.equal(tensor[first:], theirs.state_dict()[name][first:]), name
    ids = torch.randint(5, 79, (3, 65))
    assert torch.equal(again.eval()(ids)[0], theirs.eval()(ids)[0])
    assert read_weights(tmp_path / "ours").settings == read_weights(tmp_path / "theirs").settings
    with helpers.refused("other-family", "nvidia", "RoBERTa"):
        export(tmp_path / "theirs", tmp_path / "nvidia", to="nvidia")


def test_an_encoder_with_its_pooler(tmp_path: Path) -> None:
    """As roberta-base on the hub, whose pooler no head has trained, and as RobertaModel writes it, without a prefix."""
    theirs = transformers.RobertaModel(their_model("pretrain").config)
    theirs.save_pretrained(tmp_path / "theirs")
    weights = read_weights(tmp_path / "theirs")
    assert "next_sentence.pool.weight" in weights.tensors
    assert {name.partition(".")[0] for name in weights.missing} == {"masked_words"}
    write_folder(tmp_path / "ours", weights)
    again = transformers.RobertaModel.from_pretrained(tmp_path / "ours")
    ids = torch.randint(5, 79, (2, 30))
    one, other = again.eval()(ids), theirs.eval()(ids)
    assert torch.equal(one.last_hidden_state, other.last_hidden_state)
    assert torch.equal(one.pooler_output, other.pooler_output)


@pytest.mark.parametrize(
    ("fields", "code"), [({"type_vocab_size": 2}, "not-a-bert"), ({"pad_token_id": None}, "bad-config")], ids=str
)
def test_other_robertas_are_refused(fields: dict[str, Any], code: str, tmp_path: Path) -> None:
    their_model("pretrain").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    helpers.write_json(config, json.loads(config.read_text()) | fields)
    with helpers.refused(code, config, *fields):
        read_weights(tmp_path)
    helpers.write_json(config, json.loads(config.read_text()) | {"type_vocab_size": 1, "model_type": "bert"})
    with helpers.refused("not-a-bert", config, "type_vocab_size"):
        read_weights(tmp_path)


# --- text ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A RoBERTa as Transformers writes it, with its tokenizer, trained on a test's own words."""
    folder = tmp_path_factory.mktemp("roberta")
    path = bpe.write_bpe(folder / "bpe", special=bpe.ROBERTA_LIKE)
    model = json.loads(path.read_text())["model"]
    tokenizer = transformers.RobertaTokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        mask_token=transformers.AddedToken("<mask>", lstrip=True),
    )
    tokenizer.save_pretrained(folder / "roberta")
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 514}
    their_model("pretrain", **fields).save_pretrained(folder / "roberta")
    return folder / "roberta"


def test_pairs_are_those_of_the_tokenizer(folder: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    vocabulary = Vocabulary.load(folder / "tokenizer.json")
    first, second = ["bato sevi", "mora", "Zu\u00df!"], ["keda lifu nuse", "a", "bakeda, sevi bato nuse lida"]
    block, _ = encode_texts(vocabulary, first, second, 64)
    assert [one.tolist() for one in np.split(block.tokens, block.offsets[1:-1])] == theirs(first, second)["input_ids"]
    truncated, count = encode_texts(vocabulary, first, second, 9)
    assert (truncated.lengths.tolist(), count) == ([9, *block.lengths[1:2].tolist(), 9], 2)
    single, _ = encode_texts(vocabulary, first, None, 64)
    assert [one.tolist() for one in np.split(single.tokens, single.offsets[1:-1])] == theirs(first)["input_ids"]


def test_words_and_merges_in_two_files(folder: Path, tmp_path: Path) -> None:
    """As older folders have them, without a tokenizer.json."""
    content = json.loads((folder / "tokenizer.json").read_text())
    numbers = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    path = helpers.write_json(tmp_path / "vocab.json", numbers)
    with helpers.refused("missing-vocabulary", tmp_path / "merges.txt"):
        Vocabulary.load(path)
    merges = "\n".join(" ".join(pair) for pair in content["model"]["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    one, other = Vocabulary.load(path), Vocabulary.load(folder / "tokenizer.json")
    assert (one.words, one.special) == (other.words, other.special)
    texts = ["bato sevi, bakeda!", " mora  nuse", "Zu\u00df \u4e2d\U0001f600", ""]
    for second in (texts[::-1], None):
        assert np.array_equal(*(encode_texts(words, texts, second, 64)[0].tokens for words in (one, other)))
    empty_word = Vocabulary.load(helpers.write_json(path, numbers | {"": len(numbers)}))
    assert not empty_word.continues_word[-1]
    helpers.write_json(path, numbers | {"<s>": None})
    with helpers.refused("bad-json", path, "<s>"):
        Vocabulary.load(path)
    helpers.write_json(path, numbers)
    (tmp_path / "merges.txt").write_text("no merge at all\n")
    with helpers.refused("bad-vocabulary", path):
        Vocabulary.load(path)
    helpers.write_json(path, {"a": 0})
    with helpers.refused("bad-vocabulary", path, "<mask>"):
        Vocabulary.load(path)


def test_continued_fine_tuned_and_exported(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of docs/how-to-continue-pretraining.md, then pairs of texts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "roberta").symlink_to(folder)
    (tmp_path / "labels").mkdir()
    helpers.write_corpus(tmp_path / "own.txt", documents=300)
    rows = [{"text": word, "pair": f"{word} sevi", "label": word[:2]} for word in helpers.vocabulary_words()]
    for name in ("train", "dev"):
        (tmp_path / "labels" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = ("--train.max_steps", 3, "--train.precision", "fp32", "--batch.sequences", 8, "--log.trackers", "none")
    page = (DOCS / "how-to-continue-pretraining.md").read_text().partition("## RoBERTa")[2]
    commands = [words_of(command) for command, _ in commands_of(page)]
    assert [words[0] for words in commands] == ["data", "pretrain", "finetune", "weights"]
    for words in commands:
        command_line(*words, *(few if words[0] in ("pretrain", "finetune") else ()))
    model = Run.open(tmp_path / "runs" / "roberta").settings.model
    assert (model.num_segments, model.nsp, model.max_positions, model.layer_norm_eps) == (1, False, 512, 1e-5)

    theirs, info = transformers.AutoModelForMaskedLM.from_pretrained("continued-roberta", output_loading_info=True)
    assert type(theirs).__name__ == "RobertaForMaskedLM"
    assert not info["missing_keys"]
    one, other = (transformers.AutoTokenizer.from_pretrained(name) for name in (folder, "continued-roberta"))
    text = "bato sevi <mask> nuse"
    inputs = other(text, return_tensors="pt")
    assert inputs["input_ids"].tolist()[0] == one(text)["input_ids"]
    place = inputs["input_ids"][0].tolist().index(other.mask_token_id)
    best = theirs(**inputs).logits[0, place].softmax(-1).topk(3).values.tolist()
    ((guesses,),) = fill_mask("runs/roberta", "bato sevi [MASK] nuse", top=3)
    assert [guess.probability for guess in guesses] == pytest.approx(best, rel=1e-5)

    # In one command:
    steps = ("--budget", "1m", "--train.max_steps", 2)
    trained = command_line("train", "own.txt", "--out", "trained", "--init", "roberta", *steps)
    assert "RoBERTa has none" in trained.err + trained.out
    assert "('a <mask> .')" in trained.err + trained.out
    assert transformers.AutoConfig.from_pretrained("trained/model").architectures == ["RobertaForMaskedLM"]

    # Rows of pairs are read too: without segments, which it does not have.
    command_line("data", "prepare", "own.txt", "--vocab", "roberta/tokenizer.json", "--out", "pairs")
    again = ("pretrain", "bert-tiny", "--data", "pairs", "--init", "roberta", *few, "--run")
    command_line(*again, "runs/pairs")
    assert command_line(*again, "runs/nsp", "--model.nsp", "true", check=False).code == 2
    command_line("finetune", "classify", "--init", "runs/pairs", "--data", "labels", "--run", "judge", *few,
                 "--task.text_pair", "pair", "--data.max_seq_length", 48)  # fmt: skip
    command_line("predict", "judge", "--data", "labels/dev.jsonl", "--out", "predicted")
    export("judge", "classifier")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained("classifier").eval()
    assert type(theirs).__name__ == "RobertaForSequenceClassification"
    texts = [[row[key] for row in rows] for key in ("text", "pair")]
    inputs = transformers.AutoTokenizer.from_pretrained("classifier")(*texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = theirs(**inputs).logits
    (written,) = Path("predicted").glob("*.jsonl")
    found = [json.loads(line)["probabilities"] for line in written.read_text().splitlines()]
    ours = torch.tensor([[row[label] for label in theirs.config.id2label.values()] for row in found])
    assert float((ours - logits.softmax(-1)).abs().max()) <= TOLERANCE
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    export("judge", "onnx", to="onnx")
    session = onnxruntime.InferenceSession("onnx/model.onnx")
    assert [value.name for value in session.get_inputs()] == ["input_ids", "attention_mask"]
    (from_onnx,) = session.run(None, {name: inputs[name].numpy() for name in ("input_ids", "attention_mask")})
    assert np.abs(from_onnx - logits.numpy()).max() <= TOLERANCE


def test_questions_and_paragraphs(folder: Path, tmp_path: Path) -> None:
    """Windows are those of the tokenizer, and both scores of each token those of Transformers."""
    for name in ("train", "dev"):
        (tmp_path / f"{name}-v1.1.json").write_text(questions(12, 1))
    run = tmp_path / "run"
    command_line(
        "finetune", "squad/v1.1", "--init", folder, "--data", tmp_path, "--run", run, "--train.max_steps", 2,
        "--train.precision", "fp32", "--batch.sequences", 4, "--log.trackers", "none", "--data.max_seq_length", 72,
    )  # fmt: skip
    export(run, tmp_path / "out")
    vocabulary = Vocabulary.load(folder / "tokenizer.json")
    split = open_task(Run.open(run).settings, Run.open(run).data, vocabulary).held_out()["dev"]
    theirs = transformers.RobertaForQuestionAnswering.from_pretrained(tmp_path / "out").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    paragraphs = json.loads((tmp_path / "dev-v1.1.json").read_text())["data"][0]["paragraphs"]
    texts = [[one["qas"][0]["question"] for one in paragraphs], [one["context"] for one in paragraphs]]
    inputs = tokenizer(*texts, padding=True, return_tensors="pt")
    is_token = inputs["attention_mask"] == 1
    assert torch.equal(inputs["input_ids"][is_token], torch.from_numpy(split.block.tokens.astype(np.int64)))
    with torch.no_grad():
        expected = theirs(**inputs)
    logits = torch.stack([expected.start_logits[is_token], expected.end_logits[is_token]], -1)
    assert helpers.relative_error(torch.from_numpy(outputs_of(run, split, vocabulary)), logits) <= TOLERANCE
