"""Predict the [MASK] tokens of a sentence: the quickest way to see what a model has learned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from bertrain.base.errors import UserError
from bertrain.data.text.tokenizer import Tokenizer
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.batch import IGNORED, Batch
from bertrain.model.bert import Bert
from bertrain.weights.source import build_model, read_weights


@dataclass(frozen=True)
class Guess:
    word: str
    probability: float


def fill_mask(source: str | Path, sentences: str | list[str], *, top: int = 5) -> list[list[list[Guess]]]:
    """The `top` guesses for each [MASK] of each sentence, by weights in any format that `show_weights` reads.

    Example: bertrain.fill_mask("runs/tiny", "the [MASK] of france")[0][0][0].word
    """
    weights = read_weights(source)
    if weights.vocabulary is None:
        raise UserError(
            "missing-vocabulary",
            f"{source} has no vocabulary; put its vocab.txt there, or use `bertrain weights import --vocab FILE`",
        )
    if weights.settings.head != "pretrain":
        raise UserError("no-pretraining-head", f"{source} is fine-tuned, without an MLM head; use its initial weights")
    model = build_model(weights)
    texts = [sentences] if isinstance(sentences, str) else sentences
    return [_fill(model, weights.vocabulary, sentence, top) for sentence in texts]


@torch.no_grad()
def _fill(model: Bert, vocabulary: Vocabulary, sentence: str, top: int) -> list[list[Guess]]:
    mask = vocabulary.id_of("[MASK]")
    pieces = Tokenizer(vocabulary).encode(sentence.split("[MASK]"))
    tokens = [vocabulary.id_of("[CLS]"), *pieces[0]]
    for piece in pieces[1:]:
        tokens += [mask, *piece]
    tokens.append(vocabulary.id_of("[SEP]"))
    positions = [position for position, token in enumerate(tokens) if token == mask]
    if not positions:
        raise UserError("no-mask", f"there is no [MASK] in {sentence!r}")
    limit = model.settings.max_positions
    if len(tokens) > limit:
        raise UserError("sentence-too-long", f"the sentence has {len(tokens)} tokens; the model reads {limit}")
    logits = model(one_sequence(tokens, positions)).mlm_logits[:, : len(vocabulary.words)]
    probabilities, words = logits.softmax(-1).topk(min(top, logits.shape[1]))
    return [
        [Guess(vocabulary.words[word], probability) for word, probability in zip(*row, strict=True)]
        for row in zip(words.tolist(), probabilities.tolist(), strict=True)
    ]


def one_sequence(tokens: list[int], positions: list[int]) -> Batch:
    """A batch of a single sequence of one segment, with tokens to predict at `positions`."""
    length = len(tokens)
    return Batch(
        input_ids=torch.tensor(tokens),
        segment_ids=torch.zeros(length, dtype=torch.long),
        position_ids=torch.arange(length),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        cls_positions=torch.tensor([0]),
        mlm_positions=torch.tensor(positions),
        mlm_labels=torch.full((len(positions),), IGNORED),
        nsp_labels=torch.full((1,), IGNORED),
        is_real=torch.ones(1, dtype=torch.bool),
        answers=None,
        max_seqlen=length,
        sequence_lengths=(length,),
        dropout_seed=0,
        num_tokens=length,
        num_sequences=1,
        num_predictions=len(positions),
    )
