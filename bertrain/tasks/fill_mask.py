"""Predict the [MASK] tokens of a sentence: the quickest way to see what a model has learned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bertrain.base.errors import UserError
from bertrain.data.feed.assemble import assemble_batch
from bertrain.data.feed.batching import Capacity, choose_policy
from bertrain.data.formats.block import Block, Masks
from bertrain.data.text.tokenizer import build_pipeline, open_tokenizer
from bertrain.data.text.vocabulary import Vocabulary
from bertrain.model.batch import IGNORED, Batch
from bertrain.model.encoder import EncoderModel
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
        cure = "put its vocab.txt there, or use `bertrain weights import --vocab FILE`"
        raise UserError("missing-vocabulary", f"{source} has no vocabulary; {cure}")
    if weights.settings.head != "pretrain":
        raise UserError("no-pretraining-head", f"{source} is fine-tuned, without an MLM head; use its initial weights")
    model = build_model(weights)
    texts = [sentences] if isinstance(sentences, str) else sentences
    return [_fill(model, weights.vocabulary, sentence, top) for sentence in texts]


@torch.no_grad()
def _fill(model: EncoderModel, vocabulary: Vocabulary, sentence: str, top: int) -> list[list[Guess]]:
    mask = vocabulary.id_of("[MASK]")
    *before, last = sentence.replace(vocabulary.words[mask], "[MASK]").split("[MASK]")
    # A mask stands for a word with the space before it.
    pieces = open_tokenizer(vocabulary).encode([*(part.rstrip() for part in before), last])
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
        [Guess(show_word(vocabulary, word), probability) for word, probability in zip(*row, strict=True)]
        for row in zip(words.tolist(), probabilities.tolist(), strict=True)
    ]


def show_word(vocabulary: Vocabulary, number: int) -> str:
    """A word as people write it; pieces of BERT's keep their ##."""
    word = vocabulary.words[number]
    if not vocabulary.tokenizer or word in vocabulary.special:
        return word
    return str(build_pipeline(vocabulary).decode([number], skip_special_tokens=False)).strip() or word


def one_sequence(tokens: list[int], positions: list[int]) -> Batch:
    """A batch of a single sequence of one segment, with tokens to predict at `positions`."""
    length, count = len(tokens), len(positions)
    masks = Masks(np.array([count]), np.array(positions), np.full(count, IGNORED))
    block = Block(np.array(tokens), np.array([length]), np.array([length]), np.array([0]), masks)
    policy, shape = choose_policy("budget"), Capacity(length, 1, count)
    return assemble_batch(block, policy=policy, shape=shape, max_seq_length=length, pad_id=0, dropout_seed=0)
